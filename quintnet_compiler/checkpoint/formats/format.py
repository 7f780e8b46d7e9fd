"""The formats that :mod:`.convert` knows, by name."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """Names the formats of checkpoints, as the command line does."""

    QUINTNET = "quintnet"
    DCP = "dcp"
    SAFETENSORS = "safetensors"
