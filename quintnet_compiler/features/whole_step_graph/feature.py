"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...runtime.execute.engines import Engine
from ..feature import Feature


def _engine() -> Engine:
    from .cuda_capture import CudaStepCapture  # what captures is imported by programs that ask for it
    from .engine import WholeStepEngine

    return WholeStepEngine(capture=CudaStepCapture())


WHOLE_STEP_GRAPH = Feature("whole_step_graph", engines={"graph": _engine})
