"""The public face: ``quintnet.compile``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import nn

from ..capture.modes import outside_of_modes
from ..core.axes import AXES
from ..core.errors import CompileError
from ..core.files import path_of
from ..core.mesh import Mesh
from ..cost_models.cluster import Cluster
from ..driver.task import CHECKS, Task
from ..ir.plan import Plan, check_plan, read_plan
from ..ir.plan_options import PlanOptions, decided, lists_options
from ..ops.rules.notation import Rule, user_rules
from .wrapped_models import refuse_wrapped

if TYPE_CHECKING:
    from ..capture.step_module import LossFn
    from .compiled_program import CompiledProgram


@outside_of_modes()
@lists_options
def compile(
    model: nn.Module,
    mesh: Mesh | Cluster,
    batch: Any = None,
    *,
    loss_fn: LossFn | None = None,
    plan: Plan | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    rules: Sequence[Rule] = (),
    check_finite: bool = True,
    training: bool = True,
    backend: str = "eager",
    device: torch.device | str | None = None,
    check: Literal["first", "always", "off"] = "first",
    tune_process: bool = True,
    cache: str | os.PathLike[str] | None = None,
    compare_every: int = 100,
    **options: Unpack[PlanOptions],
) -> CompiledProgram:
    """Compile a model written for one device into a program for every rank of ``mesh``.

    Every decision of a :class:`Plan` but its mesh is an option, too: ``microbatches=4``, ``schedule="zb-h1"``,
    ``zero=3``, ``recompute="selective"``, ``precision="bf16"``. :class:`Plan` describes them. Given here, they override
    the plan's.

    Args:
        model: any nn.Module that torch.export can trace.
        mesh: named axes, e.g. ``Mesh(pp=2, dp=2, tp=2)``; or a :class:`quintnet.Cluster`, for which the planner finds
            the best layout for ``batch``.
        batch: what one step consumes, a tuple (arguments) or a dict (keyword arguments) of tensors whose dim 0 is
            the global batch. Without it the model is captured at the first step.
        loss_fn: ``loss_fn(model(*batch[:-1]), batch[-1])``, where the batch is a tuple. Without it the model returns a
            scalar loss, or an object or dict with ``loss``.
        plan: a Plan, a dict, or the path of a plan file. None: the compiler chooses shardings. ``"auto"``: the best
            plan that the planner finds on H100 nodes, see :func:`quintnet.plan`. ``"hf"``: the parallel plan that a
            Hugging Face model comes with, see :func:`quintnet.hf_plan`.
        rules: sharding rules for further operators, see :func:`quintnet.rule`.
        check_finite: whether a step raises, before an optimizer sees it, if its loss or a gradient is NaN or Inf.
        training: False for a program that only computes outputs. ``batch`` then is what the model itself takes. No
            gradient is kept or communicated.
        backend: ``"eager"``: generated functions run as Python. ``"inductor"``: TorchInductor compiles each compute
            segment between collectives when it first runs; what it cannot compile runs eagerly, with a BackendWarning.
            ``"cudagraphs"``: as ``"inductor"``, and segments are captured in CUDA graphs where a replay does the same;
            others run as with ``"inductor"``, with a BackendWarning. ``"graph"``: as ``"inductor"``, and a whole step
            is one CUDA graph where it can be (one rank, nothing that waits for the host); else likewise.
        device: where ranks run. By default the model's device; with an accelerator process group, this rank's.
            ``"cuda"`` on a machine without CUDA: the program that H100 GPUs would run is made, to be dumped, explained
            and simulated. It cannot run; the module's parameters stay as and where they are. A cluster of GPUs as
            ``mesh`` means its kind of GPU, if neither a device nor a process group says where to run, the model is on
            the CPU, and this machine has no CUDA; ``device="cpu"`` runs the plan here.
        check: whether the captured program is compared with the module itself before anything trains: the loss, every
            gradient, and what forward changes, on a few rows of the batch, with the module's own modes and hooks.
            ``"first"``: for the first program; ``"always"``: also for those that evaluation, outputs or other batch
            sizes need; ``"off"``: never. Nothing of the module or the batch changes. With one process per rank, rank 0
            compares, and all ranks raise at the first step. See docs/verification.md.
        tune_process: whether to set, for the rest of this process, how much freed memory malloc keeps, and the
            scheduling policy of gloo's threads. Both only on CPUs; see docs/process.md. The first program of a module
            decides.
        cache: a folder, made for its owner alone (mode 0700), in which compiled programs are kept: a further start
            traces the module and reads the program instead of compiling it. With one process per rank, rank 0 reads or
            compiles for all. What cannot be kept is compiled, and a CacheWarning says why. See docs/cache.md.
        compare_every: training steps after which ranks compare what several of them hold (parameters, buffers, the
            settings of optimizers); 0: never. One process per rank only; see docs/faults.md. The first program of a
            module decides.
        options: decisions of the plan, see :class:`Plan`. None leaves one as it is.

    Raises:
        CompileError: QN1xx if the model or the batch cannot be compiled, QN2xx for the mesh or the plan.
        RunError: QN301 if the mesh does not fit the process group, or the processes that a launcher started.
        TypeError: for an option that there is not.
    """
    from ..huggingface.parallel_plan import hf_plan
    from ..ops.rules.registered import registered_rules
    from ..ops.rules.table import RULES
    from ..runtime.execute.engines import check_engine
    from ..runtime.launch.world import device_for, enter_world
    from .compiled_program import CompiledProgram

    decisions = decided("compile", options)
    if not isinstance(model, nn.Module):
        raise CompileError("QN105", f"a {type(model).__name__} is not a model", fix="pass an nn.Module")
    refuse_wrapped(model, loss_fn)
    if not isinstance(mesh, (Mesh, Cluster)):
        raise CompileError("QN201", f"a {type(mesh).__name__} is not a mesh", fix="pass quintnet.Mesh(dp=2, tp=2)")
    check_engine(backend)
    if check not in CHECKS:
        raise CompileError("QN108", f"there is no check {check!r}", fix=f"use one of {', '.join(CHECKS)}")
    if type(compare_every) is not int or compare_every < 0:
        raise CompileError("QN108", f"compare_every={compare_every!r}", fix="give a number of steps, 0 for never")
    gpu = mesh.gpu if isinstance(mesh, Cluster) else None
    if isinstance(mesh, Cluster) or plan == "auto":
        chosen = _planned(model, mesh, batch, loss_fn, None if plan == "auto" else plan, decisions, rules, backend)
        mesh = Mesh(**chosen.mesh)
    else:
        from_model = isinstance(plan, str) and plan == "hf"
        own = hf_plan(model, mesh, virtual_stages=decisions.get("virtual_stages", 1)).plan if from_model else plan
        chosen = read_plan(own).changed(decisions)
    check_plan(chosen, mesh)
    enter_world(mesh)
    book = {**RULES, **registered_rules(), **user_rules(rules)}
    where, absent = device_for(model, device, gpu)
    task = Task(
        model, loss_fn, mesh, chosen, book, where, check_finite, training, backend, check, tune_process, absent,
        None if cache is None else path_of(cache, "QN701"), compare_every,
    )  # fmt: skip
    program = CompiledProgram(task)
    return program if batch is None else program.prepare(batch)


def _planned(
    model: nn.Module,
    where: Mesh | Cluster,
    batch: Any,
    loss_fn: LossFn | None,
    plan: Plan | Mapping[str, Any] | str | os.PathLike[str] | None,
    decisions: Mapping[str, Any],
    rules: Sequence[Rule],
    backend: str,
) -> Plan:
    """Return the best plan on a cluster, or on a mesh of H100 nodes."""
    from .plan import plan as make_plan

    if batch is None:
        raise CompileError("QN102", "the planner needs to see a batch", fix="compile(model, cluster, batch)")
    fixed = dict(decisions)
    if isinstance(where, Mesh):
        fixed["mesh"] = {axis: where[axis] for axis in AXES}
        where = Cluster("h100", nodes=-(-where.size // 8), gpus_per_node=min(8, where.size))
    pinned = read_plan(plan).changed(fixed, keep_open=True)
    return make_plan(model, where, batch, loss_fn=loss_fn, plan=pinned, rules=rules, backend=backend, top_k=1).best
