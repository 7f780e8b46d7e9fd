"""Which memory the results of a function take: found by running it once on fake tensors, which have no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import pytree, storage_key
from ..core import slices
from ..core.absent_gpu import CPU, on_device
from ..core.annotations import facts, values
from ..core.mesh import Mesh
from ..ir.distributed_program import DistributedProgram, RankProgram, StageProgram
from ..ir.generated import GeneratedModule
from ..ops.attention.tiled import backward_working_bytes, working_bytes
from ..ops.collectives import COLLECTIVES
from ..ops.copies import WAYS
from ..runtime.execute.comm import Comm
from ..runtime.state.products import adds_up
from ..runtime.transport.local import LocalTransport, LocalWorld
from .known_functions import KnownFunctions, Peaks
from .live_memory import LiveMemory
from .silent_transport import SilentTransport

# What these take while they run, beside what they return
WORKING: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"tiled_attention": working_bytes, "tiled_attention_backward": backward_working_bytes}
)
# What these return is new, whatever it is; their values depend on data, or take long.
OPAQUE = frozenset(
    {"keep_mask", "local_noise", *WORKING, *WAYS, *(name for name, one in COLLECTIVES.items() if one.opaque)}
)
ADDS = frozenset({"accumulate", "accumulate_matmul"})
LEAVING = frozenset(name for name, way in WAYS.items() if way.startswith("to "))


@dataclass(frozen=True, slots=True)
class Output:
    """Where a value lies: in the memory of an argument (its position), or in the ``fresh``-th piece of new memory.
    ``host``: that is of the host, or in a file."""

    argument: int
    fresh: int
    bytes: int
    contiguous: bool
    host: bool = False


@dataclass(frozen=True)
class FunctionMemory:
    """Memory of one function: its outputs, and how much its own values take at most while it runs, beyond its
    arguments, of the device (``working``). ``parts``: the same, less what is freed of arguments, of each part that ends
    where a gradient is added up, and what there is then, and of the rest; ``adds``: the values of these gradients'
    parameters, and what a gradient takes that is a product which no kernel adds where it is added up."""

    outputs: tuple[Output, ...]
    working: int
    parts: tuple[tuple[int, int], ...]
    adds: tuple[tuple[str, int], ...]


def storage(x: Tensor) -> int:
    """What tells memory apart."""
    return storage_key(x)


class Footprints:
    """The memory of every function of a program, and of the slices of microbatches.

    The functions run once, in the order of the first microbatch, so that each sees its arguments as the ranks would;
    those for a GPU that this machine does not have, with fake tensors of the CPU, which are as large.
    ``processes``: each rank is a process, whose messages have buffers.
    """

    def __init__(self, program: DistributedProgram, *, processes: bool = False) -> None:
        self.program, self.processes = program, processes
        self.calls: dict[tuple[int, str], FunctionMemory] = {}
        self.sliced: dict[tuple[int, str], Output] = {}
        self.mode = program.source.local.mode
        self.device = None if program.source.local.staged.sharded.program.absent is None else CPU
        self.crossing: dict[str, Tensor] = {}
        self.lasting: dict[int, Tensor] = {}  # what stays for the whole step, by its memory: views free nothing
        self.outside: dict[int, Tensor] = {}  # what lies in memory of the host, or in files
        known: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad(), self.mode:
            for stage in program.stages:
                known[stage.index] = self._forward(stage)
            training = any(stage.gradients for stage in program.stages)
            for stage in reversed(program.stages if training else ()):
                here = known.pop(stage.index)
                later = set(stage.weight.dynamic) if stage.weight is not None else set()
                here |= self._run(stage, "backward", here, later)
                if stage.weight is not None:
                    self._run(stage, "weight", here)

    def _forward(self, stage: StageProgram) -> dict[str, Tensor]:
        known = {n.name: self._fake(values(n)[0]) for n in stage_inputs(stage)}
        known |= self._run(stage, "once", known)
        self.lasting |= {storage(x): x for x in known.values()}
        for name, cut in stage.slices.items():
            whole = known[cut.source] if cut.source in known else self._fake(self._source(cut.source))
            self.lasting[storage(whole)] = whole
            known[name] = slices.take(whole, cut.dim, cut.parts, self.program.schedule.num_microbatches, 0)
            shared = storage(known[name]) == storage(whole)
            self.sliced[stage.index, name] = _output(known[name], 0 if shared else -1, 0)
        return known | self._run(stage, "forward", known)

    def _source(self, name: str) -> Tensor:
        return values(next(n for n in self.program.source.graph.nodes if n.name == name))[0]

    def _run(
        self, stage: StageProgram, label: str, known: Mapping[str, Tensor], later: Set[str] = frozenset()
    ) -> dict[str, Tensor]:
        """``later``: arguments that another function still needs. Those of a forward are kept until it ends."""
        piece = stage.pieces[label]
        names = [*piece.static, *piece.dynamic]
        given = [known[name] if name in known else self._received(name) for name in names]
        kept = later | set(piece.static if label in ("backward", "weight") else names)
        lent = [x for name, x in zip(names, given, strict=True) if name in kept or storage(x) in self.lasting]
        comm = _comm(self.program, stage, processes=self.processes)
        away = [x for x in given if storage(x) in self.outside]
        made, peaks = self._functions(comm).run(
            piece.module.graph, given, lent, away, self.device,
            lambda: interpret(piece.module, given, comm, lent, away, self.device, self.program.expert_imbalance),
        )  # fmt: skip
        left = {node.name for node in piece.module.graph.nodes if _leaves(node)}
        self.outside |= {storage(x): x for name, x in zip(piece.outputs, made, strict=True) if name in left}
        places = {storage(x): index for index, x in reversed(list(enumerate(given)))}
        fresh: dict[int, int] = {}
        outputs = []
        for name, x in zip(piece.outputs, made, strict=True):
            where = storage(x)
            argument = places.get(where, -1)
            number = fresh.setdefault(where, len(fresh)) if argument < 0 else -1
            found = replace(_output(x, argument, number), host=where in self.outside)
            told = x.device.type == "cpu" and not found.host and any(one.device.type != "cpu" for one in given)
            outputs.append(replace(found, bytes=0) if told else found)  # the host's own, such as counts of rows
            self.crossing[name] = x
        nodes = [n for n in piece.module.graph.nodes if n.op == "call_method" and n.target in ADDS]
        adds = tuple((str(n.args[-1]), self._product(n, stage)) for n in nodes)
        self.calls[stage.index, label] = FunctionMemory(tuple(outputs), *peaks, adds)
        return dict(zip(piece.outputs, made, strict=True))

    def _product(self, node: fx.Node, stage: StageProgram) -> int:
        """GPUs that are not here have the kernels."""
        if node.target != "accumulate_matmul" or self.device is not None:
            return 0
        left, right = (values(n)[0] for n in node.all_input_nodes[1:3])
        spec = self.program.state[stage.gradients[str(node.args[-1])]]
        if adds_up(left.new_empty(0, dtype=spec.summed), left):
            return 0
        return left.shape[0] * right.shape[1] * left.itemsize

    def _functions(self, comm: Comm) -> KnownFunctions:
        sizes = tuple((name, size) for name, size in comm.mesh.axes if name != "pp")
        place = tuple((name, at) for name, at in comm.coordinate.items() if name != "pp")
        where = sizes, place, self.processes, self.program.expert_imbalance
        return KnownFunctions(self.mode.results, where, OPAQUE)

    def _received(self, name: str) -> Tensor:
        """From another stage: as that one made it, in memory of its own."""
        return self._fake(self.crossing.get(name, self._source(name)))

    def _fake(self, x: Tensor) -> Tensor:
        return fake(x, self.device)


def _output(x: Tensor, argument: int, fresh: int) -> Output:
    return Output(argument, fresh, x.untyped_storage().nbytes(), x.is_contiguous())


def fake(x: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of the same shape and strides, in memory of its own; on ``device``, or where ``x`` is."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)


def stage_inputs(stage: StageProgram) -> list[fx.Node]:
    """The state and the whole-batch values that a stage's functions take."""
    wanted = {*stage.state, *stage.inputs}
    found: dict[str, fx.Node] = {}
    for piece in stage.pieces.values():
        for node in piece.module.graph.nodes:
            if node.op == "placeholder" and node.name in wanted:
                found.setdefault(node.name, node)
    return list(found.values())


