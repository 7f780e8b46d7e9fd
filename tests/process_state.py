"""What a process has of which all of its code has one: settings of Python and torch, functions that may be replaced."""

from __future__ import annotations

import atexit
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module

State = dict[str, Any]
LIBRARIES = ("torch", "transformers", "numpy", "logging", "warnings")
OWN = "quintnet"
HOOKS = [name for name in vars(nn_module) if name.startswith("_global_")]


def process_state() -> State:
    """Name -> value of everything that is looked at. Functions are compared by identity, so they are kept."""
    return {**dict(_python()), **dict(_logging()), **dict(_torch()), **dict(_kernels()), **dict(_functions())}


def changes(before: State, after: State) -> list[str]:
    """What is there before, and is something else after; loggers, operators and functions may be added."""
    gone = before.keys() - after.keys()
    found = [f"{name} is gone" for name in gone]
    for name in before.keys() - gone:
        a, b = before[name], after[name]
        if a is not b and (name.startswith("function ") or a != b):
            found.append(f"{name}: {str(a)[:200]} -> {str(b)[:200]}")
    return sorted(found)


def _python() -> Iterator[tuple[str, Any]]:
    yield "warnings.filters", list(warnings.filters)
    yield "warnings.showwarning", warnings.showwarning
    unchangeable = (signal.SIGKILL, signal.SIGSTOP)
    yield "signal handlers", {s: signal.getsignal(s) for s in signal.valid_signals() if s not in unchangeable}
    yield "os.environ", {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield "working directory", os.getcwd()
    yield "sys.path", list(sys.path)
    yield "hooks", (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)
    yield "tracers", (sys.gettrace(), sys.getprofile())
    yield "streams", (sys.stdin, sys.stdout, sys.stderr)
    yield "recursion limit", sys.getrecursionlimit()
    yield "gc", (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(), list(gc.callbacks))
    yield "functions at exit", atexit._ncallbacks()
    yield "switch interval", sys.getswitchinterval()
    yield "locale", locale.setlocale(locale.LC_ALL)
    yield "threads", sorted(thread.name for thread in threading.enumerate())
    yield "random of Python", random.getstate()
    if sys.platform == "linux":
        yield "scheduling", (os.sched_getscheduler(0), os.sched_getaffinity(0), os.nice(0))


def _logging() -> Iterator[tuple[str, Any]]:
    yield "logging.disable", logging.root.manager.disable
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            yield (
                f"logger {name}",
                (logger.level, logger.propagate, logger.disabled, list(logger.handlers), list(logger.filters)),
            )


def _torch() -> Iterator[tuple[str, Any]]:
    ask: dict[str, Callable[[], Any]] = {
        "grad mode": torch.is_grad_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "default dtype": torch.get_default_dtype,
        "default device": torch.get_default_device,
        "threads of operators": torch.get_num_threads,
        "threads between operators": torch.get_num_interop_threads,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "precision of matmuls": torch.get_float32_matmul_precision,
        "oneDNN": lambda: torch.backends.mkldnn.enabled,
        "cuDNN": lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "tf32": lambda: (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "kinds of attention": lambda: (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "anomaly detection": torch.is_anomaly_enabled,
        "autocast": lambda: [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autograd in threads": torch.autograd.is_multithreading_enabled,
        "modes": lambda: (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "random of torch": lambda: torch.get_rng_state().numpy().tobytes(),
        "process group": torch.distributed.is_initialized,
        "printing": lambda: vars(torch._tensor_str.PRINT_OPTS).copy(),
        "sharing of tensors": torch.multiprocessing.get_sharing_strategy,
        "checks of distributions": lambda: torch.distributions.Distribution._validate_args,
        "hooks of all modules": lambda: [
            list(found) for name in HOOKS if isinstance(found := getattr(nn_module, name), dict)
        ],
    }
    yield from ((name, call()) for name, call in ask.items())
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "random of NumPy", str(numpy.random.get_state(legacy=False))
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if (config := sys.modules.get(name)) is not None:
            yield name, config.get_config_copy()


def _kernels() -> Iterator[tuple[str, Any]]:
    """What C++ and Python would run for every operator."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(f"{OWN}::"):
            yield f"kernels of {name}", torch._C._dispatch_dump(name)
    for name, packet in list(vars(torch.ops.aten).items()):
        for overload, operator in list(vars(packet).items()) if hasattr(packet, "overloads") else ():
            if kernels := getattr(operator, "py_kernels", None):
                yield f"Python kernels of aten.{name}.{overload}", dict(kernels)


def _functions() -> Iterator[tuple[str, Any]]:
    """Functions, classes and methods by the names under which modules have them; entries of registries."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, classmethod, staticmethod, property)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if issubclass(type(value), kinds):  # some values warn of being asked for their class
                yield f"function {name}.{key}", value
            if issubclass(type(value), type) and value.__module__ == name:
                for attribute, inner in list(vars(value).items()):
                    if isinstance(inner, kinds) or attribute.startswith("__"):
                        yield f"function {name}.{key}.{attribute}", inner
            elif isinstance(registry := getattr(type(value), "_global_mapping", None), dict):
                yield f"registry {name}.{key}", dict(registry)
