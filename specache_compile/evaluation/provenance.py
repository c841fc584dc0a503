"""The provenance of a figure in one line: command, versions, commit, model, machine, seed."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("specache-compile", "torch", "transformers")
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


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that contains this code, with a + if files differ; None outside a checkout."""
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # installed: an enclosing checkout is another project
        return None
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"],
            cwd=here, capture_output=True, text=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def provenance(command: str, fingerprint: str, device: str, dtype: str, seed: int, origin: str = "") -> str:
    """The provenance line. origin: the model's source and licence, if known."""
    parts = [
        command,
        *(f"{name} {version(name)}" for name in PACKAGES),
        f"python {platform.python_version()}",
        f"commit {commit()}" if commit() else "no commit",
        f"weights {fingerprint}",
        *([origin] if origin else []),
        f"{device} {dtype}, {torch.get_num_threads()} threads",
        f"seed {seed}",
    ]
    return "; ".join(parts)
