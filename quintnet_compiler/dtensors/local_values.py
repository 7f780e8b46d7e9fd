"""Numbers and random draws of DTensors as those of whole tensors; gradients of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..compat.distributed import dtensor_operators, dtensor_over, local_tensor
from ..compat.interpreter import call_once
from ..compat.torch import plain_function, schema
from ..core.errors import RunError

aten = torch.ops.aten
# what draws numbers for its first argument, and reads no value of it
_FILLS = (
    aten.normal_, aten.uniform_, aten.exponential_, aten.log_normal_, aten.cauchy_, aten.geometric_, aten.random_,
    aten.bernoulli_, aten.rand_like, aten.randn_like, aten.randint_like,
)  # fmt: skip
_READS_PROBABILITIES = (aten.bernoulli,)
# what answers with a number of Python's at once
_ANSWERS = (torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, Tensor.tolist)


@dataclass(frozen=True)
class GradientSource:
    """Name the gradients of a pipeline stage that a tensor was computed from.

    Attributes:
        parameter: whose gradient it is; None: of several parameters, or of all that a rank has.
        elements: of this gradient; 0 for several.
    """

    parameter: str | None
    elements: int


_SEVERAL = GradientSource(None, 0)


class StageGradient(DTensor):
    """The gradient of a parameter of one pipeline stage, and what was computed from it.

    Ranks of other stages do not have it. What is computed for each parameter is right on its own rank; a number that
    combines the gradients of several parameters is not: the unsplit module's would be of all stages.

    Attributes:
        source: what it was computed from.

    Raises:
        RunError: QN113 where an operator combines gradients of several parameters into one number, where a Python
            number is asked for, and by ``full_tensor`` of a number.
    """

    source: GradientSource

    @staticmethod
    def __torch_function__(
        func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS:
            raise _number_of_a_stage(_SEVERAL)
        result = plain_function(func, types, args, kwargs or {})
        values = [*args, *(kwargs or {}).values()]
        # without a result, the first argument was written to: x[0] = y, operators on lists
        _trace_sources(values[0] if result is None else result, values)
        return result

    @property
    def is_number(self) -> bool:
        """Return whether this is one number of more elements."""
        return self.numel() == 1 and self.source.elements != 1

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the whole gradient of the parameter."""
        if self.is_number:
            raise _number_of_a_stage(self.source)
        whole: Tensor = super().full_tensor(**options)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the same values, no longer as the gradient of a parameter."""
        copied: Tensor = memo.setdefault(id(self), self.detach().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Write a DTensor: files are read where there are no pipeline stages."""
        same = dtensor_over(local_tensor(self), self.device_mesh, self.placements, self.shape, self.stride())
        return same.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark_stage_gradients(gradients: Mapping[str, DTensor]) -> None:
    """Make these gradients, by their parameters' names, a :class:`StageGradient` each: all that this rank has."""
    for name, gradient in gradients.items():
        gradient.__class__ = StageGradient
        gradient.source = GradientSource(name if len(gradients) > 1 else None, gradient.numel())  # type: ignore[attr-defined]


def _trace_sources(result: Any, args: Sequence[Any]) -> None:
    """Say of an operator's results what they were computed from.

    Raises:
        RunError: QN113 if one is a number of gradients of several parameters.
    """
    single = [x for x in args if isinstance(x, Tensor)]
    many = [list(x) for x in args if isinstance(x, (list, tuple))]
    inputs = [x for x in chain(single, *many) if isinstance(x, Tensor)]
    if isinstance(result, Tensor):
        joined = any(isinstance(x, StageGradient) for x in chain(*many))
        _set_source(result, _SEVERAL if joined else _combined(single), inputs)
    elif isinstance(result, (list, tuple)):
        lists = [x for x in many if len(x) == len(result)]  # an operator on lists takes one of each for a result
        for index, x in enumerate(result):
            if isinstance(x, Tensor):
                _set_source(x, _combined([*single, *(values[index] for values in lists)]), inputs)


def _combined(inputs: Iterable[Any]) -> GradientSource | None:
    sources = {x.source for x in inputs if isinstance(x, StageGradient)}
    return None if not sources else sources.pop() if len(sources) == 1 else _SEVERAL


def _set_source(x: Tensor, source: GradientSource | None, inputs: Sequence[Tensor]) -> None:
    """Set the source of a result; it may be one of the ``inputs``, which the operator wrote to."""
    if source is None:
        return
    is_written = any(x is written for written in inputs)
    if type(x) is DTensor and (not is_written or _collects_numbers(x, source, inputs)):
        x.__class__ = StageGradient
        x.source = source  # type: ignore[attr-defined]
    elif isinstance(x, StageGradient):
        x.source = replace(source, elements=x.source.elements) if is_written else source
    if isinstance(x, StageGradient) and source.parameter is None and (is_written or not _is_view(x, inputs)):
        _refuse_number(x)


