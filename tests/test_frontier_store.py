"""After compile the module's parameters are the program's: optimizers, state dicts, copies and hand-written loops see
what is trained."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.swa_utils import AveragedModel

import quintnet
from quintnet import Mesh

TWO: tuple[dict[str, int], ...] = ({"dp": 2}, {"tp": 2}, {"pp": 2})


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def make_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator).double(), torch.randint(4, (rows,), generator=generator)


def plain_steps(model: nn.Module, count: int, loss_fn=F.cross_entropy) -> list[float]:  # type: ignore[no-untyped-def]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(count):
        loss = loss_fn(model(make_batch()[0]), make_batch()[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_an_optimizer_of_the_module_trains_the_program(axes: dict[str, int]) -> None:
    plain, model = build(), build()
    expected = plain_steps(plain, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    program = quintnet.compile(model, Mesh(**axes), make_batch(), loss_fn=F.cross_entropy)
    found = []
    for _ in range(3):
        found.append(float(program.step(make_batch())))
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx(expected, rel=1e-9)
    assert equal(model, plain)
    assert all(map(lambda a, b: a is b, program.parameters(), model.parameters()))


def test_parameters_and_gradients_offer_what_dtensors_do() -> None:
    model = build()
    program = quintnet.compile(model, Mesh(tp=2), make_batch(), loss_fn=F.cross_entropy)
    program.step(make_batch())
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter) and weight.is_leaf
    assert torch.equal(weight.full_tensor(), weight) and torch.equal(weight.to_local(), weight)
    assert weight.grad.full_tensor().shape == (8, 4) and weight.grad.to_local().shape == (8, 4)
    program.step(make_batch())  # added to the first
    assert weight.grad.full_tensor().shape == (8, 4)
    assert type(weight * 2) is Tensor and torch.equal(weight.detach().full_tensor(), weight)


def test_two_programs_of_one_module_train_the_same_parameters() -> None:
    def other_loss(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, F.one_hot(target, 4).double())

    plain, model = build(), build()
    losses = (F.cross_entropy, other_loss)
    programs = [
        quintnet.compile(model, mesh, make_batch(), loss_fn=loss)
        for mesh, loss in zip((Mesh(dp=2), Mesh(tp=2)), losses, strict=True)
    ]
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(4):
        loss = losses[step % 2](plain(make_batch()[0]), make_batch()[1])
        loss.backward()
        assert float(programs[step % 2].step(make_batch())) == pytest.approx(float(loss), rel=1e-9)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model, plain)


def test_the_module_stays_a_module() -> None:
    model = build()
    program = quintnet.compile(model, Mesh(pp=2), make_batch(), loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    for _ in range(3):
        program.step(make_batch())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    trained = copy.deepcopy(model)
    found = float(program.evaluate(make_batch()))
    for one in (model, trained):
        assert found == pytest.approx(float(F.cross_entropy(one(make_batch()[0]), make_batch()[1])), rel=1e-12)
    assert not equal(average.module, model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(type(x) is Tensor for x in saved.values())
    model.load_state_dict(build().state_dict())
    assert float(program.evaluate(make_batch())) == pytest.approx(plain_steps(build(), 1)[0], rel=1e-9)


def test_what_the_module_gets_instead_of_its_tensors_is_followed() -> None:
    def new() -> dict[str, Tensor]:
        torch.manual_seed(1)
        return {name: torch.randn_like(x) for name, x in build().state_dict().items()}

    def fresh(model: nn.Module) -> None:
        model.load_state_dict(new(), assign=True)

    def data(model: nn.Module) -> None:
        values = new()
        for name, parameter in model.named_parameters():
            parameter.data = values[name]

    plain = build()
    plain.load_state_dict(new())
    expected = float(F.cross_entropy(plain(make_batch()[0]), make_batch()[1]))
    for change in (fresh, data):
        model = build()
        program = quintnet.compile(model, Mesh(tp=2), make_batch(), loss_fn=F.cross_entropy)
        program.step(make_batch())
        change(model)
        assert float(program.step(make_batch())) == pytest.approx(expected, rel=1e-9)
        assert [p.grad is not None for p in model.parameters()] == [True] * 4
        assert all(map(lambda a, b: a is b, program.parameters(), model.parameters()))
        model.float()
        with pytest.raises(quintnet.RunError, match=r"QN112(.|\n)*0.weight is .* torch.float32"):
            program.step(make_batch())


def test_verify_compares_the_values_that_the_module_has_now() -> None:
    model = build()
    program = quintnet.compile(model, Mesh(tp=2), make_batch(), loss_fn=F.cross_entropy)
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()}, assign=True)  # before the first step
    plain = copy.deepcopy(model)
    assert float(program.step(make_batch())) == pytest.approx(plain_steps(plain, 1)[0], rel=1e-9)
    model.load_state_dict({name: x / 3 for name, x in model.state_dict().items()}, assign=True)
    assert program.verify().ok


def test_tensors_that_become_one_or_two_are_refused() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        model[1].weight = model[0].weight
        return model

    for build_it, places in ((tied, (0, 1)), (lambda: nn.Sequential(*tied()).append(nn.Linear(4, 4).double()), (0, 2))):
        model = build_it()
        program = quintnet.compile(model, Mesh(dp=2), make_batch(), loss_fn=F.cross_entropy)
        program.step(make_batch())
        one, other = (model[place] for place in places)
        shared = one.weight is other.weight
        other.weight = nn.Parameter(one.weight.detach().clone()) if shared else one.weight
        with pytest.raises(quintnet.RunError, match=r"QN112(.|\n)*(one tensor now|a tensor each now)"):
            program.step(make_batch())


def test_what_step_did_already_is_refused_by_name() -> None:
    model = build()
    program = quintnet.compile(model, Mesh(dp=2), make_batch(), loss_fn=F.cross_entropy)
    loss = program.step(make_batch())
    for backward in (
        lambda: loss.backward(),  # type: ignore[no-untyped-call]
        lambda: torch.autograd.backward(loss / 4),
        lambda: torch.amp.GradScaler("cpu").scale(loss),  # type: ignore[attr-defined]
        lambda: torch.amp.GradScaler("cpu").scale([loss, 2 * loss]),  # type: ignore[attr-defined]
        lambda: ShardedGradScaler("cpu").scale(loss),
    ):
        with pytest.raises(quintnet.RunError, match=r"QN113(.|\n)*step computed the gradients"):
            backward()
    assert f"{loss:.4f}" == f"{loss.item():.4f}" and repr(loss).startswith("tensor(")
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Tensor and type(copy.deepcopy(loss)) is Tensor
    for copied in (lambda: AveragedModel(program), lambda: copy.deepcopy(program)):  # type: ignore[arg-type]
        with pytest.raises(quintnet.RunError, match=r"QN113(.|\n)*AveragedModel\(model\)"):
            copied()


def with_scale(head: nn.Module, out: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(head(out) * scale.exp(), target)


def with_a_loss(axes: dict[str, int], seed: int) -> tuple[quintnet.CompiledProgram, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model, head, scale = nn.Linear(4, 8).double(), nn.Linear(8, 4).double(), nn.Parameter(torch.randn(()).double())
    loss_fn = functools.partial(with_scale, head, scale=scale)
    program = quintnet.compile(model, Mesh(**axes), make_batch(), loss_fn=loss_fn)
    return program, torch.optim.AdamW(program.parameters(), lr=0.1)


def restored(axes: dict[str, int], other: dict[str, int], folder: Path) -> float:
    """How far the third step of a program that goes on from a checkpoint is from the one that wrote it."""
    losses = []
    program, optimizer = with_a_loss(axes, 0)
    for step in range(3):
        if step == 2:
            program.save(folder, step=step, optimizer=optimizer)
            state = {name: x.full_tensor().clone() for name, x in program.state_dict().items()}
        losses.append(float(program.step(make_batch())))
        optimizer.step()
        optimizer.zero_grad()
    again, optimizer = with_a_loss(other, 1)
    assert abs(float(again.evaluate(make_batch())) - losses[2]) > 1e-3
    again.load(folder, optimizer=optimizer)
    third, _ = with_a_loss(other, 2)
    third.load_state_dict(state)
    return max(abs(float(one(make_batch())) - losses[2]) for one in (again.step, third.evaluate))


@pytest.mark.slow
def test_a_state_dict_of_a_loss_that_is_a_module() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1, scale, 1, scale], dtype=torch.float64))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(out * self.scale, target)

    one, other = (quintnet.compile(build(), Mesh(dp=2), make_batch(), loss_fn=Scaled(scale)) for scale in (2.0, 3.0))
    state = one.state_dict()
    assert {"0.weight", "loss_fn.scale"} < state.keys()
    assert other.evaluate(make_batch()) != one.evaluate(make_batch())
    other.load_state_dict(state)
    assert other.evaluate(make_batch()) == one.evaluate(make_batch())
    with pytest.raises(RuntimeError, match=r"scale"):
        other.load_state_dict({name: x for name, x in state.items() if name != "loss_fn.scale"})
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        other.load_state_dict({name: x for name, x in state.items() if name != "0.weight"})
    zeros = {name: torch.zeros_like(x) for name, x in state.items()}
    for wrong in ({**zeros, "loss_fn.bias": torch.zeros(4)}, {n: x for n, x in zeros.items() if n != "loss_fn.scale"}):
        with pytest.raises(RuntimeError, match=r"loss_fn\..*nothing was loaded"):
            other.load_state_dict(wrong)
    assert other.evaluate(make_batch()) == one.evaluate(make_batch())


@pytest.mark.slow
def test_parameters_of_a_loss_are_saved_and_loaded(tmp_path: Path) -> None:
    assert {"loss_fn.0.weight", "loss_fn.scale"} < dict(with_a_loss({"dp": 1}, 0)[0].named_parameters()).keys()
    for i, (one, other) in enumerate(itertools.pairwise(TWO)):
        assert restored(one, other, tmp_path / str(i)) < 1e-9, (one, other)


# -- in processes: parameters become DTensors, as fully_shard and parallelize_module leave them


def mse_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, F.one_hot(target, 4).double())


def message(work: Any) -> str:
    try:
        work()
    except quintnet.RunError as error:
        return str(error)
    return "no error"


def on_ranks(folder: str, layouts: Sequence[dict[str, int]]) -> dict[str, dict[str, Any]]:
    return {str(axes): train(axes, f"{folder}/{'-'.join(axes)}") for axes in layouts}


def train(axes: dict[str, int], folder: str) -> dict[str, Any]:
    model, plain, batch, found = build(), build(), make_batch(), dict[str, Any]()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    program = quintnet.compile(model, Mesh(**axes), batch, loss_fn=F.cross_entropy)
    found["early"] = message(early.step)
    other = quintnet.compile(model, Mesh(**axes), batch, loss_fn=mse_loss)
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    average, plain_average = AveragedModel(model), AveragedModel(plain)
    errors = []
    for step, rows in enumerate((8, 8, 4, 8)):
        mine, loss_fn = (program, F.cross_entropy) if step % 2 == 0 else (other, mse_loss)
        loss = loss_fn(plain(make_batch(rows)[0]), make_batch(rows)[1])
        loss.backward()
        errors.append(abs(float(mine.step(make_batch(rows))) - loss.item()))
        for optimizer, one, mean in ((ours, model, average), (theirs, plain, plain_average)):
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(one)
    found["losses"] = max(errors)
    whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
    found["state"] = {name: float((x - plain.state_dict()[name]).abs().max()) for name, x in whole.items()}
    ema = {name: x.full_tensor() for name, x in average.module.state_dict().items()}
    found["average"] = max(float((x - plain_average.module.state_dict()[n]).abs().max()) for n, x in ema.items())
    found["shared"] = all(map(lambda a, b: a is b, program.parameters(), other.parameters()))
    found["call"] = message(lambda: model(batch[0]))
    found["verified"] = "tp" not in axes or program.verify().ok
    program.step(batch)
    found["clip"] = message(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    found["mesh"] = message(lambda: quintnet.compile(model, Mesh(dp=dist.get_world_size()), batch, loss_fn=mse_loss))
    model.zero_grad()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    if dist.get_rank() == 0:
        stored = {name: torch.empty_like(x) for name, x in plain.state_dict().items()}
        dcp.load(stored, checkpoint_id=folder, no_dist=True)
        found["stored"] = max(float((x - plain.state_dict()[n]).abs().max()) for n, x in stored.items())
    model.load_state_dict(build().state_dict())
    expected = [F.cross_entropy(build()(batch[0]), batch[1]).item(), F.cross_entropy(plain(batch[0]), batch[1]).item()]
    again = [float(program.evaluate(batch))]
    model.load_state_dict(plain.state_dict(), assign=True)
    again.append(float(program.step(batch)))
    found["loaded"] = max(abs(a - b) for a, b in zip(again, expected, strict=True))
    found["restored"] = restored(axes, axes, Path(folder, "of a loss"))
    scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def scaled(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out * scale, target)

    found["further"] = message(lambda: quintnet.compile(model, Mesh(**axes), batch, loss_fn=scaled))
    program.close()
    found["closed"] = abs(F.cross_entropy(model(batch[0]), batch[1]).item() - expected[1])
    found["used"] = message(lambda: program.step(batch))
    first = quintnet.compile(model, Mesh(**axes), batch, loss_fn=scaled)
    found["first"] = abs(float(first.step(batch)) - expected[1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [TWO, pytest.param(({"dp": 2, "tp": 2},), marks=pytest.mark.slow)], ids=str)
def test_in_processes_the_module_has_what_is_trained(tmp_path: Path, layouts: Sequence[dict[str, int]]) -> None:
    ranks = quintnet.launch(on_ranks, math.prod(layouts[0].values()), args=(str(tmp_path), layouts), timeout=300)
    for layout in ranks[0]:
        for rank, results in enumerate(ranks):
            found = results[layout]
            where = f"{layout} on rank {rank}: {found}"
            assert "make the optimizer after" in found["early"], where
            assert max(found[name] for name in ("losses", "average", "loaded", "closed", "first")) < 1e-9, where
            assert "loss_fn.scale" in found["further"] and "close()" in found["further"], where
            assert max(found["state"].values()) < 1e-9, where
            assert found["shared"] and found["verified"] and found.get("stored", 0.0) < 1e-9, where
            assert "program(x) for outputs" in found["call"], where
            assert "was closed" in found["used"], where
            assert ("program.clip_grad_norm" in found["clip"]) == ("pp" in layout), where
            assert ("close()" in found["mesh"]) == (layout != "{'dp': 2}"), where
            assert found["restored"] < 1e-9, where
            whole = {"0.weight", "0.bias", "2.weight", "2.bias"}
            assert found["state"].keys() == ({n for n in whole if int(n[0]) == 2 * rank} if "pp" in layout else whole)


# -- modules that share parts, each with a program of its own


class Critic(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise: Tensor, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(self.generator(noise).detach())).mean()


class Generator(Critic):
    def forward(self, noise: Tensor) -> Tensor:  # type: ignore[override]
        return F.softplus(-self.critic(self.generator(noise))).mean()


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)).double() for a, b in ((4, 6), (6, 2))]
    return made[0], made[1]


def compete(axes: dict[str, int] | None) -> list[float]:
    """Losses of two steps of each, of programs or (None) of the modules."""
    generator, critic = adversaries()
    modules = Critic(generator, critic), Generator(generator, critic)
    dice = torch.Generator().manual_seed(1)
    noise, x = (torch.randn(8, n, generator=dice, dtype=torch.float64) for n in (4, 6))
    batches: tuple[tuple[Tensor, ...], ...] = (noise, x), (noise,)
    pairs = zip(modules, batches, strict=True)
    programs = [quintnet.compile(m, Mesh(**axes), batch) for m, batch in pairs] if axes else []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, generator)]
    losses = []
    for i in (0, 1, 0, 1):
        if axes:
            losses.append(float(programs[i].step(batches[i])))
        else:
            loss = modules[i](*batches[i])
            loss.backward()
            losses.append(float(loss))
        optimizers[i].step()
        for module in modules:
            module.zero_grad()
    return losses


def adversaries_on_ranks() -> tuple[list[float], list[float], list[str]]:
    generator, critic = adversaries()
    noise = torch.zeros(8, 4, dtype=torch.float64)
    quintnet.compile(Critic(generator, critic), Mesh(dp=2), (noise, torch.zeros(8, 6, dtype=torch.float64)))
    texts = [
        message(lambda: quintnet.compile(generator, Mesh(dp=2), (noise,), training=False)),
        message(lambda: compete({"pp": 2})),
    ]
    return compete({"dp": 2}), compete({"tp": 2}), texts


@pytest.mark.slow
def test_modules_that_share_parts_train_the_same_parameters() -> None:
    expected = compete(None)
    assert max(map(abs, map(lambda a, b: a - b, compete({"dp": 2}), expected))) < 1e-9
    for dp, tp, texts in quintnet.launch(adversaries_on_ranks, 2, timeout=200):
        assert max(abs(a - b) for a, b in zip((*dp, *tp), (*expected, *expected), strict=True)) < 1e-9
        assert "same name in both modules" in texts[0]
        assert "in another place" in texts[1] and "close()" in texts[1]
