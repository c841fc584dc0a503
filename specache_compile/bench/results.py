"""Where figures come from, and the file that keeps them."""

from __future__ import annotations

import datetime
import importlib.util
import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from specache_compile.errors import SpecacheError


def provenance(device: torch.device, program: str, given: Sequence[str] | None = None) -> dict[str, Any]:
    """The command, the day, the device, the host's threads and the versions behind a file of results.

    program: a script, or a command's name.
    given: its arguments, where they are not this process's.
    """
    words = [*(["python"] if program.endswith(".py") else []), program, *(sys.argv[1:] if given is None else given)]
    return {
        "command": shlex.join(words),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": triton_version(), "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip


def triton_version() -> str | None:
    """Triton's version; None where there is none. Triton exists for Linux only."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def processor() -> str:
    """The processor's model on Linux; elsewhere its kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or f"{platform.machine()} CPU"


class Results:
    """The rows of one file of results. The file is written anew with each row, so that a run may end anywhere.

    resume: go on with the file's rows. SpecacheError where these were measured on another device, with other versions
    of the packages that matter, or under other `settings`: such rows do not belong into one table.
    """

    def __init__(
        self, out: Path | None, program: str, device: torch.device, resume: bool, given: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.out = out
        origin = provenance(device, program, given)
        self.report: dict[str, Any] = {"provenance": origin, "settings": settings, "rows": []}
        if resume and out is not None and out.exists():
            found = json.loads(out.read_text())
            old, new = ({**report["settings"], **report["provenance"]} for report in (found, self.report))
            other = [
                f"{name} {old.get(name)}, not {new[name]}" for name in (*SAME, *settings) if old.get(name) != new[name]
            ]
            if other:
                raise SpecacheError(f"{out} was measured with {'; '.join(other)}: give another file")
            self.report = found

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.report["rows"]
        return rows

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these figures."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows.extend(rows)
        self.write()

    def drop(self, **key: Any) -> None:
        """Drop the rows with these figures, to be replaced by others."""
        self.rows[:] = [row for row in self.rows if any(row.get(name) != value for name, value in key.items())]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A fact about the whole file: the file's, or else the result of `make`."""
        if name not in self.report:
            self.report[name] = make()
        return self.report[name]

    def write(self) -> None:
        """Write by way of another file, so that a killed process leaves the old one. Without a file, do nothing."""
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self.out)


# The parts of the provenance that rows of one table share.
SAME = ("device", "torch", "cuda", "triton", "transformers")
