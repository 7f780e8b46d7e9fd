"""Private names of torch: tensors, operators, traces and graphs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo import guards as dynamo_guards
from torch._C._dynamo.guards import assert_size_stride
from torch._decomp import get_decompositions
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "pytree",  # nested batches and outputs as lists of leaves; instead: optree, or torch.export's public registry
    "OpOverload",  # the type of operators, for isinstance; instead: type(torch.ops.aten.add.Tensor)
    "OpOverloadPacket",  # all overloads of an operator, for isinstance; instead: type(torch.ops.aten.add)
    "HigherOrderOperator",  # the type of cond, scan and autocast in a trace; instead: any other callable target
    "FakeTensorMode",  # shapes and strides without values; instead: tensors on the meta device
    "FakeTensor",  # tells tensors of a trace from real ones; instead: the mode's own record of what it made
    "FunctionalTensor",  # likewise, inside torch.export
    "TorchDispatchMode",  # sees each operator that runs; instead: a tensor subclass with __torch_dispatch__
    "without_modes",  # operators run as usual inside a mode; instead: calling them before it is entered
    "make_fx",  # traces a function of tensors into a graph; instead: torch.export of a module around it
    "unrecorded",  # inside, a trace takes no notice; instead: removing the nodes that were made meanwhile
    "is_recording",  # whether a trace is on; instead: looking at the types of the tensors that are computed with
    "get_decompositions",  # torch's Python definitions of operators; instead: torch.export.default_decompositions
    "assert_size_stride",  # AssertionError if a tensor has another size or stride; instead: comparing them in Python
    "EXPORT_CHECKS", "codegen_of", "composite_definition", "composite_in_cpp", "dict_version", "foreach_copy_",
    "foreach_mul_", "foreach_norm", "function_name", "gelu", "host_linear", "implementations_of_aten",
    "is_functional", "linear", "nn_functions", "packed_weight", "packs",
    "plain_function", "resets_itself", "root_of", "same_implementation", "schema", "schema_or_none", "operator_name",
    "silu", "storage_key", "storage_uses", "truncated_normals", "version", "without_printed_graphs",
    "without_torch_function", "built_for_xpu", "check_dims", "has_kernel", "RNN_WEIGHT_LISTS", "needs_values",
    "runs_on", "writing_operators", "OLD_CHOLESKY", "custom_operator", "free_unbacked_symbols", "unwritten_guard",
    "views_untracked", "draws_random_numbers",
]  # fmt: skip


# The version of a dict: each write makes one that no dict of the process had (PEP 509; from Python 3.12 on torch counts
# writes itself). Hot: guards call it with map(). Instead: comparing all that a dict holds before each step.
dict_version: Callable[[dict[Any, Any]], object] = getattr(dynamo_guards, "dict_version", lambda _: object())


def unwritten_guard(owners: Sequence[object], dicts: Sequence[dict[Any, Any]]) -> Callable[[], bool]:
    """Return what says whether objects have their classes, and nobody writes to their namespaces and to ``dicts``.

    Hot: it compares in C++, before each step. Making it takes 25 us for each of them. Instead: comparing ``type`` and
    :data:`dict_version`.
    """
    from torch._dynamo.guards import GuardManagerType  # imported by torch with the first trace

    kind, root = GuardManagerType.GUARD_MANAGER, dynamo_guards.RootGuardManager()
    for index, owner in enumerate(owners):
        guard = root.tuple_getitem_manager(index, "", owner, kind)
        guard.add_type_match_guard(id(type(owner)), [""], None)
        guard.get_generic_dict_manager("", vars(owner), kind).add_dict_version_guard(vars(owner), [""], None)
    for index, space in enumerate(dicts, len(owners)):
        root.tuple_getitem_manager(index, "", space, kind).add_dict_version_guard(space, [""], None)
    return functools.partial(root.check, (*owners, *dicts))


def needs_values() -> tuple[type[Exception], ...]:
    """Return what a trace raises where code asks for a value that it does not know; instead: the classes' names.

    Symbolic shapes import sympy, which torch, too, leaves to the first trace.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, GuardOnDataDependentSymNode


