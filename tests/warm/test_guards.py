"""Which of Dynamo's guards torch stores, and which are stored with a description; none is dropped.

pytest tests/warm/test_guards.py -m '' -s        prints them by family
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tabulate import tabulate

from conftest import LOSSLESS, prompt
from families import FAMILIES, Family
from kept_traces import Traces
from specache_compile.warm import guards, stored_trace, trace_folder

QUICK = ("llama 3", "gemma2")
# How many of the two graphs are kept, where not both are: they are not rewritten, or their code is in no module.
KEPT = {"llama, dynamic rope": 0, "mistral, sliding": 0, "phi3, longrope": 1, "falcon, alibi": 0}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.quick_for(*QUICK)
def test_no_guard_is_dropped(traces: Traces, folder: Path, monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    """Of a prefill and a decode of each family: torch stores a guard, or it has a description."""
    made: list[tuple[Counter[str], tuple[bytes, bytes]]] = []
    kept_guards = guards.kept_guards

    def keep(code: Any, output_graph: Any) -> tuple[bytes, bytes]:
        kept = kept_guards(code, output_graph)
        made.append((named(output_graph.guards), kept))
        return kept

    monkeypatch.setattr(stored_trace, "kept_guards", keep)
    compiled = torch.compile(family.one_layer.model(), backend="specache", options=LOSSLESS)
    compiled.generate(prompt(60), max_new_tokens=3)
    forms = list(folder.rglob(trace_folder.TRACE))
    kept_forms = 0 if family.absorbed else KEPT.get(family.name, 2)
    assert len(forms) == kept_forms <= len(made)
    assert kept_forms < 2 or len(made) == 2
    for every, kept in made:
        stored = named(guards.state_of(kept[0]).output_graph.guards)
        others = named(guard for guard, _ in guards.others_of(kept[1]))
        assert stored + others == Counter(
            re.sub(r"__builtins_dict__\w+", guards.BUILTINS, guard) for guard in every.elements()
        )
        kinds = Counter(guard.split()[0] for guard in others.elements())
        assert set(kinds) <= guards.VALUE | guards.LENGTH | guards.KEYS | guards.NOTHING | {"TYPE_MATCH", "HASATTR"}
        print(f"\n{family.name}: {stored.total()} guards stored by torch, {kinds.total()} described")
        print(tabulate(kinds.most_common()))


def named(found: Any) -> Counter[str]:
    return Counter(f"{guard.create_fn_name()} {guard.name}" for guard in found)
