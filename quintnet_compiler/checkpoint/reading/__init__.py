"""Checkpoints that are read while others write: which one is chosen, and that what was checked is what is read."""
