"""Texts that a compiled program writes, with caches of keys and values in pages. See README.md."""

from .feature import TEXT_GENERATION

__all__ = ["TEXT_GENERATION"]
