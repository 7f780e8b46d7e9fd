"""Values of states as JSON, and back: every value keeps its type, tensors are stored by path."""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..core.errors import CheckpointError
from ..weights.files import shown
from ..weights.safetensors_writer import bytes_of
from .parts import SavedPart

Put = Callable[[str, Tensor], None]
Get = Callable[[str], Tensor]
PutOther = Callable[[str, Any], Any]
GetOther = Callable[[str, Any], Any]

_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
_SEQUENCE_KINDS = {kind: name for name, kind in _SEQUENCES.items()}
_MAPPING_KINDS = {kind: name for name, kind in _MAPPINGS.items()}
_BYTES: dict[str, type] = {"bytes": bytes, "bytearray": bytearray}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}


def plain(x: Any, what: str) -> Any:
    """Return ``x`` as JSON has it. A number of NumPy, or in a tensor, is one of Python.

    Raises:
        CheckpointError: QN603 if JSON has no such thing.
    """
    if isinstance(x, np.generic):
        x = x.item()
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, Tensor) and x.dim() == 0:
        return x.item()
    if isinstance(x, (list, tuple)):
        return [plain(part, what) for part in x]
    if isinstance(x, Mapping) and all(isinstance(key, str) for key in x):
        return {key: plain(part, what) for key, part in x.items()}
    text = f"{what} is a {type(x).__name__}, which JSON cannot hold"
    raise CheckpointError("QN603", text, fix="keep numbers, texts, lists and dicts with texts as keys")


def path_of(key: str) -> str:
    """Return a state's key without separators."""
    return quote(key, safe="")


def encoded(x: Any, path: str, what: str, put: Put, put_other: PutOther | None = None) -> Any:
    """Return ``x`` as JSON.

    A tensor becomes ``{"tensor": path}``, and is given to ``put``; what JSON does not have becomes an object with one
    key, its type.

    Args:
        x: None, a number of Python or NumPy, text, bytes, a tensor, an array, a member of an Enum, or a container of
            Python or a NamedTuple of them.
        path: of ``x``; parts of it add ``:key``.
        what: names ``x`` in errors.
        put: stores a tensor.
        put_other: returns JSON for what is none of these, or None if it has none either.

    Raises:
        CheckpointError: QN603 for what is none of these.
    """
    return _Encoder(what, put, put_other).encode(x, path)


class _Encoder:
    def __init__(self, what: str, put: Put, put_other: PutOther | None) -> None:
        self.what, self.put, self.put_other = what, put, put_other

    def encode(self, x: Any, path: str) -> Any:
        if isinstance(x, Tensor) and _is_storable(x):
            self.put(path, x)
            return {"tensor": path}
        if type(x) in _PLAIN:
            return x
        if type(x) is list:
            return self._items(x, path)
        kind, content = self._container(x, path) or _leaf(x) or ("", None)
        if kind:
            return {kind: content}
        if self.put_other is not None and (note := self.put_other(path, x)) is not None:
            return {"other": [path, note]}
        self._refuse(x, path)

    def _items(self, items: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(item, f"{path}:{i}") for i, item in enumerate(items)]

    def _pairs(self, x: Mapping[Any, Any], path: str) -> list[list[Any]]:
        paths = [f"{path}:{path_of(key) if type(key) is str else '#' + path_of(repr(key))}" for key in x]
        keys = [self._key(key, at) for key, at in zip(x, paths, strict=True)]
        return [[key, self.encode(value, at)] for key, value, at in zip(keys, x.values(), paths, strict=True)]

    def _key(self, key: Any, path: str) -> Any:
        def refuse(_: str, x: Any) -> NoReturn:
            self._refuse(x, path)

        return _Encoder(f"a key of {self.what}", refuse, None).encode(key, path)

    def _container(self, x: Any, path: str) -> tuple[str, Any] | None:
        if type(x) in (set, frozenset):  # in one order in all processes, as texts have other hashes in each
            return _SEQUENCE_KINDS[type(x)], sorted(self._items(x, path), key=json.dumps)
        if type(x) in _SEQUENCE_KINDS:
            return _SEQUENCE_KINDS[type(x)], self._items(x, path)
        if type(x) in _MAPPING_KINDS:
            return _MAPPING_KINDS[type(x)], self._pairs(x, path)
        if type(x) is deque:
            return "deque", [x.maxlen, self._items(x, path)]
        if type(x) is defaultdict and (x.default_factory is None or x.default_factory in _FACTORIES.values()):
            return "defaultdict", [getattr(x.default_factory, "__name__", None), self._pairs(x, path)]
        if isinstance(x, tuple) and _is_named_tuple(type(x)) and _class_named(*_name_of(x)) is type(x):
            return "named_tuple", [*_name_of(x), self._items(x, path)]
        return None

    def _refuse(self, x: Any, path: str) -> NoReturn:
        keys = ".".join(unquote(part.removeprefix("#")) for part in path.split(":")[1:])
        what = f"{self.what}: {keys}" if keys else self.what
        kind = "nested tensor" if type(x) is Tensor else type(x).__qualname__
        raise CheckpointError(
            "QN603",
            f"{what} is a {kind}, which a checkpoint cannot hold",
            fix="keep plain tensors, numbers, texts, members of an Enum, and lists, tuples, sets or dicts of them",
        )


