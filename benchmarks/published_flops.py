"""What a source counts as FLOPs: from it and a stated rate follows the time of a step.

A convention stands in ``published_facts.py`` where the source states its formula, or where rows of the same source
state tokens per second, too, and the formula gives their rates (``Facts.convention`` says which).
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.closed_forms import expressions
from benchmarks.closed_forms.transformer import Decoder
from benchmarks.published_facts import facts_of
from quintnet_compiler.cost_models.hardware import HARDWARE

# Of a source that does not say: attention whole, or its causal half; nobody counts less, and no training more.
OPEN = ("causal", "full")


def step_flops(model: Decoder, batch: int, convention: str, *, recomputed: bool) -> float:
    """FLOPs of a step.

    ``"full"``: model FLOPs with every score; ``"causal"``: half of the scores; ``"narayanan"``: Narayanan et al. 2021,
    equation 3, which has every score, and what full recompute redoes; ``"korthikanti"``: the same without that.
    """
    if convention in ("narayanan", "korthikanti"):
        whole = float(expressions.narayanan_flops(model, batch))
        redone = 24.0 * batch * model.seq * model.layers * model.hidden**2 * (1 + model.seq / (6 * model.hidden))
        return whole if convention == "narayanan" and recomputed else whole - redone
    scores = 3.0 * batch * expressions.score_flops(model)
    full = float(expressions.step_flops(model, batch))
    return full if convention == "full" else full - scores / 2


def rate(row: Mapping[str, str], device: str) -> float | None:
    """FLOP/s of a GPU: stated, or from its utilisation, of the dense peak in 16 bits; that of 8-bit runs is of one peak
    or the other, and says nothing."""
    if row.get("tflops_per_gpu"):
        return float(row["tflops_per_gpu"]) * 1e12
    if row.get("mfu_or_hfu") and row.get("dtype", "") not in ("fp8", "fp4"):
        return float(row["mfu_or_hfu"]) * HARDWARE[device].flops_per_second("fp16")
    return None


def seconds_between(row: Mapping[str, str], model: Decoder, device: str) -> tuple[float, float] | None:
    """The least and the most that a step took, by the stated rate: equal where the convention is known. None if the row
    states no rate, or not of how much."""
    batch, gpus, flops_per_second = row.get("global_batch_seqs"), row.get("gpus"), rate(row, device)
    if not (batch and gpus and flops_per_second):
        return None
    convention, recomputed = facts_of(row["id"]).convention, row.get("recompute") == "full"
    times = [
        step_flops(model, int(float(batch)), each, recomputed=recomputed) / (int(float(gpus)) * flops_per_second)
        for each in ((convention,) if convention else OPEN)
    ]
    return min(times), max(times)