def free_unbacked_symbols(x: Any) -> set[Any]:
    """Return the symbols of sizes that depend on values; instead: sympy symbols of ``node.meta["val"].shape``."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as its_symbols

    return set(its_symbols(x))


# Autograd runs beside a trace as it does in the plain module; instead: removing the nodes that were made meanwhile.
unrecorded: Callable[[], contextlib.AbstractContextManager[Any]] = disable_proxy_modes_tracing


def custom_operator(definition: Any) -> OpOverload | None:
    """Return the operator of torch.library.custom_op or triton_op, else None; instead: torch.ops.lib.op.default."""
    return definition._opoverload if isinstance(definition, CustomOpDef) else None


def is_recording() -> bool:
    """Return whether make_fx or torch.export records operators now."""
    return get_proxy_mode() is not None


# -- tensors


class FakeTensorMode(TorchFakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's own, with the right dtype of the logarithms of sums that attention on the CPU saves in float64.

    Before 2.13 torch says float32 there. ``results``: results of operators, for all graphs of this mode.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.results: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            out, sums = results
            if out.dtype == torch.float64 and sums.dtype != out.dtype:
                return out, sums.double()
        return results


def views_untracked() -> contextlib.AbstractContextManager[None]:
    """Inside, results of view operators do not know what they are views of: a tensor in C++ that holds a tensor of
    Python is a cycle that Python's garbage collector cannot see; instead: torch.inference_mode()."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


# How often a tensor was written to; instead: a digest of its values. Hot: guards read it with map().
version: Callable[[Tensor], int] = attrgetter("_version")

# Gradients are scaled, copied and measured in one kernel; instead: a loop over the public operators.
foreach_mul_, foreach_copy_, foreach_norm = torch._foreach_mul_, torch._foreach_copy_, torch._foreach_norm

# As __torch_function__: operators on a subclass give plain tensors; instead: Tensor.__torch_function__, and unwrapping.
plain_function: Any = torch._C._disabled_torch_function_impl


