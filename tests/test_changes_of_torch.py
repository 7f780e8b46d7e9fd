"""What changes in torch or around it between two steps: functions, settings, results that functions keep, parametrized
weights. A step is as that of the plain module, or it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quintnet

MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
SCALE = 2.0


@functools.lru_cache(maxsize=4)
def scale_of(number: int) -> float:
    return SCALE * number


@functools.cache
def settings_of(number: int) -> dict[str, float]:
    return {"scale": SCALE * number}


class Net(nn.Module):
    """``first``, a function, and ``second``; ``scale()`` times that."""

    def __init__(self, function: Callable[[Tensor], Tensor], scale: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.function, self.scale = function, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x))) * self.scale()  # type: ignore[no-any-return]


def _losses(
    model: nn.Module, mesh: dict[str, int] | None, changes: list[Callable[[], Any]], steps: int = 2
) -> list[float]:
    """Return the losses of steps with SGD before ``changes``, and after each of them; of a program, if on a mesh."""
    torch.manual_seed(1)
    batch = torch.randn(4, 4), torch.randint(0, 4, (4,))
    program = quintnet.compile(model, quintnet.Mesh(**mesh), batch, loss_fn=F.cross_entropy) if mesh else None
    optimizer = torch.optim.SGD((model if program is None else program).parameters(), lr=0.1)
    losses = []
    for change in (lambda: None, *changes):
        change()
        for _ in range(steps):
            optimizer.zero_grad()
            if program is None:
                loss = F.cross_entropy(model(batch[0]), batch[1])
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                loss = program.step(batch)
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def _sine(x: Tensor) -> Tensor:
    return torch.sin(x)


def _cosine(x: Tensor) -> Tensor:
    return torch.cos(x)


def _fails(*_: Any, **options: Any) -> Tensor:
    raise AssertionError("a program called a function that the module does not call")


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize(
    ("function", "names", "other"),
    [
        (_sine, ["sin"], torch.cos),
        (_cosine, ["sin", "neg", "mul"], _fails),  # its derivative has these, and the module does not name them
        (_cosine, ["mm", "bmm", "addmm", "sum", "t", "div"], _fails),
    ],
    ids=["in forward", "in its derivative", "in those of layers"],
)
def test_a_function_of_torch_is_replaced(
    function: Callable[[Tensor], Tensor], names: list[str], other: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(mesh: dict[str, int] | None) -> list[float]:
        with monkeypatch.context() as patch:
            return _losses(Net(function), mesh, [lambda: [patch.setattr(torch, name, other) for name in names]])

    assert run(MESHES[layout]) == pytest.approx(run(None), abs=1e-5)


def _set_scale(value: float) -> None:
    global SCALE
    SCALE = value


def _forget() -> None:
    scale_of.cache_clear()
    settings_of.cache_clear()


CACHED: dict[str, tuple[Callable[[], float], list[Callable[[], Any]]]] = {
    "kept": (lambda: scale_of(1), [lambda: _set_scale(3.0)]),
    "cleared": (lambda: scale_of(1), [lambda: _set_scale(3.0), _forget]),
    "cleared, and asked again": (
        lambda: scale_of(1),
        [lambda: _set_scale(3.0), lambda: (_forget(), scale_of(1), scale_of(1))],
    ),
    "pushed out": (
        lambda: scale_of(1),
        [lambda: _set_scale(3.0), lambda: list(map(scale_of, range(2, 9)))],
    ),
    "changed in place": (lambda: settings_of(1)["scale"], [lambda: settings_of(1).update(scale=5.0)]),
    "a dict, cleared": (lambda: settings_of(1)["scale"], [lambda: _set_scale(3.0), _forget]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CACHED)
def test_a_function_keeps_its_results(case: str) -> None:
    def run(mesh: dict[str, int] | None) -> list[float]:
        _set_scale(2.0)
        _forget()
        scale, changes = CACHED[case]
        return _losses(Net(_sine, scale), mesh, changes)

    try:
        assert run({"dp": 2}) == pytest.approx(run(None), abs=1e-5)
    finally:
        _forget()


@pytest.mark.slow
def test_further_results_lead_to_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintnet_compiler.driver import variants

    _forget()
    changes = [lambda: settings_of(7), lambda: monkeypatch.setattr(variants, "capture", None), lambda: settings_of(8)]
    _losses(Net(_sine, lambda: settings_of(1)["scale"]), {"dp": 2}, changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "read", [lambda: float(torch.get_num_threads()), torch.get_num_threads], ids=["named", "itself"]
)
def test_a_setting_of_the_process(read: Callable[[], float]) -> None:
    before = torch.get_num_threads()

    def run(mesh: dict[str, int] | None) -> list[float]:
        torch.set_num_threads(1)
        return _losses(Net(_sine, read), mesh, [lambda: torch.set_num_threads(2)])

    try:
        assert run({"tp": 2}) == pytest.approx(run(None), abs=1e-5)
    finally:
        torch.set_num_threads(before)


PARAMETRIZED: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm, the old one": nn.utils.weight_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm, the old one": nn.utils.spectral_norm,
}


def _refusal(change: str, mesh: dict[str, int]) -> str:
    model = Net(_sine)
    try:
        _losses(model, mesh, [lambda: PARAMETRIZED[change](model.first)])
    except quintnet.CompileError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("change", PARAMETRIZED)
def test_a_weight_is_parametrized(change: str, layout: str) -> None:
    assert "the program has no parameter for first." in _refusal(change, MESHES[layout])


def _refusals() -> list[str]:
    return [_refusal(change, {"tp": 2}) for change in PARAMETRIZED]


@pytest.mark.slow
def test_a_split_weight_is_parametrized() -> None:
    for refused in quintnet.launch(_refusals, 2, timeout=300)[0]:
        assert "QN112" in refused and "the program has no parameter for first." in refused


class _Sees(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_that_sees_operators_is_refused() -> None:
    sees: Any = _Sees  # it has no types
    batch = torch.randn(4, 4), torch.randint(0, 4, (4,))
    program = quintnet.compile(Net(_sine), quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    with sees(), pytest.raises(quintnet.CompileError, match=r"QN105[^!]*_Sees, a TorchDispatchMode"):
        program.step(batch)
    program.step(batch)
