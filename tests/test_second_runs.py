"""What torch.utils.checkpoint runs twice: the module's state on every layout, or a refusal that names its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .frontier import Case, compare, refused, report, trains_equally

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two blocks, each of which is a checkpoint around ``body(block, h)``."""

    def __init__(self, body: Body, reentrant: bool | None, **parts: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(Block(body, reentrant, **parts) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h).square().mean()


class Block(nn.Module):
    def __init__(self, body: Body, reentrant: bool | None, **parts: Callable[[], Any]) -> None:
        super().__init__()
        self.body, self.reentrant, self.linear = body, reentrant, nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(6))
        for name, part in parts.items():
            setattr(self, name, part())

    def run(self, h: Tensor) -> Tensor:
        return self.body(self, h)

    def forward(self, h: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.run(h)
        return checkpoint(self.run, h, use_reentrant=self.reentrant)


def _norm(block: Any, h: Tensor) -> Tensor:
    return F.relu(block.norm(block.linear(h)))


def _counts(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        block.count += 1
        block.mean.lerp_(h.mean(0), 0.1)
    return torch.tanh(block.linear(h))


def _counts_at_the_end(block: Any, h: Tensor) -> Tensor:
    h = torch.tanh(block.linear(h))
    with torch.no_grad():
        block.count += 1
        block.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h + 1


def _drops(block: Any, h: Tensor) -> Tensor:
    h = F.dropout(block.linear(h), 0.5)
    with torch.no_grad():
        block.mean.lerp_(h.mean(0), 0.1)
    return torch.tanh(h)


def _drops_in_place(block: Any, h: Tensor) -> Tensor:
    h = F.relu_(F.dropout(block.linear(h), 0.5))
    with torch.no_grad():
        block.mean.lerp_(h.mean(0), 0.1)
    return torch.tanh(h)


def _in_place(block: Any, h: Tensor) -> Tensor:
    h = block.linear(h).mul_(2).add_(1)
    block.mean.copy_(block.mean * 0.5 + h.detach().mean(0))
    return torch.tanh(h)


def _assigns(block: Any, h: Tensor) -> Tensor:
    block.count = block.count + 1
    block.mean = 0.9 * block.mean + 0.1 * h.detach().mean(0)
    return torch.tanh(block.linear(h))


def _detached(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        block.count += 1
    return h


def _changes_a_parameter(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        block.old.mul_(0.9).add_(0.1)
    return torch.tanh(block.linear(h))


BODIES: dict[str, tuple[Body, dict[str, Callable[[], Any]]]] = {
    "batch norm": (_norm, {"norm": lambda: nn.BatchNorm1d(6)}),
    "cumulative batch norm": (_norm, {"norm": lambda: nn.BatchNorm1d(6, momentum=None)}),
    "counters": (_counts, {}),
    "counters behind the last saved tensor": (_counts_at_the_end, {}),
    "statistics of dropout": (_drops, {}),
    "statistics of dropout changed in place": (_drops_in_place, {}),
    "values changed in place": (_in_place, {}),
    "nothing saved": (_detached, {}),
    "a frozen parameter": (_changes_a_parameter, {"old": lambda: nn.Parameter(torch.ones(3), requires_grad=False)}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_state_changes_as_often_as_in_pytorch(name: str, reentrant: bool) -> None:
    body, parts = BODIES[name]
    trains_equally(lambda: Net(body, reentrant, **parts), (X,), meshes=MESHES)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 3, "recompute": "full"},
        {"microbatches": 2},
        {"microbatches": 2, "recompute": "full"},
        {"recompute": "selective"},
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_with_other_options(axes: dict[str, int], options: dict[str, Any]) -> None:
    case = Case(lambda: Net(_counts_at_the_end, False), (X,), options=options)
    report(case, {"": compare(case, axes)})
    options = {"batch_statistics": "microbatch", **options} if "microbatches" in options else options
    case = Case(lambda: Net(_norm, True, norm=lambda: nn.BatchNorm1d(6)), (X,), options=options)
    report(case, {"": compare(case, axes)})


def test_without_early_stop_all_of_it_runs_again() -> None:
    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            with set_checkpoint_early_stop(False):
                return super().forward(x)

    trains_equally(lambda: Whole(_counts_at_the_end, False), (X,), meshes={"dp2": {"dp": 2}})


def test_a_checkpoint_that_ends_before_the_one_inside_it_begins() -> None:
    trains_equally(lambda: Net(_inside, False), (X,), meshes={"dp2": {"dp": 2}})


def test_buffers_that_are_assigned_again() -> None:
    trains_equally(lambda: Net(_assigns, True), (X,), meshes=MESHES)


def test_a_checkpoint_that_no_gradient_reaches_runs_once() -> None:
    class Aside(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0 * self.blocks[0](self.first(x).detach()).detach().sum()

    for reentrant in (True, False):
        trains_equally(lambda: Aside(_counts, reentrant), (X,), meshes={"dp2": {"dp": 2}})  # noqa: B023


@pytest.mark.slow
def test_one_block_at_two_places_and_state_that_blocks_share() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](self.first(x))
            return self.last(self.blocks[1](self.blocks[0](h))).square().mean()

    for reentrant in (True, False):
        trains_equally(lambda: Twice(_counts, reentrant), (X,), meshes={"dp2": {"dp": 2}, "tp2": {"tp": 2}})  # noqa: B023


def _reads_the_count(block: Any, h: Tensor) -> Tensor:
    block.count += 1
    return torch.tanh(block.linear(h) * block.count)


def _is_normed(block: Any, h: Tensor) -> Tensor:
    return torch.tanh(block.normed(h))


def _inside(block: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda x: _counts(block, x), h, use_reentrant=False) * 2  # type: ignore[no-any-return]


def _nested(block: Any, h: Tensor) -> Tensor:
    return torch.tanh(_inside(block, h))


def _other_numbers(block: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda x: _drops(block, x), h, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _changed_later(block: Any, h: Tensor) -> Tensor:
    h = checkpoint(lambda x: torch.tanh(block.linear(x) * block.mean), h, use_reentrant=False)
    block.mean.mul_(0.9)
    return h


def _differentiated(block: Any, h: Tensor) -> Tensor:
    h = checkpoint(lambda x: _counts(block, x), h, use_reentrant=False)
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return h + gradient


REFUSED: dict[str, tuple[Body, bool | None, str]] = {
    "a counter that it reads": (_reads_the_count, False, "'blocks.1.count' as the whole forward leaves it"),
    "likewise, reentrant": (_reads_the_count, True, "'blocks.1.count' as the whole forward leaves it"),
    "a spectral norm": (_is_normed, False, "parametrizations.weight.0"),
    "a buffer that changes after it": (_changed_later, None, "'blocks.1.mean' as the whole forward leaves it"),
    "one inside another": (_nested, False, "inside of another checkpoint"),
    "other random numbers": (_other_numbers, None, "preserve_rng_state=False"),
    "a gradient inside forward": (_differentiated, None, "torch.autograd.grad"),
    "a buffer assigned, with an end of its own": (_assigns, False, r"in place \(self.count.add_\(1\)\)"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_a_second_run_with_other_gradients_is_refused(name: str) -> None:
    body, reentrant, cause = REFUSED[name]
    normed = {"normed": lambda: spectral_norm(nn.Linear(6, 6))} if body is _is_normed else {}
    texts = refused(lambda: Net(body, reentrant, **normed), (X,), "QN105", cause=cause, meshes=MESHES, check="off")
    for text in texts.values():
        assert "test_second_runs.py:" in text
        assert "checkpoint(" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [_reads_the_count, _is_normed, _counts])
def test_what_the_refusal_offers_works(body: Body) -> None:
    normed = {"normed": lambda: spectral_norm(nn.Linear(6, 6))} if body is _is_normed else {}
    trains_equally(lambda: Net(body, None, **normed), (X,), meshes=MESHES, recompute="full")
