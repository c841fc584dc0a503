"""The C++ kernels under the address and undefined-behaviour sanitizers.

Without them, a wrong address inside the process's memory often gives right numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = ("test_attention.py", "test_tiers.py", "test_trellis.py")
# Only float32, since each dtype is a separate build.
CHOSEN = "(cpp or float32) and not half and not dtype and not bfloat16 and not any_ and not triton"


def sanitizer(name: str) -> str | None:
    """Return the path of gcc's library; None without gcc or the library."""
    try:
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    path = found.stdout.strip()
    return path if os.path.isabs(path) else None


LIBRARIES = [sanitizer("libasan.so"), sanitizer("libubsan.so")]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(None in LIBRARIES, reason="gcc has no libasan and libubsan here")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(filter(None, LIBRARIES)), "OMP_NUM_THREADS": "2",
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    }  # fmt: skip
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "sanitized.py", *arguments]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)


def test_a_read_past_a_tensor_ends_the_process() -> None:
    done = run("--overrun")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.quick_for("test_attention.py", "test_tiers.py")
@pytest.mark.parametrize("tests", TESTS)
def test_the_kernels_stay_within_their_memory(tests: str) -> None:
    done = run(tests, "-k", CHOSEN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
