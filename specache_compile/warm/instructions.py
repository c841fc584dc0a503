"""The processor's instruction sets with which Inductor's C++ compiles and loads.

Inductor tries each in a process of its own, once in every process that loads its C++: a third of a warm start.
"""

from __future__ import annotations

import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list


def found_to_work() -> tuple[str, ...] | None:
    """Those that Inductor has tried in this process, the best first; None where it has not tried yet."""
    return tuple(map(str, valid_vec_isa_list())) if valid_vec_isa_list.cache_info().currsize else None


def trust(names: tuple[str, ...] | None) -> None:
    """Have Inductor take what it found to work on this processor with this torch, where it has not tried yet.

    Where the processor claims other sets than those that worked, Inductor tries them itself.
    """
    if names is None or found_to_work() is not None:
        return
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        claimed = tuple(map(str, valid_vec_isa_list()))
    if claimed != names:
        valid_vec_isa_list.cache_clear()
