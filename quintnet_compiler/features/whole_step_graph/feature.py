"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from ...runtime.execute.engines import Engine, EngineKind
from ..feature import Feature


def _engine() -> Engine:
    from .cuda_capture import CudaStepCapture  # what captures is imported by programs that ask for it
    from .engine import WholeStepEngine

    return WholeStepEngine(capture=CudaStepCapture())


# not priced as replayed: the steps of several ranks run in segments, which the host launches
WHOLE_STEP_GRAPH = Feature("whole_step_graph", engines={"graph": EngineKind(_engine)})
