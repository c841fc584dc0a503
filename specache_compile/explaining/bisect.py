"""`bisect(model, inputs)`: find the layer whose rewrite moves the logits, by leaving layers exact, half by half.

The reference is the same model uncompiled, fed the same tokens. The option `exact_layers` leaves layers exact, so every
tried graph is one that the backend really makes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from specache_compile.compat import cache_of, with_cache
from specache_compile.errors import SpecacheError, SpecacheWarning


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`; `print` shows it as a table.

    Attributes:
        layer: the first layer whose rewrite moves the logits by more than `tolerance`; None if no rewrite does.
        moved: the largest |logit - reference| for each set of rewritten layers, in the order tried.
        step: tokens that were decoded before the logits first moved, with all layers rewritten; 0 is the prompt.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        result = sc.bisect(model, tokenizer("Hello", return_tensors="pt").to(model.device).input_ids)
        print(result.layer, result.moved)
    """

    layer: int | None
    tolerance: float
    layers: int
    step: int | None
    moved: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(", ".join(map(str, tried)) or "none", f"{moved:.3g}") for tried, moved in self.moved.items()]
        table = tabulate(rows, headers=("layers rewritten", "logits moved by at most"), maxcolwidths=[60, None])
        if self.layer is None:
            return f"no layer moves the logits by more than {self.tolerance:g}\n\n{table}"
        return (
            f"layer {self.layer} is the first whose rewrite moves the logits by more than {self.tolerance:g} "
            f"(first at step {self.step})\n\n{table}"
        )


def bisect(
    model: Any,
    inputs: Tensor | Mapping[str, Tensor],
    options: Mapping[str, Any] | None = None,
    *,
    tolerance: float = 1e-3,
    new_tokens: int = 8,
) -> Bisection:
    """Find the first layer whose rewrite moves the logits by more than `tolerance`.

    Args:
        model: an uncompiled Hugging Face decoder; it is copied, not changed.
        inputs: token ids [B, n], or a mapping with input_ids and attention_mask, padded on the left.
        options: as for torch.compile. By default every pair is fetched, so any movement is a fault.
        tolerance: largest accepted |logit - reference|.
        new_tokens: tokens to decode after the prompt.

    Returns:
        A `Bisection`; layers are counted in the model's order from 0.

    Raises:
        SpecacheError: `options` has exact_layers.

    Example:
        import specache_compile as sc

        model, tokenizer = sc.load_model("examples/needle-llama")
        print(sc.bisect(model, tokenizer("Hello", return_tensors="pt").to(model.device).input_ids))
    """
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    ids = given["input_ids"]
    lossless = {"top_k": ids.shape[1] + new_tokens, "host_bits": 16}
    settings = {"lowering": "eager", **lossless, **(options or {})}
    if settings.get("exact_layers"):
        raise SpecacheError("bisect chooses exact_layers itself: leave that option out")
    reference, tokens = logits_of(uncompiled(model), given, new_tokens)
    layers = count_layers(model, given, settings)
    moved: dict[tuple[int, ...], float] = {}
    first_step: list[int | None] = []

    def moves(rewritten: tuple[int, ...]) -> bool:
        if rewritten not in moved:
            exact = [n for n in range(layers) if n not in rewritten]
            logits = compiled_logits(model, given, tokens, {**settings, "exact_layers": exact})
            steps = [difference(a, b) for a, b in zip(logits, reference, strict=True)]
            moved[rewritten] = max(steps)
            first_step.append(next((n for n, by in enumerate(steps) if not by <= tolerance), None))
        return not moved[rewritten] <= tolerance  # a NaN moves

    if not moves(tuple(range(layers))):
        return Bisection(None, tolerance, layers, None, moved)
    low, high = 0, layers  # rewriting layers 0..low-1 is known not to move the logits; 0..high-1 does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if moves(tuple(range(middle))) else (middle, high)
    for layer in range(low, high):  # alone too: is its own rewrite at fault, or only with earlier ones?
        moves((layer,))
    return Bisection(low, tolerance, layers, first_step[0], moved)


def plain(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b|; NaN where either has one."""
    return float((a.float() - b.float()).abs().max())


@torch.no_grad()
def logits_of(
    step: Any, given: Mapping[str, Tensor], new_tokens: int, tokens: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """The last logits after the prompt and after each further token, and these tokens [B, new_tokens].

    tokens: those to decode; None: the tokens of the highest logits.
    """
    out = step(**given, use_cache=True)
    logits, decoded = [out.logits[:, -1]], list[Tensor]()
    mask = given.get("attention_mask")
    for number in range(new_tokens):
        chosen = logits[-1].argmax(-1, keepdim=True) if tokens is None else tokens[:, number : number + 1].clone()
        decoded.append(chosen)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
        extra = {} if mask is None else {"attention_mask": mask}
        out = step(chosen, **with_cache(cache_of(out)), **extra)
        logits.append(out.logits[:, -1])
    return logits, torch.cat(decoded, 1)


def uncompiled(model: Any) -> Any:
    """A copy that shares the weights and calls no compiled code."""
    twin = copy.copy(plain(model))
    twin.__dict__["_compiled_call_impl"] = None
    return twin.eval() if twin.training else twin


def compiled_logits(
    model: Any, given: Mapping[str, Tensor], tokens: Tensor, options: Mapping[str, Any]
) -> list[Tensor]:
    """The logits of the model compiled with `options`, fed the reference's tokens."""
    from specache_compile.compile.backend import specache

    twin = uncompiled(model)
    torch._dynamo.reset_code(type(twin).forward.__code__)
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        warnings.simplefilter("ignore", SpecacheWarning)  # layers are left exact on purpose
        step = torch.compile(twin, backend=lambda graph, example: specache(graph, example, options=options))
        return logits_of(step, given, tokens.shape[1], tokens)[0]


def count_layers(model: Any, given: Mapping[str, Tensor], options: Mapping[str, Any]) -> int:
    """The attentions that the backend sees in the model, rewritten or not."""
    from .explain import explain

    batch, length = given["input_ids"].shape
    explained = explain(plain(model), length, batch, options)
    if not explained.sites and not explained.absorbed:
        reasons = "; ".join(sorted({item.reason for item in explained.left_alone})) or "it has no attention"
        raise SpecacheError(f"nothing of this model is rewritten, so nothing can be at fault: {reasons}")
    return len(explained.sites) + len(explained.absorbed) + len(explained.left_alone)
