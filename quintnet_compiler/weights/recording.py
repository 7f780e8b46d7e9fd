"""Recording of a module's own initialisation code, on tensors without values.

The code runs once, on the meta device, and reads that its tensors are on the CPU: it does what it would do there, and
no memory is used. Operators are kept with places in memory, not with tensors: views, ``.data`` and copies of Python
objects need no rules then.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.torch import (
    TorchDispatchMode,
    operator_name,
    pytree,
    schema,
    storage_key,
    truncated_normals,
    without_modes,
    without_torch_function,
)
from ..core.replaced import for_this_thread, one_thread
from .tape import Call, MemoryPlace, Tape, refuse_initialisation

# These write all of their arguments and do not read them, as operators do with ``out``.
_DRAWS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_")
_OVERWRITES = frozenset(("fill_", "zero_", "copy_", *_DRAWS))
_NO_VALUES = frozenset(["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"])
_OTHER_MEMORY = frozenset(["set_", "resize_", "resize_as_"])
_CODE = "the code that initialises the module"


class Recording:
    """A recording: what runs inside ``with recording.on():`` is on its ``tape``."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._kept: list[torch.UntypedStorage] = []  # so that no memory's key is used again
        self._constants: dict[int, torch.UntypedStorage] = {}  # memory without values, for memory that has some
        self._clock = torch.random.get_rng_state()
        self._digest = hashlib.sha256()

    @property
    def text(self) -> str:
        """Return a text that is the same where the same operators were recorded, with the same constants."""
        lines = []
        for call in self.tape.calls:
            leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
            constants = [x for x in leaves if not isinstance(x, MemoryPlace)]
            lines.append(f"{getattr(call.function, '__name__', '')} {constants}")
        return "\n".join([*lines, f"constants of SHA-256 {self._digest.hexdigest()}"])

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Record operators inside, which then compute nothing.

        Raises:
            CompileError: QN604 for what cannot be recorded.
        """
        state = self._clock = torch.random.get_rng_state()

        def truncated_normal(theirs: Callable[..., Any]) -> Callable[..., Any]:
            return for_this_thread(partial(self._truncated_normal, theirs), theirs)

        try:
            with one_thread(), truncated_normals(truncated_normal), _RecorderOfValues(self), _CPU, _AsOnCpu():
                yield
            self._require_order()
        except (RuntimeError, NotImplementedError) as error:
            cause = str(error).strip().splitlines() or [type(error).__name__]
            refuse_initialisation(f"{_CODE} cannot be followed: {cause[0]}")
        finally:
            torch.random.set_rng_state(state)

    def place(self, x: Tensor) -> MemoryPlace:
        """Return the place of a tensor in memory."""
        x = self.stand_in(x)
        if x.is_conj() or x.is_neg():
            refuse_initialisation(f"{_CODE} uses lazily conjugated values")
        key, memory = storage_key(x), x.untyped_storage()
        if key not in self.tape.sizes:
            self._kept.append(memory)
            self.tape.sizes[key] = memory.nbytes()
        return MemoryPlace(key, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def stand_in(self, x: Any) -> Any:
        """Return a tensor without values for one with values (a constant of the code), always in the same memory."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        key = storage_key(x)
        if key not in self._constants:
            memory = x.untyped_storage()
            data = torch.empty(0, dtype=torch.uint8).set_(memory).clone()
            stand_in = torch.empty(memory.nbytes(), dtype=torch.uint8, device="meta")
            self._kept.append(memory)
            self._digest.update(data.numpy().tobytes())
            self._constants[key] = stand_in.untyped_storage()
            results = (self.place(stand_in),)
            none: frozenset[int] = frozenset()
            self.tape.calls.append(Call(data.clone, (), {}, none, none, none, results, False, torch.float32))
        view = torch.empty(0, dtype=x.dtype, device="meta")
        return view.set_(self._constants[key], x.storage_offset(), x.shape, x.stride())

    def add(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep a call, unless it only makes views, or memory without values."""
        name = operator_name(function)
        if name in _OTHER_MEMORY:
            refuse_initialisation(f"{_CODE} calls {name}")
        args, kwargs = pytree.tree_map(self._placed, (tuple(args), dict(kwargs)))
        inputs = {place.memory for place in _places((args, kwargs))}
        reads, writes, overwrites = self._accesses(function, args, kwargs)
        results = [self.place(x) for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        fresh = tuple(None if place.memory in inputs else place for place in results)
        if name in _NO_VALUES or not (writes or any(fresh)):
            return
        draws = torch.Tag.nondeterministic_seeded in function.tags
        memory = reads, writes, overwrites - reads
        self._keep(Call(function, args, kwargs, *memory, fresh, draws, torch.get_default_dtype()))

    def _accesses(self, function: Any, args: Any, kwargs: Any) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Return the memory that a call reads, that it writes, and that it overwrites as a whole."""
        reads: set[int] = set()
        writes: set[int] = set()
        overwrites: set[int] = set()
        for index, argument in enumerate(schema(function).arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            whole = written and (argument.is_out or operator_name(function) in _OVERWRITES)
            for place in _places(value):
                (writes if written else reads).add(place.memory)
                if whole and self._covers(place):
                    overwrites.add(place.memory)
        return frozenset(reads), frozenset(writes), frozenset(overwrites)

    def _truncated_normal(self, theirs: Callable[..., Any], x: Tensor, *bounds: Any, **more: Any) -> Tensor:
        """Keep the call that fills ``x`` as a whole: how often it draws depends on values."""
        with without_torch_function(), without_modes():
            args, kwargs = pytree.tree_map(self._placed, ((x, *bounds), more))
            place = args[0]
            over = frozenset({place.memory} if self._covers(place) else ())
            written = frozenset({place.memory})
            self._keep(Call(theirs, args, kwargs, frozenset(), written, over, (None,), True, torch.get_default_dtype()))
        return x

    def _keep(self, call: Call) -> None:
        if call.draws:
            self._require_order()
            torch.rand(())  # one number for each call that draws: the generator's state says how many there were
            self._clock = torch.random.get_rng_state()
        self.tape.calls.append(call)

    def _require_order(self) -> None:
        """Raise QN604 if random numbers do not follow from each other, but from a state that was set."""
        if not torch.equal(torch.random.get_rng_state(), self._clock):
            refuse_initialisation(
                f"{_CODE} sets the seed or the state of random numbers itself",
                "draw all of them in one sequence, whose seed is that of program.initialize(seed=)",
            )

    def _placed(self, x: Any) -> Any:
        """Return what a call keeps of an argument."""
        if isinstance(x, torch.Generator):
            refuse_initialisation(f"{_CODE} has a random generator of its own", "use torch's default generator")
        return self.place(x) if isinstance(x, Tensor) else x

    def _covers(self, place: MemoryPlace) -> bool:
        """Return whether a place has every byte of its memory."""
        dense = all(stride > 0 or size == 1 for size, stride in zip(place.size, place.stride, strict=True))
        return dense and torch.Size(place.size).numel() * place.dtype.itemsize == self.tape.sizes[place.memory]


def _places(values: Any) -> list[MemoryPlace]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, MemoryPlace)]


