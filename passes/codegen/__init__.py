"""Generated functions per rank.

Imports no other passes.
"""
