"""The plan: decisions about a layout, as a document that a person, a tool or the planner writes."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..core.axes import SHARDED_AXES, DataAxis
from ..core.errors import CompileError
from ..core.files import path_of, save_text
from ..core.mesh import Mesh
from ..core.names import MAX_PATH_LENGTH, one_line
from ..core.precision import COMPUTE_DTYPES, SUM_DTYPES, Precision, check_precision
from ..core.sharding import AxisType, parse_type
from ..schedules.synthesis import check_schedule
from .expectations import Expectations
from .plan_options import Offloaded
from .plans.feature_fields import OfFeature, check_feature_fields
from .program import BUCKET_MIB, TILE_BYTES

MAX_PLAN_BYTES = 16 * 2**20
Experts = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], BeforeValidator(lambda x: tuple(x) if isinstance(x, list) else x)
]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!a} has characters that are not printable")
    return text


# a path of names, and as much again for what a pattern or an operator adds
Text = Annotated[str, Field(max_length=2 * MAX_PATH_LENGTH), AfterValidator(_printable)]


class Plan(BaseModel):
    """Decisions about a program. What a plan leaves open, the compiler decides. The plan of a compiled program has
    everything filled in, and compiling with it gives the same program.

    Attributes:
        version: of this format.
        mesh: axis -> number of ranks, outermost axis first; empty: any mesh.
        microbatches: the number of microbatches of a step (gradient accumulation, or pipelining over stages).
        batch_statistics: what statistics over rows are taken of, with several microbatches: ``"batch"``: all rows (such
            a module is refused with microbatches); ``"microbatch"``: the rows of one microbatch of all data ranks. A
            step is then that of the module called with one microbatch after the other: its loss is the mean of their
            losses, and buffers change once for each. See docs/modules.md.
        schedule: the pipeline schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-v"`` or
            ``"dualpipe-v"`` (see :mod:`..schedules.kinds`), or ``"synthesized"``, which is generated from the stage
            times that the cost model predicts.
        virtual_stages: pipeline stages per rank: one for ``"1f1b"`` and ``"zb-h1"``, two for ``"zb-v"`` and
            ``"dualpipe-v"``, two or more for ``"interleaved"``, any number for ``"gpipe"`` and ``"synthesized"``.
        sequence_parallel: whether tensor parallelism may also split the values between its operators (sequence
            parallelism: reduce-scatter and all-gather instead of all-reduce).
        parameters: parameter name or glob -> axis -> type, for example ``{"*.up_proj.weight": {"tp": "S(0)"}}``. Later
            patterns win.
        stages: where each pipeline stage but the first begins: module paths or operator names.
        context: attention over sequences that ``cp`` splits: ``"all_gather"``: every rank gathers all keys and values
            for its own queries; ``"ulysses"``: an all-to-all exchanges sequences for heads; ``"ring"``: keys and values
            travel around a ring.
        context_load_balance: whether the ranks of a ring exchange runs of their sequences during attention that is
            causal or has documents, so that each has equally much to compute, whatever the lengths of documents.
        attention_tile_bytes: attention whose mask would take more than so many bytes, and a ring's, makes masks in
            tiles of at most about that size, and no mask of whole blocks of positions that are seen or hidden alike.
        experts: the axes over which experts are spread; empty: ``ep``. ``("dp",)`` or ``("dp", "cp")`` let data and
            context ranks hold different experts.
        hot_experts: parameter name or glob -> the experts of that mixture to which most rows go (any of its weights
            names it; later patterns win), for example ``{"layers.3.mlp.experts.*": [3, 17]}``. All ranks over which
            experts are spread get their weights, and their rows stay where they are. See docs/experts.md.
        zero: ZeRO stage over data-parallel ranks: 0 = off, 1 = slices of optimizer state, 2 = and of gradients, 3 = and
            of parameters, which are gathered for each microbatch.
        zero_axes: the axes of those slices; one of two data axes gives hybrid sharding (HSDP). Slices over data axes
            that ``parameters`` asks for are gathered the same way (with ``zero=0``: as with 3).
        reshard_after_forward: whether gathered parameters (``zero=3``) are freed after the forward and gathered again
            in the backward. Likewise for values that sequence and context parallelism gather: ranks keep their slices.
        overlap: whether collectives start before what reads them, overlapped with matmuls. A block's parameters are
            then gathered while the block before it is computed.
        async_tp: whether collectives that nothing else hides run slice by slice, each slice overlapped with the matmul
            of the one before: all-gathers that column-parallel matmuls read, and reduce-scatters of row-parallel
            results (with ``sequence_parallel``), forward and backward.
        recompute: activation checkpointing of values inside repeated blocks: ``"none"``; ``"selective"``: values that
            take no more than passes over memory (no matmul, attention or communication); ``"full"``: all of them;
            ``"auto"``: what the cost model finds cheapest within ``activation_memory_budget``. With
            ``backend="inductor"``, ``"none"`` makes again what fused kernels make in passing.
        activation_memory_budget: for ``recompute="auto"``: how many GiB of saved values a rank may hold at once.
        offload: what waits in host memory while the device has no use for it: ``"activations"``, values that a forward
            saves for its backward; ``"parameters"``, what ranks store of parameters, and their gradients when they are
            added up, so that optimizers compute there; ``"optimizer"``, the state of an optimizer that
            ``program.optimizer`` makes, which computes on the host.
        offload_folder: a folder of each host, on a disk, in files of which ``"activations"`` wait instead of in its
            memory. Each rank makes a folder of its own there, and removes it.
        loss_chunks: in how many parts of its rows a loss over many classes computes logits, so that one part is in
            memory at a time. 1: all rows at once.
        precision: ``"model"``: computes in the dtypes in which the model is written. ``"bf16"``, or ``"fp16"`` with a
            scaled loss: mixed precision, with 16-bit copies of float32 parameters; the optimizer sees float32. See
            :mod:`..passes.frontend.lower_precision`. ``"fp8"``: as ``"bf16"``, and products of linear layers are of
            8-bit numbers with scales, forward and backward.
        fp8_recipe: for ``"fp8"``: what has one scale. ``"tensorwise"``: a tensor; ``"rowwise"``: a row, along the dim
            that a product sums over; ``"rowwise_with_gw_hp"``: likewise, and gradients of weights are 16-bit products;
            ``"blockwise"``: 128 numbers of a row, and 128 x 128 of a weight; ``"mxfp8"``: 32 numbers of a row.
        fp8_skip: for ``"fp8"``: names or globs of linear layers, or of their weights, that stay in 16 bits.
        loss_scale: for ``"fp16"``: the initial loss scale. It halves with every step that overflows (which is then
            skipped) and doubles after 2000 good steps.
        reduce_dtype: the dtype in which ranks add up gradients of parameters: ``"parameter"``, the parameter's own;
            ``"float32"``, in which microbatches are added up, too; or ``"bfloat16"``, half the bytes of float32.
        sum_dtype: the dtype in which ranks add up other partial results, as those of row-parallel matmuls:
            ``"value"``, the value's own, or ``"float32"``, twice the bytes of 16 bits.
        bucket_mib: gradients of so many MiB (or of one parameter, if that is more) are added up in one message, and
            parameters that are gathered at the start of a step (``zero=1`` and 2) travel in such messages. 25 is
            DistributedDataParallel's size; a planner takes the smallest at which its cluster's links are used well.
        seed: of dropout masks, which are the same on every layout.
        expect: what predictions, the planner and the searches of a compilation assume of batches: ``documents``,
            ``hot_rows`` and ``expert_imbalance``, see :class:`.expectations.Expectations`. It changes no result.
        unknown_ops: what happens to an operator without a sharding rule: ``"error"``, or ``"replicate"``: it runs
            unsplit on every rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[2] = 2
    mesh: dict[Text, int] = Field(default_factory=dict)
    microbatches: int = Field(default=1, ge=1)
    batch_statistics: Literal["batch", "microbatch"] = "batch"
    schedule: Text = "1f1b"
    virtual_stages: int = Field(default=1, ge=1, le=1024)
    sequence_parallel: bool = True
    parameters: dict[Text, dict[Text, Text]] = Field(default_factory=dict)
    stages: tuple[Text, ...] = ()
    context: Literal["all_gather", "ulysses", "ring"] = "all_gather"
    context_load_balance: bool = True
    attention_tile_bytes: int = Field(default=TILE_BYTES, ge=1, le=2**40)
    experts: tuple[DataAxis, ...] = ()
    hot_experts: Annotated[dict[Text, Experts], OfFeature] = Field(default_factory=dict)
    zero: Literal[0, 1, 2, 3] = 0
    zero_axes: tuple[DataAxis, ...] = ("dp",)
    reshard_after_forward: bool = True
    overlap: bool = True
    async_tp: Annotated[bool, OfFeature] = False
    recompute: Literal["none", "selective", "full", "auto"] = "none"
    activation_memory_budget: float | None = Field(default=None, gt=0, lt=2**20)
    offload: Annotated[tuple[Offloaded, ...], OfFeature] = ()
    offload_folder: Annotated[Text | None, OfFeature] = None
    loss_chunks: Annotated[int, OfFeature] = Field(default=1, ge=1, le=2**20)
    precision: Literal["model", "bf16", "fp16", "fp8"] = "model"
    fp8_recipe: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"], OfFeature] = (
        "tensorwise"
    )
    fp8_skip: Annotated[tuple[Text, ...], OfFeature] = ()
    loss_scale: float = Field(default=2.0**16, ge=1, lt=2.0**100)
    reduce_dtype: Literal["parameter", "float32", "bfloat16"] = "parameter"
    sum_dtype: Literal["value", "float32"] = "value"
    bucket_mib: float = Field(default=BUCKET_MIB, gt=0, le=2**16)
    seed: int = Field(default=0, ge=0, lt=2**63)
    expect: Expectations = Expectations()
    unknown_ops: Literal["error", "replicate"] = "error"

    def to_json(self) -> str:
        """Return the plan as stable text: equal plans give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @property
    def agreed(self) -> str:
        """Return the text on which ranks must agree: all but what only predictions read of a rank's own batch."""
        return self.model_copy(update={"expect": self.expect.model_copy(update={"documents": ()})}).to_json()

    @property
    def decisions(self) -> dict[str, Any]:
        """Return the decisions that differ from the defaults, without ``parameters``."""
        decisions, defaults = self.model_dump(mode="json", exclude={"parameters"}), Plan().model_dump(mode="json")
        return {key: value for key, value in decisions.items() if value != defaults[key]}

    def _repr_html_(self) -> str:
        from ..core.html import table

        decided = table(["decision", ""], self.decisions.items(), "Plan")
        kinds = [(name, ", ".join(f"{a}: {k}" for a, k in types.items())) for name, types in self.parameters.items()]
        if not kinds:
            return decided
        rows = table(["name", "types"], kinds)
        return f"{decided}<details><summary>parameters ({len(kinds)})</summary>{rows}</details>"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Raises: CompileError QN207 for anything that is not a plan: unknown or repeated keys, other types, ..."""
        with _explained():
            document = text.decode() if isinstance(text, bytes) else text
            if len(document) > MAX_PLAN_BYTES:
                raise ValueError(f"more than {MAX_PLAN_BYTES} characters")
            # for what pydantic's parser lets pass: keys given twice, NaN
            json.loads(document, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
            return cls.model_validate_json(document, strict=True)

    def changed(self, decisions: Mapping[str, Any], *, keep_open: bool = False) -> Plan:
        """Return this plan with ``decisions`` in place of its own; None leaves one as it is. ``keep_open``: what
        neither sets stays open for a planner; else it is decided by its default.

        Raises:
            CompileError: QN207 for a value that a plan cannot have.
        """
        decided = {name: value for name, value in decisions.items() if value is not None}
        with _explained():
            return Plan.model_validate({**self.model_dump(exclude_unset=keep_open), **decided}, strict=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a file that :func:`quintnet.compile` reads: at once, in place of what was there."""
        save_text(path_of(path, "QN701"), self.to_json())


