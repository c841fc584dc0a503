"""Checkpoints: names of models, and the GGUF files of known names."""
