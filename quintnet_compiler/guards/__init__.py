"""What a trace read in Python, recorded while it runs and compared before each step.

Imports ``core`` only.
"""
