"""Provenance of figures, and a resumable file of results."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from specache_compile.errors import SpecacheError


def provenance(device: torch.device, program: str, given: Sequence[str] | None = None) -> dict[str, Any]:
    """The command, the date, the device, the host's threads and the versions of a file of results.

    program: a script, or the name of a command.
    given: its arguments; None: the arguments of this process.
    """
    words = [*(["python"] if program.endswith(".py") else []), program, *(sys.argv[1:] if given is None else given)]
    return {
        "command": shlex.join(words),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": version_of("triton"), "transformers": transformers.__version__, "python": platform.python_version(),
        "specache-compile": version_of("specache-compile"), "commit": commit(),
    }  # fmt: skip


def version_of(package: str) -> str | None:
    """A package's version; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def processor() -> str:
    """The processor's model on Linux, otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or f"{platform.machine()} CPU"


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


class Results:
    """The rows of one file of results. Each new row rewrites the file, so that an interrupted run loses no row.

    resume: keep the rows of the file. SpecacheError if they have another device, other package versions or other
        `settings`, because such rows do not belong in one table.
    """

    def __init__(
        self, out: Path | None, program: str, device: torch.device, resume: bool, given: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.out = out
        if out is not None:
            if out.is_dir():
                raise SpecacheError(f"{out} is a folder; name a file in it")
            out.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out.parent).close()  # an error of --json comes before the first row
        origin = provenance(device, program, given)
        self.report: dict[str, Any] = {"provenance": origin, "settings": settings, "rows": []}
        if resume and out is not None and out.exists():
            try:
                found = json.loads(out.read_text())
                old, new = ({**report["settings"], **report["provenance"]} for report in (found, self.report))
                found["rows"] = [dict(row) for row in found["rows"]]
            except (ValueError, TypeError, LookupError) as error:
                raise SpecacheError(f"{out} has no rows of a benchmark. Move the file, or name another file") from error
            other = [
                f"{name} {old.get(name)}, not {new[name]}" for name in (*SAME, *settings) if old.get(name) != new[name]
            ]
            if other:
                raise SpecacheError(f"{out} was measured with {'; '.join(other)}; name another file")
            self.report = found

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.report["rows"]

    def find(self, **key: Any) -> list[dict[str, Any]]:
        """The rows with these values."""
        return [row for row in self.rows if key.items() <= row.items()]

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows.extend(rows)
        self.write()

    def drop(self, **key: Any) -> None:
        """Remove the rows with these values."""
        self.rows[:] = [row for row in self.rows if not key.items() <= row.items()]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A value of the whole file: the stored one, or the result of `make`."""
        if name not in self.report:
            self.report[name] = make()
        return self.report[name]

    def write(self) -> None:
        """Write the file, if there is one."""
        if self.out is not None:
            write_whole(self.out, json.dumps(self.report, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a killed process leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


# Provenance that is equal for all rows of a table.
SAME = ("device", "torch", "cuda", "triton", "transformers")
