"""Properties of every `specache::` op: schema, fake, mutations. An op without inputs here fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from held_tiers import adjacent, cursor_over
from specache_compile.kernels.attention.kept_logits import whole_logits
from specache_compile.kernels.codes.records import stored_dim
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.op import Op, loaded_on_first_use, registered
from specache_compile.kernels.state.center import set_center
from specache_compile.kernels.state.layout import Layout, StoredTiers
from specache_compile.kernels.state.operands import takes
from specache_compile.methods import load_others

load_others()  # the baselines' ops too
OPS = registered()
BY_NAME = {op.name: op for op in OPS}
WINDOW, GROUP, CAPACITY, TOP_K, BUDGET = 64, 32, 256, 12, 24
SINKS = 5


@dataclass(frozen=True)
class Case:
    """Parameters of the generators: shapes, dtype, optional arguments, and the length of the cache."""

    name: str
    length: int = 127  # the step behind it moves a group from the recent tier to the low-bit tier
    batch: int = 2
    heads: int = 2
    ratio: int = 2
    lanes: int = 2
    head_dim: int = 16
    bits: int = 2
    value_bits: int | None = None
    rotate: bool = False
    center: bool = False
    dtype: torch.dtype = torch.float32
    mask: str | None = None
    sinks: bool = False
    softcap: float | None = None


CASES = (
    Case("plain"),
    Case("bfloat16, bool mask, sinks", dtype=torch.bfloat16, mask="bool", sinks=True, batch=3, lanes=1),
    Case("additive mask, softcap", mask="additive", softcap=5.0, heads=1, ratio=4, bits=1, head_dim=80),
    Case("16 bits, one row", dtype=torch.bfloat16, bits=16, batch=1, ratio=1, head_dim=32, softcap=5.0, mask="bool"),
    Case("nothing in the low-bit tier", length=20, sinks=True, mask="additive", dtype=torch.bfloat16),
    Case("keys and values apart, rotated", bits=2, value_bits=1, rotate=True, mask="bool", head_dim=96),
    Case("centered", center=True, length=63, softcap=5.0),  # the first group comes into the low-bit tier
)


def low_bit_length(length: int) -> int:
    return GROUP * max(0, (length - (WINDOW - GROUP)) // GROUP)


class Inputs:
    """Random tensors of one case by name, each in separate memory."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        rows, d = (case.batch, case.heads), case.head_dim
        n, low_bit = case.length, low_bit_length(case.length)
        query_heads = case.heads * case.ratio
        self.cursor = cursor_over(adjacent(case.batch, CAPACITY), n, low_bit, low_bit_length(n + 1))
        self.q = self.normal(case.batch, query_heads, case.lanes, d)
        self.k, self.v = self.normal(*rows, case.lanes, d), self.normal(*rows, case.lanes, d)
        self.new_k, self.new_v = self.normal(*rows, 1, d), self.normal(*rows, 1, d)
        self.sinks = self.normal(query_heads) if case.sinks else None
        self.frequencies = torch.tensor([1.0, 0.1, 0.01])
        quantized = case.bits < 16
        self.layout = Layout(case.bits, case.value_bits or case.bits, case.rotate)
        shape = (*rows, CAPACITY, self.layout.width(d))
        self.codes = torch.randint(0, 256, shape, dtype=torch.uint8) if quantized else self.normal(*shape)
        self.key_params = self.normal(*rows, CAPACITY // GROUP if quantized else 0, 2, stored_dim(d))
        self.value_params = self.normal(*rows, CAPACITY if quantized else 0, 2, stored_dim(d) // 16)
        self.center = torch.zeros(*rows, 4 if case.center else 0, d)
        if case.center and low_bit:
            set_center(self.normal(*rows, low_bit, d) + 30.0, None, self.frequencies, self.center, GROUP)
        self.sink_pairs = self.normal(*rows, SINKS if quantized else 0, 2, d)
        self.sink_index = torch.arange(self.sink_pairs.shape[2], dtype=torch.int32).repeat(case.batch, 1, 1)
        self.sink_index[..., -1:] = -1
        self.recent = self.normal(*rows, WINDOW, 2, d)
        self.slots = self.normal(*rows, TOP_K, 2, d)
        self.host = self.normal(*rows, CAPACITY, 2, d)
        self.slot_index = torch.arange(TOP_K, dtype=torch.int32).expand(*rows, -1).clone()
        self.slot_index[..., ::3] = -1
        self.selected = torch.arange(TOP_K - 1, -1, -1, dtype=torch.int32).expand(*rows, -1) * 2 % 31
        self.selected = self.selected.contiguous()
        self.scores = torch.rand(*rows, CAPACITY) - 0.2
        self.lane_scores = torch.rand(case.lanes, *rows, CAPACITY) - 0.2
        self.logits, self.base = whole_logits(self.q, CAPACITY)
        self.logits.normal_()
        self.fetched, self.corrected = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.scale = d**-0.5
        self.device_keys = self.normal(*rows, CAPACITY, d)
        self.fp8_codes = torch.randint(0, 127, (*rows, CAPACITY, 2, d), dtype=torch.uint8)
        self.kept = self.normal(*rows, BUDGET, 2, d)
        tokens = torch.arange(BUDGET, dtype=torch.int32)
        self.kept_token = tokens.masked_fill(tokens >= n, -1).expand(*rows, -1).clone()
        self.history = torch.rand(*rows, BUDGET, 4)
        self.compressed = self.normal(*rows, CAPACITY, 2, d)
        self.compressed_token = torch.full((*rows, CAPACITY), -1, dtype=torch.int32)
        self.compressed_token[:, :, : min(n, BUDGET)] = tokens[: min(n, BUDGET)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.case.dtype)

    def mask(self, new: int) -> Tensor | None:
        """Return a mask [B, 1, 1, n + new] that hides the first tokens, fewer in later rows."""
        columns = torch.arange(self.case.length + new)
        seen = columns >= torch.arange(self.case.batch, 0, -1).view(-1, 1, 1, 1)
        if self.case.mask == "additive":
            return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return seen if self.case.mask == "bool" else None

    def padding(self) -> Tensor | None:
        """Return padding [B, 1, 1, C] for a bool mask: every third token is hidden, others in each row."""
        if self.case.mask != "bool":
            return None
        return (torch.arange(CAPACITY) % 3 != torch.arange(self.case.batch).view(-1, 1, 1, 1) % 3).contiguous()


def tiers_of(i: Inputs) -> tuple[list[Tensor], list[int]]:
    """Return the operands `tiers` and `layout`."""
    return [getattr(i, name) for name in StoredTiers._fields], [int(value) for value in i.layout]


def decode_inputs(i: Inputs) -> tuple[Any, ...]:
    step = (i.q, i.k, i.v, i.mask(1), i.sinks, i.cursor, i.slots, i.slot_index)
    return (*step, *tiers_of(i), i.scale, i.case.softcap, 0.01)


def score_inputs(i: Inputs) -> tuple[Any, ...]:
    return (i.q, i.k, i.v, i.mask(1), i.sinks, i.cursor, *tiers_of(i), i.scale, i.case.softcap, False)


def scored_inputs(i: Inputs) -> tuple[Any, ...]:
    kept = (i.logits, i.base, i.slot_index.flip(-1), i.slots, i.slot_index)
    return (i.q, i.k, i.v, i.mask(1), i.sinks, i.cursor, *kept, *tiers_of(i), i.scale, i.case.softcap, 0.01)


GENERATORS: dict[str, Callable[[Inputs], tuple[Any, ...]]] = {
    "decode_attention": decode_inputs,
    "score_low_bit": score_inputs,
    "correct": lambda i: (
        i.lane_scores, i.cursor, i.host, i.slots, i.slot_index, i.corrected, i.q, i.logits, i.base, i.mask(1),
    ),
    "attend_scored": scored_inputs,
    "extend_attention": lambda i: (
        i.q, i.k, i.v, i.mask(i.case.lanes), i.sinks, i.cursor, i.host, i.scale, i.case.softcap,
    ),
    "append": lambda i: (
        i.new_k, i.new_v, i.padding(), i.cursor, i.codes, i.key_params, i.value_params, i.center,
        i.sink_pairs, i.sink_index, i.recent, *i.layout, "midpoint", i.frequencies if i.case.center else None,
    ),
    "offload": lambda i: (i.new_k, i.new_v, i.padding(), i.cursor, i.host),
    "select_topk": lambda i: (i.scores, i.selected),
    "select_pages": lambda i: (i.scores, i.selected, 5),
    "prefetch": lambda i: (i.selected, i.cursor, i.host, i.slots, i.slot_index, i.fetched),
    "wait": lambda i: (i.q, i.cursor, i.slots, i.slot_index, i.selected),
    "budget_attention": lambda i: (
        i.q, i.k, i.v, i.mask(i.case.lanes), i.sinks, i.cursor, i.kept, i.kept_token, i.history, "roco", 1, 0,
        i.scale, i.case.softcap,
    ),
    "prompt_attention": lambda i: (
        i.q, i.k, i.v, i.mask(i.case.lanes), i.sinks, i.cursor, i.compressed, i.compressed_token, "expected_attention",
        BUDGET, [4, 512], i.scale, i.case.softcap, 0.7 ** torch.arange(i.q.shape[-1] // 2, dtype=torch.float32),
    ),
    "kcache_attention": lambda i: (
        i.q[:, :, :1].contiguous(), i.new_k, i.new_v, i.mask(1), i.sinks, i.cursor, i.device_keys, i.host, 8, i.scale,
        i.case.softcap,
    ),
    "fp8_attention": lambda i: (
        i.q[:, :, :1].contiguous(), i.new_k, i.new_v, i.mask(1), i.sinks, i.cursor, i.fp8_codes, i.scale,
        i.case.softcap,
    ),
    "keep_fp8": lambda i: (i.new_k, i.new_v, i.padding(), i.cursor, i.fp8_codes),
    "keep_keys": lambda i: (i.new_k, i.new_v, i.padding(), i.cursor, i.device_keys),
}  # fmt: skip

# An op's C++ takes the op's arguments.
GENERATORS |= {f"{op.name}_fused": GENERATORS[op.name] for op in OPS if op.fused is not None}

# Ops that declare operands as mutated but write nothing: a wait, which keeps readers after it, and what a GPU writes.
GUARDS = {"wait", "attend_scored", "attend_scored_fused"}

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Compilation takes most of `opcheck`'s time, so only these cases compile.
COMPILED = ("plain", "keys and values apart, rotated")
compiled_cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in COMPILED else [pytest.mark.slow]) for case in CASES],
)


