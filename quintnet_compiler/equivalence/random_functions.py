"""Random functions of torch, computed from the numbers that a program draws, for the module itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import TorchDispatchMode, schema
from ..core.errors import CompileError
from ..core.rng import DISTRIBUTIONS, Key

aten = torch.ops.aten
Draw = Callable[[str, Sequence[int], torch.dtype], Tensor]  # whole numbers of a distribution, on the right device


def whole_noise(kind: str, size: Sequence[int], key: Key, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return all numbers of a random operator."""
    positions = [torch.arange(n, device=device) for n in size]
    return DISTRIBUTIONS[kind](positions, size, key, dtype)


def _uniform(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return draw("uniform", like.shape, like.dtype) * (high - low) + low


def _normal(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    return draw("normal", like.shape, like.dtype) * arguments.get("std", 1.0) + arguments.get("mean", 0.0)


def _bernoulli(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    p = arguments.get("p", arguments["self"])
    if isinstance(p, Tensor):
        return (draw("uniform", like.shape, p.dtype) < p).to(like.dtype)
    return (draw("bits", like.shape, torch.int32).double() < math.floor(p * 2**32) - 2**31).to(like.dtype)


def _exponential(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    return draw("exponential", like.shape, like.dtype) * (1 / arguments["lambd"])


def _integers(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    low, high = arguments.get("low", arguments.get("from", 0)), arguments.get("high", arguments.get("to"))
    if high is None:
        whole = not like.dtype.is_floating_point
        high = torch.iinfo(like.dtype).max + 1 if whole else round(2 / torch.finfo(like.dtype).eps)
    return (torch.floor(draw("uniform", like.shape, torch.float64) * (high - low)) + low).to(like.dtype)


def _permutation(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    return draw("uniform", like.shape, torch.float64).argsort().to(like.dtype)


def _multinomial(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    rates, count = arguments["self"], arguments["num_samples"]
    if arguments["replacement"] and count > 1:
        races = draw("exponential", (*rates.shape[:-1], count, rates.shape[-1]), rates.dtype)
        return (rates.unsqueeze(-2) / races).argmax(-1)
    return (rates / draw("exponential", rates.shape, rates.dtype)).topk(count, -1).indices


def _leaky(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    """Compute rrelu, and write each element's slope to ``noise``, from which PyTorch computes the gradient."""
    x, low, high = arguments["self"], arguments["lower"], arguments["upper"]
    if not arguments["training"]:
        return torch.where(x <= 0, x * ((low + high) / 2), x)
    slope = draw("uniform", like.shape, like.dtype) * (high - low) + low
    arguments["noise"].copy_(torch.where(x <= 0, slope, 1.0))
    return x * arguments["noise"]


def _log_normal(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    return _normal(draw, like, arguments).exp()


def _cauchy(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    return (
        torch.tan((draw("uniform", like.shape, like.dtype) - 0.5) * math.pi) * arguments["sigma"] + arguments["median"]
    )


def _geometric(draw: Draw, like: Tensor, arguments: Mapping[str, Any]) -> Any:
    trials = draw("exponential", like.shape, torch.float64) / -math.log(1 - arguments["p"])
    return trials.ceil().to(like.dtype)


_FUNCTIONS: Mapping[str, Callable[[Draw, Tensor, Mapping[str, Any]], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
        **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), _normal),
        "bernoulli": _bernoulli,
        "exponential": _exponential,
        **dict.fromkeys(("randint", "randint_like", "random"), _integers),
        "randperm": _permutation,
        "multinomial": _multinomial,
        "rrelu_with_noise": _leaky,
        "log_normal": _log_normal,
        "cauchy": _cauchy,
        "geometric": _geometric,
    }
)


class ProgramNumbers(TorchDispatchMode):
    """A mode in which torch's random functions return the numbers of a program, in this thread.

    Operators are numbered in the order of the model's calls, as capture meets them. A call that runs again for the
    backward (torch.utils.checkpoint) gets the same number: calls are identified by the state of torch's generator.

    Raises:
        CompileError: QN111 for a random function that programs do not have, so that nothing could be compared.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.step = seed, step
        self.numbers: dict[tuple[int, int], int] = {}
        self.paused = False

    def next_key(self) -> Key:
        """Return the key of the next random operator."""
        self.paused = True  # these numbers are torch's own
        drawn = (int(torch.randint(2**62, ())), int(torch.randint(2**62, ())))
        self.paused = False
        return Key(self.seed, self.step, self.numbers.setdefault(drawn, len(self.numbers)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = str(func.overloadpacket).removeprefix("aten.")
        parameters = schema(func).arguments
        arguments = {parameter.name: parameter.default_value for parameter in parameters}
        arguments |= dict(zip((parameter.name for parameter in parameters), args, strict=False)) | kwargs
        make = _FUNCTIONS.get(name.removesuffix("_"))
        if make is None or arguments.get("generator") is not None:
            raise CompileError("QN111", f"{func} draws random numbers that no program draws")
        like = args[0] if name.endswith("_") else self._like(func, args, kwargs)
        numbers = make(partial(self._draw, like.device), like, arguments)
        return like.copy_(numbers) if name.endswith("_") else numbers

    def _like(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Return a value like the result, and leave torch's generator as it was."""
        state = torch.get_rng_state()
        like: Tensor = func(*args, **kwargs)
        torch.set_rng_state(state)
        return like

    def _draw(self, device: torch.device, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return whole_noise(kind, size, self.next_key(), dtype, device)