def _malformed(message: str) -> CompileError:
    return CompileError("QN207", one_line(message[:500]), fix=f"a plan has the keys {', '.join(Plan.model_fields)}")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError(f"a key is given twice among {', '.join(ascii(key) for key, _ in pairs)}")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise _malformed(f"{place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _malformed(f"the document: {error}") from None


def read_plan(source: Any) -> Plan:
    """A plan from what ``compile(plan=...)`` takes: None, a Plan, a dict, or a path.

    Raises:
        CompileError: QN207.
    """
    if source is None:
        return Plan()
    if isinstance(source, Plan):
        return source
    if isinstance(source, Mapping):
        try:
            return Plan.from_json(json.dumps(dict(source)))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, CompileError):
                raise
            raise _malformed(f"the dict: {error}") from None
    if isinstance(source, (str, os.PathLike)):
        return Plan.from_json(_read(path_of(source, "QN207")))
    raise CompileError("QN207", f"a {type(source).__name__} is not a plan", fix="pass a Plan, a dict, or a path")


def _read(path: Path) -> bytes:
    try:
        if path.is_file():  # and not a pipe or a device, which may never end
            with path.open("rb") as file:
                return file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise CompileError(
            "QN207", f"the plan file cannot be read: {error.strerror}", fix="pass a Plan, or the path of one"
        ) from None
    raise CompileError("QN207", f"there is no plan file {str(path)[:300]!r}", fix="pass a Plan, or the path of one")