def _is_storable(x: Tensor) -> bool:
    """Return whether numbers and a shape say what a tensor is; those of other classes would lose theirs."""
    kind = type(x)
    return (kind is Tensor or issubclass(kind, (nn.Parameter, DTensor))) and not is_lazy(x) and not x.is_nested


def _leaf(x: Any) -> tuple[str, Any] | None:
    """Return the kind of a value without parts, and its content; None for another one."""
    if type(x) is np.ndarray and x.dtype.kind not in "OV":
        return "array", [x.dtype.str, list(x.shape), _text(np.ascontiguousarray(x).tobytes())]
    if isinstance(x, np.generic) and x.dtype.kind not in "OV":
        return "number", [x.dtype.str, _text(x.tobytes())]
    if isinstance(x, Enum) and type(x).__members__.get(x.name) is x and _class_named(*_name_of(x)) is type(x):
        return "enum", [*_name_of(x), x.name]
    if type(x) in _BYTES.values():
        return type(x).__name__, _text(x)
    if type(x) is complex:
        return "complex", [x.real, x.imag]
    if type(x) is range:
        return "range", [x.start, x.stop, x.step]
    return None


def decoded(x: Any, get: Get, get_other: GetOther | None = None) -> Any:
    """Return what :func:`encoded` was given. ``get`` has its tensors; ``get_other`` reads what ``put_other`` gave."""
    if isinstance(x, list):
        return [decoded(item, get, get_other) for item in x]
    if not isinstance(x, dict):
        return x

    def each(items: Any) -> list[Any]:
        return [decoded(item, get, get_other) for item in items]

    def pairs(items: Any) -> dict[Any, Any]:
        return {decoded(key, get, get_other): decoded(value, get, get_other) for key, value in items}

    match list(x.items()):
        case [("tensor", str(path))]:
            return get(path)
        case [("other", [str(path), note])] if get_other is not None:
            return get_other(path, note)
        case [("dict", [[str(mark), content]])] if mark[:1] == "\0" and mark[1:] in _LEAVES:  # of earlier versions
            return _LEAVES[mark[1:]](content)
        case [(kind, list(content))] if kind in _CONTAINERS:
            return _CONTAINERS[kind](content, each, pairs)
        case [(str(kind), content)] if kind in _LEAVES:
            return _LEAVES[kind](content)
    return {key: decoded(value, get, get_other) for key, value in x.items()}  # as earlier versions wrote it


def to_json(state: Any, what: str, put_other: PutOther | None = None) -> Any:
    """Return ``state`` as JSON. ``what`` names it in errors; ``put_other``: see :func:`encoded`.

    Raises:
        CheckpointError: QN603 for a value that ``encoded`` does not have, or that holds itself.
    """
    tensors: dict[str, Any] = {}

    def put(path: str, x: Tensor) -> None:
        SavedPart.whole(x).require_storable(f"{what}{path}")
        data = bytes(bytes_of(x.detach().cpu()))
        tensors[path] = [str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]

    try:
        return {"value": encoded(state, "", what, put, put_other), "tensors": tensors}
    except RecursionError:
        raise CheckpointError("QN603", f"{what} holds itself", fix="keep values that do not") from None


