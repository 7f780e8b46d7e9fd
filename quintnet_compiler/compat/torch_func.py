"""Private names of torch: transforms of functions (``torch.func``, ``torch.vmap``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch import apis, eager_transforms
from torch._functorch.vmap import vmap_impl
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = [
    "count_function_modes",
    "default_device",
    "count_dispatch_modes",
    "dispatch_modes",
    "dispatch_modes_off",
    "function_modes",
    "graph_of_trace",
    "is_transformed",
    "nodes_of_trace",
    "only_function_modes",
    "saved_tensors_hooked",
    "set_grad",
    "transforms_by",
]

# A tensor inside a transform, which stands for a row of a batch, say; instead: the exception that tracing it raises.
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


# What torch.no_grad and torch.enable_grad call; instead: torch.is_grad_enabled() after each operator.
set_grad: Any = torch._C._set_grad_enabled


def nodes_of_trace() -> list[fx.Node]:
    """Return the nodes that the innermost make_fx has so far; instead: a TorchDispatchMode that counts operators."""
    mode = get_proxy_mode()
    return [] if mode is None else list(mode.tracer.graph.nodes)


def graph_of_trace() -> fx.Graph:
    """Return the graph of the innermost make_fx, which must be on; instead: likewise."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


@contextlib.contextmanager
def only_function_modes(keep: Callable[[TorchFunctionMode], bool]) -> Iterator[None]:
    """Inside, only those of the modes that see calls of torch's functions are on; instead: torch.export without its
    own, which notes tensors inside transforms as constants."""
    every = [_pop_mode() for _ in range(count_function_modes())]  # type: ignore[no-untyped-call]
    kept = [mode for mode in reversed(every) if keep(mode)]
    for mode in kept:
        _push_mode(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in reversed(every):
            _push_mode(mode)  # type: ignore[no-untyped-call]


# How many modes see calls of torch's functions; instead: function_modes(), for which each step would build a list.
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


# How many modes see operators; instead: likewise.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the modes that see operators now, the innermost last; instead: none of them."""
    modes: list[TorchDispatchMode] = _get_current_dispatch_mode_stack()
    return modes


def function_modes() -> list[TorchFunctionMode]:
    """Return the modes that see calls of torch's functions now, the innermost last.

    Instead: an error of any kind for what they change.
    """
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def default_device(modes: Sequence[TorchFunctionMode]) -> torch.device | None:
    """Return the device that the innermost of ``modes`` names that is torch's own for devices; None: there is none.

    Instead: torch.get_default_device(), which does not say who names it.
    """
    return next((torch.device(mode.device) for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


@contextlib.contextmanager
def dispatch_modes_off() -> Iterator[None]:
    """Inside, no mode sees operators (a FakeTensorMode, a counter of operations); instead: an error that names them."""
    with _disable_current_modes():
        yield


def saved_tensors_hooked() -> bool:
    """Return whether hooks see what autograd saves; instead: hooks of our own around everything, which do nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def transforms_by(run: Callable[..., Any], replace: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Inside, a transform that is called is ``run(transform, *args, **kwargs)``, where ``transform`` is torch's own
    function. ``replace(ours, theirs)`` is what the process calls meanwhile. Instead: our own vmap, grad, jvp, vjp."""

    def ours(transform: Callable[..., Any]) -> Callable[..., Any]:
        return replace(lambda *args, **kwargs: run(transform, *args, **kwargs), transform)  # type: ignore[no-any-return]

    own = eager_transforms._vjp_with_argnums

    def vjp(function: Any, *primals: Any, **options: Any) -> Any:
        """Return torch's results with a vjp that computes ``function`` again: a trace keeps equal operators once."""
        results = run(lambda *inputs: _without_function(own(function, *inputs, **options)), *primals)

        def back(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
            return run(lambda inputs, arriving: own(function, *inputs, **options)[1](arriving), primals, cotangents)

        return (results[0], back, *results[1:])

    with (
        mock.patch.object(apis, "vmap_impl", ours(vmap_impl)),
        mock.patch.object(eager_transforms, "grad_and_value_impl", ours(eager_transforms.grad_and_value_impl)),
        mock.patch.object(eager_transforms, "_jvp_with_argnums", ours(eager_transforms._jvp_with_argnums)),
        mock.patch.object(eager_transforms, "_vjp_with_argnums", replace(vjp, own)),
    ):
        yield


def _without_function(results: Any) -> Any:
    """Return the results ``(output, function, auxiliary)`` of torch's vjp without the function."""
    return results[0], *results[2:]
