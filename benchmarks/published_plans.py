"""The planner's search against the layouts of published runs, priced by the closed forms that predict those runs.

    python benchmarks/published_plans.py            # the rows in benchmarks/data, as a table per source
    python benchmarks/published_plans.py --rows FILE.csv --json

For each row whose layout is stated: the fastest layout of the same model, batch and software on the same cluster that
fits its memory, beside the published one. Both are predictions; the published layout is in the space that is searched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.closed_forms.memory import peak_memory
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.closed_forms.transformer import ParallelLayout, stage_layers
from benchmarks.published_rows import Row, Run, Unmodelled, read, run_of
from benchmarks.published_runs import DATA
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.planner.layouts import divisors
from quintnet_compiler.planner.search import Wanted, search_layouts

CHOICES = ("dp", "tp", "cp", "ep", "pp", "vpp", "microbatch", "zero", "recompute", "sequence_parallel", "expert_tp")
STAGES_PER_RANK = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, order=True)
class Choice:
    """The choices of a layout that are searched, as a value that can be ordered."""

    dp: int
    tp: int
    cp: int
    ep: int
    pp: int
    vpp: int
    microbatch: int
    zero: int
    recompute: str
    sequence_parallel: bool
    expert_tp: int

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}" for name in ("dp", "tp", "cp", "ep", "pp", "vpp") if getattr(self, name) > 1
        ]
        more = [f"mb{self.microbatch}", *([f"zero{self.zero}"] if self.zero else [])]
        more += [self.recompute] if self.recompute != "none" else []
        return " ".join([*sizes, *more])


@dataclass(frozen=True)
class Found:
    layout: Choice
    seconds: float
    claimed_bytes: float


@dataclass(frozen=True)
class Space:
    """Every layout of a run's model, batch and software on its cluster."""

    run: Run

    @cached_property
    def published(self) -> Choice:
        return Choice(**{name: getattr(self.run.layout, name) for name in CHOICES})

    def layout(self, choice: Choice) -> ParallelLayout:
        return replace(self.run.layout, **vars(choice))

    def __iter__(self) -> Iterator[Choice]:
        run, published = self.run, self.published
        batch = run.layout.global_batch
        tps = [n for n in divisors(min(run.gpus, run.gpus_per_node)) if run.model.heads % n == 0]
        for tp, cp, pp in product({*tps, published.tp}, {1, published.cp}, divisors(run.gpus)):
            dp, remainder = divmod(run.gpus, tp * cp * pp)
            if remainder or pp > run.model.layers or batch % dp:
                continue
            deeper = {*STAGES_PER_RANK, published.vpp} if pp > 1 else {1}
            layers = run.model.layers  # the embedding and the head may count as one each
            stages = [v for v in deeper if v == 1 or 0 in (layers % (pp * v), (layers + 2) % (pp * v))]
            experts = [(1, 1)]
            if run.model.experts:
                experts = [(ep, etp) for ep in divisors(run.model.experts) for etp in {1, tp, published.expert_tp}
                           if (dp * cp * tp) % (ep * etp) == 0]  # fmt: skip
            for microbatch in divisors(batch // dp):
                for vpp, (ep, etp), zero, recompute, spread in product(
                    stages, experts, {0, 1, 3, published.zero} if dp * cp > 1 else {0, published.zero},
                    {"none", "selective", "full", published.recompute},
                    (False, True) if tp > 1 else (published.sequence_parallel,),
                ):  # fmt: skip
                    if vpp == 1 or batch // (dp * microbatch) % pp == 0:
                        yield Choice(dp, tp, cp, ep, pp, vpp, microbatch, zero, recompute, spread, etp)


class Prices:
    """Closed forms for a run's layouts, and what they cost at least: the layers of a stage, one microbatch after the
    other."""

    def __init__(self, space: Space) -> None:
        self.space, self.run, self.cluster = space, space.run, space.run.cluster()

        @lru_cache(None)
        def layer(choice: Choice) -> float:
            forward, backward, again = StepModel(self.run.model, space.layout(choice), self.cluster).layer
            return forward + backward + again * self.run.layout.recompute_share

        self.layer = layer

    def __call__(self, choice: Choice) -> Found:
        layout = self.space.layout(choice)
        stage_layers(self.run.model, layout)
        seconds = StepModel(self.run.model, layout, self.cluster).step().seconds
        return Found(choice, seconds, peak_memory(self.run.model, layout).used)

    def narrow(self, choices: Iterable[Choice], /) -> None:
        """All bounds are true of any layout."""

    @property
    def steps(self) -> int:
        return 1

    def functions(self, choice: Choice, /) -> Choice:
        return choice

    def new_functions(self) -> Sequence[Choice]:
        return ()

    def seconds(self, choice: Choice, /) -> float:
        alike = replace(choice, dp=self.run.gpus // (choice.tp * choice.cp), pp=1, vpp=1, zero=0)
        with suppress(CompileError):
            batch = self.run.layout.global_batch
            alike = alike if batch % (alike.dp * choice.microbatch) == 0 else replace(choice, vpp=1, zero=0)
            microbatches = batch // (choice.dp * choice.microbatch)
            return 0.999 * microbatches * self.run.model.layers / choice.pp * self.layer(alike)
        return 0.0

    def closer_seconds(self, choice: Choice, step: int, /) -> float:
        return self.seconds(choice)

    def bytes(self, choice: Choice, /) -> float:
        with suppress(CompileError):
            return peak_memory(self.run.model, self.space.layout(choice)).used
        return 0.0

    def closer_bytes(self, choice: Choice, step: int, /) -> float:
        return self.bytes(choice)

    rough_seconds = seconds

    def similarity(self, choice: Choice, /) -> tuple[Hashable, ...]:
        """A guess is wrong by what a pipeline waits, and state that is sliced."""
        pipeline = choice.pp, choice.vpp
        sliced = *pipeline, choice.zero
        return (*sliced, choice.tp, choice.microbatch), sliced, pipeline, choice.pp


def compare(row: Row, seconds: float) -> dict[str, Any]:
    """One row's result; ``skipped`` is the reason where there is none."""
    try:
        space = Space(run_of(row))
        prices = Prices(space)
        published = prices(space.published)
    except Unmodelled as error:
        return {"id": row["id"], "skipped": str(error)}
    except CompileError as error:
        return {"id": row["id"], "skipped": error.message}
    # what was run has fitted, whatever is predicted
    memory = max(space.run.cluster().device.memory_bytes, published.claimed_bytes)
    result = search_layouts(
        space, lambda choice: (choice, prices(choice)), prices, Wanted(1, "time", memory, time.monotonic() + seconds)
    )
    best = result.ranked[0] if result.ranked else None
    return {
        "id": row["id"], "skipped": None, "published": str(published.layout), "published_s": published.seconds,
        "planned": str(best.layout) if best else None, "planned_s": best.seconds if best else None,
        "ratio": best.seconds / published.seconds if best else None, "complete": result.complete,
    }  # fmt: skip


def summary(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per source: rows, how many plans are predicted slower than what was published, and ratios of step times."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if not result["skipped"]:
            for group in ("all", result["id"].partition("-")[0]):
                ratios[group].append(result["ratio"] if result["ratio"] is not None else float("inf"))
    return {group: _figures(values) for group, values in sorted(ratios.items())}


def _figures(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "rows": len(ratios),
        "slower": sum(ratio > 1 + 1e-9 for ratio in ratios),
        "same": sum(abs(ratio - 1) <= 1e-9 for ratio in ratios),
        "median": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, nargs="+", help="CSV files (default: those in benchmarks/data)")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--seconds", type=float, default=60.0, help="how long to search for one row")
    args = options.parse_args()
    files = args.rows or [DATA / "published_runs.csv", DATA / "published_runs_single_node.csv"]
    results = [compare(row, args.seconds) for file in files for row in read(file)]
    total = summary(results)
    if args.json:
        print(json.dumps({"rows": results, "summary": total}, indent=1))
        return
    print(f"{'source':<10} {'rows':>5} {'slower':>7} {'same':>5} {'median':>8} {'least':>8} {'most':>8}")
    for group, group_figures in total.items():
        numbers = " ".join(f"{group_figures[name]:8.3f}" for name in ("median", "least", "most"))
        print(f"{group:<10} {group_figures['rows']:5} {group_figures['slower']:7} {group_figures['same']:5} {numbers}")
    print(f"{sum(not r['skipped'] and not r['complete'] for r in results)} searches ran out of time")


if __name__ == "__main__":
    main()
