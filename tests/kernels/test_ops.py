"""Properties of every `specache::` op: schema, fake, mutations. An op without inputs here fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_step import Case, Numbers, make_mask, make_step
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specache_compile.kernels.attention.kept_logits import whole_logits
from specache_compile.kernels.movement import tier_ops as tiers
from specache_compile.kernels.op import Op, loaded_on_first_use, registered
from specache_compile.kernels.state.layout import Layout, StoredTiers
from specache_compile.kernels.state.operands import takes
from specache_compile.kernels.state.page_table import PAGE
from specache_compile.methods import load_others

load_others()  # the baselines' ops too
OPS = registered()
BY_NAME = {op.name: op for op in OPS}
TOP_K, BUDGET = 12, 24
# The step after 127 tokens moves a group from the recent tier to the low-bit tier.
PLAIN = Case(length=127, top_k=TOP_K, filled=8, sink_tokens=5)
CASES = {
    "plain": PLAIN,
    "bfloat16, bool mask, sinks": replace(PLAIN, dtype=torch.bfloat16, mask="padding", sinks=True, batch=3, lanes=1),
    "additive mask, softcap": replace(
        PLAIN, mask="additive float32", softcap=5.0, heads=1, ratio=4, bits=1, head_dim=80
    ),
    "16 bits, one row": replace(
        PLAIN, dtype=torch.bfloat16, bits=16, batch=1, ratio=1, head_dim=32, softcap=5.0, mask="padding", sink_tokens=0
    ),
    "nothing in the low-bit tier": replace(PLAIN, length=20, sinks=True, mask="additive float32", dtype=torch.bfloat16),
    "keys and values apart, rotated": replace(PLAIN, value_bits=1, rotate=True, mask="padding", head_dim=96),
    # The first group comes into the low-bit tier.
    "centered": replace(PLAIN, center=True, length=63, softcap=5.0),
}


class Inputs:
    """Tensors of one case by name, each in separate memory: those of a decode step, and those of other ops."""

    def __init__(self, case: Case) -> None:
        step, numbers = make_step(case), Numbers(case.dtype)
        normal, self.case, self.cursor, self.sinks = numbers.normal, case, step.cursor, step.sinks
        self.q, self.k, self.v = step.q, step.k, step.v  # views, as a model's are
        self.tiers = [step.state[name].nan_to_num() for name in StoredTiers._fields]
        self.slots, self.slot_index = step.state["slots"].nan_to_num(), step.state["slot_index"]
        self.layout, self.scale, self.frequencies = list(map(int, case.layout)), case.head_dim**-0.5, torch.rand(3)
        rows, pairs = (case.batch, case.heads), (2, case.head_dim)
        pages = (len(step.state["codes"]), case.heads, PAGE)
        self.new_k, self.new_v = normal(*rows, 1, case.head_dim), normal(*rows, 1, case.head_dim)
        self.host, self.device_keys = normal(*pages, *pairs), normal(*pages, case.head_dim)
        self.fp8_codes = numbers.bytes(*pages, *pairs, high=127)
        self.selected = torch.arange(TOP_K - 1, -1, -1, dtype=torch.int32).repeat(*rows, 1) * 2 % 31
        self.scores, self.lane_scores = torch.rand(*rows, PAGE) - 0.2, torch.rand(case.lanes, *rows, PAGE) - 0.2
        self.logits, self.base = whole_logits(self.q, PAGE)
        self.logits.normal_()
        self.fetched, self.corrected = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.kept, self.compressed = normal(*rows, BUDGET, *pairs), normal(*rows, PAGE, *pairs)
        tokens = torch.arange(BUDGET, dtype=torch.int32)
        self.kept_token = tokens.masked_fill(tokens >= case.length, -1).repeat(*rows, 1)
        self.compressed_token = torch.nn.functional.pad(self.kept_token, (0, PAGE - BUDGET), value=-1)
        self.history = torch.rand(*rows, BUDGET, 4)

    def mask(self, new: int) -> Tensor | None:
        """Return a mask of the cached and `new` tokens."""
        case, heads = self.case, self.case.heads * self.case.ratio
        return make_mask(case.mask, case.batch, heads, case.lanes, case.length, new, torch.Generator())

    def padding(self) -> Tensor | None:
        """Return padding [B, 1, 1, C] for a bool mask: every third token is hidden, others in each row."""
        if self.case.mask != "padding":
            return None
        return (torch.arange(PAGE) % 3 != torch.arange(self.case.batch).view(-1, 1, 1, 1) % 3).contiguous()


def decode_inputs(i: Inputs) -> tuple[Any, ...]:
    step = (i.q, i.k, i.v, i.mask(1), i.sinks, i.cursor, i.slots, i.slot_index)
    return (*step, i.tiers, i.layout, i.scale, i.case.softcap, 0.01)


def score_inputs(i: Inputs) -> tuple[Any, ...]:
    return (i.q, i.k, i.v, i.mask(1), i.sinks, i.cursor, i.tiers, i.layout, i.scale, i.case.softcap, False)


def scored_inputs(i: Inputs) -> tuple[Any, ...]:
    kept = (i.logits, i.base, i.slot_index.flip(-1), i.slots, i.slot_index)
    return (i.q, i.k, i.v, i.mask(1), i.sinks, i.cursor, *kept, i.tiers, i.layout, i.scale, i.case.softcap, 0.01)


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
        i.new_k, i.new_v, i.padding(), i.cursor, *i.tiers, *i.layout, "midpoint",
        i.frequencies if i.case.center else None,
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
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# Compilation takes most of `opcheck`'s time, so only these cases compile.
compiled_cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[] if name in ("plain", "keys and values apart, rotated") else pytest.mark.slow)
     for name, case in CASES.items()],
)  # fmt: skip


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
    for case in CASES.values():
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


# The vmap rule: a mapped axis becomes the lanes


def lane_inputs(mask: str, lanes: int) -> tuple[list[Any], tuple[Tensor | None, int | None]]:
    """Return arguments with folded lanes, and the mask for vmap, with the place of its lane axis; None: unmapped."""
    i = Inputs(replace(PLAIN, lanes=lanes, mask="padding"))
    arguments = list(decode_inputs(i))
    if mask == "none":
        arguments[3] = None
        return arguments, (None, None)
    if mask == "unmapped":
        return arguments, (arguments[3], None)
    each = torch.rand(lanes, i.case.batch, 1, 1, i.case.length + 1) < 0.7
    each[..., -1] = True
    arguments[3] = each.squeeze(3).movedim(0, 2)
    return arguments, (each.movedim(0, 1), 1)


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("mask", ["none", "unmapped", "mapped"])
def test_vmap_over_lanes_is_one_op_over_folded_lanes(mask: str, lanes: int) -> None:
    """Wherever the lane axis is: that of q stays in place, that of k is last, that of v is first."""
    folded, (lane_mask, mask_dim) = lane_inputs(mask, lanes)
    op = torch.ops.specache.decode_attention
    out, scores = op(*folded)
    dims, rest = (2, 4, 0), folded[4:]
    q, k, v = (x.unsqueeze(3).movedim(2, dim) for x, dim in zip(folded[:3], dims, strict=True))

    def one_lane(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out, scores = op(q, k, v, mask, *rest)
        assert out.shape == q.shape
        return out, scores

    mapped, same_scores = torch.vmap(one_lane, (*dims, mask_dim), (0, None))(q, k, v, lane_mask)
    torch.testing.assert_close(mapped, out.unsqueeze(3).movedim(2, 0))
    torch.testing.assert_close(same_scores, scores)


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
