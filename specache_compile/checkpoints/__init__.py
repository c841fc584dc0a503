"""Checkpoints: names of models, and reading of GGUF files."""

from .names import resolved as resolved
