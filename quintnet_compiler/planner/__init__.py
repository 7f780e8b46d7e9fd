"""The planner: searches layouts of a model on a cluster and ranks them by predicted cost."""
