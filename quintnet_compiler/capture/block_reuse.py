"""Trace equal blocks of a module once: a planner needs no more, and :mod:`.repeat_blocks` adds the others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.torch import pytree, storage_key
from ..compat.torch_hooks import MODULE_HOOKS
from ..ir.repeated_blocks import longest_repetition

# Attributes of every module; those that matter (parameters, submodules, hooks) are compared by themselves.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


Setting = tuple[str, str]  # path of a module in its block, name of an attribute


@dataclass(frozen=True)
class BlockRun:
    """A run of equal blocks: ``times`` units of ``period`` blocks. ``numbers``: settings that are a block's number."""

    names: tuple[str, ...]
    period: int
    times: int
    numbers: frozenset[Setting]


@dataclass
class Skipped:
    """Blocks that a trace left out.

    Attributes:
        like: For a traced block, the blocks that were left out because they do the same.
        readers: For a block of a run, the blocks that may read its results.
        runs: Of equal blocks.
    """

    like: dict[str, list[str]] = field(default_factory=dict)
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    runs: list[BlockRun] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return whether a parameter is inside one of them."""
        return any(name.startswith(f"{block}.") for names in self.like.values() for block in names)

    def chained(self, modules: Mapping[fx.Node, str]) -> bool:
        """Return whether only the next block reads the results of a block that was left out.

        ``modules``: of the nodes of a graph.
        """
        names = {name for more in self.like.values() for name in more}
        passed = {node for node, module in modules.items() if module in names}
        for node in passed.union(*(node.all_input_nodes for node in passed)):
            home = next((block for block in self.readers if _inside(modules.get(node, ""), block)), None)
            allowed = (home, *self.readers[home]) if home else ()
            if not all(any(_inside(modules.get(user, ""), block) for block in allowed) for user in node.users):
                return False
        return True


def _inside(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")


class UnseenUsed(Exception):
    """A trace used a module or tensor that torch.export does not know."""


@dataclass(frozen=True)
class Unseen:
    """Modules and tensors that torch.export does not know, since a trace that leaves out their blocks uses none.

    ``modules``: their ids. ``tensors``: their parameters and buffers by id. A use of one of them is noticed.
    """

    modules: frozenset[int] = frozenset()
    tensors: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def inside_blocks(cls, model: nn.Module, runs: Sequence[BlockRun]) -> Unseen:
        """Return those that are only inside of blocks between the second and the last unit of a run."""
        blocks = {name for run in runs for name in run.names[2 * run.period : -run.period]}
        depths = {name.count(".") + 1 for name in blocks}
        inside, outside = dict[int, nn.Module](), set[int]()
        for name, module in model.named_modules(remove_duplicate=False):
            parts = name.split(".")
            if any(len(parts) > depth and ".".join(parts[:depth]) in blocks for depth in depths):
                inside[id(module)] = module
            else:
                outside.add(id(module))
        own = {key: module for key, module in inside.items() if key not in outside}
        tensors = [x for module in own.values() for x in (*module._parameters.values(), *module._buffers.values())]
        return cls(frozenset(own), {id(x): x for x in tensors if x is not None})

    def used_by(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of ``tensors`` shares memory with one that is unseen."""
        memory = set(map(storage_key, self.tensors.values()))
        return any(isinstance(x, Tensor) and x.layout == torch.strided and storage_key(x) in memory for x in tensors)


@contextlib.contextmanager
def blocks_once(model: nn.Module, least: int = 4) -> Iterator[Skipped]:
    """Let a block that is built and called like the one before it return that one's results inside.

    In each run of equal blocks (numbered children of one module, none of them inside another such run) the first, the
    second and the last are called; those between only if they get other arguments. A block's computation must not
    depend on its number other than through its parts and settings. Afterwards :meth:`Skipped.chained` tells whether
    only the next block reads the results of a block that was left out. ``least``: the minimum number of equal units in
    a run.
    """
    skipped = Skipped()
    patched: list[nn.Module] = []
    try:
        for path, blocks, period, times in _runs(model, least):
            names = [".".join(filter(None, (path, name))) for name, _ in blocks]
            skipped.runs.append(BlockRun(tuple(names), period, times, _own_numbers(blocks)))
            skipped.readers |= {name: (*names[i + 1 : i + 2], *names[i + period :][:1]) for i, name in enumerate(names)}
            run = _Run(names, period, times, skipped)
            for index, (_, block) in enumerate(blocks):
                block.forward = run.called(index, block.forward)
                patched.append(block)
        yield skipped
    finally:
        for block in patched:
            del block.forward


