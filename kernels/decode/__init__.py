"""Triton kernels of a decode step over the tiers."""
