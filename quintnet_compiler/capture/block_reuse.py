"""Repeated blocks of a module, traced once: a planner needs no more, and :mod:`.repeat_blocks` makes all of them."""

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
from .repetition import longest_repetition

# What every module has of torch's own: what of it matters (parameters, parts, hooks) is compared by itself.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


Setting = tuple[str, str]  # path of a module in its block, name of an attribute


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks, by name: ``times`` units of ``period`` blocks. ``numbers``: settings that are a block's own
    number."""

    names: tuple[str, ...]
    period: int
    times: int
    numbers: frozenset[Setting]


@dataclass
class Skipped:
    """``like[name]``: the names of the blocks that were not traced because they do what block ``name`` does.
    ``readers[name]``: the blocks that may read what a block of a run returns. ``runs``: of blocks that are equal."""

    like: dict[str, list[str]] = field(default_factory=dict)
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    runs: list[BlockRun] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether a parameter is inside one of them."""
        return any(name.startswith(f"{block}.") for names in self.like.values() for block in names)

    def chained(self, modules: Mapping[fx.Node, str]) -> bool:
        """Whether what blocks that were left out hand on is read by the next block alone; the modules of a graph's
        nodes are given."""
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
    """A trace used a part that torch.export was not told of."""


@dataclass(frozen=True)
class Unseen:
    """Parts that torch.export is not told of, as a trace that leaves out their blocks does not use them: ``modules`` by
    ``id``, and their parameters and buffers, ``tensors``, likewise. What uses one of them all the same is noticed."""

    modules: frozenset[int] = frozenset()
    tensors: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, runs: Sequence[BlockRun]) -> Unseen:
        """What is inside of the blocks between the second unit of a run and the last, and nowhere else."""
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
        """Whether one of these tensors has the memory of one of those that are not seen."""
        memory = set(map(storage_key, self.tensors.values()))
        return any(isinstance(x, Tensor) and x.layout == torch.strided and storage_key(x) in memory for x in tensors)


@contextlib.contextmanager
def blocks_once(model: nn.Module, least: int = 4) -> Iterator[Skipped]:
    """While inside, a block that is built and called like the one before it returns what that one returned.

    Of each run of equal blocks (numbered children of one module, none of them inside another such run) the first, the
    second and the last are called; those between only where they are given something else. What a block does must not
    depend on its number, other than through what it is built of. Afterwards :meth:`Skipped.chained` says whether
    nothing but the next block reads what a block that was left out should have made. ``least``: of how many equal units
    a run has at least.
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
    """(path of the parent, blocks, how many of them repeat, how often)."""
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
    """Whether nothing else in the model shares the block, or its parameters."""
    own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
    return modules[id(block)] == 1 and all(owners[key] == count for key, count in own.items())


def _settings(block: nn.Module) -> Iterator[tuple[Setting, Any]]:
    for path, part in block.named_modules():
        yield from (((path, name), value) for name, value in vars(part).items() if name not in _TORCHS)
        yield from (((path, name), tuple(vars(part)[name].values())) for name in MODULE_HOOKS)


def _own_numbers(blocks: Blocks) -> frozenset[Setting]:
    """Settings that are each block's own number (``layer_idx``)."""
    found: set[Setting] = set()
    others: set[Setting] = set()
    for name, block in blocks:
        for setting, value in _settings(block):
            (found if type(value) is int and value == int(name) else others).add(setting)
    return frozenset(found - others)


def _built(block: nn.Module, numbers: frozenset[Setting]) -> Hashable:
    """Return what a block consists of. Devices do not count: blocks that do not run need no values."""
    parts = tuple((path, type(part)) for path, part in block.named_modules())
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for name, x in tensors)
    rest = frozenset((key, _plain(value)) for key, value in _settings(block) if key not in numbers)
    return parts, shapes, rest


def _plain(value: Any) -> Hashable:
    """A key under which equal settings are equal; other objects are equal only to themselves."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(_plain(one) for one in value)
    if type(value) is dict:
        return "dict", tuple((_plain(name), _plain(one)) for name, one in value.items())
    return (type(value).__name__, value) if isinstance(value, _PLAIN) else id(value)


def _known(leaves: Sequence[Any]) -> bool:
    """Whether these are tensors and plain values alone, and no objects that collect something."""
    return all(isinstance(x, (Tensor, *_PLAIN)) for x in leaves)


@dataclass
class _Run:
    names: Sequence[str]
    period: int
    times: int
    skipped: Skipped
    calls: dict[int, Hashable | None] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # what calls were given: identities are compared
    results: dict[int, Any] = field(default_factory=dict)

    def called(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[index] = self._given(index, (args, kwargs))
            unit, twin = index // self.period, index - self.period
            alike = self.calls.get(twin) == self.calls[index] is not None
            if 1 < unit < self.times - 1 and alike and _known(pytree.tree_leaves(self.results[twin])):
                # objects of its own, so that who reads them is known
                self.results[index] = pytree.tree_map_only(Tensor, torch.clone, self.results[twin])
                self._skip(twin, index)
            else:
                self.results[index] = forward(*args, **kwargs)
            return self.results[index]

        return call

    def _given(self, index: int, given: Any) -> Hashable | None:
        """What a block is called with, where results of the block before it count by their places, and by what they are
        like. None where a block may change what it is given."""
        before = {id(x): place for place, x in enumerate(pytree.tree_leaves(self.results.get(index - 1)))}
        leaves, spec = pytree.tree_flatten(given)
        if not _known(leaves):
            return None
        self.alive.append(leaves)
        found = tuple(
            ("before", before[id(x)], str(tuple(x.shape)), str(x.stride()), x.dtype, x.requires_grad)
            if isinstance(x, Tensor) and id(x) in before else _plain(x) for x in leaves
        )  # fmt: skip
        return str(spec), found

    def _skip(self, twin: int, index: int) -> None:
        name, like = self.names[index], self.names[twin]
        first = next((kept for kept, names in self.skipped.like.items() if like in names), like)
        self.skipped.like.setdefault(first, []).append(name)
