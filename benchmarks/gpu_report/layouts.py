"""Models of the tests on layouts, all ranks in this process on one device, beside the unsplit module on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import quintnet
from quintnet_compiler.compat.torch import pytree
from quintnet_compiler.core.errors import QuintNetError
from tests.models import CASES, build, reference, worst_error

from .entries import Check, Entry
from .setting import Setting

LIMIT = 1e-8  # of gradients in float64, relative to the largest element; where a model computes in float32: as its case


@dataclass(frozen=True)
class Job:
    """A model of the tests on a layout."""

    model: str
    axes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    sample: bool = False  # on the emulated accelerator, too

    def __str__(self) -> str:
        layout = " ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return ", ".join([self.model, layout, *(f"{name}={value}" for name, value in self.options.items())])


BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
EXACT = (
    Job("mlp", {"dp": 2, "tp": 2}, {"zero": 1}, sample=True),
    Job("gpt", {"dp": 2, "tp": 2}, {"zero": 1}),
    Job("cnn", {"pp": 2}, {"microbatches": 2}, sample=True),
    Job("mixture", {"ep": 2}, sample=True),
    Job("gpt", {"cp": 2}, {"context": "ring"}, sample=True),
    Job("mlp", {"tp": 2}),
    Job("mlp", {"dp": 2}, {"zero": 2, "microbatches": 2}),
    Job("gpt", {"dp": 2}, {"zero": 3}),
    Job("gpt", {"dp": 2}, {"zero": 3, "reshard_after_forward": True}),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True}),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True, "async_tp": True}),
    Job("gpt", {"cp": 2}, {"context": "ulysses"}),
    Job("gpt", {"cp": 2}, {"context": "all_gather"}),
    Job("gpt", {"pp": 2}, {"microbatches": 4}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "gpipe"}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    Job("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    Job("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    Job("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "dualpipe-v", "virtual_stages": 2}),
    Job("gpt", {"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2}),
    Job("mixture", {"dp": 2}, {"zero": 3, "experts": ("dp",), "microbatches": 2}),
    Job("mixture", {"tp": 2}),
    Job("cnn", {"tp": 2}),
    Job("vit", {"dp": 2}, {"recompute": "full"}),
    Job("vit", {"tp": 2}),
    Job("encoder", {"tp": 2}, {"recompute": "selective"}),
    Job("hf_gpt2", {"tp": 2}),
    Job("hf_llama", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "offload": ("activations",)}),
    Job("gpt", {"dp": 2}, {"zero": 3, "offload": ("activations",)}),
)
ROUNDED = (
    # no layer norm: in 16 bits, the emulated accelerator's keeps its statistics as the CPU's does, not as CUDA's
    Job("mixture", {"ep": 2}, BF16, sample=True),
    Job("hf_llama", {"tp": 2}, BF16),
    Job("gpt", {"tp": 2}, BF16),
    Job("gpt", {"dp": 2}, {**BF16, "zero": 3}),
    Job("gpt", {"cp": 2}, {**BF16, "context": "ring"}),
    Job("gpt", {"cp": 2}, {**BF16, "context": "ulysses"}),
    Job("gpt", {"pp": 2}, {**BF16, "microbatches": 4}),
    Job("gpt", {"dp": 2}, FP16),
)


def run(setting: Setting) -> Iterator[Entry]:
    for job in EXACT:
        if job.sample or not setting.emulated:
            yield _judged(f"{job}, float64", lambda job=job: exact(setting, job))
    for job in ROUNDED:
        if job.sample or not setting.emulated:
            yield _judged(str(job), lambda job=job: rounded(setting, job))


def _judged(what: str, work: Any) -> Check:
    """A layout that fails says so, and the others go on."""
    start = time.perf_counter()
    try:
        good, details = work()
    except (QuintNetError, RuntimeError) as error:
        return Check(what, False, f"{type(error).__name__}: {error}"[:600])
    return Check(what, good, f"{details}; {time.perf_counter() - start:.1f} s")


def exact(setting: Setting, job: Job) -> tuple[bool, str]:
    """Two steps: loss and gradients in float64 beside those of the CPU's unsplit module."""
    case = CASES[job.model]
    batch = case.batch(8)
    options = {"loss_fn": case.loss_fn, "device": setting.device, **job.options}
    program = quintnet.compile(build(job.model), quintnet.Mesh(**job.axes), batch, **options)
    expected, gradients = reference(build(job.model), batch, case.loss_fn)
    worst = 0.0
    for _ in range(2):
        loss = float(program.step(batch))
        computed, wanted = parts(program, gradients)
        worst = max(worst, worst_error(computed, wanted)[0])
        program.zero_grad()
    off = abs(loss - float(expected)) / max(1.0, abs(float(expected)))
    limit = max(LIMIT, 100 * case.tolerance)
    return worst < limit and off < limit, f"gradients {worst:.0e}, loss {off:.0e}"


def narrow_batch(job: Job) -> Any:
    """The model's batch, with float32 in the place of float64."""
    return pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, CASES[job.model].batch(8))


def parts(
    program: quintnet.CompiledProgram, gradients: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return this process's part of each gradient, and the same part of ``gradients``, on the host.

    Nothing is communicated.
    """
    gradients_here = {name: p.grad for name, p in program.named_parameters() if p.grad is not None}
    local_parts: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for spec, _, positions in program._state().parts(program._primary().program):
        if spec.name in gradients_here:
            grad = gradients_here[spec.name]
            local_parts[spec.name] = (grad.to_local() if isinstance(grad, DTensor) else grad).detach().cpu()
            part = gradients[spec.name]
            for dim, index in enumerate(positions):
                part = part.index_select(dim, index)
            wanted[spec.name] = part
    return local_parts, wanted


def rounded(setting: Setting, job: Job) -> tuple[bool, str]:
    """Beside the module in float64, twice as far from it as one rank of this precision at most."""
    case, batch = CASES[job.model], narrow_batch(job)
    options = {"loss_fn": case.loss_fn, "device": setting.device, **job.options}
    model = build(job.model, torch.float32)
    report = quintnet.compile(model, quintnet.Mesh(**job.axes), batch, **options).verify(batch, steps=1)
    worst = report.worst
    return report.ok, f"worst {worst.what} {worst.name} {worst.error:.0e} of {worst.limit:.0e}"
