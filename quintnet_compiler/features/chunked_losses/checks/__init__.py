"""Checks of losses in parts, and of gradients that are computed in the forward; they import nothing of this feature."""
