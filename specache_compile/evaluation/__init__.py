"""The evaluation of `specache eval`: settings, a runner of models, resumable rows, tables and plots.

`specache_compile.evaluation.tasks` has the tasks. The backend does not import this package.
"""