def _collects_numbers(x: Tensor, source: GradientSource, inputs: Sequence[Tensor]) -> bool:
    """Return whether a tensor that is no parameter gets numbers of gradients, as a sum of norms does."""
    numbers = [y for y in inputs if isinstance(y, StageGradient) and y.is_number]
    return bool(numbers) and source.elements != 1 and not isinstance(x, nn.Parameter)


def _refuse_number(x: StageGradient) -> None:
    if x.is_number:
        raise _number_of_a_stage(x.source)


def _is_view(x: DTensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether this is a part of an input, for which nothing was computed."""
    memory = local_tensor(x).untyped_storage().data_ptr()
    wholes = [local_tensor(whole) for whole in inputs if isinstance(whole, DTensor)]
    return any(whole.untyped_storage().data_ptr() == memory for whole in wholes)


def _number_of_a_stage(source: GradientSource) -> RunError:
    whose = "the gradients of this rank's parameters"
    fix = "use program.grad_norm() or program.clip_grad_norm(max_norm): of all gradients, the same on every rank"
    if source.parameter is not None:
        whose = f"the gradient of {source.parameter}"
        fix += "; what is done with one parameter alone can stay a tensor: p.grad.mul_(p.norm() / p.grad.norm())"
    return RunError(
        "QN113",
        f"a number was computed from {whose}: this rank has the gradients of its pipeline stages alone, and the others "
        "would go on with other numbers",
        fix=fix,
    )


def whole_number(function: Any, args: Sequence[DTensor], kwargs: Mapping[str, Any]) -> Any:
    """Return the Python number of a replicated DTensor.

    Raises:
        RunError: QN113 for a DTensor of which each rank has a part or a term, and for what was computed from the
            gradient of a pipeline stage.
    """
    x = args[0]
    if isinstance(x, StageGradient) and x.is_number:
        raise _number_of_a_stage(x.source)
    if not all(placement.is_replicate() for placement in x.placements):
        raise RunError(
            "QN113",
            f"a number was asked for of which each rank has a part ({', '.join(map(str, x.placements))}): a norm or "
            "sum of a split parameter or gradient",
            fix="x.full_tensor().item() on every rank; in an optimizer's step, make it with program.optimizer(make)",
        )
    return local_tensor(x).item()


@call_once
def read_and_draw_whole_dtensors() -> None:
    """Let DTensors of this process give Python numbers, and draw random numbers, as whole tensors do, from now on.

    torch reads and draws each rank's part by itself: on CPUs, all parts get the same random numbers.
    """
    packets = (*_FILLS, *_READS_PROBABILITIES)
    handlers = dtensor_operators()
    handlers[aten._local_scalar_dense.default] = whole_number
    handlers |= {getattr(packet, name): _draw for packet in packets for name in packet.overloads()}  # type: ignore[no-untyped-call]


def _draw(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """Draw the whole tensor on every rank, and return this rank's part.

    Raises:
        RunError: QN113 where other ranks, of other pipeline stages, do not have the tensor, and draw nothing.
    """
    x: DTensor = args[0]
    if x.device_mesh.size() < dist.get_world_size():
        raise RunError(
            "QN113",
            "random numbers were asked for a parameter or gradient of this rank's pipeline stages: the unsplit module "
            "would draw those of all stages, one after the other",
            fix="use a mesh without pp; or draw for a plain copy of the module, on every rank, and load that: "
            "program.load_state_dict(copy.state_dict())",
        )
    whole = _whole(x) if function.overloadpacket in _READS_PROBABILITIES else _empty(x)
    rest = [_whole(value) if isinstance(value, DTensor) else value for value in args[1:]]
    drawn = function(whole, *rest, **kwargs)
    part = part_like(x, drawn)
    if schema(function).is_mutable:
        local_tensor(x).copy_(part)
        return x
    return dtensor_over(part, x.device_mesh, x.placements, x.shape, tuple(drawn.stride()))


def part_like(x: DTensor, whole: Tensor) -> Tensor:
    """Return this rank's part of values that every rank has, cut as ``x`` is."""
    replicated = DTensor.from_local(whole, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    return local_tensor(replicated.redistribute(placements=x.placements))


def _whole(x: DTensor) -> Tensor:
    whole: Tensor = x.full_tensor()
    return whole


def _empty(x: DTensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=local_tensor(x).device)
