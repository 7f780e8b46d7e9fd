"""Initial values by a module's own code, and by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.api.initial_values import InitialValues
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.weights.initialize import run_fill
from quintnet_compiler.weights.own_values import OwnValues, values_of_build, values_of_reset


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:  # after its children's
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.inner.bias)


def _shapes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(x.shape), x.dtype) for name, x in module.state_dict().items()}


def _all(own: OwnValues, module: nn.Module, seed: int) -> dict[str, Tensor]:
    own.require(_shapes(module), _shapes(module))
    return {name: x.clone() for name, x in own.values(_shapes(module), seed)}


def test_reset_functions_run_children_first() -> None:
    with torch.device("meta"):
        module = nn.Sequential(Scaled(), nn.MultiheadAttention(4, 2))
    own = values_of_reset({"": module})
    assert own.changed == set(_shapes(module)) and all(x.is_meta for x in module.state_dict().values())
    expected = nn.Sequential(Scaled(), nn.MultiheadAttention(4, 2))
    torch.manual_seed(5)
    expected.apply(
        lambda m: getattr(m, "reset_parameters", getattr(m, "_reset_parameters", lambda: None))()  # type: ignore[no-any-return]
    )
    found = _all(own, module, 5)
    for name, x in expected.state_dict().items():
        assert torch.equal(found[name], x), name
    assert not found["0.inner.bias"].any() and found["0.norm.running_var"].eq(1).all()


def test_what_nothing_resets_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(2, 2), nn.Parameter(torch.randn(3))

    with torch.device("meta"):
        module = Bare()
    own = values_of_reset({"": module})
    own.require(_shapes(module), ["linear.weight"])
    with pytest.raises(CompileError, match=r"(?s)QN604.*nothing gives values to table\n.*initialize\(build\)"):
        own.require(_shapes(module), _shapes(module))
    _all(values_of_build(Bare), module, 0)  # the fix
    with pytest.raises(CompileError, match=r"linear.weight is \(2, 2\) torch.float32 there, and \(2, 3\)"):
        own.require({"linear.weight": ((2, 3), torch.float32)}, ["linear.weight"])
    with pytest.raises(CompileError, match="gave a Tensor"):
        values_of_build(lambda: torch.ones(1))  # type: ignore[arg-type, return-value]


def test_functions_fill_whole_tensors() -> None:
    torch.manual_seed(3)
    expected = nn.init.xavier_uniform_(torch.empty(4, 6))
    torch.manual_seed(3)
    assert torch.equal(run_fill("w", nn.init.xavier_uniform_, (4, 6), torch.float32), expected)
    assert torch.equal(run_fill("w", lambda x: torch.ones(2), (2,), torch.float32), torch.ones(2))
    values: InitialValues = {"w": nn.init.zeros_}
    assert values

    def half(x: Tensor) -> None:
        x[:1].zero_()

    for fill in (lambda x: None, half, lambda x: x.log()):
        with pytest.raises(CompileError, match=r"QN604.*\n.*for w left elements without a number"):
            run_fill("w", fill, (2, 2), torch.float32)
    with pytest.raises(CompileError, match=r"gave \(1,\) torch.float64 on cpu"):
        run_fill("w", lambda x: torch.ones(1, dtype=torch.float64), (2,), torch.float32)
