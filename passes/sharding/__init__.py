"""Choose a strategy for every operator, one integer program per mesh axis, and the storage of ZeRO.

Imports ``rules``.
"""
