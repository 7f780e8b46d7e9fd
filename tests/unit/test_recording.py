"""What initialising code does is recorded without memory, and values computed from it are those of the code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.weights.recording import Recording
from quintnet_compiler.weights.tape import Tape, needed


class Everything(nn.Module):
    """The ways to initialise a module that PyTorch has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=1)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.parts = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2), nn.LSTM(8, 8)])
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # deep copies
        self.by_init = nn.ParameterList(torch.empty(6, 6) for _ in range(7))
        nn.init.orthogonal_(self.by_init[0])
        nn.init.trunc_normal_(self.by_init[1], std=2.0)
        nn.init.sparse_(self.by_init[2], 0.5)
        nn.init.eye_(self.by_init[3])
        nn.init.xavier_normal_(self.by_init[4])
        nn.init.kaiming_uniform_(self.by_init[5])
        self.by_init[6].data = torch.full((6, 6), 3.0)
        nn.init.dirac_(self.parts[0].weight)  # type: ignore[arg-type]
        self.transposed = nn.Parameter(torch.randn(3, 4).t() * 0.5)
        self.numpy = nn.Parameter(torch.from_numpy(np.arange(4.0)))
        self.bare = nn.Parameter(torch.Tensor(2, 3))
        nn.init.normal_(self.bare)
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.register_buffer("waves", torch.arange(4.0).sin(), persistent=False)
        self.register_buffer("listed", torch.tensor([1.0, 2.0]))
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)] + torch.linspace(0, 1, 2).tolist()
        self.blocks = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.blocks.apply(self._again)
        with torch.no_grad():
            self.blocks[0].weight[0].zero_()
            self.blocks[1].weight.mul_(2)
            self.blocks[2].weight.copy_(self.blocks[1].weight)
        self.where = self.blocks[0].weight.device, self.blocks[0].weight.is_meta

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def _recorded(build: Callable[[], nn.Module]) -> tuple[Recording, nn.Module]:
    recording = Recording()
    with recording.on():
        module = build()
    return recording, module


def test_values_are_those_of_the_code() -> None:
    torch.manual_seed(7)
    expected = Everything()
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    recording, module = _recorded(Everything)
    wanted = {name: recording.place(x) for name, x in _tensors(module).items()}
    found = {name: x.clone() for name, x in recording.tape.values(wanted, 7)}
    assert found.keys() == _tensors(expected).keys()
    for name, x in _tensors(expected).items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
    assert module.rates == expected.rates and module.where == expected.where
    assert torch.equal(torch.random.get_rng_state(), before)


def test_some_of_the_values_are_those_among_all() -> None:
    recording, module = _recorded(Everything)
    wanted = {name: recording.place(x) for name, x in _tensors(module).items()}
    found = {name: x.clone() for name, x in recording.tape.values(wanted, 7)}
    for name in ("blocks.0.weight", "by_init.1", "waves"):
        ((again, x),) = recording.tape.values({name: wanted[name]}, 7)
        assert again == name and torch.equal(x, found[name])


def test_about_one_parameter_is_in_memory_at_a_time() -> None:
    """Weights that are drawn twice, all of them at first and again at the end, are not kept in between."""

    class Twice(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*[nn.Linear(64, 64) for _ in range(8)])
            for module in self:
                nn.init.normal_(module.weight)  # type: ignore[arg-type]

    recording, module = _recorded(Twice)
    wanted = {name: recording.place(x) for name, x in module.named_parameters()}
    steps, unknown = needed(recording.tape.calls, {place.memory for place in wanted.values()})
    there: dict[int, int] = {}
    most = 0
    for step in steps:
        there |= {
            memory: recording.tape.sizes[memory] for memory in step.call.made | step.call.reads | step.call.writes
        }
        most = max(most, sum(there.values()))
        there = {memory: size for memory, size in there.items() if memory not in step.freed}
    assert not unknown and most <= 2 * 64 * 64 * 4 + 8 * 64 * 4 and not there
    assert sum(step.call.draws for step in steps) == 3 * 8


def _seeds() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2)


def _forks() -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.randn(2)
    return torch.randn(2)


def _decides() -> Tensor:
    x = torch.randn(2)
    return x if x[0] > 0 else -x


def _own_generator() -> Tensor:
    return torch.randn(2, generator=torch.Generator())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (_seeds, "sets the seed or the state of random numbers itself"),
        (_forks, "sets the seed or the state of random numbers itself"),
        (_decides, "reads a number that depends on random values"),
        (_own_generator, "a random generator of its own"),
        (lambda: torch.ones(2).resize_(4), "calls resize_"),
        (lambda: torch.ones(2).numpy(), "makes a NumPy array"),
        (lambda: torch.ones(2).view(3), "cannot be followed: "),
    ],
)
def test_what_cannot_be_recorded_is_refused(code: Callable[[], Tensor], message: str) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(CompileError, match=f"QN604.*\n.*{message}"), Recording().on():
        code()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_memory_that_is_read_before_it_is_written_is_known() -> None:
    recording = Recording()
    with recording.on():
        given, written = torch.empty(3), torch.empty(3)
        made = given + 1
        written[0] = 1.0
        whole = torch.empty(3).fill_(2.0)
    tape: Tape = recording.tape
    assert tape.unknown([recording.place(made).memory]) == {recording.place(given).memory}
    assert tape.unknown([recording.place(written).memory]) == {recording.place(written).memory}
    assert not tape.unknown([recording.place(whole).memory])


def test_digests_tell_constants_and_operators_apart() -> None:
    def digest(code: Callable[[], object]) -> str:
        recording = Recording()
        with recording.on():
            code()
        return recording.text

    found = [digest(lambda x=x: torch.from_numpy(np.ones(2) * x) + 1) for x in (1.0, 1.0, 2.0)]  # type: ignore[misc]
    assert found[0] == found[1] != found[2]
    assert digest(lambda: torch.ones(2)) != digest(lambda: torch.zeros(2))
    assert digest(lambda: torch.ones(2).mul_(2.0)) != digest(lambda: torch.ones(2).mul_(3.0))


def test_a_number_is_computed_when_it_is_asked_for() -> None:
    recording = Recording()
    with recording.on():
        x = torch.zeros(3)
        x[1] = 4.0
        assert x.sum().item() == 4.0 and bool(x[1] > 3) and x.tolist() == [0.0, 4.0, 0.0]
    assert recording.tape.read_number(recording.place(x[1])) == 4.0
