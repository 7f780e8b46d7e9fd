"""Checks of values and parameters that wait in host memory; of this feature they import nothing."""
