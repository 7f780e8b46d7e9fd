"""Check a checkpoint's states of data and Trainer before anything is restored, as anyone can write one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
from pydantic import Field, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from ...checkpoint.values import from_json
from ...core.errors import CheckpointError
from ...weights.files import shown

_MT19937_WORDS = 624
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")

Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]
StoredState = dict[StrictStr, Any] | None


class EpochNote(TypedDict):
    """An epoch that ended, on one rank."""

    epoch: Count
    seen: Count
    rows: Count
    batches: Count
    begin: dict[StrictStr, Any]
    digest: StrictInt


class RankNote(TypedDict):
    """The states of one rank's random generators and loader; earlier versions had no ``last``."""

    begin: StoredState
    now: StoredState
    loader: StoredState
    digest: StrictInt
    last: NotRequired[EpochNote | None]


class DataNote(TypedDict):
    """See :meth:`.resumable_loader.ResumableLoader.state_dict`; earlier versions did not have all of it."""

    epoch: Count
    seen: Count
    rows: NotRequired[Count | None]
    batches: NotRequired[Count]
    in_epoch: NotRequired[Count]
    states: NotRequired[Annotated[list[RankNote], Field(min_length=1)]]
    of: NotRequired[list[Count]]
    data_ranks: NotRequired[Annotated[StrictInt, Field(ge=1, lt=2**63)]]
    data_rank_of: NotRequired[list[Count]]


class TrainerNote(TypedDict):
    """The state of a Trainer besides the position in the data."""

    best: Annotated[StrictInt | StrictFloat, Field(allow_inf_nan=False)] | None
    bad: Count
    data: NotRequired[dict[StrictStr, Any]]
    scheduler: NotRequired[dict[StrictStr, Any]]


_DATA, _TRAINER = TypeAdapter(DataNote), TypeAdapter(TrainerNote)


def require_data_state(state: Mapping[str, Any], where: str = "the state of the data") -> None:
    """Refuse a state that no ResumableLoader has returned.

    Raises:
        CheckpointError: QN602, naming the field.
    """
    _require(_DATA, state, where)
    if "batches" not in state and "in_epoch" not in state:
        raise unfit(f"{where}: batches is missing")
    if "states" not in state:
        return
    if not all(name in state for name in ("of", "data_ranks", "data_rank_of")):
        raise unfit(f"{where}: of, data_ranks or data_rank_of is missing")
    if not state["of"] or len(state["of"]) != len(state["data_rank_of"]) or max(state["of"]) >= len(state["states"]):
        raise unfit(f"{where}: of names ranks or states that it does not have")
    for number, states in enumerate(state["states"]):
        for name in ("begin", "now", "loader"):
            _require_decodable(states[name], f"{where}: states.{number}.{name}", generators=name != "loader")
        if (last := states.get("last")) is not None:
            _require_decodable(last["begin"], f"{where}: states.{number}.last.begin", generators=True)


def require_trainer_state(state: Any, where: str) -> None:
    """Refuse a state that no Trainer has saved.

    Raises:
        CheckpointError: QN602, naming the field.
    """
    _require(_TRAINER, state, where)
    require_data_state(state.get("data", state), where)


def _require(kind: TypeAdapter[Any], state: Any, where: str) -> None:
    try:
        kind.validate_python(state)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise unfit(f"{where}: {shown(field)}: {first['msg']}") from None


def _require_decodable(stored: Any, where: str, *, generators: bool) -> None:
    try:
        state = from_json(stored)
        if generators and state is not None:
            _try_generators(state)
    except Exception as error:  # of any library that was given wrong values
        raise unfit(f"{where}: {type(error).__name__}: {shown(str(error))}") from None


def _try_generators(states: Mapping[str, Any]) -> None:
    """Set states on unused generators, which raise errors for wrong ones."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["random"])
    _try_numpy(states["numpy"])
    for state in states["own"].values():
        _try_own(state)


def _try_own(state: Any) -> None:
    if isinstance(state, Tensor):  # of any device
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise ValueError("a torch generator's state is a row of bytes")
    elif isinstance(state, Mapping):
        if state["bit_generator"] not in _BIT_GENERATORS:
            raise ValueError("there is no such bit generator")
        generator = getattr(np.random, state["bit_generator"])()
        generator.state = dict(state)
        if state["bit_generator"] == "MT19937":
            _require_position(state["state"]["pos"])
    elif isinstance(state[0], str):
        _try_numpy(state)
    else:
        random.Random().setstate(state)


def _try_numpy(state: Any) -> None:
    np.random.RandomState().set_state(state)
    _require_position(state[2])


def _require_position(position: Any) -> None:
    """Require an index of the Mersenne Twister's words, which NumPy does not compare with their number."""
    if not 0 <= int(position) <= _MT19937_WORDS:
        raise ValueError(f"position {position} of {_MT19937_WORDS} words")


def unfit(text: str) -> CheckpointError:
    """Return the error for a state that was changed."""
    return CheckpointError("QN602", text, fix="go on from a checkpoint that has not been changed")
