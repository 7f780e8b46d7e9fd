"""Torch custom operators: collectives, attention, expert layers, user-defined derivatives.

Imports ``core`` only.
"""
