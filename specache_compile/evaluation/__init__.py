"""The harness behind `specache eval`: settings, a runner that asks a model, rows that survive an interruption, figures.

The tasks are in `specache_compile.evaluation.tasks`. Nothing of the backend imports this package.
"""
