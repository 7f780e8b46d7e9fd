"""Linear layers and experts whose matmuls are of 8-bit numbers with scales. See README.md."""

from .feature import FP8

__all__ = ["FP8"]
