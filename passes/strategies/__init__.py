"""The strategies that the rules of :mod:`...ops.rules` allow on a mesh axis, and the axes of experts.

Imports ``core``, ``ops`` and ``ir``; no other pass.
"""
