"""Importing this module adds tests/ to sys.path, so that a tool can import its helpers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
