"""A barrier around files that one rank writes."""

from __future__ import annotations

import torch

from ..runtime.launch.accelerator import group_accelerator
from ..runtime.launch.calls import announced
from ..runtime.launch.consistency import tell
from ..runtime.launch.world import many


def wait_for_all(what: str = "the end of a save") -> None:
    """Wait until every rank calls this. ``what``: named in an error if another rank calls something else.

    Raises:
        RunError: QN401 or QN402, as from any call in which ranks communicate.
    """
    if many():
        with announced(what):
            tell("", group_accelerator() or torch.device("cpu"))
