"""Writes docs/models.md: which Hugging Face models were compared with themselves on which axes.

    python docs/make_models.py [--only NAME ...] [--on LAYOUT ...] [--missing]

Each cell is measured: the model is compiled, all its ranks run in this process for two optimizer steps, and loss,
outputs, every gradient and every parameter are compared with the unsplit model's in float64. About an hour for all.
``--only`` measures some models again, ``--on`` some columns, and ``--missing`` those cells that the page does not have;
the page keeps all others, and is written after each model.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT))
from tests.zoo import COMPOSED, EXPERTS, KINDS, SINGLE, ZOO, Entry, Layout, Outcome, columns, outcome  # noqa: E402

HEAD = """# Models and axes

Written by `python docs/make_models.py`; do not edit. torch {torch}, transformers {transformers}.

Each cell is the largest relative difference from the unsplit model, in float64, of the loss, the outputs, every
gradient and every parameter, over two optimizer steps with all ranks in one process. The models are transformers' own,
unmodified, in tiny configurations (`tests/zoo/`); labels are ignored and rows padded unevenly over ranks. Axes of 2
ranks each; pipelines and `dp` alone run 2 microbatches, except where the loss or a statistic couples rows (contrastive
losses, BatchNorm, Qwen2-VL, Mistral 3). An empty cell was not measured.
[Some models](huggingface.md#models-that-need-a-setting) need a setting.
"""
OTHERS = "## Vision, diffusion and graphs"  # written by another script
Found = dict[tuple[str, str], Outcome]


def cell(found: Outcome | None, notes: list[str]) -> str:
    """An error, or the number of the note that says why there is none."""
    if found is None:
        return ""
    if found.ok:
        return f"{abs(found.error):.0e}"
    text = found.reason.replace("|", "/").splitlines()[0] if found.error is None else f"differs by {found.error:.0e}"
    if text not in notes:
        notes.append(text)
    return f"refused [{notes.index(text) + 1}]" if found.error is None else f"**wrong** [{notes.index(text) + 1}]"


def table(names: Sequence[str], layouts: Sequence[Layout], found: Found) -> list[str]:
    """A Markdown table, and its notes."""
    notes: list[str] = []
    layouts = [layout for layout in layouts if any((name, str(layout)) in found for name in names)]
    lines = ["| model | " + " | ".join(map(str, layouts)) + " |", "|---" * (len(layouts) + 1) + "|"]
    for name in names:
        cells = [cell(found.get((name, str(layout))), notes) for layout in layouts]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, *([""] if notes else []), *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]


def page(found: Found, rest: str) -> str:
    lines = HEAD.format(torch=torch.__version__.partition("+")[0], transformers=transformers.__version__).splitlines()
    for title, entries in KINDS.items():
        measured = [name for name in entries if any(model == name for model, _ in found)]
        if measured:
            lines += [f"\n## {title}\n", *table(measured, SINGLE + COMPOSED, found)]
        spread = [name for name in measured if any((name, str(layout)) in found for layout in EXPERTS)]
        if spread:
            lines += table(spread, EXPERTS, found)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + (f"\n{rest}" if rest else "")


def read(text: str) -> Found:
    """The cells of a page."""
    found: Found = {}
    for part in re.split(r"\n(?=\| model )", text)[1:]:
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
        notes = dict(re.findall(r"(?m)^(\d+)\. (.*)$", part))
        for name, *cells in rows[2:]:
            for layout, text in zip(rows[0][1:], cells, strict=True):
                note = re.search(r"\[(\d+)\]", text)
                if note is not None:
                    found[name, layout] = Outcome(None, notes[note[1]])
                elif text:
                    found[name, layout] = Outcome(float(text))
    return {(name, layout): outcome for (name, layout), outcome in found.items() if name in ZOO}


def measure(name: str, entry: Entry, layouts: Sequence[Layout]) -> Mapping[tuple[str, str], Outcome]:
    found = {}
    for layout in layouts:
        started = time.perf_counter()
        try:
            found[name, str(layout)] = result = outcome(entry, layout)
        except Exception as error:  # the others are measured all the same
            result = Outcome(None, f"{type(error).__name__}: {error}")
        took = time.perf_counter() - started
        print(f"{name:12} {layout!s:50} {result.error} {result.reason[:60]} {took:.0f} s", flush=True)
    return found


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ZOO), help="models")
    parser.add_argument("--on", nargs="*", help="columns")
    parser.add_argument("--missing", action="store_true", help="only what the page does not have")
    options = parser.parse_args()
    torch.set_num_threads(1)
    own, mark, others = PAGE.read_text().partition(OTHERS)
    found = read(own)
    for name in options.only:
        wanted = [c for c in columns(ZOO[name]) if options.on is None or str(c) in options.on]
        if options.missing:
            wanted = [c for c in wanted if (name, str(c)) not in found]
        found |= measure(name, ZOO[name], wanted)
        PAGE.write_text(page(found, mark + others))
    return 0 if all(result.ok or result.error is None for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
