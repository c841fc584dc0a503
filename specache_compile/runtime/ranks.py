"""The ranks that a model is split over (tensor parallel), and their agreement before they compute together.

A rank that stopped or took another branch would leave the others waiting in a collective. So an error that one rank
alone might raise is raised on all ranks, with the same text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from specache_compile.errors import SpecacheError
from specache_compile.options import MethodOptions

T = TypeVar("T")
# Ends of the names of key projections in plans.
KEYS = ("k_proj", "kv_b_proj", "query_key_value")


def ranks_of(tensors: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group of the ranks that hold parts of these tensors; None if all are whole."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None or (mesh.ndim > 1 and "tp" not in (mesh.mesh_dim_names or ())):
        return None  # several dimensions without "tp": FSDP with replicas
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def ranks_here(ranks: dist.ProcessGroup | None) -> int:
    """Number of ranks that share this machine's memory: for a split model, all that the launcher has started here.

    Processes with a whole model each, as in the evaluation, have a budget each.
    """
    return 1 if ranks is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size()))


def gather(ranks: dist.ProcessGroup | None, own: T) -> list[T]:
    """The values of all ranks, in their order."""
    if ranks is None:
        return [own]
    found: list[Any] = [None] * ranks.size()
    dist.all_gather_object(found, own, group=ranks)
    return found


def check_same(ranks: dist.ProcessGroup | None, options: MethodOptions, sizes: dict[str, int]) -> None:
    """SpecacheError on every rank, if a rank's options or prompt sizes differ from those of the first rank."""
    if ranks is None:
        return
    given = {**{field.name: repr(getattr(options, field.name)) for field in fields(options)}, **sizes}
    first, *others = gather(ranks, given)
    for rank, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            found = ", ".join(f"{n}: {first.get(n)} on rank 0, {other.get(n)} on rank {rank}" for n in names)
            raise SpecacheError(
                f"the ranks of this model have different arguments ({found}) and would block each other. Compile with "
                "the same options and generate from the same prompt on every rank"
            )


def splits_heads(model: Any) -> bool:
    """Whether tensor parallelism splits a model's KV heads, by its plan; without a plan it is assumed to."""
    plan = getattr(model, "tp_plan", None) or {}
    return not plan or any(name.endswith(KEYS) and style == "colwise" for name, style in plan.items())


def check_heads(model: Any) -> None:
    """SpecacheError if a model's KV heads do not divide by the ranks that its key projections are split over."""
    ranks = getattr(model, "tp_size", None) or 1  # Hugging Face's attribute; its FSDP splits weights but no heads
    if ranks == 1 or not splits_heads(model):
        return
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    if isinstance(heads, int) and heads % ranks:
        raise SpecacheError(
            f"{heads} KV heads cannot be split over {ranks} ranks: each rank needs whole heads. Use a number of ranks "
            f"that divides {heads}, or a DistributedConfig whose tp_plan does not split the attention"
        )