def from_json(stored: Any, get_other: GetOther | None = None) -> Any:
    """Return the value of :func:`to_json`; None for None."""
    if stored is None:
        return None

    def get(path: str) -> Tensor:
        dtype, shape, text = stored["tensors"][path]
        data = bytearray(base64.b64decode(text))
        words = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return words.view(getattr(torch, dtype)).reshape(shape)

    return decoded(stored["value"], get, get_other)


def stored_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's document has for ``extra``: JSON's own values as they are, others with their types.

    Raises:
        CheckpointError: QN603 for a key that is no text, and for a value that :func:`encoded` does not have, or that
            holds itself.
    """
    try:
        if type(extra) is dict and _is_json(extra):
            return {"extra": copy.deepcopy(extra)}
    except RecursionError:
        pass  # the next line says which value it is
    if other := [key for key in extra if type(key) is not str]:
        raise CheckpointError("QN603", f"extra has the key {other[0]!r}", fix="use texts as keys")
    return {"typed_extra": to_json(dict(extra), "extra")}


def extra_of(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``extra`` of :func:`stored_extra`.

    Raises:
        CheckpointError: QN602 if it cannot be read here.
    """
    if "typed_extra" not in note:
        return dict(note.get("extra", {}))
    try:
        extra = from_json(note["typed_extra"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        text = f"state.json: typed_extra cannot be read: {type(error).__name__}: {shown(str(error))}"
        raise CheckpointError("QN602", text, fix="import the modules of its classes, or load another one") from None
    if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
        raise CheckpointError("QN602", "state.json: typed_extra is no dict of names", fix="load another checkpoint")
    return extra


def _is_json(x: Any) -> bool:
    """Return whether JSON gives back ``x`` with all its types."""
    if type(x) is list:
        return all(map(_is_json, x))
    if type(x) is dict:
        return all(type(key) is str for key in x) and all(map(_is_json, x.values()))
    return type(x) in _PLAIN


Each = Callable[[Any], list[Any]]
Pairs = Callable[[Any], dict[Any, Any]]


def _named_tuple_of(content: list[Any], each: Each, pairs: Pairs) -> Any:
    module, name, items = content
    return _named_tuple(_class_named(module, name), each(items), name)


def _default_dict_of(content: list[Any], each: Each, pairs: Pairs) -> defaultdict[Any, Any]:
    factory, items = content
    return defaultdict(None if factory is None else _FACTORIES[factory], pairs(items))


_CONTAINERS: dict[str, Callable[[list[Any], Each, Pairs], Any]] = {
    **{name: lambda items, each, pairs, kind=kind: kind(each(items)) for name, kind in _SEQUENCES.items()},  # type: ignore[misc]
    **{name: lambda items, each, pairs, kind=kind: kind(pairs(items)) for name, kind in _MAPPINGS.items()},  # type: ignore[misc]
    "deque": lambda content, each, pairs: deque(each(content[1]), content[0]),
    "defaultdict": _default_dict_of,
    "named_tuple": _named_tuple_of,
}


def _array(content: Any) -> Any:
    dtype, shape, text = content
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()


def _number(content: Any) -> Any:
    return np.frombuffer(base64.b64decode(content[-1]), content[0])[0]


def _member(content: Any) -> Any:
    module, name, member = content
    kind = _class_named(module, name)
    if kind is None or not issubclass(kind, Enum):
        raise ValueError(f"there is no Enum {module}.{name} here")
    return kind.__members__[member]


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "array": _array,
    "number": _number,
    "enum": _member,
    "complex": lambda content: complex(*content),
    "range": lambda content: range(*content),
    **{name: lambda text, kind=kind: kind(base64.b64decode(text)) for name, kind in _BYTES.items()},  # type: ignore[misc]
}


def _name_of(x: object) -> tuple[str, str]:
    return type(x).__module__, type(x).__qualname__


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _class_named(module: str, name: str) -> type | None:
    """Return a class of a module that is imported already; None if it has no such one. No code runs."""
    part: Any = sys.modules.get(module)
    for attribute in name.split("."):
        part = vars(part).get(attribute) if hasattr(part, "__dict__") else None
    return part if isinstance(part, type) else None


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _named_tuple(kind: type | None, items: list[Any], name: str) -> Any:
    if kind is None or not _is_named_tuple(kind) or len(items) != len(vars(kind)["_fields"]):
        raise ValueError(f"there is no NamedTuple {name} with {len(items)} fields here")
    return tuple.__new__(kind, items)
