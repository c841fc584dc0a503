"""The `specache::` ops: their schemas, shapes and PyTorch implementations. Importing this registers them."""

from . import ops as ops
