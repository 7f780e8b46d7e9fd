"""One rank's share of a large model, alone on this device: the time of everything but communication.

The program is that of 64 ranks, for the first, a middle and the last pipeline stage; what other ranks would send is
made up (``benchmarks/one_rank.py``). ``plain`` and ``compiled`` are the stage's blocks alone, in bf16, under autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

from one_rank import MODELS, blocks_of, builders, program_of

import quintnet

from .entries import Entry, Figures, NotRun
from .peers import ceiling, compared
from .setting import Setting

LARGE = ("llama-70b", {"tp": 8, "pp": 8}, 8)  # model, mesh, microbatches
SMALL = ("tiny", {"tp": 2, "pp": 2}, 2)


def run(setting: Setting) -> Iterator[Entry]:
    name, axes, microbatches = SMALL if setting.emulated else LARGE
    mesh, rows, size = quintnet.Mesh(**axes), microbatches, MODELS[name]
    if setting.emulated:
        yield NotRun("Llama-3 70B on 64 ranks", f"the emulated accelerator is slow: {name} on {mesh} instead")
    plan = quintnet.Plan(microbatches=microbatches, precision="bf16")
    program = program_of(size, mesh, plan, rows, setting.device)
    top = ceiling(setting)
    yield Figures("setting", {"what": "model", "value": name})
    yield Figures("setting", {"what": "mesh", "value": str(mesh)})
    yield Figures("setting", {"what": "microbatches of one sequence", "value": microbatches})
    yield Figures("setting", {"what": "ceiling, TFLOP/s", "value": top / 1e12})
    places = {"middle": mesh["pp"] // 2, "first": 0, "last": mesh["pp"] - 1}
    for stage, where in {stage: where for where, stage in places.items()}.items():
        part = program.rank(mesh.rank({"pp": stage}))
        what = f"{where} stage, {blocks_of(part)} blocks"
        yield from compared(setting, what, builders(program, part, size, rows, setting.device), top)
