"""The file of an evaluation's rows, each with its provenance, and the hashes of a model.

A row's key names all inputs of its figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specache_compile.bench.results import write_whole
from specache_compile.errors import SpecacheError

# Parts of a configuration that do not change the model.
ELSEWHERE = ("transformers_version", "_name_or_path")


def model_hash(model: Any) -> str:
    """Twelve hex digits over the names, shapes and values of a model's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def config_hash(model: Any, tokenizer: Any) -> str:
    """Twelve hex digits over a model's configurations and its tokenizer's chat template."""
    parts = [model.config.to_diff_dict(), model.generation_config.to_diff_dict()]
    configurations = [{name: value for name, value in part.items() if name not in ELSEWHERE} for part in parts]
    text = json.dumps([*configurations, tokenizer.chat_template], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass
class ResultRow:
    """One setting on one cell of a task.

    score, metric: the cell's figure.
    samples: the number of questions or tokens in the mean.
    detail: further figures (by depth, by position, ...).
    kv_ratio: device KV bytes over the full cache's in the last batch.
    """

    key: str
    task: str
    method: str
    cell: str
    context: int
    score: float
    metric: str
    samples: int
    seed: int
    kv_ratio: float | None
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)
    provenance: str = ""


def read_rows(path: Path) -> dict[str, ResultRow]:
    """The finished rows of a file by key; none without the file. SpecacheError if it has something else."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        return {row["key"]: ResultRow(**row) for row in [*found["rows"], *found.get("others", ())]}
    except (ValueError, TypeError, LookupError) as error:
        raise SpecacheError(f"{path} has no rows of an evaluation. Move the file, or pass another --out") from error


def write_rows(path: Path, done: Mapping[str, ResultRow], requested: Collection[str]) -> None:
    """Write the finished rows, a line each: those of the requested keys in their order, and those of other calls, which
    may have written meanwhile."""
    done = {**read_rows(path), **done}
    rows = [done[key] for key in requested if key in done]
    others = [row for key, row in done.items() if key not in requested]
    lines, more = (",\n".join(json.dumps(asdict(row)) for row in some) for some in (rows, others))
    given = json.dumps(sources(rows))
    write_whole(path, f'{{"provenance": {given},\n"rows": [\n{lines}\n],\n"others": [\n{more}\n]}}\n')


def sources(rows: Iterable[ResultRow]) -> list[str]:
    """The provenance of these rows, one line for each run."""
    return list(dict.fromkeys(row.provenance for row in rows))
