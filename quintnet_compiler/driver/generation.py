"""Texts continued token by token: programs for the prompt and for one further token, which share caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..capture.decode import Shape, cache_shapes, capture_call
from ..core.errors import CompileError, InputError
from ..core.sharding import AxisType
from ..equivalence.reference import differs
from ..ir.distributed_program import DistributedProgram
from ..ir.program import Captured
from ..runtime.backends.backend import Backend, Caches
from ..runtime.execute.executor import Run

SAME = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # how far equal logits are apart, relative to the largest
STEP = 32  # prompts are padded, and caches made, to multiples of it: so that few lengths are ever compiled
Held = Mapping[tuple[str, str], AxisType]  # (cache, axis) -> how it is split


class Compile(Protocol):
    """A program on the parameters of another one, for so many rows."""

    def __call__(self, captured: Captured, size: int, held: Held, /) -> DistributedProgram: ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises: CompileError QN108 for values that mean nothing."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = None
        if not self.temperature > 0:
            wrong = f"temperature={self.temperature}", "use a number above 0, or do_sample=False"
        if self.top_k is not None and self.top_k < 1:
            wrong = f"top_k={self.top_k}", "use 1 or more"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong = f"top_p={self.top_p}", "use a number above 0, at most 1"
        if wrong:
            raise CompileError("QN108", wrong[0], fix=wrong[1])

    def choose(self, logits: Tensor, noise: torch.Generator) -> Tensor:
        """The next token of each row of logits [rows, vocabulary]."""
        scores = logits.to("cpu", torch.float64)
        if not self.do_sample:
            return scores.argmax(-1)
        scores = scores / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None:
            ordered, order = scores.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, before >= self.top_p)
            scores = scores.masked_fill(dropped, -torch.inf)
        return torch.multinomial(scores.softmax(-1), 1, generator=noise).squeeze(1)


@dataclass(frozen=True)
class Ends:
    """Tokens that end a text, and the one that follows."""

    ends: tuple[int, ...]
    then: int


def ends_of(model: nn.Module, eos: int | Sequence[int] | None, pad: int | None) -> Ends:
    """As given, or as the model's generation_config says."""
    config: Any = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Ends(ends, pad if pad is not None else ends[0] if ends else 0)


