"""One trace for modules that are alike, where a test is about what follows the trace.

Tests of layouts, stages, state, precision, checkpoints and prices compile the same few models many times, and half of
what that takes is torch.export. With the fixture ``shared_captures`` a module is traced once in a process of tests, and
compared with its trace once; another one that is built of the same classes, settings and shapes gets that graph with
its own parameters and buffers. Such a program has no guards, so the fixture is not for tests of capture, of guards, of
caches, of that comparison, or of modules that change between steps. What cannot be compared without doubt (hooks,
closures, objects, tensors of other classes) is traced as usual.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.places import LEAF
from quintnet_compiler.compat.torch import storage_key
from quintnet_compiler.compat.torch_hooks import GLOBAL_HOOKS, MODULE_HOOKS, accumulation_hooks, backward_hooks
from quintnet_compiler.compat.torch_settings import active_modes, settings_of_torch
from quintnet_compiler.driver.variants import Programs
from quintnet_compiler.ir.program import Captured

TORCHS = frozenset(vars(nn.Module())) - {"training"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType)  # a key keeps them, so an ``id`` is not used twice
TENSORS = (Tensor, nn.Parameter, nn.Buffer, DTensor)


class Incomparable(Exception):
    """What decides how a module is traced, and is not compared here."""


@dataclass
class SharedCaptures:
    """Calls of :func:`quintnet_compiler.capture.capture.capture`, of which equal ones share a graph."""

    kept: dict[Hashable, Captured] = field(default_factory=dict)
    compared: set[fx.Graph] = field(default_factory=set)
    reused: int = 0

    def __call__(
        self, model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None = None, **options: Any
    ) -> Captured:
        modules = {"": model, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
        try:
            key = _key(modules, batch, loss_fn, options)
        except Incomparable:
            return capture(model, batch, loss_fn, **options)
        if key in self.kept:
            self.reused += 1
            return _of(self.kept[key], modules)
        captured = capture(model, batch, loss_fn, **options)
        if captured.brought is not None:
            return captured
        self.kept[key] = replace(captured, tensors=_constants(captured), guards=None)
        return replace(captured, guards=None)

    def compare_once(
        self,
        programs: Programs,
        kind: str,
        captured: Captured,
        batch: Any,
        *,
        first: bool,
        compare: Callable[..., None],
    ) -> None:
        """Compare a capture with its module as ``compare`` does, unless its graph was found to be that of one."""
        asked = first and kind != "parts" and programs.task.check == "first"
        if asked and captured.graph in self.compared:
            return
        compare(programs, kind, captured, batch, first=first)
        if asked:
            self.compared.add(captured.graph)


def _constants(captured: Captured) -> dict[str, Tensor | None]:
    """Return the names of a capture's tensors, in order, with those that belong to no module."""
    leaves = (node.meta.get(LEAF) for node in captured.graph.nodes if node.op == "placeholder")
    constants = {leaf.name for leaf in leaves if leaf is not None and leaf.kind == "constant"}
    return {name: x if name in constants else None for name, x in captured.tensors.items()}


def _of(captured: Captured, modules: Mapping[str, nn.Module]) -> Captured:
    """Return the same capture with the parameters and buffers of ``modules``."""
    own = {name: x for name, _, x in _tensors(modules)}
    tensors = {name: own[name] if x is None else x for name, x in captured.tensors.items()}
    return replace(captured, tensors=types.MappingProxyType(tensors))


def _tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, Tensor]]:
    for prefix, module in modules.items():
        for kind, named in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            for name, x in named(remove_duplicate=False):
                yield ".".join(filter(None, (prefix, name))), kind, x


def _key(
    modules: Mapping[str, nn.Module], batch: Any, loss_fn: Callable[..., Tensor] | None, options: Mapping[str, Any]
) -> Hashable:
    """Return what a trace depends on.

    Raises:
        Incomparable: if something may decide that is not in a key.
    """
    if active_modes() or any(GLOBAL_HOOKS) or any(options.get(name) is not None for name in ("brought", "call")):
        raise Incomparable
    places: dict[int, str] = {}
    memory: dict[int, str] = {}
    tensors = []
    for name, kind, x in _tensors(modules):
        if type(x) not in TENSORS or x.layout is not torch.strided or backward_hooks(x) or accumulation_hooks(x):
            raise Incomparable
        first = places.setdefault(id(x), name)
        shared = first if isinstance(x, DTensor) or x.is_meta else memory.setdefault(storage_key(x), name)
        like = tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad
        tensors.append((name, kind, type(x), first, shared, like))
    described = tuple(part for module in modules.values() for part in _parts(module, places))
    function = None if isinstance(loss_fn, nn.Module) else _value(loss_fn, places)
    leaves, structure = pytree.tree_flatten(batch)
    inputs = tuple(
        (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) if type(x) is Tensor else _value(x, places)
        for x in leaves
    )
    asked = tuple((name, repr(value)) for name, value in sorted(options.items()))
    return tuple(tensors), described, function, inputs, str(structure), asked, tuple(settings_of_torch())


def _parts(root: nn.Module, places: Mapping[int, str]) -> Iterator[Hashable]:
    """Yield what a module is built of, part by part."""
    for path, part in root.named_modules(remove_duplicate=False):
        if any(vars(part)[name] for name in MODULE_HOOKS):
            raise Incomparable
        settings = [(name, _value(x, places)) for name, x in sorted(vars(part).items()) if name not in TORCHS]
        absent = [name for kind in (part._parameters, part._buffers) for name, x in kind.items() if x is None]
        yield path, type(part), type(part).forward, tuple(settings), tuple(absent)


def _value(value: Any, places: Mapping[int, str]) -> Hashable:
    """Return what a value is, so that equal ones are traced alike."""
    if isinstance(value, functools.partial):
        return "partial", _value(value.func, places), _value([*value.args], places), _value(value.keywords, places)
    if isinstance(value, types.FunctionType) and (value.__closure__ or value.__dict__):
        raise Incomparable
    if isinstance(value, BY_IDENTITY):
        return value
    if isinstance(value, Tensor) and id(value) in places:
        return "tensor", places[id(value)]
    if type(value) in PLAIN:
        return type(value), repr(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value), tuple(_value(x, places) for x in value)
    if type(value) is dict:
        return dict, tuple((_value(name, places), _value(x, places)) for name, x in value.items())
    if type(value).__module__.startswith("transformers.") and hasattr(value, "to_dict"):
        return type(value), repr(value.to_dict())
    raise Incomparable
