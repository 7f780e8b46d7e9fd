"""Texts that come and go: each call computes the next token of all that are under way (continuous batching).

After Orca (Yu et al. 2022, OSDI): texts enter and leave between two calls, not between two batches.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InputError
from ...runtime.backends.backend import Caches
from ...runtime.launch.calls import announced, frequent
from ...runtime.threads.turns import Turn, in_turn
from .decoding import CallSize, Decoding, TextRow, power_of_two, rounded
from .pages import Pool
from .sampling import Sampling, draws_of, ends_of

PAYS = 8  # calls that save the time in which weights are laid out for a processor


@dataclass(frozen=True)
class NewToken:
    """A ``token`` that a step made for the text ``text``; ``ended``: whether it is the text's last."""

    text: int
    token: int
    ended: bool


@dataclass
class Text:
    """A text under way. ``computed``: how many of its tokens have keys and values in its ``pages``, which are those of
    the pool ``pool``."""

    number: int
    tokens: list[int]
    prompt: int
    most: int
    sampling: Sampling
    draws: Sequence[float]
    ends: frozenset[int]
    pool: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def longest(self) -> int:
        """The tokens that it may keep; the last one is not read again."""
        return self.prompt + self.most - 1


class Generation:
    """Continues texts with the parameters of a compiled program, made by :meth:`CompiledProgram.generation`. Every rank
    makes the same calls.

    A text waits until a row is free, and until the pages are that it may need at most; then it is computed beside the
    others, and leaves when it ends. Its tokens are those that it would have alone. Texts that begin with the same
    tokens share the pages that these fill. Caches grow with the tokens that there are.
    """

    def __init__(self, decoding: Decoding, seed: int, rows: int, page: int, most_pages: int | None, turn: Turn) -> None:
        self._turn = turn
        self._decoding, self._seed, self._page, self._most_pages = decoding, seed, page, most_pages
        self._rows = -(-rows // decoding.pools)  # of each pool
        self._pools = [Pool(page) for _ in range(decoding.pools)]
        self._waiting: deque[Text] = deque()
        self._running: dict[int, Text] = {}
        self._ended: dict[int, Text] = {}
        self._count, self._new = 0, list[Any]()
        self._caches: Caches | None = None
        self._room = 0  # pages of each pool that caches have

    @in_turn
    def add(
        self,
        prompt: Tensor | Sequence[int],
        *,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> int:
        """A further text, on every rank; nothing is computed yet.

        Args:
            prompt: int64 ids [length] without padding, or a list of them.
            seed: of the samples. The text is a function of prompt, options and seed, whatever runs beside it. By
                default, each text has a seed of its own, made of the program's and its number.

        The other options are those of :meth:`CompiledProgram.generate`.

        Returns:
            The text's number.

        Raises:
            InputError: QN102 if there is no prompt, or it needs more pages than there may be.
            CompileError: QN108 for options that mean nothing.
        """
        sampling = Sampling(do_sample, temperature, top_k, top_p)
        stream = (self._seed, self._count) if seed is None else (seed, 0)
        ends = ends_of(self._decoding.model, eos_token_id).ends
        return self.add_text(prompt, max_new_tokens, sampling, stream, ends)

    @in_turn
    def add_text(
        self,
        prompt: Tensor | Sequence[int],
        most: int,
        sampling: Sampling,
        stream: tuple[int, int],
        ends: frozenset[int],
    ) -> int:
        """As :meth:`add`; ``stream``: the seed, and which of its streams of numbers."""
        tokens = checked(prompt, most)
        draws = draws_of(*stream, most) if sampling.do_sample else ()
        text = Text(self._count, tokens, len(tokens), most, sampling, draws, ends)
        needed = self._pools[0].pages_for(text.longest)
        if self._most_pages is not None and needed > self._most_pages:
            raise InputError(
                "QN102",
                f"a text of {text.prompt} tokens, and {most} new ones, may need {needed} pages of {self._page}, and "
                f"there are at most {self._most_pages}",
                fix="raise max_pages, or ask for fewer tokens",
            )
        self._waiting.append(text)
        self._new.append((tokens, most, str(sampling), stream, sorted(ends)))
        self._count += 1
        return text.number

    @property
    def unfinished(self) -> int:
        """Return the number of texts that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def pages_in_use(self) -> int:
        """Pages that texts have now, of all pools."""
        return sum(pool.used for pool in self._pools)

    @in_turn
    def step(self) -> list[NewToken]:
        """One call of the model: the next token of every text that runs, or a part of the prompts of new ones.

        Returns:
            The tokens that were made, by text; none while long prompts are read, or if there is no text.

        Raises:
            CompileError: QN105 if the model cannot generate with a cache.
        """
        new, self._new = self._new, []
        label = self._decoding.backend.label
        called = announced("generation.step", label, lambda: str(new)) if new else frequent("generation.step", label)
        with called if self.unfinished else contextlib.nullcontext():
            self._admit()
            texts, tokens = self._chosen()
            return self._advance(texts, tokens) if texts else []

    @in_turn
    def run(self) -> dict[int, Tensor]:
        """Take steps until all texts have ended, and return the tokens of each, as :meth:`pop` does."""
        remaining = max(
            (text.longest - len(text.tokens) for text in (*self._running.values(), *self._waiting)), default=0
        )
        # until all have ended, no other code runs that could change a weight
        with self._decoding.backend.weights_stay() if remaining >= PAYS else contextlib.nullcontext():
            while self.unfinished:
                self.step()
        return {number: self.pop(number) for number in list(self._ended)}

    @in_turn
    def pop(self, text: int) -> Tensor:
        """Remove a text, and return the prompt and what followed [length].

        A text that has not ended, ends.
        """
        entry = self._ended.pop(text, None) or self._running.get(text)
        entry = entry or next((other for other in self._waiting if other.number == text), None)
        if entry is None:
            raise InputError("QN102", f"there is no text {text}", fix="pass a number that add returned, once")
        if text in self._running:
            self._leave(entry)
        elif entry in self._waiting:
            self._waiting.remove(entry)
        return torch.tensor(entry.tokens)

    # -- one call

    def _admit(self) -> None:
        while self._waiting:
            text = self._waiting[0]
            held = [sum(other.pool == i for other in self._running.values()) for i in range(len(self._pools))]
            places = [
                (len(pool.known(text.tokens)), -held[i], -i)
                for i, pool in enumerate(self._pools)
                if held[i] < self._rows and self._fits(i, text)
            ]
            if not places:
                return  # texts enter in the order in which they came
            text.pool = -max(places)[2]
            text.pages, text.computed = self._pools[text.pool].enter(text.tokens)
            self._running[text.number] = self._waiting.popleft()

    def _fits(self, index: int, text: Text) -> bool:
        """Return whether all pages that the pool's texts may still need would be free."""
        if self._most_pages is None:
            return True
        pool = self._pools[index]
        running = [other for other in self._running.values() if other.pool == index]
        later = sum(pool.pages_for(other.longest) - len(other.pages) for other in running)
        needed = pool.pages_for(text.longest) - len(pool.known(text.tokens))
        return pool.used + later + needed <= self._most_pages

    def _chosen(self) -> tuple[list[Text], int]:
        """Return the texts of the next call, and how many tokens each row of it has.

        Prompts come first, those of like length together. A prompt whose first pages another text is still to write
        waits.
        """
        ready = [text for text in self._running.values() if self._is_written(text)]
        first = next((text for text in ready if text.pending > 1), None)
        if first is None:
            return ready, 1
        tokens, texts = rounded(first.pending), list[Text]()
        for text in self._running.values():
            if rounded(text.pending) == tokens and self._is_written(text):
                texts.append(text)
                full = (text.computed + min(tokens, text.pending)) // self._page
                self._pools[text.pool].written.update(text.pages[:full])
        return texts, tokens

    def _is_written(self, text: Text) -> bool:
        return self._pools[text.pool].written.issuperset(text.pages[: text.computed // self._page])

    def _advance(self, texts: Sequence[Text], tokens: int) -> list[NewToken]:
        """Compute up to ``tokens`` further tokens of each text, and return those that were chosen."""
        by_pool = [[text for text in texts if text.pool == i] for i in range(len(self._pools))]
        call = CallSize(power_of_two(max(map(len, by_pool))), tokens, self._page)
        self._decoding.prove(call)
        for text in texts:  # pages of tokens that were chosen
            while len(text.pages) * self._page < text.computed + min(tokens, text.pending):
                text.pages.append(self._pools[text.pool].take())
        self._grow(call)
        assert self._caches is not None
        rows = [[self._row(text, tokens) for text in group] for group in by_pool]
        logits = self._decoding.logits(call, rows, self._caches)
        finished: dict[Sampling, list[tuple[Text, int]]] = {}
        for pool, group in enumerate(by_pool):
            for index, text in enumerate(group, pool * call.rows):
                text.computed += min(tokens, text.pending)
                self._pools[text.pool].written.update(text.pages[: text.computed // self._page])
                if not text.pending:
                    finished.setdefault(text.sampling, []).append((text, index))
        new = [token for sampling, places in finished.items() for token in self._next_tokens(sampling, places, logits)]
        return sorted(new, key=lambda token: token.text)

    def _next_tokens(self, sampling: Sampling, places: Sequence[tuple[Text, int]], logits: Tensor) -> list[NewToken]:
        """Choose the next tokens of texts with one kind of sampling, whose rows of ``logits`` have these indices."""
        draws = [text.draws[len(text.tokens) - text.prompt] for text, _ in places if sampling.do_sample]
        tokens = sampling.choose(logits, [index for _, index in places], draws)
        return [self._given(text, token) for (text, _), token in zip(places, tokens, strict=True)]

    def _row(self, text: Text, tokens: int) -> TextRow:
        end = text.computed + min(tokens, text.pending)
        return TextRow(text.tokens[text.computed : end], text.computed, text.pages[: -(-end // self._page)])

    def _grow(self, call: CallSize) -> None:
        """Caches have all pages that there are, and room for half as many more."""
        needed = max(pool.count for pool in self._pools)
        if needed > self._room:
            limit = needed if self._most_pages is None else self._most_pages + 1
            self._room = needed if self._caches is None else max(needed, min(needed + needed // 2, limit))
            self._caches = self._decoding.backend.new_caches(self._decoding.program(call), self._room, self._caches)

    def _given(self, text: Text, token: int) -> NewToken:
        text.tokens.append(token)
        ended = token in text.ends or len(text.tokens) - text.prompt == text.most
        if ended:
            self._leave(text)
            self._ended[text.number] = text
        return NewToken(text.number, token, ended)

    def _leave(self, text: Text) -> None:
        pool = self._pools[text.pool]
        del self._running[text.number]
        pool.leave(text.pages)
        for other in self._running.values() if text.pending else ():  # what it has not written, they write themselves
            while other.pool == text.pool and not self._is_written(other):
                other.computed -= self._page


def checked(prompt: Tensor | Sequence[int], most: int) -> list[int]:
    """The tokens of a prompt."""
    ids = prompt if isinstance(prompt, Tensor) else torch.tensor(list(prompt), dtype=torch.int64)
    if ids.dim() != 1 or ids.dtype is not torch.int64 or not ids.numel():
        raise InputError("QN102", f"a prompt is {tuple(ids.shape)} {ids.dtype}", fix="pass int64 ids [length]")
    if most < 1:
        raise InputError("QN102", f"max_new_tokens is {most}", fix="ask for 1 or more")
    return ids.tolist()