def check_plan(plan: Plan, mesh: Mesh) -> None:
    """Raises: CompileError QN201, QN207 or QN208 where a plan does not fit a mesh or itself."""
    if plan.mesh and plan.mesh != dict(mesh.axes):
        raise CompileError(
            "QN207", f"the plan is for {Mesh(**plan.mesh)}, and the mesh is {mesh}", fix="compile on the plan's mesh"
        )
    check_schedule(plan.schedule, plan.virtual_stages)
    check_precision(plan.precision)
    if (plan.recompute == "auto") != (plan.activation_memory_budget is not None):
        raise CompileError(
            "QN207", f"recompute={plan.recompute!r} with activation_memory_budget={plan.activation_memory_budget}",
            fix='use recompute="auto" and activation_memory_budget together, in GiB',
        )  # fmt: skip
    if plan.zero and all(mesh[name] == 1 for name in plan.zero_axes):
        raise CompileError(
            "QN201",
            f"the plan has zero={plan.zero} over {' x '.join(plan.zero_axes) or 'no axis'}, which {mesh} does not have",
            fix="use zero=0, or give dp a size",
        )
    check_feature_fields(plan)
    for name in plan.experts:
        if mesh[name] == 1:
            raise CompileError(
                "QN201", f"the plan spreads experts over {name}, and {mesh} has no such axis", fix=f"give {name} a size"
            )
    for pattern, kinds in plan.parameters.items():
        for axis, text in kinds.items():
            if axis not in SHARDED_AXES:
                raise CompileError(
                    "QN201", f"the plan shards {pattern!r} over {axis!r}", fix=f"name one of {', '.join(SHARDED_AXES)}"
                )
            _type(pattern, text)


