"""The entry point that `torch.compile(model, backend="specache")` loads."""

import os

from .compile.backend import specache as specache
from .compile.rewritten import Rewrites, observers
from .generate.route import route_generate
from .generate.verify import route_verification
from .runtime.variant import Variant
from .warm.route import route_traces


def dump_where_asked(rewrites: Rewrites, variant: Variant) -> None:
    """Explain each compiled graph into $SPECACHE_DUMP; explaining is imported by those who ask for it."""
    folder = os.environ.get("SPECACHE_DUMP")
    if folder:
        from .explaining.dump import dump_explanation

        dump_explanation(rewrites, variant, folder)


route_generate()
route_verification()
route_traces()
observers.append(dump_where_asked)
