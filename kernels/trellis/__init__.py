"""A code over whole vectors: values at one bit a number, by a trellis (docs/design.md)."""
