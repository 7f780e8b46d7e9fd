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
        liked = min(one.predicted for one in self.layouts) * (1 + TIED)
        return statistics.mean(one.measured for one in self.layouts if one.predicted <= liked) / self.best - 1

    @property
    def random_regret(self) -> float:
        """What a random pick is expected to lose."""
        return statistics.mean(one.measured for one in self.layouts) / self.best - 1

    @property
    def best(self) -> float:
        return min(one.measured for one in self.layouts)

    @property
    def correlation(self) -> float:
        """Spearman's, of predicted and measured times; tied layouts share their mean rank."""
        predicted = ranks([one.predicted for one in self.layouts])
        measured = ranks([one.measured for one in self.layouts])
        return statistics.correlation(predicted, measured) if len(set(predicted)) > 1 < len(set(measured)) else 0.0

    def pairs(self) -> tuple[float, int]:
        """Of pairs whose measured times differ by more than ``APART``: how many are ordered rightly (a tie is half),
        and all."""
        right, found = 0.0, 0
        for one, other in combinations(sorted(self.layouts, key=lambda each: each.measured), 2):
            if other.measured > one.measured * (1 + APART):
                found += 1
                tied = abs(one.predicted - other.predicted) <= TIED * one.predicted
                right += 0.5 if tied else one.predicted < other.predicted
        return right, found

    def ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of layouts that predictions do not tell apart."""
        return tuple(
            (one.names[0], other.names[0])
            for one, other in combinations(self.layouts, 2)
            if abs(one.predicted - other.predicted) <= TIED * one.predicted
        )


def ranks(values: Sequence[float]) -> list[float]:
    """Of each value, from 0; equal values have the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def source_of(row_id: str) -> str:
    """The source, and the release of the software that it measured."""
    source, _, rest = row_id.partition("-")
    release = re.match(r"\d\d\.\d\d(\.\d\d)?", rest)
    return f"{source}-{release[0]}" if release else source


def groups(found: Iterable[tuple[Row, Run, float]]) -> list[Group]:
    """Groups of two layouts or more, of rows with their runs and predicted seconds."""
    alike: dict[Hashable, dict[Hashable, list[tuple[Run, float]]]] = defaultdict(lambda: defaultdict(list))
    for row, run, predicted in found:
        if run.seconds:
            software = frozenset(word.lower() for word in SOFTWARE.findall(row.get("notes", "")))
            key = (source_of(run.id), software, *(row.get(name, "") for name in SAME))
            alike[key][run.layout].append((run, predicted))
    made = []
    for layouts in alike.values():
        if len(layouts) > 1:
            runs = [run for each in layouts.values() for run, _ in each]
            made.append(
                Group(source_of(runs[0].id), runs[0].cluster().nodes > 1, tuple(map(_measured, layouts.values())))
            )
    return made


def _measured(each: Sequence[tuple[Run, float]]) -> Measured:
    times = [run.seconds for run, _ in each if run.seconds]
    return Measured(tuple(run.id for run, _ in each), statistics.mean(times), each[0][1])


def figures(made: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Of groups on one node, on several, and of each source; correlations are of groups of three layouts or more."""
    of: dict[str, list[Group]] = defaultdict(list)
    for group in made:
        of["several nodes" if group.several_nodes else "one node"].append(group)
        of[f"source {group.source.partition('-')[0]}"].append(group)
    return {name: _figures(each) for name, each in sorted(of.items())}


def _figures(made: Sequence[Group]) -> dict[str, float]:
    regrets = [group.regret for group in made]
    counts = [group.pairs() for group in made]
    larger = [group.correlation for group in made if len(group.layouts) > 2]
    pairs = sum(found for _, found in counts)
    return {
        "groups": len(made), "layouts": sum(len(group.layouts) for group in made),
        "ties": sum(len(group.ties()) for group in made),
        "correlation": statistics.median(larger) if larger else float("nan"),
        "pairs": pairs, "pairs_right": sum(right for right, _ in counts) / pairs if pairs else float("nan"),
        "regret_mean": statistics.mean(regrets), "regret_median": statistics.median(regrets),
        "regret_worst": max(regrets), "regret_random": statistics.mean(group.random_regret for group in made),
    }  # fmt: skip


def worst(made: Sequence[Group], count: int) -> list[Mapping[str, object]]:
    """The groups with the largest regrets: what was liked, and what was best."""
    found = []
    for group in sorted(made, key=lambda each: -each.regret)[:count]:
        liked = min(group.layouts, key=lambda one: one.predicted)
        best = min(group.layouts, key=lambda one: one.measured)
        found.append({
            "several_nodes": group.several_nodes, "layouts": len(group.layouts), "regret": group.regret,
            "liked": vars(liked), "best": vars(best),
        })  # fmt: skip
    return found
