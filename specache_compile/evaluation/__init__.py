"""The evaluation of `specache eval`: settings, a runner of models, resumable rows and tables.

`specache_compile.evaluation.tasks` has the tasks. The backend does not import this package.
"""
