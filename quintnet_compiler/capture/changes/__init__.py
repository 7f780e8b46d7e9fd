"""Changes that a traced forward makes to its inputs, as results of the graph."""
