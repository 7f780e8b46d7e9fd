"""What a traced forward changes of what it is given, as results of the graph."""
