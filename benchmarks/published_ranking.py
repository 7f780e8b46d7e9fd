"""How well predictions rank the layouts of one model: rows of one source that differ in nothing else.

A source that measured several releases of its software (``MBR-26.04-...``) is one source for each. A layout that was
measured several times counts once, with the mean of its times. Printed by ``published_runs.py``.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.published_rows import Row, Run

# What all rows of a group have in common.
SAME = (
    "model", "n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab", "seq_len", "n_experts", "top_k",
    "global_batch_seqs", "gpus", "gpu_type", "gpus_per_node", "dtype",
)  # fmt: skip
# What notes say of software where a source has run several: how experts exchange rows, and JZV100's two.
SOFTWARE = re.compile(r"\b(?:deepep|hybridep|a2a dispatcher)\b|^(?:ds|megatron)\b", re.IGNORECASE)
APART = 0.03  # times that are closer are not a matter of rank
TIED = 1e-9


@dataclass(frozen=True)
class Measured:
    """A layout of a group: seconds of a step, measured and predicted."""

    names: tuple[str, ...]
    measured: float
    predicted: float


@dataclass(frozen=True)
class Group:
    """Layouts of one model, batch, cluster and software."""

    source: str
    several_nodes: bool
    layouts: tuple[Measured, ...]

    @property
    def regret(self) -> float:
        """Measured time of the layout that predictions like best over the best measured, less one; the mean over those
        that predictions do not tell apart."""
        liked = min(layout.predicted for layout in self.layouts) * (1 + TIED)
        return statistics.mean(layout.measured for layout in self.layouts if layout.predicted <= liked) / self.best - 1

    @property
    def random_regret(self) -> float:
        """Return the expected loss of a random pick."""
        return statistics.mean(layout.measured for layout in self.layouts) / self.best - 1

    @property
    def best(self) -> float:
        return min(layout.measured for layout in self.layouts)

    @property
    def correlation(self) -> float:
        """Spearman's, of predicted and measured times; tied layouts share their mean rank."""
        predicted = ranks([layout.predicted for layout in self.layouts])
        measured = ranks([layout.measured for layout in self.layouts])
        return statistics.correlation(predicted, measured) if len(set(predicted)) > 1 < len(set(measured)) else 0.0

    def pairs(self) -> tuple[float, int]:
        """Return how many pairs are ordered rightly (a tie is half), and how many there are.

        Pairs count if their measured times differ by more than ``APART``.
        """
        right, total = 0.0, 0
        for faster, slower in combinations(sorted(self.layouts, key=lambda each: each.measured), 2):
            if slower.measured > faster.measured * (1 + APART):
                total += 1
                tied = abs(faster.predicted - slower.predicted) <= TIED * faster.predicted
                right += 0.5 if tied else faster.predicted < slower.predicted
        return right, total

    def ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of layouts that predictions do not tell apart."""
        return tuple(
            (layout.names[0], other.names[0])
            for layout, other in combinations(self.layouts, 2)
            if abs(layout.predicted - other.predicted) <= TIED * layout.predicted
        )


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 0; equal values have their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def source_of(row_id: str) -> str:
    """The source, and the release of the software that it measured."""
    source, _, rest = row_id.partition("-")
    release = re.match(r"\d\d\.\d\d(\.\d\d)?", rest)
    return f"{source}-{release[0]}" if release else source


def groups(predictions: Iterable[tuple[Row, Run, float]]) -> list[Group]:
    """Groups of two layouts or more, of rows with their runs and predicted seconds."""
    alike: dict[Hashable, dict[Hashable, list[tuple[Run, float]]]] = defaultdict(lambda: defaultdict(list))
    for row, run, predicted in predictions:
        if run.seconds:
            software = frozenset(word.lower() for word in SOFTWARE.findall(row.get("notes", "")))
            key = (source_of(run.id), software, *(row.get(name, "") for name in SAME))
            alike[key][run.layout].append((run, predicted))
    results = []
    for layouts in alike.values():
        if len(layouts) > 1:
            runs = [run for each in layouts.values() for run, _ in each]
            results.append(
                Group(source_of(runs[0].id), runs[0].cluster().nodes > 1, tuple(map(_measured, layouts.values())))
            )
    return results


def _measured(each: Sequence[tuple[Run, float]]) -> Measured:
    times = [run.seconds for run, _ in each if run.seconds]
    return Measured(tuple(run.id for run, _ in each), statistics.mean(times), each[0][1])


def figures(all_groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return figures of groups on one node, on several, and of each source.

    Correlations are of groups of three layouts or more.
    """
    of: dict[str, list[Group]] = defaultdict(list)
    for group in all_groups:
        of["several nodes" if group.several_nodes else "one node"].append(group)
        of[f"source {group.source.partition('-')[0]}"].append(group)
    return {name: _figures(each) for name, each in sorted(of.items())}


def _figures(groups_: Sequence[Group]) -> dict[str, float]:
    regrets = [group.regret for group in groups_]
    counts = [group.pairs() for group in groups_]
    larger = [group.correlation for group in groups_ if len(group.layouts) > 2]
    pairs = sum(total for _, total in counts)
    return {
        "groups": len(groups_), "layouts": sum(len(group.layouts) for group in groups_),
        "ties": sum(len(group.ties()) for group in groups_),
        "correlation": statistics.median(larger) if larger else float("nan"),
        "pairs": pairs, "pairs_right": sum(right for right, _ in counts) / pairs if pairs else float("nan"),
        "regret_mean": statistics.mean(regrets), "regret_median": statistics.median(regrets),
        "regret_worst": max(regrets), "regret_random": statistics.mean(group.random_regret for group in groups_),
    }  # fmt: skip


def worst(all_groups: Sequence[Group], count: int) -> list[Mapping[str, object]]:
    """The groups with the largest regrets: what was liked, and what was best."""
    results = []
    for group in sorted(all_groups, key=lambda each: -each.regret)[:count]:
        liked = min(group.layouts, key=lambda layout: layout.predicted)
        best = min(group.layouts, key=lambda layout: layout.measured)
        results.append({
            "several_nodes": group.several_nodes, "layouts": len(group.layouts), "regret": group.regret,
            "liked": vars(liked), "best": vars(best),
        })  # fmt: skip
    return results
