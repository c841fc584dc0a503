"""The methods that SpeCache is compared with, one file each: op, state, options, recipe.

Importing this registers them. The entry point `specache_compile.methods` does.
"""

from __future__ import annotations

from specache_compile.kernels.op import register
from specache_compile.methods import METHODS
from specache_compile.methods.specache import SELECTORS

from . import eviction, expected_attention, fp8, kcache, pages, snapkv

for _op in (fp8.KEEP, *kcache.OPS, snapkv.ATTENTION, expected_attention.ATTENTION, eviction.ATTENTION, pages.SELECT):
    register(_op)
METHODS |= {
    one.name: one for one in (fp8.METHOD, kcache.METHOD, snapkv.METHOD, expected_attention.METHOD, *eviction.METHODS)
}
SELECTORS["pages"] = pages.selector
