"""The entry point that `torch.compile(model, backend="specache")` loads."""

import logging
import os

import torch

from .cache_folder import VARIABLE
from .compile.backend import specache as specache
from .compile.recompile_limit import raise_limit
from .generate.checks import route_checks
from .generate.compiled_calls import route_generate

log = logging.getLogger(__name__)


def keep_traces() -> None:
    """Store traces for later processes, if $SPECACHE_CACHE is set and torch has the private names for it."""
    if not os.environ.get(VARIABLE):
        return
    try:
        from .warm.hooks import route_traces

        route_traces()
    except (ImportError, AttributeError) as missing:
        log.warning("SPECACHE_CACHE: torch %s cannot store traces (%s): use 2.11 to 2.15", torch.__version__, missing)


raise_limit()
route_generate()
route_checks()
keep_traces()
