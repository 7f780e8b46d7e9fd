"""Enumerate the strategies that the rules of :mod:`...ops.rules` allow on a mesh axis, and those of experts.

Imports ``core``, ``ops`` and ``ir``; no other pass.
"""
