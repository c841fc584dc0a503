"""Shared parts of the C++ kernels: compilation, vectors and their math."""