class _Quiet:
    """Takes gradients, and keeps none."""

    def accumulate(self, gradient: Tensor, value: str) -> None:
        pass

    def accumulate_matmul(self, left: Tensor, right: Tensor, value: str) -> None:
        pass


def _comm(program: DistributedProgram, stage: StageProgram, *, processes: bool) -> Comm:
    """What the rank of a stage calls, where all other ranks do the same."""
    mesh: Mesh = program.mesh
    rank = mesh.rank({"pp": program.schedule.placement[stage.index]})
    part: RankProgram = program.rank(rank)
    world = LocalWorld(mesh, program.sites)
    world.present = frozenset({rank})
    comm = Comm(SilentTransport(mesh, rank) if processes else LocalTransport(world, rank), mesh, part.coordinate)
    quiet = _Quiet()
    comm.accumulate, comm.accumulate_matmul = quiet.accumulate, quiet.accumulate_matmul
    return comm


def interpret(
    module: GeneratedModule,
    given: Sequence[Tensor],
    comm: Comm,
    lent: Sequence[Tensor],
    away: Sequence[Tensor] = (),
    device: torch.device | None = None,
    imbalance: float = 1.0,
) -> tuple[tuple[Tensor, ...], Peaks]:
    """The outputs, and the peaks of :class:`FunctionMemory`. Values die at their last use, as in generated code;
    ``lent``: arguments that the caller keeps; ``away``: those on the host; ``device``: in the place of those that the
    code names; ``imbalance``: how many times their average of rows comes to the experts of this rank."""
    last: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    dies: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        dies.setdefault(node, []).append(source)
    env: dict[fx.Node, Any] = {}
    arguments = iter([comm, *given])
    own = {storage(x) for x in given}
    elsewhere = any(x.device.type != "cpu" for x in given)
    memory = LiveMemory(own, own - {storage(x) for x in (*lent, *away)})
    for node in module.graph.nodes:
        passed: list[int] = []
        if node.op == "placeholder":
            env[node] = next(arguments)
        elif node.op == "output":
            memory.part()
            return tuple(env[n] for n in node.args[0]), (memory.working, tuple(memory.parts))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if device is not None:
                args, kwargs = on_device((args, kwargs), device)
            if node.target in ADDS:
                memory.part()
            env[node], passed = _evaluate(node, args, kwargs, device, memory, imbalance)
            made = _tensors(env[node])
            if node.target in LEAVING:
                memory.own.add(storage(made[0]))  # nothing of the device's
            memory.own |= {storage(x) for x in made if elsewhere and x.device.type == "cpu"}  # such as counts of rows
            del made
            del args, kwargs
        memory.use(*_tensors(env[node]))  # no variable here may keep one
        for where in passed:
            memory.drop(where)
        memory.note(_inside(node, env))
        for source in dies.get(node, ()):
            gone = env.pop(source)
            for where in map(storage, _tensors(gone)):
                memory.drop(where)
            del gone
    raise AssertionError("a generated function returns")


