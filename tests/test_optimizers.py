"""Optimizers of split parameters: after three steps equal to those of the unsplit module, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import quintnet
from quintnet import Mesh

Layout = tuple[dict[str, int], dict[str, Any]]
Outcome = dict[str, float | str]
BATCH = (
    torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.zeros(8, 4, dtype=torch.float64),
)


class OfEach(optim.Optimizer):
    """Updates each parameter that has a gradient by itself."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, p.grad, self.state[p]), alpha=group["lr"])

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Shampoo(OfEach):
    """Preconditioners of both sides, whose shape is not the parameter's."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        g = gradient.reshape(p.shape[0], -1)
        if not state:
            state["left"], state["right"] = (torch.eye(size, dtype=p.dtype) * 1e-3 for size in g.shape)
        state["left"] += g @ g.T
        state["right"] += g.T @ g
        return (_root(state["left"]) @ g @ _root(state["right"])).reshape(p.shape)


class Soap(OfEach):
    """Adam in the basis of Shampoo's eigenvectors."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        g = gradient.reshape(p.shape[0], -1)
        if not state:
            state["left"], state["right"] = (torch.eye(size, dtype=p.dtype) * 1e-3 for size in g.shape)
            state["second"] = torch.zeros_like(g)
        state["left"] += g @ g.T
        state["right"] += g.T @ g
        left, right = torch.linalg.eigh(state["left"])[1], torch.linalg.eigh(state["right"])[1]
        turned = left.T @ g @ right
        state["second"].mul_(0.9).addcmul_(turned, turned, value=0.1)
        return (left @ (turned / (state["second"].sqrt() + 1e-6)) @ right.T).reshape(p.shape)


class Lamb(OfEach):
    """A ratio of norms, as tensors."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["second"] = torch.zeros_like(p)
        state["second"].mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        towards = gradient / (state["second"].sqrt() + 1e-6) + 0.01 * p
        return towards * self.ratio(p.norm(), towards.norm())

    def ratio(self, size: Tensor, change: Tensor) -> Any:
        return size / change


class LambOfNumbers(Lamb):
    """A ratio of norms, as Python's numbers."""

    def ratio(self, size: Tensor, change: Tensor) -> float:
        return size.item() / change.item()


class Muon64(OfEach):
    """torch.optim.Muon's iteration in the parameter's own dtype."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return gradient
        x = gradient / (gradient.norm() + 1e-7)
        x = x.T if p.shape[0] > p.shape[1] else x
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return x.T if p.shape[0] > p.shape[1] else x


class EightBits(OfEach):
    """Adam with states of 8 bits. Each block of 8 numbers of a flattened matrix has a scale."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        kept = [_unpacked(*state[name], p.shape) if state else torch.zeros_like(p) for name in ("first", "second")]
        first, second = kept[0].lerp(gradient, 0.1), kept[1].lerp(gradient.square(), 0.05)
        state["first"], state["second"] = _packed(first), _packed(second)
        return first / (second.sqrt() + 0.1)


