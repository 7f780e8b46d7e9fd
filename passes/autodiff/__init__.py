"""The backward as nodes of the same graph, and which values it computes again.

Imports ``rules`` and ``lowering``.
"""
