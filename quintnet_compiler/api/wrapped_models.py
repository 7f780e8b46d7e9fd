"""Models that another library has split or copied already, which a program would split again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from ..core.errors import CompileError, Where


@dataclass(frozen=True)
class _Wrapper:
    """A class of torch's: what it is called, how to come back to the plain module, and what does the same here."""

    name: str
    plain: str
    instead: str


_PLAIN = "pass the model as it was before"
_SPLIT = "Mesh(dp=...) with zero=3 splits parameters, gradients and optimizer state over data ranks"
WRAPPERS: Mapping[str, _Wrapper] = MappingProxyType(
    {
        "torch.nn.parallel.distributed.DistributedDataParallel": _Wrapper(
            "DistributedDataParallel", "pass its .module", "Mesh(dp=...) gives each data rank its rows"
        ),
        "torch.nn.parallel.data_parallel.DataParallel": _Wrapper(
            "DataParallel", "pass its .module", "Mesh(dp=...) gives each data rank its rows"
        ),
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _Wrapper(
            "FullyShardedDataParallel", _PLAIN, _SPLIT
        ),
        "torch.distributed.fsdp.FSDPModule": _Wrapper("fully_shard", _PLAIN, _SPLIT),
    }
)


def refuse_wrapped(*models: object) -> None:
    """Raise if a module, or a part of it, is split or copied by torch's own wrappers.

    Raises:
        CompileError: QN105, with the wrapper's name, the place, and the option that does the same.
    """
    from ..runtime.backends.split_parameters import home_of, split_parameter

    for model in models:
        if not isinstance(model, nn.Module):
            continue
        for path, part in model.named_modules():
            wrapper = _wrapper_of(type(part))
            if wrapper is not None:
                raise CompileError(
                    "QN105",
                    f"{path or 'the model'} is wrapped by {wrapper.name}",
                    where=Where(path),
                    fix=f"{wrapper.plain}: {wrapper.instead}",
                )
        name = split_parameter(model) if home_of(model) is None else None
        if name is not None:
            raise CompileError(
                "QN105",
                f"{name} is a DTensor, as parallelize_module and distribute_tensor make it",
                fix=f"{_PLAIN}: Mesh(tp=...) splits parameters over model ranks, in the dims that parameters={{...}} "
                "says or that the compiler chooses",
            )


def _wrapper_of(kind: type) -> _Wrapper | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
