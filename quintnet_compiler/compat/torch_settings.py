"""Private names of torch: what it is set to that may decide which operators a compiler makes of others."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.backends import mha, opt_einsum
from torch.fx.experimental import _config as shapes_config
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_PLACE = re.compile(r"registered at (\S+?):\d+")
__all__ = [
    "QUESTIONS",
    "active_modes",
    "files_of_kernels",
    "part_left_out",  # the part that a kernel takes for another; instead: comparing results
    "questions_answered",
    "root_of_build",
    "settings_named",
    "settings_of_torch",
    "switches_of_torch",
]

# Each function that is asked, and what it reads.
_FLAGS = {"is_compiling": "_is_compiling_flag", "is_exporting": "_is_exporting_flag"}
QUESTIONS = frozenset(_FLAGS)


def settings_of_torch() -> list[str]:
    """Return "name: value" of each flag of the process that PyTorch's own code reads.

    Instead: the public getters alone, which leave out those of fake tensors and symbolic sizes.
    """
    backends: Any = torch.backends  # much of it has no types
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    values: dict[str, object] = {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed(),
        ),
        "cuda": (cuda.matmul.allow_tf32, str(cuda.preferred_linalg_library()), str(cuda.preferred_blas_library())),
        "cudnn": (cudnn.is_available(), cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32),
        "mkldnn": (mkldnn.is_available(), mkldnn.enabled, mkldnn.deterministic),
        "mkl": backends.mkl.is_available(),
        "einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "functorch": _digest(functorch_config),
        "shapes": _digest(shapes_config),
        "build": torch.__config__.show(),
        "version": (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip),
    }  # fmt: skip
    return [f"{name}: {value}" for name, value in values.items()]


_SWITCHES = (
    torch._C._get_deterministic_algorithms, torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_cudnn_enabled, torch._C._get_cudnn_benchmark, torch._C._get_cudnn_deterministic,
    torch._C._get_mkldnn_enabled,
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)  # fmt: skip


# Settings that forward reads by a function or an attribute of this name, or not at all: others need no comparison.
_NAMED: dict[str, Callable[[], Any]] = {
    "get_num_threads": torch.get_num_threads,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "initial_seed": torch.initial_seed,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "is_autocast_cache_enabled": torch.is_autocast_cache_enabled,
    "get_autocast_dtype": lambda: (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
    "allow_tf32": lambda: (torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()),
    "allow_fp16_reduced_precision_reduction": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "allow_bf16_reduced_precision_reduction": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "fp16_bf16_reduction_math_sdp_allowed": torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    "preferred_linalg_library": torch._C._get_linalg_preferred_backend,
    "preferred_blas_library": torch._C._get_blas_preferred_backend,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "fill_uninitialized_memory": torch._C._get_deterministic_fill_uninitialized_memory,
    "opt_einsum": lambda: (opt_einsum.enabled, opt_einsum.strategy),
    "get_swap_module_params_on_conversion": torch.__future__.get_swap_module_params_on_conversion,
    "get_overwrite_module_params_on_conversion": torch.__future__.get_overwrite_module_params_on_conversion,
    "is_enabled": torch._C._check_sparse_tensor_invariants,
}


def settings_named(names: Set[str]) -> tuple[Callable[[], Any], ...]:
    """Return what reads the settings of the process that have one of ``names``; instead: nothing."""
    return tuple(read for name, read in _NAMED.items() if name in names)


def switches_of_torch(others: Sequence[Callable[[], Any]] = ()) -> tuple[Any, ...]:
    """Return what scripts change on the way and forward may ask for; ``others``: see :func:`settings_named`.

    These are deterministic algorithms, the precision of matrix products, and backends. Instead: the public attributes,
    which take 30 times as long to read, in each step.
    """
    try:
        precision = torch._C._get_float32_matmul_precision()
    except RuntimeError:  # it was set in another way, and has no such name
        precision = "other"
    return (precision, mha._is_fastpath_enabled, *[read() for read in (*_SWITCHES, *others)])


def _digest(config: Any) -> str:
    return str(config.get_hash().hex())


def active_modes() -> list[str]:
    """Return the modes that see operators now, but for a default device; instead: no compilation inside one."""
    modes: tuple[Any, ...] = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())  # type: ignore[no-untyped-call]
    return [type(mode).__name__ for mode in modes if type(mode) is not DeviceContext]


def files_of_kernels() -> set[str]:
    """Return the files that register kernels of PyTorch's operators, as libraries may replace some.

    Kernels of a device that PyTorch does not know (PrivateUse1) are left out: on CPUs and GPUs they never run. Instead:
    torch.library's own list, which has no files and nothing of C++.
    """
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    dumps: list[str] = [torch._C._dispatch_dump(name) for name in names]
    lines = (line for dump in dumps for line in dump.splitlines())
    return {file for line in lines if "PrivateUse1" not in line.partition(":")[0] for file in _PLACE.findall(line)}


def root_of_build() -> str:
    """Return the folder in which this build of PyTorch was compiled: files of its kernels in C++ begin with it."""
    dump: str = torch._C._dispatch_dump("aten::mm")
    schema: str = _PLACE.findall(dump)[0]
    return schema.partition("build/aten/")[0]


@contextlib.contextmanager
def questions_answered(answer: Callable[[bool], bool], replace: Any) -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` and ``is_exporting()`` are ``answer(what they were before)``; no, for
    code that imported them by name. ``replace(ours, theirs)`` is what the process calls meanwhile. Instead of the
    flags: the functions alone, and code that imported them is told what torch.export set."""
    with contextlib.ExitStack() as stack:
        for name, flag in _FLAGS.items():
            theirs, truth = getattr(torch.compiler, name), getattr(torch.compiler, flag)
            stack.enter_context(mock.patch.object(torch.compiler, flag, False))
            stack.enter_context(mock.patch.object(torch.compiler, name, replace(partial(answer, truth), theirs)))
        yield


