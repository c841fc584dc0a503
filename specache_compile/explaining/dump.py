"""SPECACHE_DUMP: the explanation of graphs as they are really compiled, written at that time."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specache_compile.compile.rewrites import Rewrites
from specache_compile.kernels.costs import bytes_of
from specache_compile.passes.reading.nodes import is_weight
from specache_compile.runtime.variant import Variant

from .explain import explanation_of
from .times.devices import Device, device_called, find_device


def dump_explanation(rewrites: Rewrites, variant: Variant, folder: str) -> None:
    """Write explain.txt, explain.json, report.html, and timeline.json of a timed decode, into folder/<graph's name>.

    A pre-decode is explained with its decode. Each is for the first length and batch that Dynamo met.
    """
    captured = rewrites.captured
    if variant.phase != captured.phase:
        return
    target = Path(folder) / rewrites.name
    target.mkdir(parents=True, exist_ok=True)
    hint = captured.symbols.hint
    placeholders = zip(captured.placeholders, captured.fakes, strict=True)
    explained = explanation_of(
        [captured], [rewrites], variant.options, hint(captured.past) + hint(captured.tokens), hint(captured.batch),
        device=device_at(captured.layers[0].device), name=rewrites.name,
        weight_bytes=sum(bytes_of(fake) for node, fake in placeholders if is_weight(node)),
    )  # fmt: skip
    (target / "explain.txt").write_text(f"{explained}\n")
    (target / "explain.json").write_text(json.dumps(explained.to_dict(), indent=1))
    explained.save(target / "report.html")
    if explained.is_timed:
        explained.save(target / "timeline.json")


def device_at(place: torch.device) -> Device:
    """The device that runs a model, or the default where its figures are not known."""
    if place.type != "cuda":
        return find_device()
    return device_called(torch.cuda.get_device_name(place)) or find_device()
