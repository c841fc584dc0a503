"""Checkpoints: where a model's name leads, and how a GGUF file is read."""

from .names import resolved as resolved
