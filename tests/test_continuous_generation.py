"""Texts that come and go have the tokens that transformers gives each of them alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import quintnet
from quintnet_compiler.runtime.backends.local import LocalBackend

from .test_generation import large_model

torch.set_num_threads(1)
PAGE = 4
Axes = dict[str, int]


def prompts_of(*lengths: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(5)
    return [torch.randint(3, 60, (length,), generator=dice) for length in lengths]


def alone(model: Any, prompt: Tensor, new: int, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.generate(
            input_ids=prompt[None], max_new_tokens=new, do_sample=False, pad_token_id=0, **options
        )
    return found[0]


def program_of(model: Any, axes: Axes, **options: Any) -> quintnet.CompiledProgram:
    batch = {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}
    return quintnet.compile(model, quintnet.Mesh(**axes), batch, training=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {}),
        *(
            pytest.param(axes, options, marks=pytest.mark.slow)
            for axes, options in (
                ({"tp": 2}, {"sequence_parallel": False}),
                ({"pp": 2, "tp": 2}, {"microbatches": 2}),
                ({"dp": 2, "pp": 2}, {"microbatches": 2}),
                ({"cp": 2}, {}),
            )
        ),
    ],
    ids=str,
)
def test_more_prompts_than_rows(axes: Axes, options: dict[str, Any]) -> None:
    model = large_model("Llama")
    prompts, ends = prompts_of(3, 11, 6, 1, 9, 12), [*range(50, 60)]
    found = program_of(model, axes, **options).generate(prompts, max_new_tokens=8, rows=4, eos_token_id=ends)
    expected = [alone(model, one, 8, eos_token_id=ends) for one in prompts]
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    assert len({len(text) - len(prompt) for text, prompt in zip(found, prompts, strict=True)}) > 1  # some end early


@pytest.mark.slow
def test_texts_come_and_go() -> None:
    model = large_model("Llama")
    texts = program_of(model, {"tp": 2}).generation(rows=2, page=PAGE, max_pages=8)
    assert texts.step() == []
    prompts = prompts_of(9, 5, 3)
    first = texts.add(prompts[0], max_new_tokens=6)
    made = texts.step()
    assert [(one.text, one.ended) for one in made] == [(first, False)] and texts.pages_in_use == 3
    others = [texts.add(one, max_new_tokens=5) for one in prompts[1:]]
    found = {first: [made[0].token]}
    while texts.unfinished:
        for one in texts.step():
            found.setdefault(one.text, []).append(one.token)
        assert texts.pages_in_use <= 8
    assert texts.pages_in_use == 0
    for number, prompt, new in zip([first, *others], prompts, (6, 5, 5), strict=True):
        text = texts.pop(number)
        assert torch.equal(text, alone(model, prompt, new))
        assert text[len(prompt) :].tolist() == found[number]
    with pytest.raises(quintnet.InputError, match=r"(?s)QN102.*there is no text"):
        texts.pop(first)
    with pytest.raises(quintnet.InputError, match=r"(?s)QN102.*may need 9 pages of 4, and there are at most 8"):
        texts.add(prompts[0], max_new_tokens=25)


@pytest.mark.slow
def test_samples_of_one_prompt_share_its_pages_and_do_not_depend_on_each_other() -> None:
    """As GRPO has them: the pages of a prompt of 4 whole pages and a token are there once."""
    model = large_model("Llama")
    program, (prompt, other) = program_of(model, {}), prompts_of(17, 6)
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "temperature": 4.0}
    texts = program.generation(rows=4, page=PAGE)
    numbers = [texts.add(prompt, seed=seed, **how) for seed in range(4)]
    texts.step()
    assert texts.pages_in_use == 4 + 4  # and not four times 5
    together = texts.run()
    assert texts.pages_in_use == 0
    apart = program.generation(rows=3, page=PAGE)
    apart.add(other, max_new_tokens=3)
    again = [apart.add(prompt, seed=seed, **how) for seed in (2, 0)]
    found = apart.run()
    assert torch.equal(found[again[0]], together[numbers[2]]) and torch.equal(found[again[1]], together[numbers[0]])
    assert len({tuple(one.tolist()) for one in together.values()}) > 1
    assert torch.equal(found[0], alone(model, other, 3))


@pytest.mark.slow
def test_a_text_that_is_given_up_leaves_its_pages_to_those_that_share_them() -> None:
    model = large_model("Llama")
    program, (prompt,) = program_of(model, {}), prompts_of(17)
    texts = program.generation(rows=2, page=PAGE)
    numbers = [texts.add(prompt, max_new_tokens=4) for _ in range(3)]
    texts._admit()  # two have rows, and nothing is computed yet
    assert texts.pop(numbers[0]).tolist() == prompt.tolist() and texts.unfinished == 2
    found = texts.run()
    assert all(torch.equal(found[number], alone(model, prompt, 4)) for number in numbers[1:])
    long = prompts_of(600)[0]
    texts = program.generation(rows=1)
    number = texts.add(long[:530] % 60, max_new_tokens=1)
    assert texts.step() == [] and texts.step()[0].ended and number in texts.run()


def test_a_token_needs_two_messages_in_each_layer() -> None:
    """As in Megatron: what attention and MLP add is summed, and so are the looked up rows; logits are gathered."""
    program = program_of(large_model("Llama"), {"tp": 2}, sequence_parallel=False)
    program.generate(prompts_of(3, 3), max_new_tokens=2)
    assert program._kept["decoding"] is not None
    for one in program._kept["decoding"].programs.values():
        found = re.findall(r"comm\.(all_\w+|reduce\w+)", one.rank(0).forward.code)
        assert sum(name.startswith("all_reduce") for name in found) <= 2 * 2 + 1 and len(found) <= 2 * 2 + 2, found


@pytest.mark.slow
def test_a_program_that_trains_generates_with_its_own_parameters() -> None:
    """Not with copies of them: those of each rank are parts of the same memory."""
    model, ids = large_model("Llama"), torch.zeros(4, 8, dtype=torch.int64)
    program = quintnet.compile(model, quintnet.Mesh(tp=2, pp=2), {"input_ids": ids, "labels": ids}, microbatches=2)
    parameters = dict(program.named_parameters())
    for change in (1.0, 0.5):
        with torch.no_grad():
            for p in parameters.values():
                p.mul_(change)
        assert torch.equal(program.generate(prompts_of(5), max_new_tokens=4)[0], alone(model, prompts_of(5)[0], 4))
    backend, decoding = program._state(), program._kept["decoding"]
    assert isinstance(backend, LocalBackend) and decoding is not None and decoding.programs
    there = {x.untyped_storage().data_ptr() for x in parameters.values()}
    for made in decoding.programs.values():
        ranks = backend.worlds[id(made)]
        assert not ranks.cut
        for name, x in ((name, x) for state in ranks.state for name, x in state.items() if name in parameters):
            assert x.untyped_storage().data_ptr() in there, name


@pytest.mark.slow
def test_a_program_that_trains_in_16_bits_generates_with_caches_of_16_bits() -> None:
    """A cache has what operators read of it. The tokens are those of the plain module under autocast."""
    model, ids = large_model("Llama").float(), torch.zeros(4, 8, dtype=torch.int64)
    program = quintnet.compile(model, quintnet.Mesh(tp=2), {"input_ids": ids, "labels": ids}, precision="bf16")
    prompts = prompts_of(5, 12, 3)
    found = program.generate(prompts, max_new_tokens=4)
    assert program._kept["decoding"] is not None
    for made in program._kept["decoding"].programs.values():
        assert {spec.dtype for spec in made.state.values() if spec.kind == "cache"} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert [one.tolist() for one in found] == [alone(model, one, 4).tolist() for one in prompts]


def _stream(axes: Axes) -> list[list[int]]:
    torch.set_num_threads(1)
    texts = program_of(large_model("Llama"), axes).generation(rows=2)
    for prompt in prompts_of(3, 11, 6):
        texts.add(prompt, max_new_tokens=5)
        texts.step()
    return [text.tolist() for _, text in sorted(texts.run().items())]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_processes_write_the_same_texts(axes: Axes) -> None:
    model = large_model("Llama")
    expected = [alone(model, prompt, 5).tolist() for prompt in prompts_of(3, 11, 6)]
    for found in quintnet.launch(_stream, 2, (axes,), timeout=240):
        assert found == expected


def _resharded(trained: Axes, generating: Axes, options: dict[str, Any]) -> tuple[list[int], list[int], int, int]:
    """What both programs write after a step, the bytes that came, and those that this rank has."""
    torch.set_num_threads(1)
    model, ids = large_model("Llama"), torch.arange(32).reshape(4, 8)
    with torch.device("meta"):
        empty = type(model)(model.config).double().eval()  # type: ignore[operator]
    trainer = quintnet.compile(model, quintnet.Mesh(**trained), {"input_ids": ids, "labels": ids}, **options)
    rollout = program_of(empty, generating)
    trainer.step({"input_ids": ids, "labels": ids})
    with torch.no_grad():
        for p in trainer.parameters():
            p.sub_(0.1 * p.grad)
    came = rollout.copy_parameters(trainer)
    assert rollout.copy_parameters(trainer) == came
    texts = [one.generate(prompts_of(5), max_new_tokens=6)[0].tolist() for one in (trainer, rollout)]
    mine = [p.to_local() if isinstance(p, DTensor) else p for p in rollout.parameters()]
    return texts[0], texts[1], came, sum(x.nbytes for x in mine)


def _rounded(*dtypes: torch.dtype) -> list[int]:
    """The bytes that came to programs of other dtypes, which have what the module has in these."""
    torch.set_num_threads(1)
    model, ids = large_model("Llama").float(), torch.arange(32).reshape(4, 8)
    plain, came = copy.deepcopy(model), list[int]()
    trainer = quintnet.compile(model, quintnet.Mesh(tp=2), {"input_ids": ids, "labels": ids})
    for dtype in dtypes:
        expected = dict(copy.deepcopy(plain).to(dtype).named_parameters())
        rollout = program_of(copy.deepcopy(plain).to("meta", dtype), {"dp": 2})
        came.append(rollout.copy_parameters(trainer))
        for name, p in rollout.named_parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            assert whole.dtype is dtype and torch.equal(whole, expected[name]), name
        assert len(rollout.generate(prompts_of(5), max_new_tokens=3)[0]) == 8
    return came


@pytest.mark.slow
def test_processes_exchange_rounded_numbers() -> None:
    """Numbers travel in the narrower of two dtypes."""
    for exact, rounded, wide in quintnet.launch(
        _rounded, 2, (torch.float32, torch.bfloat16, torch.float64), timeout=300
    ):
        assert exact == 2 * rounded == wide > 0


@pytest.mark.slow
def test_the_trained_parameters_on_another_mesh() -> None:
    here, there, came, _ = _resharded({"pp": 2, "dp": 2}, {"tp": 4}, {"microbatches": 2})
    assert here == there and came == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "generating", "options"),
    [
        ({"pp": 2}, {"tp": 2}, {"microbatches": 2}),
        ({"dp": 2}, {"tp": 2}, {"zero": 3}),
        ({"tp": 2}, {"tp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"tp": 4}, {"microbatches": 2}),
    ],
    ids=str,
)
def test_processes_exchange_what_is_missing(trained: Axes, generating: Axes, options: dict[str, Any]) -> None:
    ranks = quintnet.Mesh(**trained).size
    found = quintnet.launch(_resharded, ranks, (trained, generating, options), timeout=300)
    for here, there, came, has in found:
        assert here == there == found[0][0]
        assert came < has
        if trained == generating:
            assert came == 0
