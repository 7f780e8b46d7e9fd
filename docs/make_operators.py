"""Writes docs/operators.md: which operators of PyTorch's own database, and which losses, are equal on which layouts.

    python docs/make_operators.py [--found FILE ...]

Everything is measured: a step in float64, with all ranks in this process, beside the plain module. About half an hour.
``--found``: files with lines of ``python -m tests.opinfo_layouts``, whose entries are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import quintnet

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests import every_loss, opinfo_layouts  # noqa: E402

HEAD = """# Operators and losses

Written by `python docs/make_operators.py`; do not edit. torch {torch}.

## PyTorch's own database of operators

OpInfo, with which PyTorch tests its operators, has {entries} entries with a derivative. {none} of them have nothing to
compare: {reasons}. Of the other {some}, **{equal} ({share:.0%}) are equal to the plain module on all of these
layouts**, to 1e-9 in float64: every result and every gradient, element by element. {wrong}

| layout | equal | refused | |
|---|---|---|---|
"""
HOW = """
One small sample of each entry is run (`tests/opinfo_layouts.py`). Where its rows are independent, which is tried on the
sample itself ({rows} entries), its inputs are rows of the batch. Of others, the first input depends on the batch,
except with microbatches: what couples rows cannot run on a part of them. Over tp, its parameters are split wherever
they can be. Operators that draw random numbers are compared with themselves on other layouts instead ([random
numbers](modules.md#random-numbers)).

What is refused:

| entry | layouts | error | reason |
|---|---|---|---|
"""
LOSSES = """
## Losses

Every loss of `torch.nn` with every reduction, in a small module: the largest relative difference of the loss and of
every gradient from the unsplit module, in float64 (`tests/every_loss.py`). With `reduction="none"`, what is left is
squared and averaged.
"""


def sweep(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What became of each entry."""
    ops = opinfo_layouts.entries()
    left = [op for op in ops if op.formatted_name not in known]
    found = dict(known)
    for line in opinfo_layouts.sweep(left):
        print(json.dumps(line), flush=True)
        found[line["name"]] = line
    return [found[op.formatted_name] for op in ops]


def operators(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The page's first part."""
    some = [line for line in found if "none" not in line]
    reasons = Counter(line["none"].partition(":")[0] for line in found if "none" in line)
    kinds = {line["name"]: {layout: kind for layout, (kind, _) in line["found"].items()} for line in some}
    equal = sum(set(one.values()) == {"equal"} for one in kinds.values())
    wrong = sorted(name for name, one in kinds.items() if {"different", "raw", "QN209", "QN111"} & set(one.values()))
    yield _wrapped(
        HEAD,
        torch=torch.__version__.partition("+")[0],
        entries=len(found),
        none=len(found) - len(some),
        reasons=", ".join(f"{reason} ({count})" for reason, count in reasons.most_common()),
        some=len(some),
        equal=equal,
        share=equal / len(some),
        wrong=f"**Wrong: {', '.join(wrong)}.**" if wrong else "None is different, and none ends without an error's id.",
    )
    for layout in opinfo_layouts.LAYOUTS:
        counts = Counter(one[layout] for one in kinds.values())
        refused = ", ".join(f"{count} {kind}" for kind, count in counts.most_common() if kind != "equal")
        yield f"| {layout} | {counts['equal']} | {sum(counts.values()) - counts['equal']} | {refused} |"
    yield "\n" + _wrapped(HOW, rows=sum(line["rows"] for line in some))
    for line in some:
        refusals = defaultdict(list)
        for layout, (kind, text) in line["found"].items():
            if kind != "equal":
                refusals[kind, reason(text)].append(layout)
        for (kind, text), layouts in refusals.items():
            where = "all" if len(layouts) == len(opinfo_layouts.LAYOUTS) else "; ".join(layouts)
            yield f"| `{line['name']}` | {where} | {kind} | {text} |"


def _wrapped(text: str, **values: Any) -> str:
    """``text`` with ``values``, in lines of 120 characters; headings and tables as they are."""
    parts = (part.format(**values) for part in text.rstrip().split("\n\n"))
    return "\n\n".join(
        part if part.lstrip().startswith(("#", "|")) else textwrap.fill(" ".join(part.split()), 120) for part in parts
    )


def reason(text: str) -> str:
    """The line of an error that says why, without the place."""
    lines = text.splitlines()
    return (lines[1] if len(lines) > 1 else text).strip().replace("|", "/").partition(", and each of")[0][:160]


def losses() -> Iterator[str]:
    """The page's second part."""
    yield _wrapped(LOSSES) + "\n"
    yield "| loss | reduction | " + " | ".join(every_loss.LAYOUTS) + " |"
    yield "|---" * (2 + len(every_loss.LAYOUTS)) + "|"
    for name in every_loss.all_cases():
        cells = []
        for layout in every_loss.LAYOUTS:
            try:
                gap = every_loss.difference(name, layout)
                cells.append(f"{gap:.0e}" if gap < every_loss.LIMIT else f"**wrong: {gap:.0e}**")
            except quintnet.QuintNetError as error:
                cells.append(f"refused: {error.code}")
        loss, _, reduction = name.rpartition(", ")
        yield f"| {loss} | {reduction} | " + " | ".join(cells) + " |"
        print(name, *cells, flush=True)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--found", nargs="*", type=Path, default=[], help="files with entries that are known")
    known = {
        line["name"]: line
        for file in parser.parse_args().found
        for line in map(json.loads, file.read_text().splitlines())
    }
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    page = ROOT / "docs" / "operators.md"
    page.write_text("\n".join([*operators(sweep(known)), *losses()]) + "\n")


if __name__ == "__main__":
    main()
