"""Writes docs/models.md: which Hugging Face models were compared with themselves on which axes.

    python docs/make_models.py [--only NAME ...]

Each cell is measured: the model is compiled, all its ranks run in this process for two optimizer steps, and loss,
outputs, every gradient and every parameter are compared with the unsplit model's in float64. About half an hour.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.zoo import COMPOSED, EXPERTS, SINGLE, ZOO, Layout, Outcome, columns, outcome  # noqa: E402

HEAD = """# Models and axes

Written by `python docs/make_models.py`; do not edit. torch {torch}, transformers {transformers}.

Each cell is the largest relative difference from the unsplit model, in float64, of the loss, the outputs, every
gradient and every parameter, over two optimizer steps with all ranks in one process. The models are transformers' own,
unmodified, in tiny configurations (`tests/zoo.py`); labels are ignored and rows padded unevenly over ranks. Axes of 2
ranks each; pipelines and `dp` alone run 2 microbatches.
"""


def cell(found: Outcome | None, notes: list[str]) -> str:
    """An error, or the number of the note that says why there is none."""
    if found is None:
        return ""
    if found.ok:
        return f"{found.error:.0e}"
    text = found.reason.replace("|", "/").splitlines()[0] if found.error is None else f"differs by {found.error:.0e}"
    if text not in notes:
        notes.append(text)
    return f"refused [{notes.index(text) + 1}]" if found.error is None else f"**wrong** [{notes.index(text) + 1}]"


def table(names: Sequence[str], layouts: Sequence[Layout], found: dict[tuple[str, str], Outcome]) -> list[str]:
    """A Markdown table, and its notes."""
    notes: list[str] = []
    lines = ["| model | " + " | ".join(map(str, layouts)) + " |", "|---" * (len(layouts) + 1) + "|"]
    for name in names:
        cells = [cell(found.get((name, str(layout))), notes) for layout in layouts]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ZOO), help="models")
    names = parser.parse_args().only
    torch.set_num_threads(1)
    found: dict[tuple[str, str], Outcome] = {}
    for name in names:
        for layout in columns(name):
            started = time.perf_counter()
            found[name, str(layout)] = result = outcome(name, layout)
            print(f"{name:12} {layout!s:50} {result.error} {result.reason[:60]} {time.perf_counter() - started:.0f} s")
            sys.stdout.flush()
    mixtures = [name for name in names if len(columns(name)) > len(SINGLE + COMPOSED)]
    lines = HEAD.format(torch=torch.__version__.partition("+")[0], transformers=transformers.__version__).splitlines()
    lines += ["", *table(names, SINGLE + COMPOSED, found)]
    if mixtures:
        lines += ["## Mixtures of experts", "", *table(mixtures, EXPERTS, found)]
    (ROOT / "docs" / "models.md").write_text("\n".join(lines))
    return 0 if all(result.ok or result.error is None for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
