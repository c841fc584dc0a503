"""Print the sizes of the project: product lines, lines that compiling loads, test lines, and words of the docs.

python tools/count_lines.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parent.parent
PRODUCT = ("specache_compile", "passes", "lowering", "kernels")
CODE = {".py", ".cpp", ".h"}
# What `torch.compile(model, backend="specache")` loads, in a process of its own.
LOADED = """
import sys
import torch
torch._dynamo.lookup_backend("specache")
names = (name for name in sys.modules if name.split(".")[0] == "specache_compile")
print("\\n".join(sys.modules[name].__file__ for name in names if getattr(sys.modules[name], "__file__", None)))
"""


def files(folders: tuple[str, ...], suffixes: set[str]) -> list[Path]:
    """The files of these folders that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {ROOT / name for name in listed.splitlines()}
    return sorted(path for path in found if path.suffix in suffixes and path.is_file())


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def loaded() -> list[Path]:
    """The modules of the project that looking up the backend imports."""
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return [Path(name) for name in run.stdout.splitlines()]


def sizes() -> dict[str, int]:
    return {
        "product lines, C++ included": lines(files(PRODUCT, CODE)),
        "lines loaded by the backend": lines(loaded()),
        "test lines, C++ included": lines(files(("tests",), CODE)),
        "words in docs": sum(len(path.read_text().split()) for path in files(("docs",), {".md"})),
    }


if __name__ == "__main__":
    print(tabulate(sizes().items(), colalign=("left", "right"), intfmt=","))
