"""The `specache::` ops: one registry of schema, implementation and fake, so that tests can loop over it.

Every op names exactly the state tensors that it mutates; order between ops is their data flow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import attention, costs, cpp_decode, cpp_tiers, evict, few_rows, fp8, kcache, pages, snapkv, tiers
from .costs import CostOf
from .kept_logits import based_logits, whole_logits
from .measure import measure


@dataclass(frozen=True)
class Op:
    """One op, and all that the passes, the lowering and the roofline know of it.

    schema: every mutated argument marked. run: the PyTorch code that defines it. fake: its shapes under FakeTensorMode
    and on the meta device. cuda: "module:function" of the CUDA implementation, loaded on first use (triton is on Linux
    only); None: there is none, the op is for CPUs. fused: the same in C++, for CPUs: an op `NAME_fused` of its own,
    which lowering puts in place of the op. library: has that C++ compiled, for arguments like these. cost: see
    `costs.py`. lanes: its vmap rule, where a mapped axis becomes lanes. copies: it runs on the copy stream. is_work: it
    takes long enough to hide a copy behind. early: it starts as soon as it can, of several that could the one of the
    lowest number first. is_wait: it blocks until copies have ended, and starts as late as it can. reads_host: it waits
    for the offloads by itself. capturable: a CUDA graph may hold it, as it reads no length on the host.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    cuda: str | None = None
    fused: Callable[..., Any] | None = None
    library: Callable[..., object] | None = None
    cost: CostOf = costs.nothing
    lanes: Callable[..., Any] | None = None
    copies: bool = False
    is_work: bool = False
    early: int | None = None
    is_wait: bool = False
    reads_host: bool = False
    capturable: bool = True

    @property
    def name(self) -> str:
        return self.schema.split("(")[0]


def with_fused(op: Op) -> Iterator[Op]:
    """The op, and what its C++ is declared as."""
    yield op
    if op.fused is not None:
        schema = op.schema.replace("(", "_fused(", 1)
        yield replace(op, schema=schema, run=op.fused, fused=None, library=None, cuda=None, lanes=None)


def fake_nothing(*args: object) -> None:
    """The fake of an op that only mutates its arguments."""


