"""The public face on the local transport: steps, evaluation, state, plans, dumps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet

from .models import CASES, GPT, ViT, build, reference, worst_error

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
MESH = quintnet.Mesh(pp=2, dp=2, tp=2)


def _program(name: str = "gpt", rows: int = 8, microbatches: int = 2, **options: object) -> quintnet.CompiledProgram:
    case = CASES[name]
    return quintnet.compile(
        build(name),
        MESH,
        case.batch(rows),
        loss_fn=case.loss_fn,
        microbatches=microbatches,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.slow
def test_other_batch_sizes_follow_the_first() -> None:
    program, model = _program(), build("gpt")
    for rows in (4, 12, 8):
        batch = CASES["gpt"].batch(rows)
        loss, expected = reference(model, batch, None)
        program.zero_grad()
        assert abs(program.step(batch) - loss) / loss < 1e-9
        error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
        assert error < 1e-9, worst


def test_gradients_add_up_until_they_are_cleared() -> None:
    program = _program()
    batch = CASES["gpt"].batch(8)
    program.step(batch)
    once = {n: p.grad.full_tensor().clone() for n, p in program.named_parameters()}  # type: ignore[union-attr]
    program.step(batch)
    for name, parameter in program.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * once[name])  # type: ignore[union-attr]


def test_evaluate_and_outputs_equal_the_unsplit_model() -> None:
    case, model = CASES["vit"], build("vit")
    program = _program("vit")
    images, labels = case.batch(8)
    with torch.no_grad():
        logits = model(images)
    torch.testing.assert_close(program(images), logits, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(program.evaluate((images, labels)), F.cross_entropy(logits, labels))
    assert all(p.grad is None for p in program.parameters())


def test_training_equals_the_unsplit_model_and_moves_the_module() -> None:
    case, model, twin = CASES["gpt"], build("gpt"), build("gpt")
    program = quintnet.compile(model, MESH, case.batch(8), microbatches=2)
    ours = torch.optim.AdamW(program.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(5):
        loss = program.step(case.batch(8))
        norm = program.clip_grad_norm(0.5)
        ours.step()
        ours.zero_grad()
        expected, _ = reference(twin, case.batch(8), None)
        expected_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        theirs.step()
        assert abs(loss - expected) / expected < 1e-9
        assert abs(norm - expected_norm) / expected_norm < 1e-9
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=name)


def test_parameters_have_the_original_names_and_values() -> None:
    program, model = _program(), build("gpt")
    expected = dict(model.named_parameters())
    found = dict(program.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert isinstance(parameter, torch.nn.Parameter)
        torch.testing.assert_close(parameter.full_tensor(), expected[name].detach())


def test_lazy_capture_at_the_first_step() -> None:
    case = CASES["mlp"]
    program = quintnet.compile(build("mlp"), quintnet.Mesh(dp=2), loss_fn=case.loss_fn)
    loss, expected = reference(build("mlp"), case.batch(4), case.loss_fn)
    assert abs(program.step(case.batch(4)) - loss) / loss < 1e-9
    assert len(list(program.parameters())) == len(expected)


def test_plan_round_trips_and_reproduces_the_program(tmp_path: Path) -> None:
    first = _program()
    first.plan.save(tmp_path / "plan.json")
    again = _program(plan=tmp_path / "plan.json")
    assert again.plan == first.plan == quintnet.Plan.from_json(first.plan.to_json())
    assert _folder(first.dump(tmp_path / "a")) == _folder(again.dump(tmp_path / "b"))


def _folder(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def test_default_rules_find_megatron_with_sequence_parallelism() -> None:
    program = _program()
    kinds = {name: kind["tp"] for name, kind in program.plan.parameters.items()}
    assert kinds["blocks.0.qkv.weight"] == "S(0,3)" and kinds["blocks.0.proj.weight"] == "S(1)"
    assert kinds["blocks.1.up.weight"] == "S(0)" and kinds["blocks.1.down.weight"] == "S(1)"
    assert kinds["blocks.1.ln1.weight"] == "R"  # its gradient is partial: the sequence is split
    assert "reduce_scatter" in program.ranks[0].forward.code and "all_reduce" not in program.ranks[0].forward.code


def test_sequence_parallelism_can_be_switched_off() -> None:
    program = _program(sequence_parallel=False)
    code = program.ranks[0].forward.code
    assert "all_reduce" in code and "reduce_scatter" not in code


@pytest.mark.sample(1)
@pytest.mark.parametrize("fixed", ["S(0)", "S(1)", "I"])
def test_a_plan_fixes_a_parameter(fixed: str) -> None:
    plan = quintnet.Plan(parameters={"blocks.*.up.weight": {"tp": fixed}})
    program = _program(plan=plan)
    assert program.plan.parameters["blocks.1.up.weight"]["tp"].replace("R", "I") == fixed
    loss, _ = reference(build("gpt"), CASES["gpt"].batch(8), None)
    assert abs(program.step(CASES["gpt"].batch(8)) - loss) / loss < 1e-9


@pytest.mark.slow
def test_what_does_not_divide_is_kept_whole_and_still_exact() -> None:
    torch.manual_seed(0)
    model = GPT(vocab=31, width=36, heads=3, depth=2).double()  # 3 heads and 31 tokens on tp=2
    case = CASES["gpt"]
    ids, labels = case.batch(4)
    batch = (ids % 31, torch.where(labels < 0, labels, labels % 31))
    loss, expected = reference(model, batch, None)
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, quintnet.Mesh(tp=2), batch)
    assert abs(program.step(batch) - loss) / loss < 1e-9
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst


class UnevenQKV(nn.Module):
    """One linear for 4 query heads and 2 shared key and value heads, as in Phi-3: the pieces are not equal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.head = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split([32, 16, 16], dim=-1)
        q, k, v = (y.view(b, t, -1, 8).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + self.proj(y.transpose(1, 2).reshape(b, t, 32))).mean(dim=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_uneven_heads_of_any_number(ranks: int) -> None:
    """2 key heads on 2, 4 and 8 ranks; a fused projection of unequal pieces; 8 classes."""
    torch.manual_seed(0)
    model = UnevenQKV().double()
    batch = (torch.randn(4, 8, 32, dtype=torch.float64), torch.randint(0, 8, (4,)))
    loss, expected = reference(model, batch, F.cross_entropy)
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, quintnet.Mesh(tp=ranks), batch, loss_fn=F.cross_entropy)
    assert abs(program.step(batch) - loss) / loss < 1e-9
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst


