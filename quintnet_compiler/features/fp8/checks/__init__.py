"""Checks of rewrites and of layers of experts in 8 bits; of this feature they import the operators alone."""
