"""From a graph of Dynamo's to a rewritten one that runs."""
