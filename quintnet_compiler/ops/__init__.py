"""Operators of our own as torch custom operators: collectives, attention, expert layers, user derivatives.

Imports ``core`` only.
"""
