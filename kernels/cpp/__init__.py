"""Shared parts of the C++ kernels: compilation, tiles and vectors."""
