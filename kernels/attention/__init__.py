"""Attention over the tiers: its definition, C++ and Triton."""