@contextlib.contextmanager
def truncated_normals(replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, what ``torch.nn.init.trunc_normal_`` draws with, whose loop depends on values, is what ``replaced`` makes
    of it; instead: nothing, ``trunc_normal_`` itself cannot be replaced in modules that have imported it."""
    with mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", replaced(torch.nn.init._no_grad_trunc_normal_)):
        yield


def resets_itself(module: torch.nn.Module) -> Callable[[], object] | None:
    """Return what initializes a module's own parameters; instead: reset_parameters, which MultiheadAttention lacks."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


# Autograd's graph is read as it is, whatever modes are on; instead: torch.overrides, which disables subclasses alone.
without_torch_function: Any = torch._C.DisableTorchFunction


def storage_key(x: Tensor) -> int:
    """Return a key of a tensor's memory, also of one without address (meta, fake); instead: a kept storage's ``id``."""
    return int(x.untyped_storage()._cdata)


def storage_uses(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Count tensors of each storage, which tells whether a result was kept; instead: weak references to results."""
    return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]


# Whether ``x.data = y`` may be written; nn.Module.to asks it too. Instead: trying, and the RuntimeError.
same_implementation: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type


def is_functional(x: Tensor) -> bool:
    """Return whether functionalization wraps a tensor; instead: only the types above, if export has one layer."""
    return torch._is_functional_tensor(x)


def built_for_xpu() -> bool:
    """Return whether this build supports Intel GPUs; instead: torch.backends.xpu, once it has is_built, too."""
    return bool(torch.xpu._is_compiled())


# An RNN's second lists of its parameters, which guards need not follow; instead: nothing, if RNNs do without.
RNN_WEIGHT_LISTS = frozenset({"_flat_weights", "_flat_weight_refs"})

# -- operators


# An operator's signature: names, defaults, what it writes to; instead: parsing str(operator's docs), or a table.
schema: Callable[[Any], Any] = attrgetter("_schema")


def schema_or_none(target: object) -> Any:
    """Return the signature of a graph node's target; None for a Python function."""
    return getattr(target, "_schema", None)


def writing_operators() -> tuple[Any, ...]:
    """Return torch's operators that write values to their first argument, or to ``out``; instead: their names."""
    parts = [name.replace(".", "::").split("::") for name in torch._C._dispatch_get_all_op_names()]
    names = [(name, *overload) for space, name, *overload in parts if space == "aten" and not name.startswith("__")]
    writing = [name for name in names if name[0].endswith("_") or name[-1].endswith("out")]
    writing = [name for name in writing if name[0] not in ("detach_", "requires_grad_")]
    return tuple(getattr(getattr(torch.ops.aten, name), *overload or ["default"]) for name, *overload in writing)


def draws_random_numbers(target: object) -> bool:
    """Return whether an operator draws from torch's random generator; instead: a list of their names."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def operator_name(target: object) -> str:
    """Return an operator's name without namespace and overload; instead: the parts of ``str(target)``."""
    return str(getattr(target, "_opname", ""))


# Matrices' Cholesky factors, under the name that torch has had until 2.13; instead: linalg_cholesky alone.
OLD_CHOLESKY: tuple[OpOverload, ...] = (torch.ops.aten.cholesky.default,) if hasattr(torch.ops.aten, "cholesky") else ()

# Generated code calls them as C++ functions, without the wrappers of torch.nn.functional; instead: torch.ops.aten.
nn_functions = torch._C._nn
gelu, linear, silu = torch._C._nn.gelu, torch._C._nn.linear, torch._C._nn.silu
# oneDNN's product with a weight as it lies in memory, (x, weight, bias, "none", [], ""); None where torch has no oneDNN
host_linear: Callable[..., Any] | None = torch.ops.mkldnn._linear_pointwise.default if torch._C._has_mkldnn else None


def packed_weight(weight: Tensor) -> Tensor:
    """Pack a weight [O, I] for oneDNN's ``host_linear``; instead: the weight itself, which each call packs again."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies with packed weights of this dtype, see :func:`packed_weight`."""
    if host_linear is None or dtype is not torch.bfloat16:
        return host_linear is not None and dtype is torch.float32
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def composite_definition(target: Any) -> Callable[..., Any] | None:
    """Return the Python that defines an operator by others; instead: a trace with an explicit decomposition table."""
    keys, kernels = torch._C.DispatchKey, getattr(target, "py_kernels", {})
    kernel: Callable[..., Any] | None = kernels.get(keys.CompositeImplicitAutograd) or kernels.get(keys.Autograd)
    return kernel


def composite_in_cpp(target: Any) -> bool:
    """Return whether C++ defines an operator by others; instead: attempting ``target.decompose``."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(target, OpOverload) and bool(target.has_kernel_for_dispatch_key(composite))


def has_kernel(target: OpOverload, device: torch.device) -> bool:
    """Return whether an operator has a kernel for a device itself; instead: running it once."""
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device.type))
    return bool(target.has_kernel_for_dispatch_key(key))


def runs_on(target: OpOverload, device: torch.device) -> bool:
    """Return whether an operator has a kernel for a device, be it one for all devices; instead: running it once."""
    key = torch._C._dispatch_key_for_device(device.type)
    return bool(
        torch._C._dispatch_has_computed_kernel_for_dispatch_key(str(schema(target).name) + _overload(target), key)
    )


def _overload(target: OpOverload) -> str:
    name = schema(target).overload_name
    return f".{name}" if name else ""


def check_dims(norm: nn.BatchNorm1d, x: Tensor) -> None:
    """Raise what a batch norm raises for an input with another number of dims; instead: calling the norm."""
    norm._check_input_dim(x)


@contextlib.contextmanager
def implementations_of_aten() -> Iterator[Any]:
    """Yield a library that registers functions as aten's kernels, until the end; instead: a TorchFunctionMode."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        yield library


@contextlib.contextmanager
def without_printed_graphs() -> Iterator[None]:
    """Inside, torch.export does not print the graph with which it gave up on stderr; instead: redirecting stderr."""
    from torch.export import _trace  # imported by the first export

    here = threading.get_ident()

    def say(*values: object, **options: Any) -> None:
        if threading.get_ident() != here or options.get("file") is not sys.stderr:
            print(*values, **options)

    with mock.patch.object(_trace, "print", say, create=True):
        yield


# -- graphs

# Calls that torch.export adds and no program needs, by part of their names; instead: matching their operators.
EXPORT_CHECKS = (
    "_guards_fn", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_assert_async",
)  # fmt: skip

# The node before the first; instead: inserting before ``next(iter(graph.nodes))``, where there is one.
root_of: Callable[[fx.Graph], fx.Node] = attrgetter("_root")

# What writes a graph as Python, for a part of that graph; instead: keeping it where it is set.
codegen_of: Callable[[fx.Graph], fx.graph.CodeGen] = attrgetter("_codegen")

# The name of the function that a graph becomes; instead: "forward", which it always is here.
function_name: Callable[[fx.graph.CodeGen], str] = attrgetter("_func_name")
