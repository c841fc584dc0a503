"""Checkpoints: what a model's name refers to, and how a GGUF file is read."""

from .names import resolved as resolved
