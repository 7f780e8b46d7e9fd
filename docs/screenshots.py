"""Takes the screenshots of the documentation: dumps and trains a small model, and lets Chromium look at the pages.

    python docs/screenshots.py [--if-possible]

The pictures go to docs/screenshots/, which is not committed: pages show those that are there (see pictures.py), and the
site builds without. ``--if-possible``: a line instead of an error where there is no Chromium.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.simulation.timeline import Timeline
from quintnet_compiler.training.run_page import RunPage

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MESH = {"pp": 2, "tp": 2}


@dataclass(frozen=True)
class Shot:
    """A section of the page of a dump (``""``: all of another page). ``unfolded``: how many blocks of the model are
    open."""

    section: str
    size: tuple[int, int]
    unfolded: int = 0
    page: str = "dump"


SHOTS = {
    "dump": Shot("graph", (1280, 1100), unfolded=2),
    "timeline": Shot("timeline", (1280, 1210)),
    "what-if": Shot("plan", (1280, 640)),
    "notebook": Shot("", (1080, 1790), page="notebook"),
    "run": Shot("", (1280, 1420), page="run"),
}


def example() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The Vision Transformer of the examples, and a batch."""
    sys.path.insert(0, str(ROOT / "examples"))
    from vit import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(8, 2, hidden=128), (torch.randn(256, 8, 8), torch.randint(0, 10, (256,)))


def compiled() -> quintnet.CompiledProgram:
    model, batch = example()
    return quintnet.compile(model, quintnet.Mesh(**MESH), batch, loss_fn=F.cross_entropy, microbatches=4)


def measured() -> Timeline:
    """A step on this rank's world, after a few."""
    program, (_, batch) = compiled(), example()
    for _ in range(3):
        program.step(batch)
        program.zero_grad()
    return program.measure(batch)[1]


def dump(folder: Path) -> Path:
    """A page with everything: predictions for this machine, a measured step, and other plans."""
    from quintnet_compiler.cost_models.calibrated import CalibratedCosts
    from quintnet_compiler.reports.calibrate import calibrate

    program, (model, batch) = compiled(), example()
    costs = CalibratedCosts(calibrate((2, program.mesh.size)))
    timeline = quintnet.launch(measured, program.mesh.size)[0]
    cluster = quintnet.Cluster("h100", gpus_per_node=8)
    report = quintnet.plan(model, cluster, batch, loss_fn=F.cross_entropy, top_k=6)
    return program.dump(folder, costs=costs, measured=timeline, report=report) / "index.html"


def notebook(folder: Path) -> Path:
    """What a cell with a program shows."""
    page = folder / "notebook.html"
    style = "font-family: sans-serif; margin: 20px"
    page.write_text(f'<!doctype html><body style="{style}">{compiled()._repr_html_()}</body>', encoding="utf-8")
    return page


def trained(folder: Path) -> None:
    """A run of this rank's world, with a step that is measured."""
    program, (_, batch) = compiled(), example()
    data = TensorDataset(*(x.repeat(4, *(1 for _ in x.shape[1:])) for x in batch))
    optimizer = torch.optim.AdamW(program.parameters(), lr=3e-4)
    quintnet.Trainer(
        program, optimizer, DataLoader(data, batch_size=256), DataLoader(data, batch_size=256), epochs=8, log_every=1,
        log_folder=folder, metrics={"accuracy": quintnet.accuracy}, validate_every=4, measure_step=12, console=False,
    ).fit()  # fmt: skip


def run(folder: Path) -> Path:
    """The page of a short run."""
    quintnet.launch(trained, math.prod(MESH.values()), (folder / "vit",))
    shown = RunPage(folder / "vit")
    shown.update()
    shown.write(folder / "vit/page.html")
    return folder / "vit/page.html"


def take(browser: str, page: Path, shot: Shot, picture: Path) -> None:
    """Show one section alone: a browser without a window does not scroll to it."""
    text = page.read_text(encoding="utf-8")
    if shot.section:
        text = re.sub(rf'<section id="(?!{shot.section}")', '<section hidden id="', text)
    head, graph = text.split('<section id="graph"', 1) if shot.unfolded else (text, "")
    if shot.unfolded:
        first, rest = graph.split('<div class="stage"', 1)  # the picture of the blocks stays closed
        rest = rest.replace("<details>", "<details open>", shot.unfolded)
        text = f'{head}<section id="graph"{first}<div class="stage"{rest}'
    shown = page.with_name(f"{picture.stem}.html")
    shown.write_text(text, encoding="utf-8")
    width, height = shot.size
    options = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    subprocess.run(
        [browser, *options, f"--screenshot={picture}", shown.as_uri()], check=True, timeout=120, capture_output=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--if-possible", action="store_true")
    options = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        said = f"no screenshots: none of {', '.join(BROWSERS)} is on the PATH"
        if options.if_possible:
            print(said)
            return
        sys.exit(said)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        pages = {"dump": dump(Path(made)), "notebook": notebook(Path(made)), "run": run(Path(made))}
        for name, shot in SHOTS.items():
            take(browser, pages[shot.page], shot, FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
