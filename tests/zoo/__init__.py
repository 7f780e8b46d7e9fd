"""Hugging Face models in tiny configurations: what a table of models and axes is made from.

:data:`KINDS` has a file for each kind of model; what an entry is, is in :mod:`.entry`, and what it is compared on in
:mod:`.layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .adapters import ADAPTERS
from .decoders import DECODERS
from .encoders import ENCODER_DECODERS, ENCODERS
from .entry import COMMON, GROUPED, VOCAB, Entry, InDouble
from .layouts import BRIEF, COMPOSED, EXPERTS, SINGLE, Layout, Outcome, columns, has_experts, outcome
from .mixtures import MIXTURES
from .recurrent import RECURRENT
from .signals import SIGNALS
from .vision import VISION
from .vision_language import VISION_LANGUAGE

__all__ = [
    "BRIEF", "COMMON", "COMPOSED", "EXPERTS", "Entry", "GROUPED", "InDouble", "KINDS", "Layout", "Outcome", "SINGLE",
    "VOCAB", "ZOO", "columns", "has_experts", "outcome",
]  # fmt: skip

KINDS: Mapping[str, Mapping[str, Entry]] = {
    "Decoders": DECODERS,
    "Mixtures of experts": MIXTURES,
    "State-space and recurrent models": RECURRENT,
    "Encoders": ENCODERS,
    "Encoders with decoders": ENCODER_DECODERS,
    "Images and videos": VISION,
    "Images in text": VISION_LANGUAGE,
    "Sound and time series": SIGNALS,
    "Adapters of frozen models": ADAPTERS,
}
ZOO: Mapping[str, Entry] = {name: entry for kind in KINDS.values() for name, entry in kind.items()}
