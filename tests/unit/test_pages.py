"""features.text_generation: pages of caches, and how tokens are chosen."""

from __future__ import annotations

import pytest
import torch

import quintnet
from quintnet_compiler.api.program_generation import ProgramGeneration
from quintnet_compiler.core.errors import CompileError, InputError
from quintnet_compiler.features.text_generation import batches, decoding, generation, pages, sampling
from quintnet_compiler.features.text_generation.ops import NOTHING
from quintnet_compiler.features.text_generation.sampling import Sampling, draws_of


def test_texts_that_begin_alike_share_whole_pages() -> None:
    pool = pages.Pool(4)
    first, known = pool.enter(range(10))
    assert (len(first), known) == (3, 0) and NOTHING not in first
    second, known = pool.enter([*range(8), 50])  # the first two pages are those of the first text
    assert second[:2] == first[:2] and second[2] != first[2] and known == 8
    third, known = pool.enter(range(8))  # its last token is to be computed, so the second page is its own
    assert third[0] == first[0] and third[1] != first[1] and known == 4
    other, known = pool.enter([0, 1, 2, 3, 9, 5, 6, 7, 8])  # the same tokens in the second page, behind others
    assert other[0] == first[0] and known == 4 and not {*other[1:]} & {*first, *second, *third}
    assert pool.used == len({*first, *second, *third, *other})
    pool.leave(first)
    assert pool.free == first[2:] and pool.pages_for(9) == 3
    assert pool.enter([*range(8), 51])[0] == first  # two pages stayed for the second text, and the third is free


def test_pages_are_used_again_and_forgotten() -> None:
    pool = pages.Pool(2)
    for _ in range(5):
        taken, known = pool.enter([1, 2, 3, 4, 5])
        assert known == 0  # nobody has them any more
        pool.leave([*taken, pool.take()])
    assert pool.count == NOTHING + 1 + 4 and pool.used == 0 and not pool.prefixes and not pool.named


def test_tokens_are_drawn_from_what_may_be_drawn() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -5.0], [1.0, 0.0, 0.5, 4.0]])
    assert Sampling().choose(logits, [0, 1], []) == [1, 3]
    rows, draws = logits[:1].expand(4000, -1), torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    drawn = (
        torch.tensor(Sampling(do_sample=True, temperature=2.0).choose(rows, range(len(rows)), draws)).bincount(
            minlength=4
        )
        / 4000
    )
    assert torch.allclose(drawn, (logits[0] / 2).softmax(0).float(), atol=0.03)
    assert {*Sampling(do_sample=True, top_k=2).choose(rows, range(len(rows)), draws)} == {1, 2}
    assert {*Sampling(do_sample=True, top_p=0.5).choose(rows, range(len(rows)), draws)} == {1}
    assert Sampling(do_sample=True).choose(logits, [0, 1], [0.0, 1 - 2**-53]) == [0, 3]
    with pytest.raises(CompileError, match="QN108"):
        Sampling(top_k=0)


def test_the_numbers_of_texts_are_their_own() -> None:
    assert draws_of(1, 2, 8)[:5] == draws_of(1, 2, 5)
    streams = {tuple(draws_of(seed, text, 3)) for seed in range(4) for text in range(4)}
    assert len(streams) == 16
    assert sampling.ends_of(torch.nn.Linear(1, 1), [7, 8]).then == 7


def test_prompts() -> None:
    ids, mask = torch.tensor([[1, 2, 3], [0, 0, 4]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    prompts = batches.prompts_of(ids, mask)
    assert [one.tolist() for one in prompts] == [[1, 2, 3], [4]]
    texts = [torch.tensor([1, 2, 3, 5]), torch.tensor([4, 6, 7])]
    assert batches.joined(ids, prompts, texts, 9).tolist() == [[1, 2, 3, 5, 9], [0, 0, 4, 6, 7]]
    assert generation.checked([3, 4], 1) == [3, 4]
    with pytest.raises(InputError, match="QN102"):
        generation.checked([], 1)
    assert [decoding.rounded(n) for n in (1, 2, 9, 5000)] == [1, 8, 16, 512]


def test_a_program_that_has_seen_no_batch_cannot_generate() -> None:
    program = quintnet.compile(torch.nn.Linear(2, 2), quintnet.Mesh(dp=1), training=False)
    assert isinstance(program, ProgramGeneration)
    with pytest.raises(CompileError, match="QN102"):
        program.generation()
