"""What tests of several layouts share: training beside plain PyTorch, and what a step sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.transport.local import LocalTransport


def train_beside(
    program: quintnet.CompiledProgram, plain: nn.Module, batch: Sequence[Tensor], steps: int
) -> torch.optim.Optimizer:
    """Steps of AdamW with clipped gradients, as the plain module makes them; the program's optimizer."""
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (program, plain))
    for _ in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        loss, expected = program.step(batch), plain(*batch)
        expected.backward()
        assert abs(loss - expected) < 1e-9
        torch.nn.utils.clip_grad_norm_(program.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        ours.step()
        theirs.step()
    for (name, mine), other in zip(program.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-8, atol=1e-9, msg=name)  # type: ignore[attr-defined]
    return ours


def sent_in_a_step(
    program: quintnet.CompiledProgram, batch: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """The bytes that the first rank gives to each kind of collective in a step, but for the loss."""
    sent: Counter[str] = Counter()
    meet = LocalTransport._meet

    def counted(self: LocalTransport, kind: str, x: Tensor, ranks: tuple[int, ...], *rest: Any, **more: Any) -> Tensor:
        if x.dim() and self.rank == 0 and "loss" not in rest[0]:
            sent[kind] += x.nbytes * (len(ranks) if kind == "gather" else 1)
        return meet(self, kind, x, ranks, *rest, **more)

    monkeypatch.setattr(LocalTransport, "_meet", counted)
    program.step(batch)
    return sent
