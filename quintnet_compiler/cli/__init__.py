"""The command line ``quintnet``, one file per verb.

``python -m quintnet_compiler.cli`` is the same command.
"""

from .app import app, main

__all__ = ["app", "main"]
