"""Record the Python state that a trace of a module reads, and refuse and undo changes of it."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat.torch import FakeTensor, FunctionalTensor, is_functional, pytree, version
from ..compat.torch_func import is_transformed
from ..compat.torch_hooks import MODULE_HOOKS
from ..core.errors import Where
from ..guards.attribute_reads import Read, Reads
from ..guards.by_name import class_namespaces, constructors, is_users, spaces_by_name
from ..guards.call_attributes import CallAttribute, call_attributes, made_in_calls
from ..guards.class_facts import derived_classes
from ..guards.compiled_state import is_iterator
from ..guards.function_reads import CALLED, Variable, Walk
from ..guards.guards import Roots, TraceReads
from ..guards.namespaces import Cell
from ..guards.python_state import FORWARD, AttributeSnapshot, Change, Generators
from ..guards.reach import is_observable
from ..guards.seeded_generators import GeneratorWrites, own_generator
from ..guards.tensor_attributes import (
    GET_GRADIENT,
    OriginalTensor,
    StandIns,
    attributes_of,
    gives_numbers,
    reads_a_gradient,
    stand_ins_of,
    writes_in_place,
)
from .block_reuse import Unseen, UnseenUsed
from .changes.assigned_data import put_data
from .changes.refused_changes import changed_by_trace, refused
from .changes.tables_by_type import tables_by_type
from .changes.user_frames import line_of_change, user_frame, user_line
from .modes import refuse_replaced, uncompiled
from .raising_checks import checks_pass
from .traced_as import TRACED_AS

MAX_TRIES = 4  # of a trace, in case another thread draws random numbers
_TRACED = (FakeTensor, FunctionalTensor)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_FLAG = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def _is_real(x: Any) -> bool:
    """Return whether a tensor has values, and does not only stand for them in a trace."""
    return isinstance(x, Tensor) and not isinstance(x, _TRACED) and not is_functional(x) and not is_transformed(x)


@dataclass
class WatchedTrace:
    """A run of ``forward`` for a trace of the modules ``roots`` (by label), and what it read.

    After it: ``reads`` and ``variables``; ``constants``: tensors that belong to no module, with their versions;
    ``foreign``: parameters that belong to none of the modules, with the line that uses each; ``used_unseen``: whether
    a tensor of ``unseen`` was used, at which forward ends. ``originals``: the modules' own parameters and buffers.
    """

    roots: Mapping[str, nn.Module]
    functions: Sequence[Any]
    own: tuple[str, ...]  # folders of code that is not the user's
    unseen: Unseen = field(default_factory=Unseen)
    originals: Sequence[OriginalTensor] = ()
    state: AttributeSnapshot = field(init=False)
    reads: Reads = field(init=False)
    walk: Walk = field(init=False)
    variables: list[Variable] = field(default_factory=list)
    constants: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    foreign: dict[int, tuple[Tensor, Where]] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)  # that became Python numbers
    changes: list[Change] = field(default_factory=list)
    of_calls: Sequence[CallAttribute] = ()
    assigned: frozenset[str] = frozenset()
    used_unseen: bool = False
    _extent: tuple[int, ...] = ()
    _met: dict[int, Any] = field(default_factory=dict)  # objects that were met by name, by ``id``

    def run_forward(
        self,
        forward: Callable[[], Any],
        stands_for: Mapping[int, Callable[[], Tensor]],
        *,
        refuse: bool,
        buffers: bool = False,
        tries: int = MAX_TRIES,
    ) -> Any:
        """Run ``forward`` and return its result.

        Args:
            forward: The function to trace.
            stands_for: The trace's tensor for a real parameter, by its ``id``.
            refuse: Refuse new plain data, too; else ``changes`` has attributes that became plain data, which may stay.
            buffers: Whether ``forward`` may replace buffers by other tensors. Their names are ``assigned`` then, and
                the trace writes to the buffers instead.
            tries: How often it is traced while another thread may draw random numbers.

        Raises:
            CompileError: QN110 with the user's line if Python state changed; nothing has changed afterwards.
        """
        self.state, self.walk = AttributeSnapshot(), Walk()
        self.reads = Reads(self.state, self.walk.follow, self._meet_by_name)
        generators = Generators.now()
        writes = GeneratorWrites(partial(user_frame, own=self.own), partial(user_line, own=self.own))
        tensors, stand_ins = (dict(self.constants), dict(self.foreign)), stand_ins_of(self.originals)

        def watched() -> Any:
            with (
                tables_by_type(self._python_values()),
                attributes_of(stand_ins, self.reads),
                _Tensors(self, stands_for, stand_ins),
                checks_pass(_is_real, self.own),
                writes.recorded(),
                uncompiled(self.own),
                made_in_calls(self.of_calls, lambda: self.reads.missing),
            ):
                return forward()

        def restore() -> None:
            self.state.restore()
            generators.restore()
            self.reads.restore_positions()

        try:
            with self.reads.recording():
                with self.reads.unrecorded():
                    self._meet()
                    self.of_calls = call_attributes(dict([*self.reads.modules, *self.roots.items()]))
                result = watched()
            self.assigned = frozenset(self.state.write_buffers()) if buffers else frozenset()
            changes = [*self.state.changes(), *self.reads.moved_positions(), *generators.changes()]
            self.changes = [change for change in changes if change.put is not None]
            refused = changes if refuse else [change for change in changes if change.put is None]
            self._refuse_iterators()
            self._refuse_pointers()
            writes.refuse_first()
            by_others = tries > 1 and threading.active_count() > 1 and all(change.of_process for change in refused)
            if refused and not by_others:
                restore()
                line = line_of_change(watched, refused, self.own)
        finally:
            restore()
        if refused and by_others:  # or by forward, which draws again then
            self.constants, self.foreign = tensors
            return self.run_forward(forward, stands_for, refuse=refuse, buffers=buffers, tries=tries - 1)
        if refused:
            raise changed_by_trace(refused, line)
        return result

    def _python_values(self) -> list[Any]:
        """Return values in which forward may look something up."""
        modules = (vars(module) for root in self.roots.values() for module in root.modules())
        return [*(variable.value for variable in self.variables), *modules]

    def _refuse_iterators(self) -> None:
        """Raise CompileError QN110 for an iterator that the trace read: each step would take its next value."""
        reads = [read for read in self.reads.found if hasattr(read.owner, "__dict__")]
        attributes = ((read.label, vars(read.owner).get(read.name)) for read in reads)
        variables = ((variable.label, variable.value) for variable in self.variables)
        for label, value in chain(attributes, variables):
            if is_iterator(value) and not is_observable(value):
                what = f"reads {label!r}, a {type(value).__name__}; a program would take its next value once"
                fix = "take the next value outside and pass it in the batch, or keep it in an attribute"
                raise refused(what, "", fix)

    def _refuse_pointers(self) -> None:
        """Raise CompileError QN110 for a pointer that the trace may have read: what is behind it cannot be compared."""
        for label in self.reads.pointers:
            what = f"may read {label!r}, a pointer of ctypes; a program would not see that the memory behind it changes"
            raise refused(what, "", "keep the numbers in an array of ctypes or of NumPy, or pass them in the batch")

    def _meet(self) -> None:
        for label, root in self.roots.items():
            for name, module in root.named_modules():
                path = ".".join(filter(None, (label, name)))
                self.state.add(path, module)
                self.reads.meet(path, module)
                for value in (getattr(type(module), "forward", None), *vars(module).values()):
                    if isinstance(value, CALLED):
                        self.walk.follow(value, type(module))
                self._meet_hooks(path, module)
        for function in self.functions:
            self.walk.follow(function)
            self.walk.variables.append(Variable("loss_fn", "loss_fn", {"loss_fn": function}))
            self.reads.meet("loss_fn", getattr(function, "__self__", function))
            self.reads.meet("loss_fn", function)
        self._meet_by_name()

    def _meet_hooks(self, path: str, module: nn.Module) -> None:
        for kind in MODULE_HOOKS:
            if "backward" in kind:
                continue  # derivatives, which are followed when they are called
            for hook in vars(module)[kind].values():
                self.walk.follow(hook)
                self.reads.meet(f"{path}.{kind}".lstrip("."), hook)

    def follow(self, *functions: Any) -> None:
        """Watch these derivatives, too, which are about to be called."""
        self.state.by = "a derivative that is your own"
        for function in functions:
            self.walk.follow(function)
            owner = getattr(function, "__self__", function)
            self.reads.meet(type(owner).__name__, owner)
            self.reads.meet(type(owner).__name__, function)
            if isinstance(owner, type):
                self.state.add_space(owner)
        self._meet_by_name()
        self.state.by = FORWARD

    def _meet_by_name(self) -> None:
        """Meet the objects that functions look up by name in variables, classes and modules, until none is new."""
        while (extent := self._extent_now()) != self._extent:
            self._extent = extent
            self.walk.take_modules()
            new = self.walk.variables[len(self.variables) :]
            self.variables = [*self.variables, *new]
            self._remember(new)
            for variable in new:
                self.reads.meet(variable.label, variable.value)
            for label, value in list(self._named_values()):
                self._meet_once(label, value)
            if self.walk.reads_unseen:
                self.reads.take_all_whole()

    def _named_values(self) -> Iterator[tuple[str, Any]]:
        """Yield what functions may look up in modules and classes, and the constructors of the classes."""
        spaces = list(self.reads.spaces.values())
        roots = [(variable.label, variable.value) for variable in self.variables]
        for space in spaces_by_name([*roots, *spaces], self.walk.names):
            yield from space.values()
        yield from self._reached_from_classes([kind for _, kind in spaces if isinstance(kind, type)])
        if self.walk.computes_names:
            namespaces = class_namespaces(spaces)
            yield from ((f"{label}.{name}", value) for label, space in namespaces for name, value in space.items())

    def _reached_from_classes(self, kinds: Sequence[type]) -> Iterator[tuple[str, Any]]:
        """Yield constructors, where functions may call a class that they asked for, and derived classes."""
        if "__class__" in self.walk.names or any(unset.name == "type" for unset in self.walk.unset):
            yield from ((kind.__name__, function) for kind in kinds for function in constructors(kind))
        if "__subclasses__" in self.walk.names:
            yield from ((kind.__name__, kind) for kind in derived_classes(filter(is_users, kinds)))

    def _extent_now(self) -> tuple[int, ...]:
        walk = self.walk
        return len(walk.variables), len(walk.names), walk.computes_names, len(self.reads.spaces)

    def _meet_once(self, label: str, value: Any) -> None:
        if id(value) not in self._met:
            self._met[id(value)] = value
            self.reads.meet(label, value)

    def _remember(self, variables: Sequence[Variable]) -> None:
        """Record these variables, so that changes are noticed."""
        spaces: dict[int, tuple[MutableMapping[str, Any], set[str]]] = {}
        for variable in variables:
            where = variable.space
            if isinstance(where, types.CellType):
                spaces[id(where)] = Cell(variable.name, where), {variable.name}
            else:
                spaces.setdefault(id(where), (where, set()))[1].add(variable.name)
        for space, names in spaces.values():
            self.state.add_names(space, names)

    def taken(
        self, roots: Roots, reads: Sequence[Read], missing: Sequence[Read], modes: tuple[Any, ...], *, flags: bool
    ) -> TraceReads:
        """Return all Python state that the trace read: the attributes ``reads``, and ``missing`` ones."""
        set_by_calls = {attribute.key for attribute in self.of_calls}
        self.walk.take_modules()  # modules that forward imported itself
        of_forward = [read for read in reads if (id(read.owner), read.name) not in set_by_calls]
        return TraceReads(
            roots, of_forward, missing, list(self.reads.whole.values()), self.reads.modules,
            self.walk.variables, self.walk.unset, self.walk.functions, frozenset(self.walk.names),
            list(self.constants.values()), [x for x, _ in self.foreign.values()],
            list(self.reads.spaces.values()), self.walk.computes_names, modes, flags,
            self.of_calls, list(self.reads.of_tensors.values()), list(self.values.values()), self.reads.objects,
        )  # fmt: skip


class _Tensors(TorchFunctionMode):
    """A mode that sees real tensors in arguments: those that are no inputs of the trace become constants."""

    def __init__(
        self, trace: WatchedTrace, stands_for: Mapping[int, Callable[[], Tensor]], stand_ins: StandIns
    ) -> None:
        super().__init__()
        self.trace, self.stands_for, self.stand_ins = trace, stands_for, stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _puts_data(func, args):
            return None
        self._refuse(func, args, kwargs, sys._getframe(1))
        if args and _is_real(args[0]) and gives_numbers(func):
            self.trace.values[id(args[0])] = args[0]
        refuse_replaced(func, sys._getframe(1))
        func = TRACED_AS.get(func, func)
        # torch's random functions with generator=None have no kernel for symbolic sizes
        kwargs = {name: x for name, x in (kwargs or {}).items() if name != "generator" or x is not None}
        leaves = pytree.tree_leaves((args, kwargs)) if any(map(_holds, (*args, *kwargs.values()))) else ()
        for x in leaves:
            if _is_real(x) and id(x) not in self.stands_for:
                self._real(x)
        if self.stands_for and leaves:
            args, kwargs = pytree.tree_map(self._stand_in, (args, kwargs))
        return func(*args, **kwargs)

    def _refuse(self, func: Any, args: Any, kwargs: Any, frame: types.FrameType) -> None:
        """Raise CompileError QN110 for what a program could not do with a tensor that is there before forward."""
        original = self.stand_ins.get(id(args[0])) if args else None
        if isinstance((kwargs or {}).get("generator"), Generator):
            raise own_generator(Where("", user_line(frame, self.trace.own)))
        if func == _SET_DATA:
            raise refused(
                "assigns the .data of a tensor that is neither a parameter, nor a buffer, nor made in "
                "forward, or gives it another shape, strides or dtype",
                user_line(frame, self.trace.own),
                "compute a new tensor and use that one",
            )
        if func == GET_GRADIENT and original is not None:
            raise reads_a_gradient(original, user_line(frame, self.trace.own))
        if original is not None and isinstance(original.tensor, nn.Parameter) and func in _SET_FLAG:
            self._refuse_flag(_flag_of(*args[1:], **(kwargs or {})), original, user_line(frame, self.trace.own))
        if args and _is_real(args[0]) and writes_in_place(func):
            raise refused(
                f"changes a tensor of shape {list(args[0].shape)} in place that is neither a buffer, nor a "
                "parameter, nor made in forward; a program would not",
                user_line(frame, self.trace.own),
            )

    def _refuse_flag(self, flag: bool, original: OriginalTensor, line: str) -> None:
        if flag != original.tensor.requires_grad:
            what = f"sets requires_grad of {original.place.path!r}, and a program would compute as if it did not"
            detached = "{name: p.detach() for name, p in part.named_parameters()}"
            fix = f"call a part without its gradients: torch.func.functional_call(part, {detached}, inputs)"
            raise refused(what, line, fix)

    def _real(self, x: Tensor) -> None:
        self._require_seen(x)
        if x.requires_grad or isinstance(x, nn.Parameter):
            place = Where("", user_line(sys._getframe(2), self.trace.own))
            self.trace.foreign.setdefault(id(x), (x, place))
        else:
            self.trace.constants.setdefault(id(x), (x, version(x)))

    def _stand_in(self, x: Any) -> Any:
        if id(x) not in self.stands_for:
            return x
        replacement = self.stands_for[id(x)]()
        self._require_seen(replacement)
        return replacement

    def _require_seen(self, x: Tensor) -> None:
        if id(x) in self.trace.unseen.tensors:
            self.trace.used_unseen = True
            raise UnseenUsed


def _flag_of(requires_grad: bool = True) -> bool:
    """Return what a call sets a flag to, from its arguments after the tensor."""
    return requires_grad


def _puts_data(func: Any, args: Any) -> bool:
    """Assign .data if ``func`` does, to a tensor that stands for values, and a trace can follow; return whether so."""
    return func == _SET_DATA and not _is_real(args[0]) and not is_transformed(args[0]) and put_data(*args)


def _holds(value: Any) -> bool:
    return _is_real(value) or isinstance(value, (list, tuple, dict))
