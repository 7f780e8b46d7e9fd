"""The stored tensors of each tensor of a model.

For Hugging Face models this follows transformers' own table of conversions (renamed modules, experts stored one by
one); other models have the names that their files have. Nothing in this module imports transformers unless the model is
one of its own.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..compat.transformers import conversions, is_conversion, renamed, sort_key
from .adapters import base_of, is_peft
from .files import shown
from .sources import Join, Narrowed, Source, Stack, Stored, Swap


@dataclass
class Assignment:
    """Sources by the model's names (of which tied ones are several), and what could not be assigned."""

    sources: dict[str, Source] = field(default_factory=dict)
    unexpected: list[Stored] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def is_hugging_face(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def assign(model: nn.Module, stored: Mapping[str, Stored]) -> Assignment:
    """Find the model's tensors among the stored ones, by name; for a PEFT model, those of the wrapped model."""
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    if not is_peft(model):
        return _assigned(model, state, stored)
    base, names = base_of(model)
    assignment = _assigned(base, {plain: state[name] for name, plain in names.items()}, stored)
    assignment.sources = {
        name: assignment.sources[plain] for name, plain in names.items() if plain in assignment.sources
    }
    return assignment


def _assigned(model: nn.Module, state: dict[str, Tensor], stored: Mapping[str, Stored]) -> Assignment:
    return _Converter(model, state).assign(stored) if is_hugging_face(model) else _plain(state, stored)


def misread_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names under which the model's own tensors would not be loaded, because a conversion takes them."""
    if not is_hugging_face(model):
        return []
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    converter = _Converter(model, state)
    read = {name: converter.rename(name) for name in names}
    return [f"{name} would be loaded as {new}" for name, (new, by) in read.items() if new != name or by is not None]


def _plain(state: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> Assignment:
    assignment = Assignment()
    for name, source in stored.items():
        if name in state:
            assignment.sources[name] = source
        else:
            assignment.unexpected.append(source)
    return assignment


class _Unsupported(Exception):
    """A conversion that cannot be followed part by part."""


class _Converter:
    """transformers' conversions of one model, on sources instead of tensors.

    They are applied as in ``convert_and_load_state_dict_in_model``.
    """

    def __init__(self, model: Any, state: dict[str, Tensor]) -> None:
        self.model, self.state = model, state
        self.renamings, self.converters = conversions(model)

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return the model's name for a stored one, and the pattern of the converter that takes it, if one does."""
        prefix = self.model.base_model_prefix
        new, pattern = renamed(name, self.renamings, self.converters, prefix, self.state)
        if new not in self.state and name in self.state:
            new, pattern = renamed(name, [], [], prefix, self.state)
        return new, pattern

    def assign(self, stored: Mapping[str, Stored]) -> Assignment:
        assignment = Assignment()
        groups: dict[tuple[str, int], dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
        for source in sorted(stored.values(), key=lambda s: sort_key(s.name)):
            name, pattern = self.rename(source.name)
            if name not in self.state:
                assignment.unexpected.append(source)
            elif pattern is None:
                if name in assignment.sources:
                    assignment.problems.append(f"{source} and {assignment.sources[name]} are both {name}")
                assignment.sources[name] = source
            else:
                number = next(i for i, c in enumerate(self.converters) if pattern in c.source_patterns)
                groups[name, number][pattern].append(source)
        for (name, number), collected in groups.items():
            self._convert(name, self.converters[number], collected, assignment)
        return assignment

    def _convert(self, name: str, converter: Any, collected: Mapping[str, list[Stored]], into: Assignment) -> None:
        everything = [source for sources in collected.values() for source in sources]
        try:
            results = self._apply(name, converter, collected)
        except _Unsupported as error:
            names = ", ".join(shown(source.name) for source in everything[:4])
            more = f" and {len(everything) - 4} more" if len(everything) > 4 else ""
            into.problems.append(f"{names}{more} make {name}: {error}")
            return
        for target, source in results.items():
            if target not in self.state:
                into.unexpected += everything
            elif target in into.sources:
                into.problems.append(f"{source} and {into.sources[target]} are both {target}")
            else:
                into.sources[target] = source

    def _apply(self, name: str, converter: Any, collected: Mapping[str, list[Stored]]) -> dict[str, Source]:
        absent = [p for p in converter.source_patterns if p not in collected]
        if absent:
            raise _Unsupported(f"nothing in the files matches {', '.join(absent)}")
        values: dict[str, list[Source]] = {p: list(collected[p]) for p in converter.source_patterns}
        for op in converter.operations:
            values = self._operation(op, name, values, converter)
        # as WeightConverter.convert: what the patterns leave of the full name goes before and after every result
        full = name.replace("*.", "0.")
        around = next((full.partition(k) for k in values if k in full), None)
        if around is None:
            raise _Unsupported(f"{type(converter.operations[-1]).__name__} gives other names")
        return {around[0] + k + around[2]: _only(v) for k, v in values.items()}

    def _operation(
        self, op: Any, name: str, values: Mapping[str, list[Source]], converter: Any
    ) -> dict[str, list[Source]]:
        kind, targets = type(op).__name__, converter.target_patterns
        if not is_conversion(op):
            raise _Unsupported(f"the conversion {kind} is not supported")
        if kind == "MergeModulelist":
            single = len(values) == 1 and len(targets) == 1
            return {targets[0] if single else p: [_stack(op.dim, sources)] for p, sources in values.items()}
        if kind == "Concatenate" and len(targets) == 1:
            return {targets[0]: [_concatenated(op.dim, values, converter.source_patterns)]}
        if kind == "Chunk" and op.num_shards_attribute is None:
            return _chunks(op.dim, _only(_only(list(values.values()))), targets)
        if kind == "Transpose" and len(values) == 1:
            source = _only(_only(list(values.values())))
            key = targets[0] if len(targets) == 1 else converter.source_patterns[0]
            return {key: [_transposed(op, source, tuple(self.state[name].shape))]}
        raise _Unsupported(f"the conversion {kind} is not supported")


def _transposed(op: Any, source: Source, shape: tuple[int, ...]) -> Source:
    """Return a source with two dims swapped, unless it has the model's shape already and ``op`` compares these."""
    if op.check_dims and source.shape == shape:
        return source
    dims = len(source.shape)
    return Swap(source, op.dim0 % dims, op.dim1 % dims)


def _concatenated(dim: int, values: Mapping[str, list[Source]], patterns: Sequence[str]) -> Join:
    sources = tuple(source for pattern in patterns for source in values.get(pattern, ()))
    _require_alike(dim, sources)
    return Join(dim % len(sources[0].shape), sources)


def _chunks(dim: int, source: Source, targets: Sequence[str]) -> dict[str, list[Source]]:
    """Return equal parts of a source along ``dim``."""
    dim %= len(source.shape)
    size, remainder = divmod(source.shape[dim], len(targets))
    if remainder:
        raise _Unsupported(f"dim {dim} of {source}, {source.shape}, has no {len(targets)} equal parts")
    return {target: [Narrowed(source, dim, index * size, size)] for index, target in enumerate(targets)}


def _only(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise _Unsupported(f"{len(items)} tensors where the conversion takes one")
    return items[0]


def _stack(dim: int, sources: Sequence[Source]) -> Stack:
    _require_alike(None, sources)
    numbers = [[int(n) for n in re.findall(r"(?<![^.])\d+(?![^.])", s.name)] for s in sources if isinstance(s, Stored)]
    # the number in which the names differ must count from 0: a missing expert would move all that follow it
    differing = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(sources) > 1 and differing != [tuple(range(len(sources)))]:
        raise _Unsupported(f"their numbers are not 0 to {len(sources) - 1}, each once")
    return Stack(dim, tuple(sources))


def _require_alike(dim: int | None, sources: Sequence[Source]) -> None:
    """Require one dtype and, except for ``dim``, one shape."""
    dims = {len(s.shape) for s in sources}
    if len(dims) == 1 and dim is not None and not -min(dims) <= dim < min(dims):
        raise _Unsupported(f"{sources[0]} has the shape {sources[0].shape}, without a dim {dim}")
    joined = None if dim is None else dim % min(dims)
    kinds = {(s.dtype, tuple(n for d, n in enumerate(s.shape) if d != joined)) for s in sources}
    if len(dims) != 1 or len(kinds) != 1:
        raise _Unsupported(f"their shapes or dtypes differ: {', '.join(sorted(str(s.shape) for s in sources))[:200]}")
