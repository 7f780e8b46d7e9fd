"""Save and restore a run's position in its data, and its random generators."""
