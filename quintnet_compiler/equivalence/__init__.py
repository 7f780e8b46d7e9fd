"""Whether a program computes what the user's module computes: the module beside it, one rank or all of them.

Imports everything up to ``passes`` and ``runtime``; nothing that compiles imports it but ``api``, ``driver`` and tools.
"""
