"""If a simulated device is impossible, one line states the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


def message_of(tmp_path: Path, torch: str, cuda: str | None, triton: str, **environment: str) -> str:
    """Return the launcher's message for these installed packages."""
    for package in ("torch", "triton"):
        (tmp_path / package).mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = {torch!r}\ncuda = {cuda!r}\n")
    (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = '{triton}'\n")
    done = subprocess.run(
        [sys.executable, str(RUN), "--", "true"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize(
    ("torch", "cuda", "triton", "environment", "line"),
    [
        ("2.11.0+cpu", None, "3.6.0", {}, "torch 2.11.0+cpu has no CUDA: pip install torch==2.11.0"),
        ("2.13.0+cu130", "13.0", "3.6.0", {}, "torch 2.13.0+cu130 is not 2.11"),
        ("2.11.0+cu130", "13.0", "3.7.1", {}, "triton 3.7.1 is not 3.6"),
        ("2.11.0+cu130", "13.0", "3.6.0", {"CXX": "no-such-compiler"}, "no compiler no-such-compiler: install g++"),
    ],
    ids=["torch without CUDA", "another torch", "another Triton", "no compiler"],
)
def test_what_is_missing_is_reported_in_one_line(
    tmp_path: Path, torch: str, cuda: str | None, triton: str, environment: dict[str, str], line: str
) -> None:
    message = message_of(tmp_path, torch, cuda, triton, **environment)
    assert message.startswith(f"no simulated device: {line}")
    assert message.count("\n") == 1