Blocks = list[tuple[str, nn.Module]]


def _runs(model: nn.Module, least: int) -> Iterator[tuple[str, Blocks, int, int]]:
    """Yield each run: the path of the parent, its blocks, the blocks of a unit, and the number of units."""
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    modules = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for path, parent in model.named_modules():
        if any(part.isdigit() for part in path.split(".")):
            continue
        blocks = [(name, child) for name, child in parent.named_children() if name.isdigit()]
        if len(blocks) < least or any("forward" in vars(child) for _, child in blocks):
            continue
        numbers = _own_numbers(blocks)
        labels = [_built(child, numbers) if _alone(child, owners, modules) else name for name, child in blocks]
        at = 0
        while at < len(blocks):
            period, times = longest_repetition(labels, at)
            if times >= least:
                yield path, blocks[at : at + period * times], period, times
            at += period * times


def _alone(block: nn.Module, owners: Mapping[int, int], modules: Mapping[int, int]) -> bool:
    """Return whether nothing else in the model shares the block or its parameters."""
    own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
    return modules[id(block)] == 1 and all(owners[key] == count for key, count in own.items())


def _settings(block: nn.Module) -> Iterator[tuple[Setting, Any]]:
    for path, part in block.named_modules():
        yield from (((path, name), value) for name, value in vars(part).items() if name not in _TORCHS)
        yield from (((path, name), tuple(vars(part)[name].values())) for name in MODULE_HOOKS)


def _own_numbers(blocks: Blocks) -> frozenset[Setting]:
    """Return the settings that are each block's number (``layer_idx``)."""
    numbers: set[Setting] = set()
    others: set[Setting] = set()
    for name, block in blocks:
        for setting, value in _settings(block):
            (numbers if type(value) is int and value == int(name) else others).add(setting)
    return frozenset(numbers - others)


def _built(block: nn.Module, numbers: frozenset[Setting]) -> Hashable:
    """Return a key that equal blocks share. Devices do not count: blocks that do not run need no values."""
    parts = tuple((path, type(part)) for path, part in block.named_modules())
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for name, x in tensors)
    rest = frozenset((key, _plain(value)) for key, value in _settings(block) if key not in numbers)
    return parts, shapes, rest


def _plain(value: Any) -> Hashable:
    """Return a key of a setting: equal for equal plain values; other objects are equal only to themselves."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(_plain, value))
    if type(value) is dict:
        return "dict", tuple((_plain(name), _plain(entry)) for name, entry in value.items())
    return (type(value).__name__, value) if isinstance(value, _PLAIN) else id(value)


def _are_plain(leaves: Sequence[Any]) -> bool:
    """Return whether these are only tensors and plain values, and no objects that may collect something."""
    return all(isinstance(x, (Tensor, *_PLAIN)) for x in leaves)


@dataclass
class _Run:
    names: Sequence[str]
    period: int
    times: int
    skipped: Skipped
    calls: dict[int, Hashable | None] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # arguments of calls, whose identities are compared
    results: dict[int, Any] = field(default_factory=dict)

    def called(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[index] = self._arguments_key(index, (args, kwargs))
            unit, twin = index // self.period, index - self.period
            alike = self.calls.get(twin) == self.calls[index] is not None
            if 1 < unit < self.times - 1 and alike and _are_plain(pytree.tree_leaves(self.results[twin])):
                # new tensors, so that their readers are known
                self.results[index] = pytree.tree_map_only(Tensor, torch.clone, self.results[twin])
                self._skip(twin, index)
            else:
                self.results[index] = forward(*args, **kwargs)
            return self.results[index]

        return call

    def _arguments_key(self, index: int, arguments: Any) -> Hashable | None:
        """Return a key of a block's arguments, or None if the block may change them.

        Results of the block before it count by their places, shapes, strides and dtypes.
        """
        previous = {id(x): place for place, x in enumerate(pytree.tree_leaves(self.results.get(index - 1)))}
        leaves, spec = pytree.tree_flatten(arguments)
        if not _are_plain(leaves):
            return None
        self.alive.append(leaves)
        keys = tuple(
            ("before", previous[id(x)], str(tuple(x.shape)), str(x.stride()), x.dtype, x.requires_grad)
            if isinstance(x, Tensor) and id(x) in previous else _plain(x) for x in leaves
        )  # fmt: skip
        return str(spec), keys

    def _skip(self, twin: int, index: int) -> None:
        name, like = self.names[index], self.names[twin]
        first = next((kept for kept, names in self.skipped.like.items() if like in names), like)
        self.skipped.like.setdefault(first, []).append(name)
