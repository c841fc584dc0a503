"""SPECACHE_DUMP: the explanation of graphs as they were really compiled, written while they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specache_compile.passes.context import value_of

from .devices import DEVICES, Device, find_device
from .explain import explanation_of
from .roofline import bytes_of
from .session import Session

if TYPE_CHECKING:
    from .backend import CapturedGraph


def dump_explanation(graph: CapturedGraph, session: Session) -> None:
    """Write explain.txt, explain.json, report.html and, of a decode, timeline.json and schedule.graphml, into
    $SPECACHE_DUMP/<graph's name>; nothing where the variable is not set."""
    folder = os.environ.get("SPECACHE_DUMP")
    if not folder:
        return
    target = Path(folder) / graph.name
    target.mkdir(parents=True, exist_ok=True)
    past = graph.symbols.hint(graph.fakes[graph.held[0]].shape[2]) if graph.held else 0
    tokens = graph.symbols.hint(value_of(graph.sites[0].k).shape[2])
    weights = (fake for node, fake in zip(graph.placeholders, graph.fakes, strict=True) if "parameters" in node.name)
    explained = explanation_of(
        [graph], session.options, max(past, session.length) + tokens, session.batch,
        device=device_of_session(session), weight_bytes=sum(map(bytes_of, weights)), name=graph.name,
    )  # fmt: skip
    (target / "explain.txt").write_text(f"{explained}\n")
    (target / "explain.json").write_text(json.dumps(explained.to_dict(), indent=1))
    explained.save(target / "report.html")
    if "decode" in explained.graphs:
        explained.save(target / "timeline.json")
        explained.save(target / "schedule.graphml")


def device_of_session(session: Session) -> Device:
    """The device that runs it, where its figures are known; the default one elsewhere."""
    if session.layers[0].device.type != "cuda":
        return find_device()
    name = torch.cuda.get_device_name(session.layers[0].device)
    return next((device for key, device in DEVICES.items() if key.split()[-1] in name), find_device())
