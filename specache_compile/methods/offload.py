"""Offloading: all pairs on the host, copied to the device layer by layer in every step; exact, and bound by PCIe."""

from __future__ import annotations

from dataclasses import dataclass

from specache_compile.options import MethodOptions
from specache_compile.passes.recipe import OpCall, Recipe, named

from .host_tier import HOST, HostOptions
from .method import Method


@dataclass(frozen=True)
class OffloadOptions(HostOptions):
    method: str = "offload"


def recipe(options: MethodOptions, site: int) -> Recipe:
    """A decode step is an extend by one token: the host tier is streamed in blocks."""
    exact = OpCall("extend_attention", named("host"))
    return Recipe({"extend": exact, "decode": exact}, (OpCall("offload", named("host")),))


METHOD = Method("offload", OffloadOptions, (HOST,), recipe, rows_differ=True)
