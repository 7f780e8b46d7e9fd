"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ..feature import Feature
from .cuda_capture import CudaStepCapture
from .engine import WholeStepEngine

WHOLE_STEP_GRAPH = Feature("whole_step_graph", engines={"graph": lambda: WholeStepEngine(capture=CudaStepCapture())})
