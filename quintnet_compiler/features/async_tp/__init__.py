"""Matmuls in slices, overlapped with the collectives of their operands and results. See README.md."""

from .feature import ASYNC_TP

__all__ = ["ASYNC_TP"]
