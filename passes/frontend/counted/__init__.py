"""Indices that are the number of their own place, by which every row is looked up on its own."""
