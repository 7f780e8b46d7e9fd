"""The loss of several batches as if they were one batch: what of it is summed over rows."""
