"""From a rewritten graph to a callable: through Inductor, or as it is."""
