"""Rows that leave something open are intervals, and rates become times by what their source counts as FLOPs."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms import expressions
from benchmarks.closed_forms.transformer import Decoder
from benchmarks.published_facts import facts_of
from benchmarks.published_flops import rate, seconds_between, step_flops
from benchmarks.published_intervals import Interval, completions, figures, interval, intervals
from benchmarks.published_rows import Row, Unmodelled, decoder_of, device_of, read, run_of, unstated
from benchmarks.published_runs import DATA, predict

ROWS = {row["id"]: row for row in read(DATA / "published_runs.csv")}
STATED = ROWS["DGXC-24.11-Llama_3.1_70B-bf16-H100-64"]  # pp 4, 5 stages a rank, no recompute


def _without(**columns: str) -> Row:
    return {**STATED, "recompute": "none", **columns}


def test_what_is_open() -> None:
    assert unstated(STATED) == () and unstated(_without()) == ()
    assert unstated(_without(vpp="")) == ("vpp",) and unstated(_without(vpp="", notes="VPP4 by the command")) == ()
    assert unstated(_without(vpp="", pp="1")) == ()
    assert unstated(_without(micro_batch_seqs="")) == ("micro_batch_seqs",)
    assert unstated({**STATED, "recompute": "", "id": "MBR-x"}) == ("recompute",)
    assert unstated({**STATED, "recompute": ""}) == ()  # its source's files set none
    assert unstated({**STATED, "vpp": "", "id": "VTM-x"}) == ()  # software that does not interleave


def test_an_interval_contains_what_its_row_would_have_been_predicted() -> None:
    known = predict(STATED)["predicted_step_s"]
    for blank in ({"vpp": ""}, {"micro_batch_seqs": ""}, {"id": "MBR-x", "recompute": ""}):
        found = interval(_without(**blank))
        assert found is not None and found.open == unstated(_without(**blank))
        assert found.predicted[0] <= known * (1 + 1e-9) and known <= found.predicted[1] * (1 + 1e-9)
        assert found.width > 0 and predict(_without(**blank))["predicted_step_s"] is None
    assert interval(STATED) is None


def test_completions_of_a_blank_column() -> None:
    stages = {run.layout.vpp for run in completions(_without(vpp=""))}
    assert stages == {1, int(STATED["n_layers"]) // int(STATED["pp"])}
    sizes = [run.layout for run in completions(_without(micro_batch_seqs="", vpp="1"))]
    assert min(layout.microbatches for layout in sizes) >= 4 and sizes[0].microbatch == 1
    redone = [run.layout for run in completions({**STATED, "id": "MBR-x", "recompute": ""})]
    assert {(layout.recompute, layout.recompute_share) for layout in redone} == {
        ("none", 1.0), ("selective", 1.0), *(("full", share) for share in (0.25, 0.5, 0.75, 1.0))
    }  # fmt: skip
    with pytest.raises(Unmodelled, match="dp not stated"):
        list(completions(ROWS["NEMOLAUNCH-5B-64"]))


def test_figures_of_intervals() -> None:
    found = [
        Interval("A-1", ("recompute",), 3, (1.0, 2.0), (1.5, 1.5)),
        Interval("A-2", ("recompute", "vpp"), 6, (1.0, 1.5), (2.0, 2.0)),
        Interval("B-1", ("FLOPs",), 1, (3.0, 3.0), (1.0, 2.0)),
    ]
    assert [each.outside for each in found] == [0, -0.25, 0.5]
    table = figures(found)
    assert set(table) == {"all", "source A", "source B", "open: recompute", "open: vpp", "open: FLOPs"}
    assert table["all"]["within"] == 1 and (table["all"]["below"], table["all"]["above"]) == (1, 1)
    assert table["all"]["outside_median"] == 0.375 and table["source A"]["width_median"] == 0.75


@pytest.mark.slow
def test_open_rows_are_counted_apart_from_errors() -> None:
    found = intervals([row for row in ROWS.values() if row["id"].startswith(("NARA", "MCORE-H100-3", "LLMF-00"))])
    assert len(found) == 10 and all(predict(ROWS[each.id])["step_time_error"] is None for each in found)
    assert sum(not each.outside for each in found) >= 8


@pytest.mark.parametrize("source", ["MBR", "CARD", "ZOO", "MLM", "LLMF", "BLOOM", "IEVO", "KORTH"])
def test_conventions_give_the_rates_that_rows_state_beside_their_times(source: str) -> None:
    """Of rows that state both: in the median within 3%, and each within 10%."""
    ratios = []
    for row in ROWS.values():
        if row["id"].partition("-")[0] == source and (row["step_time_s"] or row["tokens_per_s_per_gpu"]):
            try:
                model, device = decoder_of(row), device_of(row)
            except Unmodelled:
                continue
            between = seconds_between(row, model, device)
            # until release 26.06, Megatron Bridge counted a sixth less of GPT-OSS
            older = "old estimator" in row["notes"] or (row["model"] == "GPT OSS 120B" and row["dtype"] == "bf16")
            if between is not None and not older:
                seconds = float(row["step_time_s"] or 0) or int(row["global_batch_seqs"]) * model.seq / (
                    int(row["gpus"]) * float(row["tokens_per_s_per_gpu"])
                )
                assert between[0] == between[1]
                ratios.append(between[0] / seconds)
    assert ratios and sorted(ratios)[len(ratios) // 2] == pytest.approx(1, abs=0.03)
    assert all(0.9 < ratio < 1.1 for ratio in ratios)


def test_a_rate_of_unknown_flops_is_an_interval_of_times() -> None:
    row = {**STATED, "id": "XYZ-1", "recompute": "none", "step_time_s": "", "mfu_or_hfu": "0.5"}
    run = run_of(row)
    assert run.seconds is None and run.seconds_between is not None
    low, high = run.seconds_between
    assert high / low == pytest.approx(
        step_flops(run.model, 8, "full", recomputed=False) / step_flops(run.model, 8, "causal", recomputed=False)
    )
    found = interval(row)
    assert found is not None and found.open == ("FLOPs",) and found.predicted[0] == found.predicted[1]
    assert predict(row)["step_time_error"] is None and facts_of("XYZ-1").convention == ""
    assert rate({**row, "dtype": "fp8"}, "h100") is None  # of which peak?


def test_flops_of_conventions() -> None:
    gpt = Decoder(2, 64, 256, 4, 128, 32)
    full = step_flops(gpt, 3, "full", recomputed=True)
    assert full == expressions.step_flops(gpt, 3) == pytest.approx(step_flops(gpt, 3, "korthikanti", recomputed=True))
    assert full - step_flops(gpt, 3, "causal", recomputed=False) == 3 * 3 * 2 * 2 * 32**2 * 64
    assert step_flops(gpt, 3, "narayanan", recomputed=True) == expressions.narayanan_flops(gpt, 3)
    assert step_flops(gpt, 3, "narayanan", recomputed=False) == pytest.approx(full)
