"""equivalence, part by part: copies, other values for a while, drawn batches, verdicts, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintnet_compiler.core.errors import CompileError, Where
from quintnet_compiler.equivalence import free_memory, verdict
from quintnet_compiler.equivalence.drawn_blocks import drawn_batch, with_values
from quintnet_compiler.equivalence.module_copy import module_copy
from quintnet_compiler.equivalence.module_step import Owner, module_step
from quintnet_compiler.equivalence.reference import differs
from quintnet_compiler.equivalence.swapped_values import double, rounded_otherwise


def _owner(model: nn.Module) -> Owner:
    return Owner(model, F.mse_loss, dict(model.named_parameters()), "loss", training=True)


def test_copies_share_what_modules_share_and_have_their_hooks() -> None:
    model = nn.Linear(2, 2)
    seen: list[int] = []
    model.weight.register_hook(lambda g: seen.append(1))
    twin, head, loss_fn = module_copy(model, nn.Sequential(model), F.mse_loss)
    assert twin is not model and head[0] is twin and loss_fn is F.mse_loss
    twin(torch.ones(1, 2)).sum().backward()
    assert seen == [1] and model.weight.grad is None
    model.lock = (x for x in ())
    with pytest.raises(CompileError, match="the module cannot be copied: TypeError"):
        module_copy(model)


def test_values_are_swapped_and_put_back() -> None:
    model = nn.Linear(3, 2)
    before, gradient = model.weight.detach().clone(), torch.ones(2, 3)
    model.weight.grad = gradient
    with double(_owner(model)):
        assert model.weight.dtype == torch.float64 and model.weight.grad is None
    assert torch.equal(model.weight, before) and model.weight.grad is gradient
    with rounded_otherwise(_owner(model)):
        off = (model.weight.detach() / before - 1).abs()
        assert 0 < float(off.max()) <= 2 * torch.finfo(torch.float32).eps
    assert torch.equal(model.weight, before)


def test_a_step_of_the_module_leaves_nothing_behind() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    batch = (torch.tensor([[3.0, 1.0]]), torch.tensor([[4.0]]))
    found = module_step(_owner(model), batch, None)
    assert [x.item() for x in found.outputs] == [1.0]  # (3 + 2 - 4) ** 2
    gradient = found.gradients["weight"]
    assert gradient is not None and gradient.tolist() == [[6.0, 2.0]] and model.weight.grad is None


def test_hooks_that_a_first_call_sets_are_gone_with_its_other_attributes() -> None:
    class Sets(nn.Linear):  # as models of transformers do, to collect hidden states
        ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.register_forward_hook(lambda module, args, out: out * 2)
                self.ready = True
            return super().forward(x)

    model, batch = Sets(2, 1), (torch.ones(1, 2), torch.ones(1, 1))
    first, again = (module_step(_owner(model), batch, None) for _ in range(2))
    assert not model.ready and not model._forward_hooks
    assert first.outputs[0].item() == again.outputs[0].item()
    assert {"ready", "_forward_hooks"} <= set(first.changes.attributes)


def test_how_far_values_are_apart() -> None:
    assert differs(torch.ones(2), torch.ones(2)) == 0
    assert differs(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == pytest.approx(0.25)


def test_few_rows_of_a_batch_and_values_for_those_that_have_none() -> None:
    ids = torch.zeros(8, 100, dtype=torch.long, device="meta")
    found = drawn_batch((ids, ids), 2, short=True)
    assert found[0].shape == (2, 64) and not found[0].is_meta and set(found[0].unique().tolist()) <= {0, 1}
    real = torch.arange(6.0).view(3, 2)
    assert torch.equal(drawn_batch({"x": real}, 2, short=False)["x"], real[:2])


def test_a_module_on_the_meta_device_gets_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(50, 40)
    (twin,), found = with_values(model, [], dict(model.named_parameters()), torch.device("cpu"))
    assert model.weight.is_meta and twin.weight is found["weight"]
    assert 0.5 < float(twin(torch.randn(200, 50)).detach().std()) < 2  # values stay near one


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = free_memory.free_bytes(torch.device("cpu"))
    assert found is None or found > 0
    assert free_memory.free_bytes(torch.device("meta")) is None
    limits = dict(zip(free_memory._GROUPS[0], (1000, 400), strict=True))
    monkeypatch.setattr(free_memory, "_number", limits.get)
    assert free_memory.free_bytes(torch.device("cpu")) == 600


class Heard:
    """A backend of two ranks, of which this one tells first."""

    def __init__(self, other: str) -> None:
        self.other = other

    def told(self, text: str) -> list[str]:
        return [text, self.other]


def test_a_difference_is_raised_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CompileError("QN111", "the loss differs", where=Where("head", "m.py:3: x"), fix="look")
    alone = verdict.Verdict()
    alone.judge(lambda: None)
    with pytest.raises(CompileError, match="the loss differs"):
        alone.judge(lambda: error)
    monkeypatch.setattr(verdict, "many", lambda: True)
    judge, other = verdict.Verdict(), verdict.Verdict()
    judge.judge(lambda: error)  # not raised: others wait for it
    monkeypatch.setattr(verdict, "judges", lambda: False)
    other.judge(lambda: error)
    assert other._found is None
    with pytest.raises(CompileError) as told:
        other.raise_error_of_any_rank(Heard(verdict._written(error)))  # type: ignore[arg-type]
    assert told.value.where == error.where and told.value.fix == "look"
    other.raise_error_of_any_rank(Heard(""))  # type: ignore[arg-type]
