"""Everything that the compiler knows of one operator, apart from its sharding rule (:mod:`.rules`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from ..compat.torch import OpOverload
from .collectives import CollectiveSpec
from .copies import Way
from .derivatives.user_derivatives import End
from .rules.notation import Work

CastStep = Literal["largest", "scale", "cast"]
Routing = Literal["plan", "dispatch", "combine", "group plan", "group", "ungroup"]
FusedAs = Literal["pointwise", "reduction"]
FUSED: tuple[FusedAs, ...] = get_args(FusedAs)


@dataclass(frozen=True)
class Product:
    """A product of rows with a matrix: the positions of its operands among the arguments.

    Attributes:
        rows: the position of the rows, [..., in].
        weight: the position of the matrix, [in, out].
        bias: the position of what is added, if anything may be; it may be left out where it comes last.
        transposed: whether the matrix is [out, in].
        weight_dims: the dims of the matrix, 2 or, with one for each batch, 3; None: either.
    """

    rows: int = 0
    weight: int = 1
    bias: int | None = None
    transposed: bool = False
    weight_dims: int | None = 2

    def operands(self, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the rows, the matrix and the bias (None: there is none) among the arguments of a call."""
        bias = args[self.bias] if self.bias is not None and self.bias < len(args) else None
        return args[self.rows], args[self.weight], bias


@dataclass(frozen=True)
class Decomposition:
    """An operator in operators of torch, for compilers that make one kernel of several operators.

    Attributes:
        function: takes what the operator takes, and returns the same.
        on_gpus: whether it is for GPUs alone.
    """

    function: Callable[..., Tensor]
    on_gpus: bool = False


@dataclass(frozen=True)
class Attention:
    """A kind of attention.

    Attributes:
        backward: whether it computes gradients; the gradient of the result is its first input then.
        positions: whether keys of all ranks travel in a ``"ring"``, or a rank computes ``"tiles"`` of its positions;
            None: it has whole sequences.
        fused: whether it is one of torch's kernels for some device.
        of_models: whether models call it, for queries and keys of the same sequences.
        masked: whether its mask is a function of positions and ids.
    """

    backward: bool = False
    positions: Literal["ring", "tiles"] | None = None
    fused: bool = False
    of_models: bool = False
    masked: bool = False

    @property
    def splits_positions(self) -> bool:
        """Return whether ranks that have other positions run another operator for it: a ring, or tiles."""
        return self.of_models and self.masked


