"""The compiler's passes in order, and the programs of one task that share their parameters.

Imports every layer below; ``planner`` and ``api`` use it.
"""
