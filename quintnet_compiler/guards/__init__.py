"""Python values that a trace read: recorded while tracing, compared before each step.

Imports ``core`` only.
"""
