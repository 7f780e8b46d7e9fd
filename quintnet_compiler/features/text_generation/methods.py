"""Methods of compiled programs: texts, all at once, or as they come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...core.errors import InputError
from ...runtime.launch.calls import announced
from ..program_parts import ProgramParts
from .batches import joined, prompts_of
from .decoding import Decoding
from .generation import Generation
from .sampling import Sampling, ends_of

_DECODING = "decoding"
# What ranks exchange for a token is small, so latency decides: values between layers stay replicated, which needs the
# fewest messages.
LATENCY_DECISIONS: Mapping[str, Any] = MappingProxyType({"sequence_parallel": False, "async_tp": False})


def generate(
    program: ProgramParts, ids: Tensor | Sequence[Tensor], attention_mask: Tensor | None, max_new_tokens: int,
    sampling: tuple[bool, float, int | None, float | None], ends: tuple[int | Sequence[int] | None, int | None],
    seed: int | None, rows: int | None,
) -> Tensor | list[Tensor]:  # fmt: skip
    """Continue texts, see ``CompiledProgram.generate``.

    Args:
        program: the program.
        ids: prompts.
        attention_mask: for a tensor of prompts.
        max_new_tokens: of each text.
        sampling: do_sample, temperature, top_k and top_p.
        ends: eos_token_id and pad_token_id.
        seed: of samples.
        rows: how many texts are computed at once.

    Raises:
        CompileError: QN105 if the model's attention cannot keep a cache.
        InputError: QN102 if the prompts do not fit.
    """
    prompts = prompts_of(ids, attention_mask) if isinstance(ids, Tensor) else [*ids]
    how, stream = Sampling(*sampling), program.plan.seed if seed is None else seed
    stops = ends_of(program.model, *ends)
    if not prompts:
        raise InputError("QN102", "there are no prompts", fix="pass one or more")
    texts = generation(program, len(prompts) if rows is None else rows)
    numbers = [
        texts.add_text(prompt, max_new_tokens, how, (stream, index), stops.ends) for index, prompt in enumerate(prompts)
    ]
    with announced("generate", program.label, lambda: (str(prompts), str(max_new_tokens), str(how), str(stops))):
        written = texts.run()
    results = [written[number].to(prompt.device) for number, prompt in zip(numbers, prompts, strict=True)]
    return joined(ids, prompts, results, stops.then) if isinstance(ids, Tensor) else results


def generation(program: ProgramParts, rows: int, page: int = 16, max_pages: int | None = None) -> Generation:
    """Return texts that come and go, see ``CompiledProgram.generation``.

    Raises:
        InputError: QN102 for numbers below 1.
    """
    for name, number in (("rows", rows), ("page", page), ("max_pages", max_pages)):
        if number is not None and number < 1:
            raise InputError("QN102", f"{name} is {number}", fix="use 1 or more")
    plan = program.plan
    with announced("generation", program.label, lambda: (str(rows), str(page), str(max_pages))):
        if _DECODING not in program.kept:
            pools = program.mesh.data_ways * (plan.microbatches if plan.batch_statistics == "batch" else 1)
            follow = partial(program.follow, decisions=LATENCY_DECISIONS)
            program.kept[_DECODING] = Decoding(program.model, program.backend, follow, pools, program.difference)
    return Generation(program.kept[_DECODING], plan.seed, rows, page, max_pages, program.turn)