LOSSES = {
    "mean of squares": F.mse_loss,
    "mean of distances": F.l1_loss,
    "Huber": F.huber_loss,
    "sum": lambda x, y: ((x - y) ** 2).sum(),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "smoothed classes": lambda x, y: F.cross_entropy(x, y.argmax(dim=1), label_smoothing=0.1),
    "weighted classes": lambda x, y: F.cross_entropy(x, y.argmax(dim=1), weight=torch.arange(1.0, 9.0).double()),
    "soft classes": lambda x, y: F.cross_entropy(x, y.softmax(dim=1)),
    "with a z-loss": lambda x, y: F.cross_entropy(x, y.argmax(dim=1)) + 1e-2 * x.logsumexp(dim=1).square().mean(),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    x, _ = CASES["mlp"].batch(8)
    batch = (x, torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    model = build("mlp")
    loss, expected = reference(model, batch, LOSSES[name])
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, MESH, batch, loss_fn=LOSSES[name], microbatches=2)
    assert abs(program.step(batch) - loss) / loss < 1e-9
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst


def test_frozen_parameters_stay_frozen() -> None:
    model = build("vit")
    model.patch.requires_grad_(False)  # type: ignore[union-attr]
    case = CASES["vit"]
    loss, expected = reference(model, case.batch(4), case.loss_fn)
    model.zero_grad()
    program = quintnet.compile(model, quintnet.Mesh(pp=2, tp=2), case.batch(4), loss_fn=case.loss_fn)
    assert abs(program.step(case.batch(4)) - loss) / loss < 1e-9
    found = {n: p.grad.full_tensor() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    assert worst_error(found, expected)[0] < 1e-9


def test_peak_of_live_activations_is_the_schedules() -> None:
    from quintnet_compiler.runtime.execute.executor import Executor, Run
    from quintnet_compiler.runtime.state.gradients import GradientStore
    from quintnet_compiler.runtime.state.state import part_of
    from quintnet_compiler.runtime.transport.local import LocalTransport, LocalWorld

    model, case = build("gpt"), CASES["gpt"]
    compiled = quintnet.compile(model, quintnet.Mesh(pp=4), case.batch(8), microbatches=8)
    program, tensors = compiled._primary().program, dict(model.named_parameters())
    peaks = {}

    def work(rank: int):  # type: ignore[no-untyped-def]
        def run(transport: LocalTransport) -> None:
            part = program.rank(rank)
            store = GradientStore(program, part, transport, torch.device("cpu"))
            executor = Executor(program, part, transport, torch.device("cpu"), store)
            state = {
                n: part_of(tensors[n].detach(), s.sharding, program.axes, part.coordinate)
                for n, s in program.state.items()
            }
            executor.step(state, list(case.batch(8)), Run(train=True))
            peaks[rank] = executor.peak_live

        return run

    with torch.no_grad():
        LocalWorld(program.mesh, program.sites).run_ranks({rank: work(rank) for rank in range(4)})
    assert peaks == {0: 4, 1: 3, 2: 2, 3: 1}


@pytest.mark.slow
def test_vit_of_an_unusual_depth_on_three_stages() -> None:
    torch.manual_seed(0)
    model = ViT(depth=4).double()
    case = CASES["vit"]
    loss, expected = reference(model, case.batch(6), case.loss_fn)
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, quintnet.Mesh(pp=3), case.batch(6), loss_fn=case.loss_fn, microbatches=3)
    assert abs(program.step(case.batch(6)) - loss) / loss < 1e-9
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst
