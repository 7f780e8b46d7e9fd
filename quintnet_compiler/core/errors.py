"""Errors that users see: a stable id, the place in the user's model, the numbers, and a fix."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

SUMMARIES = MappingProxyType(
    {
        "QN101": "the model cannot be traced",
        "QN102": "the batch does not fit the program",
        "QN103": "the model does not return a loss",
        "QN104": "the loss cannot be split into microbatches",
        "QN105": "the model uses something that is not supported yet",
        "QN106": "the batch does not divide",
        "QN107": "the program is for inference",
        "QN108": "an option is not valid",
        "QN109": "an operator cannot be rewritten",
        "QN110": "forward changes something, or draws what is drawn once",
        "QN111": "the program differs from the module",
        "QN112": "the module changed, and the program cannot follow",
        "QN113": "a split program cannot serve this use of the module",
        "QN201": "the mesh is not valid",
        "QN202": "an operator has no sharding rule",
        "QN203": "the layout does not divide",
        "QN204": "the plan names something that the model does not have",
        "QN205": "no sharding satisfies the plan",
        "QN206": "the pipeline cannot be cut",
        "QN207": "the plan document is not valid",
        "QN208": "the schedule is not valid",
        "QN209": "a compiled program failed a check of the compiler",
        "QN210": "the cost model has no price for this",
        "QN211": "the calibration or the timeline is not valid",
        "QN212": "no layout fits the cluster",
        "QN213": "the budget of saved values is too small",
        "QN214": "a partial sum would be rounded before it is added up",
        "QN215": "the precision does not fit the model",
        "QN301": "the mesh does not fit the world",
        "QN302": "a launched process failed",
        "QN303": "a rank does not answer",
        "QN304": "the run takes too long",
        "QN401": "ranks disagree about communication",
        "QN402": "a rank waits for something that never comes",
        "QN403": "ranks run different programs",
        "QN404": "ranks hold different values",
        "QN501": "a value is not finite",
        "QN601": "weights or a checkpoint cannot be read",
        "QN602": "weights or a checkpoint do not fit the model",
        "QN603": "weights or a checkpoint cannot be written",
        "QN604": "a tensor has no values yet",
        "QN701": "a name cannot be used safely",
    }
)

# the fix of an error that is the compiler's own mistake
REPORT = "a mistake of QuintNet: report it where you got QuintNet, with the model and what `quintnet doctor` prints"


@dataclass(frozen=True)
class Where:
    """A place in the user's model: the module path and the line of source that made an operator."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return "  ".join(part for part in (self.module, self.source) if part)


class QuintNetError(Exception):
    """Base of every error that QuintNet raises on purpose.

    ``code`` is stable (``QN203``); ``where`` points into the user's model; ``fix`` is a suggestion.
    """

    def __init__(self, code: str, message: str, *, where: Where | None = None, fix: str = "") -> None:
        self.code, self.message, self.where, self.fix = code, message, where, fix
        lines = [f"{code} {SUMMARIES[code]}", f"  {message}"]
        if where is not None and str(where):
            lines.append(f"  at: {where}")
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (quintnet.launch); the default would re-call __init__ wrongly.
        return _rebuild, (type(self), self.code, self.message, self.where, self.fix)


def _rebuild(kind: type[QuintNetError], code: str, message: str, where: Where | None, fix: str) -> QuintNetError:
    return kind(code, message, where=where, fix=fix)


class CompileError(QuintNetError, ValueError):
    """The model, the mesh or the plan cannot be compiled. Raised before anything runs."""


class InputError(QuintNetError, ValueError):
    """A batch does not fit the compiled program. Raised before anything runs."""


class RunError(QuintNetError, RuntimeError):
    """Something went wrong while ranks were running."""


class BackendWarning(UserWarning):
    """A backend cannot compile a part of a program, which then runs as generated Python, or cannot capture it."""


class CheckpointError(QuintNetError, ValueError):
    """Weights on disk cannot be read or written, or are not this model's. No parameter was changed."""


class CheckWarning(UserWarning):
    """A program could not be compared with its module."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and another one is used."""


class FaultWarning(UserWarning):
    """A rank failed, and all ranks are started again."""
