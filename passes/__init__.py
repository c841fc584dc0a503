"""Graph passes: one file each, functions from a graph and a plan to a graph and a report."""

import specache_compile.kernels  # noqa: F401  (registers the ops, which the passes know by name)
