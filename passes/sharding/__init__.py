"""Which strategy every operator gets: one integer program per mesh axis, and ZeRO's storage.

Imports ``rules``.
"""
