"""Whole steps as CUDA graphs. See README.md."""

from .feature import WHOLE_STEP_GRAPH

__all__ = ["WHOLE_STEP_GRAPH"]
