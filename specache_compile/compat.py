"""What differs between the versions of torch and transformers that are supported."""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version

# From 5.18 on `generate` gives the model no mask where nothing is padded.
GENERATE_MASKS_ALL = Version(transformers.__version__) < Version("5.18")
# The C++ that Inductor 2.11 writes checks an index before it has computed it, and does not compile.
CHECKS_BOUNDS_TOO_EARLY = Version(torch.__version__) < Version("2.12")
