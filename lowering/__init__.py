"""Lowering: from a rewritten graph to a callable, with Inductor or op by op."""
