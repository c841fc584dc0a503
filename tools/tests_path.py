"""Importing this lets a tool import the helpers of tests/, wherever it is started."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
