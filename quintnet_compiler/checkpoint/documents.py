"""A checkpoint's documents, checked before anything is loaded: ``index.json`` (which box of each tensor is where) and
``state.json`` (everything that is not a tensor). Anyone can make a manifest that fits, so neither is trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from pydantic import Field, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from ..weights.files import shown
from .manifest import MANIFEST, WrittenFiles, parsed
from .reading.open_files import Damaged
from .tensor_file import STORED_TYPES, BadHeader, read_header

INDEX, STATE = "index.json", "state.json"


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one checkpoint, and not one that has some."""
    return (folder / MANIFEST).is_file() and (folder / STATE).is_file()


Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class StoredBox(NamedTuple):
    """A box of a tensor: where it begins, its sizes, and the file and the key in it that hold it."""

    at: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: StrictStr
    key: StrictStr


class IndexEntry(NamedTuple):
    """A whole tensor. ``dtype``: a name in :data:`.tensor_file.STORED_TYPES`."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class _StoredEntry(TypedDict):
    dtype: StrictStr
    shape: tuple[Count, ...]
    boxes: tuple[StoredBox, ...]


OptimizerNote = TypedDict(
    "OptimizerNote",
    {
        "class": StrictStr,
        "options": list[dict[StrictStr, Any]],
        "of": dict[StrictStr, Count],
        "values": dict[StrictStr, dict[StrictStr, Any]],
        "groups": NotRequired[list[Count]],
    },
)


Scale = Annotated[StrictInt | StrictFloat, Field(gt=0, le=2.0**127, allow_inf_nan=False)]


class RandomState(TypedDict):
    seed: Count
    step: Count


class RunNote(TypedDict):
    """Without ``rng`` and ``loss_scale``: converted from a format that does not have them. ``tied``: further names of
    parameters -> the name that they are stored under."""

    rng: NotRequired[RandomState]
    loss_scale: NotRequired[tuple[Scale, Count]]
    mesh: NotRequired[StrictStr]
    tied: NotRequired[dict[StrictStr, StrictStr]]


class StateNote(TypedDict):
    """``extra``: of JSON's own values; ``typed_extra``: of others, see :func:`.values.stored_extra`."""

    step: Count
    extra: NotRequired[dict[StrictStr, Any]]
    typed_extra: NotRequired[dict[StrictStr, Any]]
    run: RunNote
    optimizer: NotRequired[OptimizerNote]


_INDEX, _STATE = TypeAdapter(dict[str, _StoredEntry]), TypeAdapter(StateNote)


def read_state(checkpoint: WrittenFiles, step: int) -> StateNote:
    """Read what the checkpoint of ``step`` has beside tensors.

    Raises:
        Damaged: if the document is not what :mod:`.storage` writes.
    """
    note: StateNote = _read(checkpoint, STATE, _STATE)
    if note["step"] != step:
        raise Damaged(f"{STATE} has step {shown(str(note['step']))}, and its folder {step}")
    optimizer = note.get("optimizer")
    numbers = [*optimizer["of"].values(), *optimizer.get("groups", ())] if optimizer else []
    if optimizer and any(number >= len(optimizer["options"]) for number in numbers):
        raise Damaged(f"{STATE} has a parameter with options that it does not have")
    return note


def read_index(checkpoint: WrittenFiles) -> dict[str, IndexEntry]:
    """Read which tensors a checkpoint has.

    Raises:
        Damaged: if the boxes of a tensor do not cover it exactly, lie in other files, or two boxes are one range of a
            file.
    """
    index = {name: IndexEntry(**entry) for name, entry in _read(checkpoint, INDEX, _INDEX).items()}
    for name, entry in index.items():
        where = f"{INDEX}, {shown(name)}"
        if entry.dtype not in STORED_TYPES:
            raise Damaged(f"{where}: there is no dtype {shown(entry.dtype)}")
        for box in entry.boxes:
            if box.file not in checkpoint.digests:
                raise Damaged(f"{where}: {shown(box.file)} is not a file of this checkpoint")
        if not covers(entry.shape, entry.boxes):
            raise Damaged(f"{where}: its boxes do not cover {entry.shape} exactly")
    _require_own_ranges(index)
    return index


def _require_own_ranges(index: Mapping[str, IndexEntry]) -> None:
    """Refuse an index of which two boxes are one range of a file."""
    ranges: set[tuple[str, str]] = set()
    for name, entry in index.items():
        for box in entry.boxes:
            if (box.file, box.key) in ranges:
                raise Damaged(f"{INDEX}, {shown(name)}: another box is {shown(box.key)} of {shown(box.file)}, too")
            ranges.add((box.file, box.key))


def check_tensors(checkpoint: WrittenFiles, index: Mapping[str, IndexEntry], files: Iterable[str]) -> None:
    """Compare what ``files`` say of their tensors with the index.

    Raises:
        Damaged: for a tensor that is missing, or has another shape or dtype.
    """
    wanted: dict[str, list[tuple[str, StoredBox]]] = {file: [] for file in files}
    for entry in index.values():
        for box in entry.boxes:
            if box.file in wanted:
                wanted[box.file].append((entry.dtype, box))
    for file, boxes in wanted.items():
        if not boxes:
            continue
        try:
            tensors = read_header(checkpoint.verified(file))
        except BadHeader as error:
            raise Damaged(f"{shown(file)}: {error}") from None
        for dtype, box in boxes:
            tensor = tensors.get(box.key)
            if tensor is None or not tensor.carries(dtype, box.sizes):
                raise Damaged(f"{shown(file)} does not have a tensor {shown(box.key)}: {dtype} {box.sizes}")


def _read(checkpoint: WrittenFiles, name: str, kind: TypeAdapter[Any]) -> Any:
    try:
        return kind.validate_python(parsed(checkpoint.read_verified(name)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{name} is not a checkpoint's: {shown(where)}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is damaged: {shown(str(error))}") from None


def covers(shape: Sequence[int], boxes: Sequence[StoredBox]) -> bool:
    """Return whether boxes lie in ``shape``, do not overlap, and have as many elements together."""
    if any(len(box.at) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        return False
    if any(a + n > whole for box in boxes for a, n, whole in zip(box.at, box.sizes, shape, strict=True)):
        return False
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    return not _overlap(sorted(boxes))


def _overlap(boxes: Sequence[StoredBox]) -> bool:
    """Return whether two of ``boxes``, which are sorted by offset, have an element in common."""
    active: list[StoredBox] = []  # those that may reach the next one along the first dim
    for box in boxes:
        active = [other for other in active if not box.at or other.at[0] + other.sizes[0] > box.at[0]]
        for other in active:
            apart = (
                a + n <= b or b + m <= a for a, n, b, m in zip(other.at, other.sizes, box.at, box.sizes, strict=True)
            )
            if not any(apart):
                return True
        active.append(box)
    return False
