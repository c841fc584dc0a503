"""The ranks that a model is split over (tensor parallel), and what they tell each other before they compute together.

A rank that stood still, or went another way than the rest, would leave them waiting in a collective. So what one rank
alone might refuse is refused by all of them, with the same words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from specache_compile.errors import SpecacheError, split_heads
from specache_compile.options import MethodOptions

Told = TypeVar("Told")


def ranks_of(tensors: Sequence[Any]) -> dist.ProcessGroup | None:
    """The group of ranks that hold the parts of these tensors; None where all of them are whole."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None or (mesh.ndim > 1 and "tp" not in (mesh.mesh_dim_names or ())):
        return None  # of several dimensions and no "tp": FSDP with replicas
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def ranks_here(ranks: dist.ProcessGroup | None) -> int:
    """How many ranks share this machine's memory: where a model is split, all that the launcher has started here.

    Processes with a whole model each, as the evaluation has them, have a budget each.
    """
    return 1 if ranks is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size()))


def everyones(ranks: dist.ProcessGroup | None, own: Told) -> list[Told]:
    """What each rank has told here, in their order."""
    if ranks is None:
        return [own]
    told: list[Any] = [None] * ranks.size()
    dist.all_gather_object(told, own, group=ranks)
    return told


def check_same(ranks: dist.ProcessGroup | None, options: MethodOptions, sizes: dict[str, int]) -> None:
    """SpecacheError, on every rank, where another has other options or another prompt's sizes than the first."""
    if ranks is None:
        return
    given = {**{field.name: repr(getattr(options, field.name)) for field in fields(options)}, **sizes}
    first, *others = everyones(ranks, given)
    for rank, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            raise ranks_differ(rank, {name: (first.get(name), other.get(name)) for name in names})


def check_heads(model: Any) -> None:
    """SpecacheError where a model's KV heads do not divide by the ranks that its key projections are split over."""
    ranks = getattr(model, "tp_size", None) or 1  # Hugging Face's; its FSDP splits weights, and no heads
    if ranks == 1 or not any(name.endswith("k_proj") and style == "colwise" for name, style in model.tp_plan.items()):
        return
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    if isinstance(heads, int) and heads % ranks:
        raise split_heads(heads, ranks)


def ranks_differ(rank: int, differences: Mapping[str, tuple[Any, Any]]) -> SpecacheError:
    told = ", ".join(
        f"{name}: {first} on rank 0, {other} on rank {rank}" for name, (first, other) in differences.items()
    )
    return SpecacheError(
        f"the ranks of this model were not given the same ({told}), and would wait for each other for ever: compile "
        "with the same options and generate from the same prompt on every rank"
    )
