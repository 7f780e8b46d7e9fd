"""Programs with TorchInductor and with CUDA graphs train as the generated Python does, for twenty steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from models import SIZES, build_model, loss_fn, make_batch

import quintnet

from .entries import Check, Entry, Figures, NotRun
from .setting import Setting

STEPS, RATE = 20, 1e-3
JOBS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"dp": 1}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {"microbatches": 4}),
    ({"dp": 2}, {"zero": 3}),
)
LIMIT = 1e-3  # of losses, relative: float32, in another order, over twenty steps


def run(setting: Setting) -> Iterator[Entry]:
    if setting.emulated:
        yield NotRun(
            "inductor and CUDA graphs", "the emulated accelerator has neither; tests/test_graphs.py has a stand-in"
        )
        return
    for axes, options in JOBS:
        losses = {}
        for backend in ("eager", "inductor", "cudagraphs"):
            losses[backend], said = _train(setting, axes, options, backend)
            for text in said:
                yield Figures("segments that fell back", {"mesh": str(axes), "backend": backend, "why": text[:300]})
        for backend in ("inductor", "cudagraphs"):
            pairs = zip(losses[backend], losses["eager"], strict=True)
            worst = max(abs(x - y) / abs(y) for x, y in pairs)
            yield Check(f"{STEPS} steps of {axes} {options} with {backend}", worst < LIMIT, f"losses {worst:.0e}")


def _train(
    setting: Setting, axes: dict[str, int], options: dict[str, Any], backend: str
) -> tuple[list[float], list[str]]:
    """Losses, and what was said of segments that could not be compiled or captured."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", quintnet.BackendWarning)
        program = quintnet.compile(
            build_model(SIZES["small"]),
            quintnet.Mesh(**axes),
            make_batch(SIZES["small"], 8, 0),
            loss_fn=loss_fn,
            device=setting.device,
            backend=backend,  # type: ignore[arg-type]
            **options,
        )
        optimizer = torch.optim.AdamW(program.parameters(), lr=RATE)
        losses = []
        for index in range(STEPS):
            losses.append(float(program.step(make_batch(SIZES["small"], 8, index))))
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(w.message) for w in said if issubclass(w.category, quintnet.BackendWarning)]
    return losses, list(dict.fromkeys(texts))