# -- what an encoder layer evaluates by one kernel, whatever its parts say

_BLOCKS = ("_sa_block", "_ff_block")


def part_left_out(module: nn.Module, *, training: bool) -> str:
    """Return the part that torch's kernel of an encoder layer takes for another, or "".

    In evaluation, without gradients, ``nn.TransformerEncoderLayer`` calls one kernel, which reads the weights of its
    parts, and decides about the activation when the layer is made. ``training``: whether gradients are on. Instead: the
    layer's public attributes alone, which do not tell whether it calls the kernel.
    """
    if not isinstance(module, nn.TransformerEncoderLayer) or not _calls_kernel(module, training):
        return ""
    if not _has_activation(module):
        return "activation"
    types = {"linear1": nn.Linear, "linear2": nn.Linear, "norm1": nn.LayerNorm, "norm2": nn.LayerNorm}
    types |= {"self_attn": nn.MultiheadAttention}
    changed = [name for name, kind in types.items() if not _is_plain(getattr(module, name), kind)]
    layer = type(module)
    blocks = [
        name
        for name in _BLOCKS
        if name in vars(module) or getattr(layer, name) is not getattr(nn.TransformerEncoderLayer, name)
    ]
    return (changed + blocks + [""])[0]


def _calls_kernel(layer: nn.TransformerEncoderLayer, training: bool) -> bool:
    """Return whether a layer, outside of autocast, calls the kernel for a batch of three dims."""
    attention = layer.self_attn
    conditions = (
        mha.get_fastpath_enabled(),
        type(layer).forward is nn.TransformerEncoderLayer.forward and "forward" not in vars(layer),
        not training or not (layer.training or any(x.requires_grad for x in layer.parameters())),
        layer.activation_relu_or_gelu,
        isinstance(attention, nn.MultiheadAttention) and attention.batch_first and attention._qkv_same_embed_dim,
        getattr(attention, "in_proj_bias", None) is not None and attention.num_heads % 2 == 0,
        getattr(layer.norm1, "eps", None) == getattr(layer.norm2, "eps", 0),
        not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()),
    )
    return all(conditions)


def _has_activation(layer: nn.TransformerEncoderLayer) -> bool:
    """Return whether the activation is the one that the kernel computes."""
    activation: Any = layer.activation
    function, kind = (
        (nn.functional.gelu, nn.GELU) if layer.activation_relu_or_gelu == 2 else (nn.functional.relu, nn.ReLU)
    )
    return activation is function or (isinstance(activation, kind) and _is_plain(activation, kind))


def _is_plain(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a part computes what one of its kind does, from the same weights."""
    own = "forward" not in vars(part) and getattr(part, "approximate", "none") == "none"
    return own and type(part).forward is kind.forward