def _inside(node: fx.Node, env: Mapping[fx.Node, Any]) -> int:
    """What an operator takes while it runs, beside what it returns."""
    return (
        WORKING[str(node.target)](*(env[n] if isinstance(n, fx.Node) else n for n in node.args[1:]))
        if node.target in WORKING
        else 0
    )


def _leaves(node: fx.Node) -> bool:
    """Whether this is a value in memory of the host, or in a file, at last."""
    made = node.all_input_nodes[-1] if node.target == "wait" else node
    return made.op == "call_method" and made.target in LEAVING


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):  # mostly, and much faster
        return [made]
    return [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]


def _evaluate(
    node: fx.Node, args: Any, kwargs: Any, device: torch.device | None, memory: LiveMemory, imbalance: float
) -> tuple[Any, list[int]]:
    """What a node makes, and the memory that is in use for it alone."""
    if node.op == "call_function":
        return node.target(*args, **kwargs), []  # type: ignore[operator]
    receiver, *rest = args
    name = str(node.target).removeprefix("start_")
    if name == "wait":
        begun = rest[0]
        return memory.communicate(begun, ()) if callable(begun) else (begun[0], [])
    if name in OPAQUE:
        shapes = facts(node).value
        made = fake(shapes, device) if isinstance(shapes, Tensor) else tuple(fake(x, device) for x in shapes)
        if name == "dispatch" and isinstance(made, Tensor):
            made = made.new_empty([math.ceil(imbalance * made.shape[0]), *made.shape[1:]])
        # until it is waited for, what a start reads and what it makes are alive
        return (made if name == node.target else (made, rest)), []
    return memory.communicate(partial(getattr(receiver, str(node.target)), **kwargs), rest, same=name == "arrived")