class EightBitsOfParts(EightBits):
    """Its blocks are those of this rank's part, as torchao's are."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not isinstance(p, DTensor) or not isinstance(gradient, DTensor):
            return super().update(p, gradient, state)
        made = super().update(p.to_local(), gradient.to_local(), state)
        placed: Tensor = DTensor.from_local(made, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        return placed


def _packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """In blocks; what is no matrix stays as it is."""
    if x.dim() != 2:
        return x, torch.ones(())
    blocks = x.reshape(-1, 8)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (blocks / scale).round().to(torch.int8), scale


def _unpacked(x: Tensor, scale: Tensor, size: torch.Size) -> Tensor:
    return x if len(size) != 2 else (x * scale).reshape(size)


def _root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return vectors @ torch.diag(values.clamp_min(1e-12) ** -0.25) @ vectors.T


def _muon(parameters: Iterable[Any]) -> optim.Optimizer:
    return optim.Muon([p for p in parameters if p.dim() == 2], 0.02)


def _of_transformers(parameters: Iterable[Any]) -> optim.Optimizer:
    import transformers

    return transformers.Adafactor(parameters, scale_parameter=True, relative_step=True)


MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "AdamW": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "AdamW, foreach": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Lamb": Lamb,
    "Muon64": Muon64,
    "LBFGS": lambda p: optim.LBFGS(p, 0.1),
    "Adafactor": optim.Adafactor,
    "Muon": _muon,
    "Rprop": optim.Rprop,
    "Adafactor of transformers": _of_transformers,
    "Shampoo": Shampoo,
    "Soap": Soap,
    "LambOfNumbers": LambOfNumbers,
    "EightBits": EightBits,
    "EightBitsOfParts": EightBitsOfParts,
}
SPLIT = tuple(MAKE)[:15]  # right where parameters are split
WHOLE = tuple(name for name in MAKE if name != "LBFGS")
BLOCKS = ("EightBits", "EightBitsOfParts")  # right where parts are whole blocks
NEED_WHOLE = tuple(name for name in WHOLE if name not in (*SPLIT, *BLOCKS))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def _three_steps(optimizer: optim.Optimizer, gradients: Callable[[], Tensor]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        return float(gradients().detach())

    for _ in range(3):
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _unsplit(name: str) -> dict[str, Tensor]:
    net = _net()

    def gradients() -> Tensor:
        loss = F.mse_loss(net(BATCH[0]), BATCH[1])
        loss.backward()
        return loss

    _three_steps(MAKE[name](list(net.parameters())), gradients)
    return dict(net.named_parameters())


def _program(layout: Layout, offload: bool = False) -> quintnet.CompiledProgram:
    axes, plan = layout
    where = {"offload": ("optimizer",)} if offload else {}
    return quintnet.compile(_net(), Mesh(**axes), BATCH, loss_fn=F.mse_loss, check="off", **plan, **where)


def _errors(layout: Layout, names: Iterable[str], whole: bool, offload: bool = False) -> Outcome:
    """The largest difference of a parameter after three steps, or the error."""
    torch.set_num_threads(1)
    found: Outcome = {}
    program = _program(layout, offload)
    for name in names:
        expected = _unsplit(name)
        program.load_state_dict(_net().state_dict())
        program.zero_grad()
        parameters = [p for p in program.parameters() if p.dim() == 2 or name != "Muon"]
        try:
            optimizer = program.optimizer(MAKE[name], parameters) if whole else MAKE[name](parameters)
            _three_steps(optimizer, lambda: program.step(BATCH))
        except (quintnet.QuintNetError, RuntimeError) as error:
            found[name] = str(error)
            continue
        found[name] = max(
            float((p.full_tensor() - expected[n]).detach().abs().max())  # type: ignore[attr-defined]
            for n, p in program.named_parameters()
        )
    return found


def _equal(found: list[Outcome]) -> None:
    wrong = [(name, error) for rank in found for name, error in rank.items() if isinstance(error, str) or error > 1e-9]
    assert not wrong


DP3: Layout = ({"dp": 2}, {"zero": 3})
TP: Layout = ({"tp": 2}, {})
DP1: Layout = ({"dp": 2}, {"zero": 1})
ALL: Layout = ({"dp": 2, "tp": 2}, {"zero": 3})
PP: Layout = ({"pp": 2}, {})


def _in_processes(layouts: list[Layout]) -> list[Outcome]:
    found = []
    for layout in layouts:
        found += [_errors(layout, SPLIT, whole=False)]
        found += [_errors(layout, WHOLE, whole=True, offload=offload) for offload in (False, True)]
    return found


def _a_few(layout: Layout) -> tuple[Outcome, Outcome, Outcome, Outcome]:
    return (
        _errors(layout, ["Muon", "Soap"], whole=True),
        _errors(layout, ["Adafactor", "EightBits", "AdamW"], whole=True, offload=True),
        _errors(layout, ["AdamW", *BLOCKS], whole=False),
        _errors(layout, [name for name in NEED_WHOLE if "transformers" not in name], whole=False),
    )


@pytest.mark.slow
def test_optimizers_of_split_parameters() -> None:
    for whole, outside, split, refused in quintnet.launch(_a_few, 2, args=(DP3,)):
        _equal([whole, outside, split])
        for name, error in refused.items():
            assert isinstance(error, str), name
        for name in ("LambOfNumbers", "Muon"):
            assert "QN113" in str(refused[name]) and "program.optimizer(" in str(refused[name])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layouts"), [(2, [DP3, DP1, TP]), (4, [ALL])])
def test_all_optimizers_on_all_layouts(world: int, layouts: list[Layout]) -> None:
    for found in quintnet.launch(_in_processes, world, args=(layouts,)):
        _equal(found)
    for refused in quintnet.launch(_errors, world, args=(layouts[0], ["Adafactor of transformers"], False)):
        assert "mixed torch.Tensor and DTensor" in str(refused["Adafactor of transformers"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [ALL, PP])
def test_optimizers_in_one_process(layout: Layout) -> None:
    _equal([_errors(layout, ("AdamW", "LBFGS", "LambOfNumbers"), whole=False)])
    _equal([_errors(layout, ("Muon", "Shampoo"), whole=True)])


# -- reductions of split gradients

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": torch.Tensor.norm,
    "norm of 1": lambda g: g.norm(p=1),
    "largest": lambda g: g.norm(p=float("inf")),
    "vector_norm": torch.linalg.vector_norm,
    "sum": torch.Tensor.sum,
    "mean": torch.Tensor.mean,
    "max": torch.Tensor.max,
    "min": torch.Tensor.min,
    "amax": lambda g: g.abs().amax(),
    "std": torch.Tensor.std,
    "root of mean square": lambda g: g.square().mean().sqrt(),
    "dot": lambda g: torch.dot(g.flatten(), g.flatten()),
    "any": lambda g: (g > 0).any(),
    "count": torch.count_nonzero,
    "product": lambda g: (g + 1).prod(),
    "distance": lambda g: torch.dist(g, torch.zeros_like(g)),
    "median": torch.Tensor.median,
}


def _reductions(layout: Layout) -> list[str]:
    """Reductions that give a wrong number, or none where they should."""
    torch.set_num_threads(1)
    net, program = _net(), _program(layout)
    F.mse_loss(net(BATCH[0]), BATCH[1]).backward()
    program.step(BATCH)
    wrong, refused = [], 0
    for name, p in program.named_parameters():
        whole = net.get_parameter(name).grad
        assert p.grad is not None and whole is not None
        for kind, reduce in REDUCTIONS.items():
            expected = float(reduce(whole))
            if abs(float(reduce(p.grad).full_tensor()) - expected) > 1e-9:  # type: ignore[attr-defined]
                wrong.append(f"{kind} of {name}")
            for number in (float, torch.Tensor.item):
                try:
                    if abs(number(reduce(p.grad)) - expected) > 1e-9:
                        wrong.append(f"number of {kind} of {name}")
                except quintnet.RunError as error:
                    refused += error.code == "QN113"
    return wrong if refused or "pp" in layout[0] else ["nothing was refused"]


def _reductions_and_others(layout: Layout) -> tuple[list[str], Outcome, Outcome, Outcome]:
    blocks = _errors(layout, BLOCKS, whole=True), _errors(layout, BLOCKS, whole=False)
    return _reductions(layout), _errors(PP, ["LBFGS", "Muon"], whole=False), *blocks


@pytest.mark.slow
def test_reductions_of_split_gradients() -> None:
    """Also: an optimizer of all parameters together is refused where stages have some of them each; and where ranks
    have parts of the rows of a matrix, blocks of a part are others than those of the whole."""
    for wrong, of_stages, whole, blocks in quintnet.launch(_reductions_and_others, 2, args=(TP,)):
        assert wrong == []
        assert "the gradients of this rank's parameters" in str(of_stages["LBFGS"])
        of_part = blocks.pop("EightBitsOfParts")
        _equal([whole, blocks, {"Muon": of_stages["Muon"]}])  # stages have whole matrices
        assert isinstance(of_part, float) and of_part > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(2, DP3), (4, ALL)])
def test_reductions_on_more_layouts(world: int, layout: Layout) -> None:
    assert quintnet.launch(_reductions, world, args=(layout,)) == [[]] * world


# -- checkpoints


def _saves(folder: str, layout: Layout) -> None:
    program = _program(layout)
    optimizer = program.optimizer(lambda p: Soap(p, 0.01))
    _three_steps(optimizer, lambda: program.step(BATCH))
    program.save(folder, step=3, optimizer=optimizer)


def _loads(folder: str, layout: Layout) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    program = _program(layout)
    optimizer = program.optimizer(lambda p: Soap(p, 1.0))
    assert program.load(folder, optimizer=optimizer).step == 3
    assert optimizer.param_groups[0]["lr"] == 0.01
    _three_steps(optimizer, lambda: program.step(BATCH))
    return {name: p.full_tensor().detach() for name, p in program.named_parameters()}  # type: ignore[attr-defined]


def _saves_and_loads(folder: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    _saves(f"{folder}/there", DP3)
    return _loads(f"{folder}/here", TP)


@pytest.mark.slow
def test_state_of_whole_parameters_is_read_by_any_layout(tmp_path: Path) -> None:
    net = _net()
    optimizer = Soap(net.parameters(), 0.01)
    for _ in range(6):
        optimizer.zero_grad()
        F.mse_loss(net(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    _saves(f"{tmp_path}/here", ({"dp": 1}, {}))
    for found in quintnet.launch(_saves_and_loads, 2, args=(str(tmp_path),)):
        for name, x in found.items():
            torch.testing.assert_close(x, net.get_parameter(name).detach(), rtol=0, atol=1e-9)
    for name, x in _loads(f"{tmp_path}/there", PP).items():
        torch.testing.assert_close(x, net.get_parameter(name).detach(), rtol=0, atol=1e-9)
