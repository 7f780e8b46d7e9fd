"""nn.Module to :class:`Captured`: one torch.export of the whole step, with a symbolic batch size.

``torch.export`` in non-strict mode traces real-world models that ``fx.symbolic_trace`` cannot, works on the meta
device, and shares the module's own parameters. :mod:`.canonical` removes nodes of its graph that would be wrong or
useless later.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from ..compat.torch import OpOverload, draws_random_numbers, pytree, schema
from ..compat.torch_codegen import forgotten_texts
from ..compat.torch_constants import constants_have_values
from ..compat.torch_export import free, kernels_alone, switches_by
from ..compat.torch_hooks import accumulation_hooks, backward_hooks, without_hooks_of_export
from ..core.annotations import is_getitem
from ..core.empty_storage import check_shapes, device_of, hollow_parameters, plain_parameters
from ..core.errors import CompileError, QuintNetError
from ..core.names import check_batch_names, check_names
from ..core.replaced import for_this_thread, new_garbage_only, one_thread
from ..guards.python_objects import objects_kept
from ..huggingface.registries import traced_as_few_nodes
from ..ir.batch_form import BatchForm, RowsElsewhere, batch_size_of, plain_batch, zeros_of
from ..ir.program import Captured
from ..weights.quantized import check_quantized
from .batch_norms import cumulative_averages, one_process
from .block_reuse import Skipped, Unseen, UnseenUsed, blocks_once
from .canonical import SizedExport, canonical, module_of
from .changes.assigned_data import place_data
from .changes.autocast import inline_where_off
from .changes.backward_writes import check_backwards
from .changes.cached_results import CachedResults
from .changes.changed_values import keep_gradients
from .changes.functional_calls import call_functional_forms
from .changes.memory import writes
from .changes.no_grad import without_switches
from .changes.second_runs import run_again
from .control_flow import control_flow_followed
from .derivatives.inner_gradients import InnerGradients, place_starts
from .derivatives.script_functions import script_functions_followed
from .derivatives.transforms import transforms_followed
from .derivatives.unfollowed_parts import check_parts
from .derivatives.user_derivatives import DerivativeFinder, user_derivatives
from .lazy_modules import materialise
from .matmul_dtypes import check_dtypes
from .messages import fixes_the_batch, place_of_error, untraceable, with_place, without_messages_of_torch
from .modes import evaluating, modes_of_a_trace
from .places import where_of
from .repeat_blocks import numbers_are_read, reads_of_all, with_all_blocks
from .sparse_gradients import check_dense
from .step_module import Call, LossFn, StepModule

Batch = tuple[Any, ...] | Mapping[str, Any]
MIN_EQUAL_BLOCKS = 8  # with fewer, all are traced
_aten = torch.ops.aten


@forgotten_texts()
def capture(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    want: str = "loss",
    training: bool = True,
    trained: bool = True,
    call: Call | None = None,
    once: bool = False,
    form: BatchForm | None = None,
    each: bool = False,
    brought: nn.Module | None = None,
) -> Captured:
    """Trace ``model`` (and its loss) on inputs shaped like ``batch``; nothing is computed.

    ``want``: ``"loss"`` (one scalar output) or ``"outputs"`` (whatever the model, or ``call(model, batch)``, returns).
    ``training``: each module keeps its mode; if not, all are in evaluation mode. ``trained``: whether any program will
    train the parameters. ``once``: equal blocks are traced once, see :mod:`.block_reuse`, for planning. Otherwise they
    may be traced once, too, if there are many, but are all in the graph, see :mod:`.repeat_blocks`; ``each``: all are
    traced. ``form``: which sizes of the batch vary; by default, the number of rows. ``brought``: that of an earlier
    capture, whose parameters a program has.

    Raises:
        CompileError: QN101 with the user's line if tracing fails, QN102, QN103, QN105, QN701.
    """
    batch = plain_batch(batch)
    check_batch_names(batch)  # before anything else: export writes names into code, and runs it
    modules = [part for part in (model, loss_fn) if isinstance(part, nn.Module)]
    for module in modules:
        check_parts(module, training=training)
        check_names(module)
    form = form or BatchForm.of_batch(batch, batch_size_of(batch))
    rows = form.rows_in(batch)
    with torch.set_grad_enabled(training or torch.is_grad_enabled()):  # training also if compiled under no_grad
        materialise(StepModule(model, loss_fn, want, call), batch, training=training)
        for module in modules:
            check_shapes(module)
            check_quantized(module)
        new_step = functools.partial(StepModule, model, loss_fn, want, call, buffers=call is None, brought=brought)
        request = _Request(
            model, new_step, device_of(model), batch, form, rows,
            training=training, trained=trained, once=once, each=each,
        )  # fmt: skip
        try:
            return _capture(request, all_seen=each)
        except UnseenUsed:
            return _capture(request, all_seen=True)


@dataclass(frozen=True)
class _Request:
    """Arguments of :func:`capture`. ``new_step`` combines the model and its loss; ``rows``: of the batch."""

    model: nn.Module
    new_step: Callable[[], StepModule]
    device: torch.device
    batch: Batch
    form: BatchForm
    rows: int
    training: bool
    trained: bool
    once: bool
    each: bool


def _capture(request: _Request, *, all_seen: bool) -> Captured:
    """Trace as :func:`capture`. ``all_seen``: whether torch.export knows the insides of blocks that are left out.

    Raises:
        UnseenUsed: if it does not, and should, or for any other error that may be due to that.
    """
    sample = request.form.sample(request.batch, request.device)
    with _tracing(request) as tracer:
        step = tracer.step
        step.unseen = Unseen() if all_seen else tracer.unseen()
        export = tracer.export(sample)
        tracer.derivatives.finish(export.program.graph)
        place_starts(export.program.graph)
        captured = canonical(export, step, tracer.skipped, training=request.training, every=not request.once)
        free(export.program)
        check_dtypes(captured.graph)
        check_dense(captured.graph)
        tensors = MappingProxyType({name: tracer.real.get(id(x), x) for name, x in captured.tensors.items()})
        captured = replace(captured, tensors=tensors, brought=step.adopted)
    complete = tracer.with_skipped_blocks(captured)
    if complete is not None:
        return complete
    return _capture(replace(request, form=captured.form, once=False, each=True), all_seen=True)


@contextlib.contextmanager
def _tracing(request: _Request) -> Iterator[_Tracer]:
    """Yield a tracer of the model and its loss; inside, both, torch and this process are as a trace needs them."""
    model, step = request.model, request.new_step()
    least = 4 if request.once else MIN_EQUAL_BLOCKS
    blocks = contextlib.nullcontext(Skipped()) if request.each else blocks_once(model, least)
    mode = contextlib.nullcontext() if request.training else evaluating(step)
    flags = contextlib.nullcontext() if request.trained else _untrained(step)
    shipped = traced_as_few_nodes(model, as_shipped=step.buffers_change and "use_cache" not in request.batch)
    inner = InnerGradients()
    user = user_derivatives(step, inner, trained=request.trained)
    hollow, plain = hollow_parameters(step), plain_parameters(step.brought())
    cached = CachedResults.of_process()
    with (
        one_thread(),
        new_garbage_only(),
        mode,
        flags,
        inner,
        user as derivatives,
        transforms_followed(),
        control_flow_followed(),
        plain,
        hollow as real,
        modes_of_a_trace(),
        without_messages_of_torch(),
        one_process(),
        cumulative_averages(),
        shipped,
        blocks as skipped,
    ):
        yield _Tracer(request, step, inner, derivatives, skipped, real, cached)


@dataclass(frozen=True)
class _Tracer:
    """A tracer of a model and its loss.

    Attributes:
        request: What is captured.
        step: The model and its loss.
        inner: The gradients that forward asks for.
        derivatives: The user's own derivatives.
        skipped: The blocks that are left out.
        real: The tensors of the model, by the ids of those in their places.
        cached: What functions kept of their results before.
    """

    request: _Request
    step: StepModule
    inner: InnerGradients
    derivatives: DerivativeFinder
    skipped: Skipped
    real: Mapping[int, Tensor]
    cached: CachedResults

    def unseen(self) -> Unseen:
        """Return what torch.export need not know: nothing if tensors in it have hooks of gradients: they are traced."""
        unseen = Unseen.inside_blocks(self.request.model, self.skipped.runs)
        tensors = [self.real.get(key, x) for key, x in unseen.tensors.items()]
        return Unseen() if any(backward_hooks(x) or accumulation_hooks(x) for x in tensors) else unseen

    def export(self, sample: Any) -> SizedExport:
        """Export for all sizes that vary or, if the model's code fixes the number of rows, for that of the batch."""
        try:
            program, form = self._export_varying(sample)
            return SizedExport(program, sample, form)
        except Exception as error:
            if self.step.unseen.modules:
                raise UnseenUsed from error
            if isinstance(error, QuintNetError):
                raise with_place(error) from error.__cause__
            return self._export_fixed(error)

    def _export_varying(self, sample: Any) -> tuple[ExportedProgram, BatchForm]:
        """Return the exported program and the form of its batches: the model's code may allow only some lengths."""
        form = self.request.form
        try:
            return self._export(sample, form.dynamic_shapes()), form
        except Exception as error:
            pattern = r"(length\d+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)"
            limits = {
                name: (int(low or form.limits[name][0]), int(high) if high else form.limits[name][1])
                for name, low, high in re.findall(pattern, str(error))
            }
            if not limits:
                raise
            form = replace(form, limits={**form.limits, **limits})
        return self._export(sample, form.dynamic_shapes()), form

    def _export_fixed(self, error: Exception) -> SizedExport:
        """Export for the batch's number of rows alone: the loss may be over pairs of rows, for example.

        ``error``: of the export for any number of rows.
        """
        request, form = self.request, self.request.form
        elsewhere = None if form.has_lengths else self._rows_elsewhere(error)
        if elsewhere is not None:
            raise RowsElsewhere(form.structure, *elsewhere, place_of_error(error)) from error
        if form.has_lengths or not fixes_the_batch(error):
            raise untraceable(error) from error
        sample = pytree.tree_map_only(Tensor, lambda x: zeros_of(x, tuple(x.shape), request.device), request.batch)
        try:
            return SizedExport(self._export(sample, None), sample, form, request.rows)
        except QuintNetError as refusal:
            raise with_place(refusal) from refusal.__cause__
        except Exception:
            raise untraceable(error) from error

    def _rows_elsewhere(self, error: Exception) -> tuple[int, str] | None:
        """Return the first tensor whose dim 0, of another size, may be the rows: its index in the leaves, and its path.

        For a batch that cannot be traced with any number of its rows, because of ``error``. None if there is no such
        tensor. If the model's code fixes that number, which may be intended, the other tensor must be the first one, or
        have more dims, or more tensors must have its size.
        """
        batch, size = self.request.batch, self.request.rows
        paths, _ = pytree.tree_flatten_with_path(batch)
        tensors = [(leaf, path, x) for leaf, (path, x) in enumerate(paths) if isinstance(x, Tensor) and x.dim() > 0]
        sizes = [x.shape[0] for _, _, x in tensors]
        dims = max((x.dim() for _, _, x in tensors if x.shape[0] == size), default=0)
        tried = {size, 1}
        for leaf, path, x in tensors:
            other = x.shape[0]
            likely = x is tensors[0][2] or x.dim() > dims or sizes.count(other) > sizes.count(size)
            if other in tried or not (likely or not fixes_the_batch(error)):
                continue
            tried.add(other)
            form = BatchForm.of_batch(batch, other)
            with contextlib.suppress(Exception):
                self._export(form.sample(batch, self.request.device), form.dynamic_shapes())
                return leaf, f"batch{pytree.keystr(path)}"
        return None

    def _export(self, sample: Any, dynamic: Any) -> ExportedProgram:
        """Export as often as derivatives and changes of Python state need it; the last one counts."""
        self.skipped.like.clear()
        derivatives = self.derivatives if self.request.training and self.step.buffers_change else None
        trace = functools.partial(_export, self.step, self.inner, derivatives, sample, dynamic)
        program = _functional(self.step.traced(self.derivatives.repeated(self.cached.kept_from(trace))))
        if self.step.used_unseen or self.step.unseen.used_by(program.constants.values()):
            raise UnseenUsed
        return program

    def with_skipped_blocks(self, captured: Captured) -> Captured | None:
        """Return the capture with the blocks that were left out, if it is known without them, and with its guards."""
        request, step, skipped = self.request, self.step, self.skipped
        if not skipped.chained({node: module_of(node) for node in captured.graph.nodes}):
            return None
        if request.once or not captured.like:
            return replace(captured, guards=step.guards(training=request.training))
        impure = step.changed or self.derivatives.found or captured.changed or step.reads_whole_modules
        if impure or numbers_are_read(step.reads, request.model, skipped.runs):
            return None
        whole = with_all_blocks(captured, skipped.runs)
        if whole is None:
            return None
        of_all = functools.partial(reads_of_all, model=request.model, captured=captured)
        return replace(whole, guards=step.guards(training=request.training, of_all=of_all))


