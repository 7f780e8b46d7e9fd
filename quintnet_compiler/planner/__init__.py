"""The planner: layouts of a model on a cluster, ranked by what they cost."""
