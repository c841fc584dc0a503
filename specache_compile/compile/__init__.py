"""From a graph that Dynamo captured to a rewritten one that runs."""
