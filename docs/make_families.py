"""Writes the last part of docs/models.md: vision, diffusion and graph models, compared with themselves on each layout.

    python docs/make_families.py [--only NAME ...] [--layouts LAYOUT ...]

Needs torchvision, timm and diffusers (``pip install -e .[vision]``). Each cell is measured; cells of other names and
layouts stay as they are on the page. About 10 s of a core for each cell.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.families import FAMILIES  # noqa: E402
from tests.frontier import LAYOUTS, Verdict, compare  # noqa: E402
from tests.zoo import InDouble  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEADING = "## Vision, diffusion and graphs"
COLUMNS = ("dp2", "tp2", "pp2", "dp2 x tp2")
HEAD = """
Written by `python docs/make_families.py`; do not edit. torch {torch}, torchvision {torchvision}, timm {timm}, diffusers
{diffusers}.

Each cell is the largest relative difference from the plain module, in float64, of losses, all gradients, parameters and
buffers (running statistics) over three steps of SGD with momentum, with dropout, stochastic depth and noise as the
models have them. They are the libraries' own, unmodified, with few and narrow layers (`tests/families/`): rounding
grows with depth and with steps, so [two deep networks](modules.md#vision-and-diffusion-models) are compared one step at
a time. An empty cell was not measured.
"""
Cells = dict[tuple[str, str], dict[str, str]]


def cell(found: Verdict) -> str:
    """The difference, or the error that says why there is none."""
    if found.kind == "equal":
        return f"{found.worst:.0e}"
    return f"refused, {found.code}" if found.kind == "refused" else "**wrong**"


def on_page(text: str) -> Cells:
    """The cells of the page, by (library, name) and layout."""
    found: Cells = {}
    for line in text.partition(HEADING)[2].splitlines():
        library, name, *cells = (
            (one.strip() for one in line.strip("|").split("|")) if line.startswith("|") else ("", "")
        )
        if library in FAMILIES:
            found[library, name] = {layout: one for layout, one in zip(COLUMNS, cells, strict=True) if one}
    return found


def written(text: str, cells: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The page with these cells in its last part."""
    versions = {name: version(name).partition("+")[0] for name in ("torch", "torchvision", "timm", "diffusers")}
    lines = [HEADING, *HEAD.format(**versions).splitlines(), ""]
    lines += ["| library | model | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for library, cases in FAMILIES.items():
        for name in cases:
            row = [cells.get((library, name), {}).get(layout, "") for layout in COLUMNS]
            lines += [f"| {library} | {name} | " + " | ".join(row) + " |"] if any(row) else []
    return text.partition(HEADING)[0].rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    """Measure, and write the page after each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="models")
    parser.add_argument("--layouts", nargs="*", default=COLUMNS, choices=COLUMNS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells, wrong = on_page(PAGE.read_text()), False
    for library, cases in FAMILIES.items():
        for name in (name for name in cases if given.only is None or name in given.only):
            for layout in given.layouts:
                with InDouble():
                    found = compare(cases[name], LAYOUTS[layout])
                cells.setdefault((library, name), {})[layout] = cell(found)
                wrong = wrong or found.kind in ("different", "raw")
                print(f"{library:12} {name:24} {layout:10} {found}", flush=True)
                gc.collect()  # programs hold each other in cycles
            PAGE.write_text(written(PAGE.read_text(), cells))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
