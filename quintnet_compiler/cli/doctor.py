"""``quintnet doctor``."""

from __future__ import annotations

from ..core.progress import working
from .answer import RANK_FAULT, Answer
from .inputs.options import Json


def doctor(json: Json = False) -> Answer:
    """What is here: versions, devices, interfaces, ports, a compiler, and two processes that add numbers. For reports.

    Exit code: 0, 6 processes here cannot talk to each other.

    Example: quintnet doctor
    """
    from ..reports.doctor import examine

    with working("looking around"):
        report = examine()
    return Answer.from_report(report, 0 if report.talk is None else RANK_FAULT)