def _export(
    step: StepModule, inner: InnerGradients, derivatives: DerivativeFinder | None, sample: Any, dynamic: Any
) -> ExportedProgram:
    shapes = None if dynamic is None else (dynamic,)
    inner.begin_trace()
    exported: ExportedProgram
    following, kept = switches_by(without_switches, for_this_thread), objects_kept(step.brought_by_user())
    scripts = script_functions_followed()
    with kept, without_hooks_of_export(), constants_have_values(), scripts, following:  # export copies containers
        exported = torch.export.export(step, (sample,), dynamic_shapes=shapes, strict=False)
    inline_where_off(exported.graph_module)
    for node in reversed(exported.graph.nodes):
        if not node.users and _only_makes(node):
            exported.graph.erase_node(node)  # only its sizes were read, which tracing again would not see
    if derivatives is not None:
        run_again(exported, derivatives.checkpoints)
        check_backwards(exported, derivatives.reached)
    place_data(exported.graph)
    keep_gradients(exported)
    return exported


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place operators. This traces the graph again, which takes as long as forward.

    Raises:
        CompileError: QN110 for running statistics that this would lose.
    """
    for node in exported.graph.nodes:
        if node.target is _aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise CompileError(
                "QN110",
                "torch.instance_norm that trains changes running statistics; a program would not",
                where=where_of(node),
                fix="call torch.nn.functional.instance_norm",
            )
    call_functional_forms(exported)
    if any(writes(node) for node in exported.graph.nodes):
        with kernels_alone(exported.graph_module):
            exported = exported.run_decompositions({})
    return exported


def _only_makes(node: fx.Node) -> bool:
    """Return whether a torch operator only returns a result. Random numbers are an effect; ours may mark hooks."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return is_getitem(node)
    returns = node.target.namespace == "aten" and bool(schema(node.target).returns)
    return returns and not draws_random_numbers(node.target) and not writes(node)


@contextlib.contextmanager
def _untrained(step: nn.Module) -> Iterator[None]:
    """Let no parameter require a gradient inside."""
    trained = [p for p in step.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
