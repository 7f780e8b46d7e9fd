"""What a captured program took from Python, compared before each step: attributes, modes, variables, constants."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import version, without_torch_function
from ..compat.torch_func import count_function_modes, default_device, function_modes
from ..compat.torch_hooks import STATE_DICT_PARTS
from ..compat.torch_settings import switches_of_torch
from .attribute_reads import Read, TensorPlace
from .by_name import (
    NamedSpace,
    class_namespaces,
    is_constant,
    spaces_by_name,
    special_spaces,
    torch_spaces,
)
from .call_attributes import CallAttribute
from .class_facts import ClassFacts
from .columns import (
    Absent,
    Constants,
    DictGuard,
    Flags,
    Kinds,
    Modes,
    PlainValues,
    Row,
    SameObjects,
    Space,
    TraceGuard,
    Values,
)
from .containers import ContainerGuards, fields_of, names_of, reading_of
from .function_reads import Unset, Variable
from .hooks import Trained, global_hooks, hook_guards
from .module_contents import DictVersions, Namespaces, Parts, Registered
from .namespaces import Cell, space_of
from .process_settings import readers_of
from .python_state import is_simple
from .reach import Unread, container_guards

Roots = Sequence[tuple[str, nn.Module]]
# methods of modules that look at all parameters or buffers, and the namespaces of these
_ALL_TENSORS = frozenset(
    ["parameters", "named_parameters", "_parameters", "buffers", "named_buffers", "_buffers", "state_dict"]
)
_DICTS = ("_parameters", "_buffers", "_modules")  # where modules keep these
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True)
class TraceReads:
    """All that a trace took from Python.

    ``roots``: the modules that were traced, with labels. ``reads``: the attributes that were read, ``missing`` those
    that were not there; ``whole``: the objects whose ``__dict__`` was read. ``modules``: those that were met elsewhere.
    ``variables``: those of functions, ``unset`` those that were not there; ``functions``: that were followed;
    ``names``: what they look up. ``constants``: tensors with their versions; ``foreign``: those whose values a program
    reads anew in each step. ``spaces``: the classes and Python modules that were met, and the classes of all objects.
    ``whole_classes``: whether all that these classes hold may have been read. ``modes``: see :func:`global_modes`.
    ``flags``: whether it matters which parameters require gradients. ``of_calls``: attributes that a call makes anew.
    ``of_tensors``: parameters and buffers of which attributes were read, and their places.
    ``values``: tensors whose values became Python numbers. ``objects``: all that were met.
    """

    roots: Roots
    reads: Sequence[Read] = ()
    missing: Sequence[Read] = ()
    whole: Sequence[Any] = ()
    modules: Roots = ()
    variables: Sequence[Variable] = ()
    unset: Sequence[Unset] = ()
    functions: Sequence[types.FunctionType] = ()
    names: Set[str] = frozenset()
    constants: Sequence[tuple[Tensor, int]] = ()
    foreign: Sequence[Tensor] = ()
    spaces: Sequence[tuple[str, Any]] = ()
    whole_classes: bool = False
    modes: tuple[Any, ...] = ()
    flags: bool = True
    of_calls: Sequence[CallAttribute] = ()
    of_tensors: Sequence[tuple[TensorPlace, Tensor]] = ()
    values: Sequence[Tensor] = ()
    objects: Sequence[tuple[str, Any]] = ()


@dataclass(frozen=True)
class Guards:
    """Conditions under which a captured graph still is that of its module.

    ``source``: what they were made of. ``unread``: what the trace was shown not to read, by the ``id`` of what holds
    it. ``versions``: of the dicts that most guards look in; ``elsewhere``: compare what is not there.
    """

    source: TraceReads
    unread: Mapping[int, Unread]
    same: SameObjects
    reads: tuple[TraceGuard, ...]  # of what the trace read in Python: ``same``, and others
    containers: ContainerGuards
    fixed: tuple[TraceGuard, ...]  # what no other trace can make up for: constants, parts, flags, hooks, modes
    versions: DictVersions
    elsewhere: tuple[Callable[[], bool], ...]

    @property
    def _all(self) -> tuple[TraceGuard, ...]:
        return (*self.reads, *self.fixed, self.containers)

    def hold(self) -> bool:
        """Return whether all is as it was: where nobody wrote to a dict, what it holds is not compared again."""
        if self.versions.hold():
            return _all_hold(self.elsewhere)
        if not _all_hold(guard.hold for guard in self._all):
            return False
        self.versions.remember()
        return True

    def broken(self) -> list[str]:
        """Say what is not as it was, with the values before and now."""
        with without_torch_function():
            return [line for guard in self._all for line in guard.broken()]

    def only_containers_differ(self) -> bool:
        """Return whether all is as it was but what containers hold."""
        return _all_hold(guard.hold for guard in (*self.reads, *self.fixed))

    def only_reads_differ(self) -> bool:
        """Return whether all is as it was but what the trace read in Python: the same graph is the same program."""
        return _all_hold(guard.hold for guard in self.fixed)

    def without(self, unread: Mapping[int, Unread]) -> Guards:
        """Return guards of what there is now, but for what a trace was shown not to read."""
        return guards_of(self.source, unread)


def _all_hold(comparisons: Iterable[Callable[[], bool]]) -> bool:
    try:
        with without_torch_function():
            for holds in comparisons:  # noqa: SIM110 -- a generator makes a call for each
                if not holds():
                    return False
            return True
    except Exception:  # gone, or not comparable any more: comparisons may run code of the user's
        return False


def global_modes() -> tuple[Any, ...]:
    """Return what torch itself is set to that decides which operators a trace has."""
    return (
        torch.get_default_dtype(),
        default_device(function_modes()) if count_function_modes() else None,
        *global_hooks(),
    )


def guards_of(source: TraceReads, unread: Mapping[int, Unread] = types.MappingProxyType({})) -> Guards:
    """Return guards with the values of now: after the trace, when everything is as its owner had it."""
    rows = _Rows(source)
    rows.collect()
    tensors = [*source.constants, *rows.tensors]
    rows.held += [("an attribute of a tensor", vars(x)) for x, _ in tensors if vars(x)]
    whole = {id(owner) for owner in source.whole}
    containers = container_guards(rows.held, lambda value: id(value) in whole, unread)
    constants, kinds = Constants.of(tensors, source.foreign), Kinds.of(rows.owners())
    read = functools.partial(switches_of_torch, readers_of(rows.names_of_functions()))
    settings, modes = Modes(read, read()), Modes(global_modes, source.modes)
    further = rows.registered(), Values.of(source.values), ClassFacts.of(source.spaces, source.names)
    others = settings, *(guard for guard in further if guard.compared)
    namespaces, parts, trained = Namespaces.current(rows.owners()), Parts.current(rows.parts), rows.trained()
    plain, same, absent = PlainValues.of(rows.plain), SameObjects(tuple(rows.same)), rows.absent()
    versions = DictVersions.current(namespaces, rows.dicts())
    in_dicts: tuple[DictGuard, ...] = kinds, plain, same, absent, namespaces, parts, trained
    always = (guard.hold for guard in (*others, constants, modes, containers))
    elsewhere = *(guard.outside(versions.ids) for guard in in_dicts), *always
    reads, fixed = (namespaces, plain, same, absent, kinds, *others), (constants, parts, trained, modes)
    return Guards(source, unread, same, reads, containers, fixed, versions, elsewhere)


@dataclass
class _Rows:
    """Collects what is to be compared. ``held``: values that may hold others, with labels."""

    source: TraceReads
    plain: list[Row] = field(default_factory=list)
    same: list[Row] = field(default_factory=list)
    absences: list[tuple[str, Any, str]] = field(default_factory=list)
    absent_in_classes: list[tuple[type, str]] = field(default_factory=list)
    absent_many: list[tuple[str, frozenset[str], Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int]] = field(default_factory=list)
    held: list[tuple[str, Any]] = field(default_factory=list)
    parts: list[tuple[str, Space]] = field(default_factory=list)
    seen: set[tuple[int, str]] = field(default_factory=set)

    def collect(self) -> None:
        source = self.source
        self._observed_reads()
        kinds = [type(owner) for _, owner in self.owners()] + [x for _, x in source.spaces if isinstance(x, type)]
        modules = [module for _, module in self._modules()]
        for space in (*self._named_spaces(), *special_spaces(kinds), *torch_spaces(source.names, modules)):
            self._named(space)
        self.held += [(function.__name__, function) for function in source.functions]
        self.held += class_namespaces(source.spaces) if source.whole_classes else []
        for owner in source.whole:
            self._whole(owner)
        for label, module in self._modules():
            self._module(label, module)
        for label, module in self.hidden:
            self._tensors_of(label, module)

    def _observed_reads(self) -> None:
        """Collect the attributes and variables that were seen to be read."""
        for read in {(id(read.owner), read.name): read for read in self.source.reads}.values():
            self._attribute(read)
        for read in self.source.missing:
            self._missing(read)
        for variable in self.source.variables:
            self._variable(variable)
        self._unset()
        self.same += [(place.path, place.space, place.name, tensor) for place, tensor in self.source.of_tensors]

    def _unset(self) -> None:
        """Collect the global variables that were not there, of which Python's own may have the names."""
        self.absences += [(unset.name, unset.space, unset.name) for unset in self.source.unset]
        of_python = vars(builtins)
        for name in dict.fromkeys(unset.name for unset in self.source.unset):
            if name in of_python:
                self.same.append((name, of_python, name, of_python[name]))
            else:
                self.absences.append((name, of_python, name))

    def _whole(self, owner: Any) -> None:
        """Collect all attributes of an object of which any may have been read."""
        label = type(owner).__name__
        self.held += [(f"{label}.{name}", x) for name, x in zip(names_of(owner), fields_of(owner), strict=True)]
        self.held.append((label, _readable(owner)))
        if reading_of(owner) is not None and hasattr(owner, "__dict__"):  # a dict, say, that has attributes, too
            self.held.append((label, types.MappingProxyType(vars(owner))))

    def owners(self) -> list[tuple[str, Any]]:
        """Return the modules, and the objects whose attributes were read, with labels."""
        reads = ((read.label.rpartition(".")[0], read.owner) for read in (*self.source.reads, *self.source.missing))
        objects = (row for row in (*reads, *self.source.objects) if not isinstance(row[1], types.ModuleType))
        return [*objects, *self._modules()]

    def dicts(self) -> list[Space]:
        """Return where modules keep their parts, parameters and buffers."""
        return [vars(module)[kind] for _, module in self._modules() for kind in _DICTS if vars(module)[kind]]

    def names_of_functions(self) -> Set[str]:
        """Return the names by which functions may be called: those that are looked up, and those of values."""
        return self.source.names | {row[-1].__name__ for row in self.plain if isinstance(row[-1], _FUNCTIONS)}

    def absent(self) -> Absent:
        """Return guards of what was not there."""
        return Absent(tuple(self.absences), tuple(self.absent_in_classes), tuple(self.absent_many))

    def registered(self) -> Registered:
        """Return a guard of how many parameters and buffers there are, where functions may ask for all of them."""
        spaces = (vars(module) for _, module in self._modules())
        return Registered.current(spaces if self.source.names & _ALL_TENSORS else ())

    def trained(self) -> Trained:
        """Return guards of the parameters' flags and of hooks."""
        rows = (
            [row for label, module in self._modules() for row in _parameters(label, module)]
            if self.source.flags
            else []
        )
        names, spaces, keys = tuple(zip(*rows, strict=True)) or ((), (), ())
        flags = Flags(names, spaces, keys, [space[key].requires_grad for space, key in zip(spaces, keys, strict=True)])
        hooks = hook_guards((*self.source.roots, *self.hidden), flags.parameters, names)
        return Trained(flags, hooks)

    @property
    def hidden(self) -> list[tuple[str, nn.Module]]:
        """The modules that were met and are no parts of those that were traced."""
        inside = {id(part) for _, root in self.source.roots for part in root.modules()}
        return [(label, module) for label, module in self.source.modules if id(module) not in inside]

    def _modules(self) -> Iterable[tuple[str, nn.Module]]:
        seen: set[int] = set()
        for label, root in (*self.source.roots, *self.hidden):
            for name, module in root.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield ".".join(filter(None, (label, name))), module

    def _compare(self, label: str, space: Any, name: Any, value: Any) -> None:
        """Add what says whether the value of a name is the one that it has now."""
        if is_simple(value) or is_constant(value):
            self.plain.append((label, space, name, value))
        else:
            self.same.append((label, space, name, value))
        if isinstance(value, Tensor):
            self.tensors.append((value, version(value)))
        elif not is_simple(value):
            self.held.append((label, value))

    def _attribute(self, read: Read) -> None:
        owner, name = read.owner, read.name
        space = space_of(owner, name)
        if space is not None:
            self._compare(read.label, space, name, space[name])
            return
        kind = type(owner)
        base = next((base for base in kind.__mro__ if name in vars(base)), None)
        if base is None or base in (nn.Module, object):
            return
        member = vars(base)[name]
        if not hasattr(type(member), "__set__") and hasattr(owner, "__dict__"):
            self.absences.append((read.label, object.__getattribute__(owner, "__dict__"), name))
        if (id(kind), name) in self.seen:
            return
        self.seen.add((id(kind), name))
        label = f"{base.__name__}.{name}"
        if hasattr(type(member), "__get__"):  # a method or a property: what it reads is recorded
            self.same.append((label, vars(base), name, member))
        else:
            self._compare(label, vars(base), name, member)
        for nearer in kind.__mro__[: kind.__mro__.index(base)]:
            self.absences.append((f"{nearer.__name__}.{name}", vars(nearer), name))

    def _missing(self, read: Read) -> None:
        owner, name = read.owner, read.name
        fields = getattr(owner, "__dict__", None)
        if isinstance(fields, dict):
            self.absences.append((read.label, fields, name))
        if isinstance(owner, nn.Module):
            for kind in ("_parameters", "_buffers", "_modules"):
                self.absences.append((read.label, vars(owner)[kind], name))
        key = id(type(owner)), name
        if key not in self.seen and not hasattr(type(owner), name):
            self.seen.add(key)
            self.absent_in_classes.append((type(owner), name))

    def _variable(self, variable: Variable) -> None:
        space = variable.space
        if isinstance(space, types.CellType):
            space = Cell(variable.name, space)  # type: ignore[assignment]
        self._compare(variable.label, space, variable.name, variable.value)

    def _named_spaces(self) -> list[NamedSpace]:
        roots = [(variable.label, variable.value) for variable in self.source.variables]
        return spaces_by_name([*roots, *self.held, *self.source.spaces], self.source.names)

    def _named(self, space: NamedSpace) -> None:
        for name in space.present:
            self._compare(space.label_of(name), space.space, name, space.space[name])
        if space.absent:
            self.absent_many.append((space.label, space.absent, space.space))

    def _module(self, label: str, module: nn.Module) -> None:
        space = vars(module)
        self.parts.append((label, space))
        self.same += [(f"{label}.{kind}".lstrip("."), space, kind, space[kind]) for kind in _DICTS if space[kind]]
        if "state_dict" in self.source.names:
            self.held += [(f"{label}.{name}".lstrip("."), space[name]) for name in STATE_DICT_PARTS]
        for tensors in (space["_parameters"], space["_buffers"]):
            absent = (name for name, x in tensors.items() if x is None)
            self.plain += [(f"{label}.{name}".lstrip("."), tensors, name, None) for name in absent]

    def _tensors_of(self, label: str, root: nn.Module) -> None:
        """Add which tensors a module has that is no part of those that were traced."""
        for path, module in root.named_modules():
            for kind in ("_parameters", "_buffers"):
                space, prefix = vars(module)[kind], ".".join(filter(None, (label, path)))
                self.same += [(f"{prefix}.{name}".lstrip("."), space, name, x) for name, x in space.items()]


def _readable(owner: Any) -> Any:
    """Return what is compared of an object of which all may have been read: of a Python module, its variables."""
    return types.MappingProxyType(vars(owner)) if isinstance(owner, types.ModuleType) else owner


def _parameters(label: str, module: nn.Module) -> list[tuple[str, Any, str]]:
    own = module._parameters
    return [(".".join(filter(None, (label, key))), own, key) for key, p in own.items() if p is not None]
