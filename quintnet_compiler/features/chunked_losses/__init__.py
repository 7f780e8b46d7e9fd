"""Losses over many classes, computed for some of the rows at a time. See README.md."""

from .feature import CHUNKED_LOSSES

__all__ = ["CHUNKED_LOSSES"]
