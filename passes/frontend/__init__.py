"""Captured graph to canonical operators: normalisation, decompositions, mixed precision.

Imports ``rules`` and ``sharding`` types; no pass that follows.
"""
