"""The methods that SpeCache is compared with, one file each: op, state, options, recipe.

Importing this registers them. The entry point `specache_compile.methods` does.
"""

from __future__ import annotations

from specache_compile.kernels.op import register
from specache_compile.methods import METHODS

from . import eviction, expected_attention, fp8, kcache, kvzip, snapkv

ONCE = (snapkv, expected_attention, kvzip)
for _op in (*fp8.OPS, *kcache.OPS, *(one.ATTENTION for one in ONCE), eviction.ATTENTION):
    register(_op)
METHODS |= {one.name: one for one in (fp8.METHOD, kcache.METHOD, *(one.METHOD for one in ONCE), *eviction.METHODS)}
