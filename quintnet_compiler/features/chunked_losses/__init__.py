"""Losses that compute logits for some of the rows at a time."""