_CPU = torch.device("cpu")
_OF_TENSOR: Any = Tensor
_TOLD = {
    _OF_TENSOR.is_meta.__get__: False,
    _OF_TENSOR.is_cpu.__get__: True,
    _OF_TENSOR.device.__get__: _CPU,
}


class _AsOnCpu(TorchFunctionMode):
    """Tells Python code that tensors on the meta device are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TOLD:
            return _TOLD[func]
        if func is Tensor.tolist and args[0].is_meta:
            return _listed(args[0])
        if func is Tensor.numpy and args[0].is_meta:
            refuse_initialisation(f"{_CODE} makes a NumPy array of a tensor")
        if (kwargs or {}).get("out") is not None:  # it says where it is, and the device cpu is not added
            with without_torch_function():
                return func(*args, **kwargs)
        return func(*args, **(kwargs or {}))


class _RecorderOfValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, into: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.into.tape.read_number(self.into.place(args[0]))
        originals: dict[int, Tensor] = {}  # the code's tensors, by the identity of their stand-ins

        def without_values(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("meta")
            stand_in = self.into.stand_in(x)
            if stand_in is not x:
                originals[id(stand_in)] = x
            return stand_in

        args, kwargs = pytree.tree_map(without_values, (tuple(args), dict(kwargs)))
        if any(argument.name == "device" for argument in schema(func).arguments) and not kwargs.get("device"):
            has_tensors = any(isinstance(x, Tensor) for x in pytree.tree_leaves(args))
            kwargs |= {} if has_tensors else {"device": torch.device("meta")}
        out = func(*args, **kwargs)
        self.into.add(func, args, kwargs, out)
        return pytree.tree_map(lambda x: originals.get(id(x), x), out)


def _listed(x: Tensor) -> Any:
    return x.item() if x.dim() == 0 else [_listed(part) for part in x.unbind(0)]
