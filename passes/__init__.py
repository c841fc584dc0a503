"""Graph passes: one file each, functions from a graph and a context to a graph and a report."""
