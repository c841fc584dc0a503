"""Attention over the tiers: definitions, C++ and Triton kernels."""
