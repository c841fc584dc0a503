"""The methods that SpeCache is compared with, one file each: options and a choice of pairs, or op, state and recipe.

Importing this registers them. The entry point `specache_compile.methods` does.
"""

from __future__ import annotations

from specache_compile.kernels.op import register
from specache_compile.methods import METHODS

from . import eviction, expected_attention, fp8, kcache, kvzip, pages, prompt_eviction, snapkv

for _op in (*fp8.OPS, *kcache.OPS, prompt_eviction.ATTENTION, eviction.ATTENTION, pages.SELECT):
    register(_op)
METHODS |= {one.METHOD.name: one.METHOD for one in (pages, fp8, kcache, snapkv, expected_attention, kvzip)}
METHODS |= {method.name: method for method in eviction.METHODS}
