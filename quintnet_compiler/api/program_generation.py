"""Texts that a compiled program writes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from ..core.errors import InputError
from ..runtime.launch.calls import announced
from ..runtime.threads.turns import all_turns, in_turn
from .program_reports import ProgramReports

if TYPE_CHECKING:
    from ..features import ProgramParts


class ProgramGeneration(ProgramReports):
    """Generation of texts by a compiled program."""

    _kept: dict[str, Any]

    @abc.abstractmethod
    def _require_device(self, what: str) -> None: ...

    @abc.abstractmethod
    def _require_open(self) -> None: ...

    @overload
    def generate(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = ...,
        max_new_tokens: int = ...,
        do_sample: bool = ...,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        eos_token_id: int | Sequence[int] | None = ...,
        pad_token_id: int | None = ...,
        seed: int | None = ...,
        rows: int | None = ...,
    ) -> Tensor: ...

    @overload
    def generate(
        self,
        ids: Sequence[Tensor],
        *,
        attention_mask: Tensor | None = ...,
        max_new_tokens: int = ...,
        do_sample: bool = ...,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        eos_token_id: int | Sequence[int] | None = ...,
        pad_token_id: int | None = ...,
        seed: int | None = ...,
        rows: int | None = ...,
    ) -> list[Tensor]: ...

    def generate(
        self,
        ids: Tensor | Sequence[Tensor],
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        rows: int | None = None,
    ) -> Tensor | list[Tensor]:
        """Continue texts, as transformers' ``generate`` does: greedily, or sampled. The key-value cache is sharded:
        texts over dp, heads over tp, layers over pp.

        For Hugging Face decoders whose attention is ``sdpa``, and modules whose ``forward(ids, positions)`` returns
        logits and calls ``F.scaled_dot_product_attention(..., is_causal=True)``, which then also sees what came before.

        Args:
            ids: the global batch of prompts on every rank: a tensor [rows, length], padded on the left, or a list of
                tensors [length] of any lengths.
            attention_mask: [rows, length], 0 for padding; for a tensor.
            temperature: for ``do_sample``: what logits are divided by.
            top_k: for ``do_sample``: sample from this many most likely tokens.
            top_p: for ``do_sample``: sample from the most likely tokens that have this probability together.
            eos_token_id: what ends a text; by default the model's generation_config's, if it has one.
            pad_token_id: what follows the end; by default the (first) eos_token_id.
            seed: of the samples, by default the program's. Equal seeds give equal samples on every layout; those of a
                text depend on the seed and on its place in ``ids``, not on other prompts.
            rows: how many texts are computed at once, by default all. When one ends, the next prompt takes its row.

        Returns:
            For a tensor: prompts and what follows them [rows, length + at most max_new_tokens]. For a list: a list of
            tensors, each a prompt and what follows it until its end. The same on every rank.

        Raises:
            CompileError: QN105 if the model's attention cannot keep a cache, QN102 before a batch was seen.
            InputError: QN102 if the prompts do not fit.
        """
        with self._turn:
            written: Tensor | list[Tensor] = self._method("generate")(
                self._parts(), ids, attention_mask, max_new_tokens, (do_sample, temperature, top_k, top_p),
                (eos_token_id, pad_token_id), seed, rows,
            )  # fmt: skip
        return written

    @in_turn
    def generation(self, *, rows: int = 16, page: int = 16, max_pages: int | None = None) -> Any:
        """Generate texts that come and go (continuous batching): ``add`` prompts at any time, and ``step`` for the next
        token of each text under way. Every rank makes the same calls. What :meth:`generate` says of models
        holds here, too.

        Args:
            rows: how many texts are computed at once; rounded up to a multiple of data ranks x microbatches.
            page: tokens in a page of the caches.
            max_pages: how many pages each data rank (and microbatch) may have; texts wait until theirs are free. By
                default, caches grow with the texts under way.

        Raises:
            CompileError: QN102 before a batch was seen.
            InputError: QN102 for numbers below 1.
        """
        return self._method("generation")(self._parts(), rows, page, max_pages)

    def _method(self, name: str) -> Callable[..., Any]:
        """Return what a feature does for a method of programs.

        Raises:
            InputError: QN102 if the feature is not installed.
        """
        from ..features import FEATURES

        methods = {method: run for feature in FEATURES for method, run in feature.methods.items()}
        if name not in methods:
            text = f"program.{name} belongs to a feature that is not installed"
            raise InputError("QN102", text, fix=f"leave {name} out")
        return methods[name]

    def _parts(self) -> ProgramParts:
        """Return what methods of features read of this program."""
        from ..equivalence.reference import differs
        from ..features import ProgramParts

        self._require_device("generate")
        self._require_open()
        self._primary()
        task, programs = self._task, self._programs
        return ProgramParts(
            task.model, self.mesh, task.plan, self._state(), programs.program_for_call, differs, self._turn,
            self._label, self._kept,
        )  # fmt: skip

    def copy_parameters(self, source: ProgramGeneration) -> int:
        """Take over the parameters and buffers of another program of the same ranks, of any layout: to generate on
        another mesh than is trained on. Ranks exchange what they lack, by one plan that both layouts give. Where this
        program has another floating-point dtype, each number is rounded as ``module.to(dtype)`` does.

        Args:
            source: a program of another module with the same parameters; this program's may have been built on the
                meta device.

        Returns:
            The bytes that this rank received from other ranks.

        Raises:
            CheckpointError: QN602 with the names, shapes and dtypes of parameters and buffers that are not alike: two
                dtypes are, of floating-point numbers of 16 bits or more. Nothing was changed.
            RunError: QN604 if the source has tensors without values, QN301 if only one of them has a process per rank.
        """
        from ..runtime.backends.copied import ProgramTensors, copy_values

        here, there = self._state(), source._state()
        with all_turns(self._turn, source._turn), announced("copy_parameters", self._label):
            return copy_values(
                ProgramTensors(self._primary().program, here, self._task.model),
                ProgramTensors(source._primary().program, there, source._task.model),
            )
