"""Which stored tensors make which tensors of a model. For Hugging Face models this follows transformers' own table of
conversions (renamed modules, experts stored one by one); other models have the names that their files have.

Nothing here imports transformers unless the model is one of its own.
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
    """Find the model's tensors among the stored ones, by name; of a model that PEFT has wrapped, those of the model
    inside."""
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    if not is_peft(model):
        return _assigned(model, state, stored)
    base, names = base_of(model)
    found = _assigned(base, {plain: state[name] for name, plain in names.items()}, stored)
    found.sources = {name: found.sources[plain] for name, plain in names.items() if plain in found.sources}
    return found


def _assigned(model: nn.Module, state: dict[str, Tensor], stored: Mapping[str, Stored]) -> Assignment:
    return _Converter(model, state).assign(stored) if is_hugging_face(model) else _plain(state, stored)


def misread_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Names under which the model's own tensors would not come back, because a conversion on loading takes them."""
    if not is_hugging_face(model):
        return []
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    converter = _Converter(model, state)
    read = {name: converter.rename(name) for name in names}
    return [f"{name} would be loaded as {new}" for name, (new, by) in read.items() if new != name or by is not None]


def _plain(state: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> Assignment:
    found = Assignment()
    for name, source in stored.items():
        if name in state:
            found.sources[name] = source
        else:
            found.unexpected.append(source)
    return found


class _Unsupported(Exception):
    """A conversion that cannot be followed part by part."""


class _Converter:
    """transformers' conversions of one model: as ``convert_and_load_state_dict_in_model`` applies them, on sources
    instead of tensors."""

    def __init__(self, model: Any, state: dict[str, Tensor]) -> None:
        self.model, self.state = model, state
        self.renamings, self.converters = conversions(model)

    def rename(self, name: str) -> tuple[str, str | None]:
        """The model's name for a stored one, and the pattern of the converter that takes it, if one does."""
        prefix = self.model.base_model_prefix
        new, pattern = renamed(name, self.renamings, self.converters, prefix, self.state)
        if new not in self.state and name in self.state:
            new, pattern = renamed(name, [], [], prefix, self.state)
        return new, pattern

    def assign(self, stored: Mapping[str, Stored]) -> Assignment:
        found = Assignment()
        groups: dict[tuple[str, int], dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
        for source in sorted(stored.values(), key=lambda s: sort_key(s.name)):
            name, pattern = self.rename(source.name)
            if name not in self.state:
                found.unexpected.append(source)
            elif pattern is None:
                if name in found.sources:
                    found.problems.append(f"{source} and {found.sources[name]} are both {name}")
                found.sources[name] = source
            else:
                number = next(i for i, c in enumerate(self.converters) if pattern in c.source_patterns)
                groups[name, number][pattern].append(source)
        for (name, number), collected in groups.items():
            self._convert(name, self.converters[number], collected, found)
        return found

    def _convert(self, name: str, converter: Any, collected: Mapping[str, list[Stored]], found: Assignment) -> None:
        everything = [source for sources in collected.values() for source in sources]
        try:
            results = self._apply(name, converter, collected)
        except _Unsupported as error:
            names = ", ".join(shown(source.name) for source in everything[:4])
            more = f" and {len(everything) - 4} more" if len(everything) > 4 else ""
            found.problems.append(f"{names}{more} make {name}: {error}")
            return
        for target, source in results.items():
            if target not in self.state:
                found.unexpected += everything
            elif target in found.sources:
                found.problems.append(f"{source} and {found.sources[target]} are both {target}")
            else:
                found.sources[target] = source

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
            alone = len(values) == 1 and len(targets) == 1
            return {targets[0] if alone else p: [_stack(op.dim, sources)] for p, sources in values.items()}
        if kind == "Concatenate" and len(targets) == 1:
            sources = tuple(source for p in converter.source_patterns for source in values.get(p, ()))
            _same_but(op.dim, sources)
            return {targets[0]: [Join(op.dim % len(sources[0].shape), sources)]}
        if kind == "Chunk" and op.num_shards_attribute is None:
            source = _only(_only(list(values.values())))
            dim = op.dim % len(source.shape)
            size, rest = divmod(source.shape[dim], len(targets))
            if rest:
                raise _Unsupported(f"dim {dim} of {source}, {source.shape}, has no {len(targets)} equal parts")
            return {t: [Narrowed(source, dim, i * size, size)] for i, t in enumerate(targets)}
        if kind == "Transpose" and len(values) == 1:
            source = _only(_only(list(values.values())))
            key = targets[0] if len(targets) == 1 else converter.source_patterns[0]
            if op.check_dims and source.shape == tuple(self.state[name].shape):
                return {key: [source]}
            dims = len(source.shape)
            return {key: [Swap(source, op.dim0 % dims, op.dim1 % dims)]}
        raise _Unsupported(f"the conversion {kind} is not supported")


def _only(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise _Unsupported(f"{len(items)} tensors where the conversion takes one")
    return items[0]


def _stack(dim: int, sources: Sequence[Source]) -> Stack:
    _same_but(None, sources)
    numbers = [[int(n) for n in re.findall(r"(?<![^.])\d+(?![^.])", s.name)] for s in sources if isinstance(s, Stored)]
    # the number in which the names differ must count from 0: a missing expert would move all that follow it
    differing = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(sources) > 1 and differing != [tuple(range(len(sources)))]:
        raise _Unsupported(f"their numbers are not 0 to {len(sources) - 1}, each once")
    return Stack(dim, tuple(sources))


def _same_but(dim: int | None, sources: Sequence[Source]) -> None:
    """Raises unless all have one dtype and, but for ``dim``, one shape."""
    dims = {len(s.shape) for s in sources}
    if len(dims) == 1 and dim is not None and not -min(dims) <= dim < min(dims):
        raise _Unsupported(f"{sources[0]} has the shape {sources[0].shape}, without a dim {dim}")
    joined = None if dim is None else dim % min(dims)
    kinds = {(s.dtype, tuple(n for d, n in enumerate(s.shape) if d != joined)) for s in sources}
    if len(dims) != 1 or len(kinds) != 1:
        raise _Unsupported(f"their shapes or dtypes differ: {', '.join(sorted(str(s.shape) for s in sources))[:200]}")
