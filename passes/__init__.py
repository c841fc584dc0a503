"""Graph passes: one file each, functions from a graph and a plan to a graph and a report."""
