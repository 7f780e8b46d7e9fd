"""Gives a program's tensors their initial values, on any layout the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.errors import CompileError
from ..ir.distributed_program import DistributedProgram
from ..runtime.backends.backend import Backend
from ..weights.initialize import Constant, Fill, Init, Normal, Uniform, key_of, match_names, run_fill
from ..weights.own_values import values_of_build, values_of_reset

InitialValues = Literal["model"] | Callable[[], nn.Module] | Mapping[str, Init | Fill]
_KINDS = ("parameter", "buffer", "constant")


def give_values(
    program: DistributedProgram,
    backend: Backend,
    modules: Mapping[str, nn.Module],
    values: InitialValues,
    seed: int,
) -> None:
    """See :meth:`quintnet.CompiledProgram.initialize`. ``modules``: by what their tensors' names begin with."""
    if isinstance(values, Mapping):
        _by_name(program, backend, modules, values, seed)
        return
    if isinstance(values, nn.Module) or not (callable(values) or values == "model"):
        described = f"a {type(values).__name__}" if isinstance(values, nn.Module) else repr(values)
        raise CompileError(
            "QN604", f"initialize was given {described}", fix='give "model", a dict, or a function: lambda: Net(config)'
        )
    specs = {name: spec for name, spec in program.state.items() if spec.kind in _KINDS}
    if callable(values):
        own = values_of_build(values)
        wanted = {n for n, spec in specs.items() if n in own.places or spec.kind == "parameter" or n in backend.unset}
    else:
        own = values_of_reset(modules)
        wanted = {name for name in specs if name in own.changed or name in backend.unset}
    backend.agree({"initial values": own.recording.text})
    own.require({name: (tuple(spec.shape), spec.dtype) for name, spec in specs.items()}, wanted)
    _place(program, backend, wanted, lambda here: own.values(here, seed))
    backend.unset -= wanted


def _place(
    program: DistributedProgram,
    backend: Backend,
    wanted: set[str],
    values: Callable[[set[str]], Iterable[tuple[str, Tensor]]],
) -> None:
    """Copy this process' parts of whole tensors. ``values``: gives those of some of the names."""
    parts = {spec.name: (part, at) for spec, part, at in backend.parts(program, _KINDS) if spec.name in wanted}
    with torch.no_grad():
        for name, whole in values(set(parts)):
            part, positions = parts[name]
            for dim, at in enumerate(positions):
                if len(at) != whole.shape[dim]:
                    whole = whole.index_select(dim, at)
            part.copy_(whole)


def _by_name(
    program: DistributedProgram,
    backend: Backend,
    modules: Mapping[str, nn.Module],
    values: Mapping[str, Init | Fill],
    seed: int,
) -> None:
    specs = {name: spec for name, spec in program.state.items() if spec.kind in _KINDS}
    parameters = [name for name, spec in specs.items() if spec.kind == "parameter"]
    wanted = match_names(values, parameters, specs.keys() - set(parameters))
    drawn = {name: init for name, init in wanted.items() if isinstance(init, (Normal, Uniform, Constant))}
    in_order = [".".join(filter(None, (at, name))) for at, m in modules.items() for name, _ in m.named_parameters()]
    fills = {name: wanted[name] for name in (*in_order, *specs) if name in wanted and name not in drawn}

    def whole(here: set[str]) -> Iterator[tuple[str, Tensor]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, fill in fills.items():
                x = run_fill(name, fill, specs[name].shape, specs[name].dtype)  # type: ignore[arg-type]
                if name in here:
                    yield name, x

    _place(program, backend, set(fills), whole)
    with torch.no_grad():
        for spec, part, positions in backend.parts(program, _KINDS):
            if spec.name in drawn:
                key = key_of(seed, parameters.index(spec.name))
                part.copy_(drawn[spec.name].draw(positions, spec.shape, key, spec.dtype))
    backend.unset -= wanted.keys()
