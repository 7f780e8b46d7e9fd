"""Pipeline stages: where the graph is cut.

Imports no other passes.
"""
