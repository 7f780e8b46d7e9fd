"""The command ``quintnet``: a file per verb. ``python -m quintnet_compiler.cli`` is the same command."""

from .app import app, main

__all__ = ["app", "main"]
