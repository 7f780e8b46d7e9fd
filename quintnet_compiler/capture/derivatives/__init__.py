"""Derivatives in a module's code: the user's functions and hooks, and gradients that are computed in forward."""
