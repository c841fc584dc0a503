"""Methods by name (`options={"method": ...}`): each one file here, an eviction policy one in kernels/policies."""

from __future__ import annotations

from specache_compile.kernels.policies import POLICIES

from . import full, kcache, kivi, offload, specache
from .eviction import eviction
from .method import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        full.METHOD,
        offload.METHOD,
        kivi.METHOD,
        specache.METHOD,
        kcache.METHOD,
        *(eviction(policy) for policy in POLICIES),
    )
}

__all__ = ["METHODS", "Method"]