@dataclass(frozen=True)
class OpSpec:
    """The facts of an operator. Passes, prices, checks and printers ask these instead of comparing operators.

    Attributes:
        work: what it is priced as; None where a rule or torch's tags say it (:func:`.rules.work.work_of`).
        priced_as: the operator as which it is priced, if it is not its own: it reads and writes rows, experts and
            features as that one does.
        operand_dtype: whether it computes in the dtype of its first input, and not in that of its result.
        autocast: the bits in which mixed precision computes it, 16 or 32; None: those of its inputs.
        keep: whether recomputing it takes longer than a few passes over memory.
        save: whether it is never recomputed, as it is small and the host may have to wait for it.
        fused_as: what compilers take it apart into and fuse, beyond what torch's tags say.
        consists_of: the same in operators of torch, where compilers would not know it, or know a slower form.
        cast_step: its step of a cast to fewer bits, with scales: ``"largest"`` finds the largest number of each block,
            ``"scale"`` makes a scale of it, ``"cast"`` divides by scales and rounds. All numbers of a block count, so
            padding has to be zeros; zeros stay zeros, whatever the scale.
        casts: whether it copies its input to another dtype or device, and computes nothing.
        user_derivative: which end of a derivative that the user wrote it is (:mod:`.derivatives.user_derivatives`):
            ``"tangent"`` brings the gradient that arrives, ``"declaration"`` says what the gradient of its input is and
            has no value, ``"end"`` passes its first input on once the others are declared.
        converts: whether it is the typed move of a value over an axis, which is lowered to a collective or to nothing.
        cuts_microbatch: whether it is a microbatch's part of a value of the whole batch.
        shares: whether it makes an equal term of a sum, for each rank, of what all ranks have.
        by_expert: whether each row is multiplied by the weights of the expert that it names, so that rows may travel to
            the ranks of their experts. Its inputs: rows, numbers of experts, then what has a part for each expert.
        no_copies: why ranks can have no copies of such a layer's experts; empty if they can.
        exchanges: whether its ranks communicate wherever an axis splits it.
        unpadded: whether a rank's part of its inputs may have no padding.
        routing: what it does with the rows of such layers: ``"plan"`` says to which ranks they go, ``"dispatch"`` sends
            them (or begins to), ``"combine"`` returns them; ``"group plan"``, ``"group"`` and ``"ungroup"`` do the same
            with the order in which a rank has them.
        product: where its operands are, if it multiplies rows by a matrix.
        permutes: whether it permutes the dims of its input: ``"two"`` of them, or ``"any"``.
        accumulates: whether generated code adds to a gradient with it: a ``"value"``, or the ``"product"`` of two.
        adds: whether it adds two tensors, or a tensor and a number.
        reshapes: whether its result is its input in another shape, of as many elements in the same order.
        slices: whether it takes a range of one dim: (x, dim, start, end, step).
        splits: what it takes apart along a dim: parts of certain ``"sizes"``, or ``"each"`` index.
        joins: whether it concatenates values along a dim.
        relayouts: whether it returns its input in a memory format, and copies only where that is another.
        clones: whether it copies its input, as it is or in another memory format.
        aliases: whether its result is its input, in the same memory.
        detaches: whether no gradient flows through it: its result is a value ``"of its own"``, or ``"in place"``.
        new_memory: whether no result ever lies in an input's memory; others may return an input with nothing to do.
        contiguous: whether its result is contiguous, whatever it reads.
        attention: what kind of attention it is, if any.
        plans_ring: whether it plans which rank of a ring has which positions.
        random: what it draws, if it draws random numbers, which are those of the unsplit model: the ``"mask"`` of a
            dropout, or ``"numbers"``.
        looks_up: whether it reads the rows of a table (its first input) that ids name: the gradient of the table is a
            sum of gradients of rows.
        caches: the positions of the caches that it writes to.
        finds: whether its results are the positions of what is not zero, as many as there are.
        convolves: whether it is a convolution, whose filters move over an image.
        reads_result_size: whether it reads no more of its first input than its result has: rows of a table.
        shape_only: the position of the tensor input of which it reads the shape alone.
        reads_twice: whether a second kernel reads its first two inputs again, for gradients of a weight and a bias.
        inner_gradient: which mark of ``torch.autograd.grad`` it is (:mod:`.derivatives.inner_gradients`).
        reduces: what it makes of all that it reduces, if it does so: a ``"sum"``, a ``"mean"``, or sums by ``"bins"``.
        averages: over what a loss takes the mean, if it is one: labels that count, ``"elements"``, or ``"rows"``.
        slice_gradient: whether it is the gradient of a slice: zeros, but for what the slice took.
        takes_strides: whether strides or offsets in memory are among its arguments.
        overwrites: whether it writes to all of its first argument, and reads nothing of it.
        keeps_zero: whether it is 0 where all that it reads is 0, with a finite derivative there.
        adds_at_indices: whether it adds elements of a source to those of its first input at indices, each of them.
        collective: the collective that it is, or begins; None: it exchanges nothing.
        way: the link that it, or the copy that it begins, takes between the device and where it keeps values meanwhile.
        start: what begins it, where it can run beside other work.
        under_way: whether it only begins something: its result is no value, and one ``wait`` alone reads it.
        waits: whether it returns the result of what has begun.
        on_rank: whether generated code calls the runtime for it: it communicates, copies, or depends on the rank's
            coordinate, the step or the microbatch.
        transpose: what computes its gradient, if it is linear in its first input: it takes the same other arguments.
        takes_size: whether its first arguments are a value, an axis, and the size of that.
    """

    work: Work | None = None
    priced_as: OpOverload | None = None
    operand_dtype: bool = False
    autocast: int | None = None
    keep: bool = False
    save: bool = False
    fused_as: FusedAs | None = None
    consists_of: Decomposition | None = None
    cast_step: CastStep | None = None
    casts: bool = False
    user_derivative: End | None = None
    converts: bool = False
    cuts_microbatch: bool = False
    shares: bool = False
    by_expert: bool = False
    no_copies: str = ""
    exchanges: bool = False
    unpadded: bool = False
    routing: Routing | None = None
    product: Product | None = None
    permutes: Literal["two", "any"] | None = None
    accumulates: Literal["value", "product"] | None = None
    adds: bool = False
    reshapes: bool = False
    slices: bool = False
    splits: Literal["sizes", "each"] | None = None
    joins: bool = False
    relayouts: bool = False
    clones: bool = False
    aliases: bool = False
    detaches: Literal["of its own", "in place"] | None = None
    new_memory: bool = False
    contiguous: bool = False
    attention: Attention | None = None
    plans_ring: bool = False
    random: Literal["mask", "numbers"] | None = None
    looks_up: bool = False
    caches: tuple[int, ...] = ()
    finds: bool = False
    convolves: bool = False
    reads_result_size: bool = False
    shape_only: int | None = None
    reads_twice: bool = False
    inner_gradient: Literal["start", "gradient"] | None = None
    reduces: Literal["sum", "mean", "bins"] | None = None
    averages: Literal["labels", "elements", "rows"] | None = None
    slice_gradient: bool = False
    takes_strides: bool = False
    overwrites: bool = False
    keeps_zero: bool = False
    adds_at_indices: bool = False
    collective: CollectiveSpec | None = None
    way: Way | None = None
    start: OpOverload | None = None
    under_way: bool = False
    waits: bool = False
    on_rank: bool = False
    transpose: OpOverload | None = None
    takes_size: bool = False

    @property
    def is_typed_move(self) -> bool:
        """Return whether it changes only the type of a value over an axis: what a rank has of it."""
        return self.converts or self.cuts_microbatch or self.shares

    @property
    def reorders_rows(self) -> bool:
        """Return whether it sends or groups the rows of a layer, which its transpose undoes."""
        return self.routing in ("dispatch", "group") and not self.under_way

    @property
    def restores_rows(self) -> bool:
        """Return whether it undoes what another one has done with the rows of a layer."""
        return self.routing in ("combine", "ungroup") and not self.under_way

    @property
    def communicates(self) -> bool:
        """Return whether it is a collective, or begins one."""
        return self.collective is not None

    @property
    def slice_at(self) -> Literal["input", "result"] | None:
        """Return which side of a collective that is fused with a matmul is one rank's slice; None for others."""
        return None if self.collective is None else self.collective.slice_at

    @property
    def is_copy(self) -> bool:
        """Return whether it is a copy from the device to another place, or back."""
        return self.way is not None and not self.under_way

    @property
    def copies_away(self) -> bool:
        """Return whether it is a copy to a place from which another copy brings the value back."""
        return self.is_copy and self.leaves_device

    @property
    def leaves_device(self) -> bool:
        """Return whether it takes a value away from the device, or begins to."""
        return self.way in ("to host", "to disk")

    @property
    def gathers(self) -> bool:
        """Return whether it is a gather that can run beside other work: of a value, or of several."""
        return self.collective is not None and self.collective.price == "all_gather" and self.start is not None

    @property
    def scatters(self) -> bool:
        """Return whether it is a reduce-scatter, of a value or of several."""
        return self.collective is not None and self.collective.price == "reduce_scatter" and self.start is not None

    @property
    def reads_named_rows(self) -> bool:
        """Return whether ids name the rows, or the experts, of an input that it reads."""
        return self.looks_up or self.by_expert
