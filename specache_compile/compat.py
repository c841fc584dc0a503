"""What differs between the versions of transformers that are supported."""

from __future__ import annotations

import transformers
from packaging.version import Version

# From 5.18 on `generate` gives the model no mask where nothing is padded.
GENERATE_MASKS_ALL = Version(transformers.__version__) < Version("5.18")