def expecting_documents(plan: Plan, lengths: tuple[int, ...]) -> Plan:
    """Return the plan with ``lengths`` as the documents that it expects; what it leaves open stays open."""
    expect = Expectations.model_validate({**plan.expect.model_dump(exclude_unset=True), "documents": lengths})
    return plan.changed({"expect": expect}, keep_open=True)


def precision_of(plan: Plan) -> Precision:
    """Return the dtypes of a plan."""
    compute = COMPUTE_DTYPES.get(plan.precision)
    reduce, sums = (SUM_DTYPES.get(word) for word in (plan.reduce_dtype, plan.sum_dtype))
    return Precision(compute, reduce, sums, plan.loss_scale if plan.precision == "fp16" else None)


def _type(pattern: str, text: str) -> AxisType:
    try:
        return parse_type(text)
    except ValueError as error:
        raise CompileError("QN207", f"parameters.{pattern}: {error}") from None


def fixed_types(
    plan: Plan, names: Iterable[str], mesh: Mesh, *, follows: bool = False
) -> dict[tuple[str, str], AxisType]:
    """(parameter, axis) -> type, for every name that a pattern of the plan matches. Later patterns win. ``follows``:
    the plan is that of another program, whose loss may have parameters of its own.

    Raises:
        CompileError: QN204 for a pattern that matches nothing, with the names that come closest.
    """
    names = list(names)
    types: dict[tuple[str, str], AxisType] = {}
    for pattern, kinds in plan.parameters.items():
        matched = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not matched and not follows:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise CompileError(
                "QN204",
                f"the plan's rule {pattern!r} matches no parameter",
                fix=f"did you mean {', '.join(close)}?" if close else "see program.named_parameters()",
            )
        for name in matched:
            types |= {(name, axis): _type(pattern, text) for axis, text in kinds.items() if mesh[axis] > 1}
    return types