def fake_decode_attention(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    codes = rest[5]
    return q.new_empty(q.shape), q.new_empty(codes.shape[:3], dtype=torch.float32)


def fake_score_low_bit(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, capacity = rest[4].shape[:3]
    room = whole_logits if q.device.type == "cpu" else based_logits
    return *room(q, capacity), q.new_empty((q.shape[2], batch, heads, capacity), dtype=torch.float32)


def fake_correct(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[4])


def fake_extend_attention(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


LAYOUT = "int key_bits, int value_bits, bool rotate"
DECODE = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor codes, Tensor key_params, "
    "Tensor value_params, Tensor center, Tensor recent, Tensor slots, Tensor slot_index, "
    f"{LAYOUT}, float scale, float? softcap) -> (Tensor, Tensor)"
)
SCORE = (
    "(Tensor q, Tensor k, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor codes, Tensor key_params, Tensor center, "
    f"Tensor recent, {LAYOUT}, float scale, float? softcap) -> (Tensor, Tensor, Tensor)"
)
SCORED = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor logits, Tensor base, "
    "Tensor codes, Tensor value_params, Tensor recent, Tensor slots, Tensor slot_index, Tensor chosen, "
    f"{LAYOUT}, float scale, float? softcap) -> Tensor"
)


def lanes_of(tensor: Tensor, lane_dim: int) -> Tensor:
    """Fold a mapped lane axis into the token axis: [lanes, B, H, 1, x] → [B, H, lanes, x]."""
    return tensor.movedim(lane_dim, 2).flatten(2, 3)


def widened_decode_attention(
    info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any
) -> Any:
    """The vmap rule of `decode_attention`: a mapped axis becomes the lanes; the selection scores are not mapped.

    A query, key or value that is not mapped is the same in every lane; a mask may have one row for all. All lanes
    share the tiers.
    """
    if any(dim is not None for dim in in_dims[4:]):
        raise NotImplementedError("decode_attention: vmap maps q, k, v and mask; all lanes share the sinks and tiers")
    folded = [
        x.expand(-1, -1, info.batch_size, -1) if dim is None else lanes_of(x, dim)
        for x, dim in zip((q, k, v), in_dims[:3], strict=True)
    ]
    if mask is not None and in_dims[3] is not None:
        mask = lanes_of(mask, in_dims[3])
    out, scores = torch.ops.specache.decode_attention(*folded, mask, *rest)
    return (out.movedim(2, 0).unsqueeze(3), scores), (0, None)


def loaded_on_first_use(place: str) -> Callable[..., Any]:
    """A function that imports `place`, "module:function", when it is first called, and runs it on the device of its
    first tensor: Triton launches on the current one, whichever its arguments are on."""
    module, name = place.split(":")

    def call(*arguments: Any) -> Any:
        run = getattr(importlib.import_module(f".{module}", __package__), name)
        device = arguments[0].device
        if device.index == torch.cuda.current_device():
            return run(*arguments)
        with torch.cuda.device(device):
            return run(*arguments)

    return call


DECLARED = (
    Op(
        "few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        few_rows.few_rows, few_rows.fake_few_rows,
        fused=few_rows.few_rows_fused, library=few_rows.library_of, is_work=True,
    ),
    Op(
        "decode_attention" + DECODE,
        attention.decode_attention, fake_decode_attention, "triton_decode:decode_attention",
        fused=cpp_decode.decode_attention_fused, library=cpp_decode.library_of, cost=costs.decode_attention,
        lanes=widened_decode_attention, is_work=True,
    ),
    Op(
        "score_low_bit" + SCORE,
        attention.score_low_bit, fake_score_low_bit, "triton_scored:score_low_bit",
        fused=cpp_decode.score_low_bit_fused, library=cpp_decode.library_of, cost=costs.score_low_bit, is_work=True,
    ),
    Op(
        "correct(Tensor scores, Tensor cursor, Tensor host, Tensor(a!) slots, Tensor(b!) slot_index, "
        "Tensor(c!) corrected) -> Tensor",
        tiers.correct, fake_correct, "copy_stream:correct",
        fused=cpp_tiers.correct_fused, library=cpp_tiers.library_of, cost=costs.correct,
    ),
    Op(
        "attend_scored" + SCORED,
        attention.attend_scored, fake_extend_attention, "triton_scored:attend_scored",
        fused=cpp_decode.attend_scored_fused, library=cpp_decode.library_of, cost=costs.attend_scored, is_work=True,
    ),
    Op(
        "extend_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor host, "
        "float scale, float? softcap) -> Tensor",
        attention.extend_attention, fake_extend_attention, "triton_extend:extend_attention",
        cost=costs.extend_attention, is_work=True, reads_host=True, capturable=False,
    ),
    Op(
        "select_topk(Tensor scores, Tensor(a!) wanted) -> ()",
        tiers.select_topk, fake_nothing, "triton_select:select_topk",
        fused=cpp_tiers.select_topk_fused, library=cpp_tiers.library_of, cost=costs.select_topk, early=0,
    ),
    Op(
        "select_pages(Tensor scores, Tensor(a!) wanted, int page) -> ()",
        pages.select_pages, fake_nothing, "pages:select_pages",
        cost=costs.select_topk, early=0,
    ),
    Op(
        "prefetch(Tensor wanted, Tensor cursor, Tensor host, Tensor(a!) slots, Tensor(b!) slot_index, "
        "Tensor(c!) fetched) -> ()",
        tiers.prefetch, fake_nothing, "copy_stream:prefetch",
        fused=cpp_tiers.prefetch_fused, library=cpp_tiers.library_of, cost=costs.prefetch, copies=True, early=1,
    ),
    Op(
        "wait(Tensor after, Tensor cursor, Tensor(a!) slots, Tensor(b!) slot_index, Tensor(c!) wanted) -> ()",
        tiers.wait, fake_nothing, "copy_stream:wait",
        is_wait=True,
    ),
    Op(
        "offload(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) host) -> ()",
        tiers.offload, fake_nothing, "copy_stream:offload",
        fused=cpp_tiers.offload_fused, library=cpp_tiers.library_of, cost=costs.offload, copies=True, early=2,
    ),
    Op(
        "append(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) recent, Tensor(b!) codes, "
        "Tensor(c!) key_params, Tensor(d!) value_params, Tensor(e!) center, "
        f"{LAYOUT}, str zero_point, Tensor? frequencies=None) -> ()",
        tiers.append, fake_nothing, "triton_append:append",
        fused=cpp_tiers.append_fused, library=cpp_tiers.library_of, cost=costs.append, early=3,
    ),
    Op(
        "keep_keys(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) device_keys) -> ()",
        kcache.keep_keys, fake_nothing, "kcache:keep_keys",
        cost=costs.keep_keys, early=4, capturable=False,
    ),
    Op(
        "keep_fp8(Tensor k, Tensor v, Tensor? padding, Tensor cursor, Tensor(a!) fp8_codes) -> ()",
        fp8.keep_fp8, fake_nothing, "fp8:keep_fp8",
        cost=costs.keep_fp8, early=4, capturable=False,
    ),
    Op(
        "budget_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor(a!) kept, "
        "Tensor(b!) kept_token, Tensor(c!) history, str policy, int block, int seed, float scale, float? softcap) "
        "-> Tensor",
        evict.budget_attention, fake_extend_attention, "evict:budget_attention",
        cost=costs.budget_attention, is_work=True, capturable=False,
    ),
    Op(
        "snapkv_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
        "Tensor(a!) compressed, Tensor(b!) compressed_token, int budget, int window, int kernel, str pooling, "
        "float scale, float? softcap) -> Tensor",
        snapkv.snapkv_attention, fake_extend_attention, "snapkv:snapkv_attention",
        cost=costs.snapkv_attention, is_work=True, capturable=False,
    ),
    Op(
        "kcache_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor cursor, "
        "Tensor device_keys, Tensor host, int top_n, float scale, float? softcap) -> Tensor",
        kcache.kcache_attention, fake_extend_attention, "copy_stream:kcache_attention",
        cost=costs.kcache_attention, is_work=True, reads_host=True, capturable=False,
    ),
    Op(
        "measure(Tensor q, Tensor k, Tensor? mask, Tensor? sinks, Tensor cursor, Tensor host, Tensor slot_index, "
        "Tensor(a!) tally, float scale, float? softcap) -> ()",
        measure, fake_nothing, "copy_stream:measure",
        cost=costs.measure, reads_host=True,
    ),
)  # fmt: skip

OPS = tuple(op for declared in DECLARED for op in with_fused(declared))

_library = torch.library.Library("specache", "DEF")
_registry: dict[str, Op] = {}


def register(op: Op) -> None:
    """Make an op known to torch and to the passes."""
    _library.define(op.schema)
    _library.impl(op.name, op.run, "CPU")
    if op.cuda is not None:
        _library.impl(op.name, loaded_on_first_use(op.cuda), "CUDA")
    torch.library.register_fake(f"specache::{op.name}", op.fake, lib=_library)
    if op.lanes is not None:
        torch.library.register_vmap(f"specache::{op.name}", op.lanes, lib=_library)
    _registry[op.name] = op


def op_of(target: Any) -> Op | None:
    """The op that a graph node's target is; None where it is none of these."""
    is_ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "specache"
    return _registry[target.name().removeprefix("specache::")] if is_ours else None


for _op in OPS:
    register(_op)