@dataclass
class Decoding:
    """Generates with the parameters of a compiled program. ``programs``: by rows, tokens and length of the caches."""

    model: nn.Module
    backend: Backend
    compile: Compile
    shapes: tuple[Shape, ...] = ()
    programs: dict[tuple[int, int, int], DistributedProgram] = field(default_factory=dict)
    proven: bool = False

    def program(self, rows: int, tokens: int, length: int) -> DistributedProgram:
        """One call with ``tokens`` further tokens; caches are split as in every other program of this length."""
        self.shapes = self.shapes or cache_shapes(self.model)
        key = rows, tokens, length
        if key not in self.programs:
            alike = (p for (r, _, n), p in self.programs.items() if (r, n) == (rows, length))
            held = _held(next(alike, None))
            captured = capture_call(self.model, self.shapes, rows, tokens, length)
            self.programs[key] = self.compile(captured, rows, held)
            self.backend.learn(self.programs[key], captured.tensors)
        return self.programs[key]

    def _call(
        self, program: DistributedProgram, ids: Tensor, positions: Tensor, start: int, seen: Tensor, caches: Caches
    ) -> Tensor:
        """The logits after ``ids``, which stand in the caches from ``start`` on."""
        here = positions[:, start : start + ids.shape[1]].contiguous()
        inputs = [ids, here, torch.tensor(start, device=ids.device), seen]
        return self.backend.run(program, inputs, Run(), caches=caches)[0]

    def _prove(self, rows: int, prompt: int, length: int, device: torch.device) -> None:
        """A token alone must have the logits that it has within its text: then nothing but attention reads what came
        before it. Raises: CompileError QN105."""
        whole, one = self.program(rows, prompt, length), self.program(rows, 1, length)
        caches, vocabulary = self.backend.new_caches(whole), whole.results[0].shape[-1]
        ids = (7 * torch.arange(rows * prompt, device=device)).reshape(rows, prompt) % vocabulary
        positions = torch.arange(length, device=device).clamp(max=prompt - 1).expand(rows, -1)
        seen = torch.ones(rows, length, dtype=torch.bool, device=device)
        expected = self._call(whole, ids, positions, 0, seen, caches)
        found = self._call(one, ids[:, -1:].contiguous(), positions, prompt - 1, seen, caches)
        # rounding may send a row to another expert; what is carried past attention shows in every row
        error = min(differs(a, b) for a, b in zip(found, expected, strict=True))
        if not error <= SAME.get(expected.dtype, 1e-3):
            raise CompileError(
                "QN105",
                f"the model cannot generate with a cache: the logits of a token alone are off by {error:.1e} from "
                "those within its text, so something else than causal attention carries what came before (a "
                "convolution, a recurrence, positions that are counted)",
                fix="take positions from the second argument; generate models with other state on one device",
            )
        self.proven = True

    def generate(self, ids: Tensor, mask: Tensor | None, most: int, sampling: Sampling, ends: Ends) -> Tensor:
        """See :meth:`CompiledProgram.generate`."""
        seen = _check(ids, mask, most)
        rows, count = ids.shape
        prompt, length = _rounded(count), _rounded(count) + _rounded(most)
        noise = torch.Generator().manual_seed(sampling.seed)
        places = F.pad(F.pad(seen, (prompt - count, 0)), (0, length - prompt), value=True)
        given, positions = F.pad(ids, (prompt - count, 0)), (places.cumsum(1) - 1).clamp(min=0)
        if not self.proven:
            self._prove(rows, prompt, length, ids.device)
        program = self.program(rows, prompt, length)
        caches = self.backend.new_caches(program)
        made, ended, start = [ids], torch.zeros(rows, dtype=torch.bool), 0
        for index in range(most):
            logits = self._call(program, given, positions, start, places, caches)
            token = sampling.choose(logits, noise).masked_fill(ended, ends.then)
            ended |= torch.isin(token, torch.tensor(ends.ends, dtype=token.dtype))
            made.append(token[:, None].to(ids.device))
            if bool(ended.all()) or index == most - 1:
                break
            start, given = prompt + index, made[-1]
            program = self.program(rows, 1, length)
        return torch.cat(made, 1)


def _held(program: DistributedProgram | None) -> dict[tuple[str, str], AxisType]:
    if program is None:
        return {}
    return {
        (spec.name, axis.name): kind
        for spec in program.state.values()
        if spec.kind == "cache"
        for axis, kind in zip(program.axes, spec.sharding, strict=True)
    }


def _rounded(count: int) -> int:
    return -(-count // STEP) * STEP


def _check(ids: Tensor, mask: Tensor | None, most: int) -> Tensor:
    """Which of ``ids`` are tokens."""
    if ids.dim() != 2 or ids.dtype is not torch.int64 or not ids.numel():
        raise InputError("QN102", f"prompts are {tuple(ids.shape)} {ids.dtype}", fix="pass int64 ids [rows, length]")
    if most < 1:
        raise InputError("QN102", f"max_new_tokens is {most}", fix="ask for 1 or more")
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if seen.shape != ids.shape:
        shapes = f"{tuple(seen.shape)} for prompts of {tuple(ids.shape)}"
        raise InputError("QN102", f"attention_mask is {shapes}", fix="pass one number for each id")
    if not bool(seen[:, -1].all()) or bool((seen[:, 1:] < seen[:, :-1]).any()):
        raise InputError("QN102", "a prompt has padding behind tokens", fix='use padding_side="left" in the tokenizer')
    return seen