def overload(op: Op) -> torch._ops.OpOverload:
    return getattr(torch.ops.specache, op.name).default


def tensors(value: Any) -> Iterator[Tensor]:
    yield from (x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor))


def clones(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tree_map_only(Tensor, Tensor.clone, arguments)


def test_every_op_has_inputs_here() -> None:
    assert set(GENERATORS) == set(BY_NAME)


@every_case
@every_op
def test_opcheck(op: Op, case: Case) -> None:
    """Schema, aliases, mutations, and the fake's shapes, dtypes and strides; the next test covers compilation."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(overload(op), GENERATORS[op.name](Inputs(case)), test_utils=checks)


@compiled_cases
@every_op
def test_a_graph_compiled_for_any_size_equals_the_op(op: Op, case: Case) -> None:
    torch.library.opcheck(overload(op), GENERATORS[op.name](Inputs(case)), test_utils="test_aot_dispatch_dynamic")


@every_op
def test_an_op_writes_only_the_operands_that_it_declares(op: Op) -> None:
    written: set[str] = set()
    declared: set[str] = set()
    for case in CASES:
        arguments = GENERATORS[op.name](Inputs(case))
        before = clones(arguments)
        overload(op)(*arguments)
        for argument, old, new in zip(overload(op)._schema.arguments, before, arguments, strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                declared.add(argument.name)
            if isinstance(new, Tensor) and not same(old, new):
                written.add(argument.name)
    assert written == (set() if op.name in GUARDS else declared)


def same(old: Tensor, new: Tensor) -> bool:
    return torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))


@every_op
def test_inputs_may_be_views(op: Op) -> None:
    """q, k and v come from a transpose, and a mask from an expand; results and their layout stay the same."""
    arguments = GENERATORS[op.name](Inputs(CASES[0]))
    declared = overload(op)._schema.arguments
    views = tuple(
        value.transpose(1, 2).contiguous().transpose(1, 2) if argument.name in ("q", "k", "v") else value
        for argument, value in zip(declared, clones(arguments), strict=True)
    )
    expected, results = list(tensors(overload(op)(*arguments))), list(tensors(overload(op)(*views)))
    for a, b in zip(expected, results, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    for a, b in zip(arguments, views, strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a, b)


# The vmap rule: a mapped axis becomes the lanes


def lane_inputs(mask: str, lanes: int) -> tuple[list[Any], tuple[Tensor | None, int | None]]:
    """Return arguments with folded lanes, and the mask for vmap: with its lane axis first, or unmapped."""
    i = Inputs(Case("lanes", lanes=lanes, mask="bool"))
    arguments = list(decode_inputs(i))
    if mask == "none":
        arguments[3] = None
        return arguments, (None, None)
    if mask == "unmapped":
        return arguments, (arguments[3], None)
    each = torch.rand(lanes, i.case.batch, 1, 1, i.case.length + 1) < 0.7
    each[..., -1] = True
    arguments[3] = each.squeeze(3).movedim(0, 2)
    return arguments, (each, 0)


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("mask", ["none", "unmapped", "mapped"])
def test_vmap_over_lanes_is_one_op_over_folded_lanes(mask: str, lanes: int) -> None:
    folded, (lane_mask, mask_dim) = lane_inputs(mask, lanes)
    op = torch.ops.specache.decode_attention
    out, scores = op(*folded)
    q, k, v = (x.unsqueeze(3).movedim(2, 0) for x in folded[:3])  # [lanes, B, H, 1, d]
    rest = folded[4:]

    def one_lane(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out, scores = op(q, k, v, mask, *rest)
        assert out.shape == q.shape
        return out, scores

    mapped, same_scores = torch.vmap(one_lane, (0, 0, 0, mask_dim), (0, None))(q, k, v, lane_mask)
    torch.testing.assert_close(mapped, out.unsqueeze(3).movedim(2, 0))
    torch.testing.assert_close(same_scores, scores)


def test_vmap_takes_the_lane_axis_wherever_it_is() -> None:
    folded, (lane_mask, _) = lane_inputs("mapped", 2)
    op = torch.ops.specache.decode_attention
    assert lane_mask is not None
    q, k, v = (x.unsqueeze(3) for x in folded[:3])  # lanes are axis 2 of q, and put last for k, in front for v
    in_dims = (2, 4, 0, 1)
    moved = (q, k.movedim(2, 4), v.movedim(2, 0), lane_mask.movedim(0, 1))
    mapped, _ = torch.vmap(lambda *lane: op(*lane, *folded[4:]), in_dims, (0, None))(*moved)
    torch.testing.assert_close(mapped, op(*folded)[0].unsqueeze(3).movedim(2, 0))


def test_vmap_gives_a_query_key_or_value_that_is_not_mapped_to_every_lane() -> None:
    folded, _ = lane_inputs("none", 2)
    op = torch.ops.specache.decode_attention
    folded[2] = folded[2][:, :, :1].expand(-1, -1, 2, -1)
    q, k, v = (x.unsqueeze(3).movedim(2, 0) for x in folded[:3])
    mapped, _ = torch.vmap(lambda q, k: op(q, k, v[0], *folded[3:]), (0, 0), (0, None))(q, k)
    torch.testing.assert_close(mapped, op(*folded)[0].unsqueeze(3).movedim(2, 0))


def test_vmap_over_the_tiers_is_refused() -> None:
    folded, _ = lane_inputs("none", 2)
    op = torch.ops.specache.decode_attention
    *others, recent = folded[8]
    with pytest.raises(NotImplementedError, match="all lanes share the sinks and tiers"):
        torch.vmap(lambda x: op(*folded[:8], [*others, x], *folded[9:]), 0, (0, None))(torch.stack([recent, recent]))


@pytest.mark.parametrize(("current", "switched"), [(1, []), (0, [torch.device("cuda:1")])], ids=["current", "another"])
def test_a_cuda_implementation_runs_on_the_device_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, current: int, switched: list[torch.device]
) -> None:
    """Triton launches on the current device; comparing devices is cheaper than switching."""
    entered: list[torch.device] = []

    @contextmanager
    def device(requested: torch.device) -> Iterator[None]:
        entered.append(requested)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(tiers, "select_topk", lambda scores, selected: ("run", selected))
    scores = SimpleNamespace(device=torch.device("cuda:1"))
    assert loaded_on_first_use(".movement.tier_ops:select_topk")(scores, 7) == ("run", 7)
    assert entered == switched


def test_every_op_takes_a_tensor_first() -> None:
    """The CUDA implementation uses the first tensor's device."""
    assert all("(Tensor " in op.schema.replace(op.name, "", 1)[:8] for op in OPS)


def test_an_implementation_takes_its_operands_without_surplus() -> None:
    run = takes(how=Layout)(lambda first, how, last: (first, how, last))
    assert run(1, 2, 4, False, 5) == (1, Layout(2, 4, False), 5)
    with pytest.raises(TypeError):
        run(1, 2, 4, False, 5, 6)
