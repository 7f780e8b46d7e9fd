"""From sharding types to local shapes and communication nodes.

Imports ``rules``.
"""
