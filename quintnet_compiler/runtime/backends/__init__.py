"""Where ranks run: all in this process, or one per process.

Imports the rest of ``runtime``.
"""
