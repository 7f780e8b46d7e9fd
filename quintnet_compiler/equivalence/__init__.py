"""Comparisons of a program with the user's module, and the dry run of all ranks.

Imports everything up to ``passes`` and ``runtime``; nothing that compiles imports it but ``api``, ``driver`` and tools.
"""
