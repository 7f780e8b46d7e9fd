"""The training loop: configuration, data order, metrics, resuming."""
