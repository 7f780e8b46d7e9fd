"""Memory of a function's results, established by running the function once on fake tensors (which have none)."""

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
from ..ops.catalog import collective_of, op_spec
from ..ops.copies import WAYS
from ..runtime.execute.comm import Comm
from ..runtime.state.products import adds_up
from ..runtime.transport.local import LocalTransport, LocalWorld
from .known_functions import KnownFunctions, Peaks
from .live_memory import LiveMemory
from .silent_transport import SilentTransport

# bytes that these take while they run, in addition to their results
WORKING: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"tiled_attention": working_bytes, "tiled_attention_backward": backward_working_bytes}
)
_OPAQUE = frozenset({"keep_mask", "local_noise", *WORKING, *WAYS})


def is_opaque(name: str) -> bool:
    """Return whether a method returns new memory, and is not run: its values depend on data, or take long."""
    collective = collective_of(name)
    return name in _OPAQUE or (collective is not None and collective.opaque)


@dataclass(frozen=True, slots=True)
class Output:
    """The memory of a value.

    Attributes:
        argument: position of the argument whose memory it shares, or -1.
        fresh: number of the piece of new memory that it is in, or -1.
        bytes: size of that memory.
        contiguous: whether the value is contiguous.
        host: whether the memory is of the host, or a file.
    """

    argument: int
    fresh: int
    bytes: int
    contiguous: bool
    host: bool = False


@dataclass(frozen=True)
class FunctionMemory:
    """The memory of one function, in bytes of the device.

    Attributes:
        outputs: the memory of each result.
        working: peak of the function's own values, without its arguments.
        parts: the same, less what is freed of arguments, for each part of the function that ends where a gradient is
            added up, with the bytes at that end; last, for the remainder.
        adds: for these ends, the value of the gradient's parameter, and the bytes of a gradient that is computed as a
            product before it is added (0 where a kernel adds it directly).
    """

    outputs: tuple[Output, ...]
    working: int
    parts: tuple[tuple[int, int], ...]
    adds: tuple[tuple[str, int], ...]


def storage(x: Tensor) -> int:
    """Return a key of the memory of a tensor."""
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
        stage_values: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad(), self.mode:
            for stage in program.stages:
                stage_values[stage.index] = self._forward(stage)
            training = any(stage.gradients for stage in program.stages)
            for stage in reversed(program.stages if training else ()):
                available = stage_values.pop(stage.index)
                later = set(stage.weight.dynamic) if stage.weight is not None else set()
                available |= self._run(stage, "backward", available, later)
                if stage.weight is not None:
                    self._run(stage, "weight", available)

    def _forward(self, stage: StageProgram) -> dict[str, Tensor]:
        available = {n.name: self._fake(values(n)[0]) for n in stage_inputs(stage)}
        available |= self._run(stage, "once", available)
        self.lasting |= {storage(x): x for x in available.values()}
        for name, cut in stage.slices.items():
            whole = available[cut.source] if cut.source in available else self._fake(self._source(cut.source))
            self.lasting[storage(whole)] = whole
            part = slices.slice_of_rank(whole, cut.dim, cut.parts, self.program.schedule.num_microbatches, 0)
            available[name] = part
            shared = storage(part) == storage(whole)
            self.sliced[stage.index, name] = _output(part, 0 if shared else -1, 0)
        return available | self._run(stage, "forward", available)

    def _source(self, name: str) -> Tensor:
        return values(next(n for n in self.program.source.graph.nodes if n.name == name))[0]

    def _run(
        self, stage: StageProgram, label: str, available: Mapping[str, Tensor], later: Set[str] = frozenset()
    ) -> dict[str, Tensor]:
        """Run one function of a stage, note its memory, and return its results by name.

        ``later``: arguments that another function still needs. Those of a forward are kept until it ends.
        """
        piece = stage.pieces[label]
        names = [*piece.static, *piece.dynamic]
        arguments = [available[name] if name in available else self._received(name) for name in names]
        needed = later | set(piece.static if label in ("backward", "weight") else names)
        lent = [x for name, x in zip(names, arguments, strict=True) if name in needed or storage(x) in self.lasting]
        comm = _comm(self.program, stage, processes=self.processes)
        away = [x for x in arguments if storage(x) in self.outside]
        results, peaks = self._functions(comm).run_once(
            piece.module.graph, arguments, lent, away, self.device,
            lambda: interpret(
                piece.module, arguments, comm, lent, away, self.device, self.program.expect.expert_imbalance
            ),
        )  # fmt: skip
        by_name = dict(zip(piece.outputs, results, strict=True))
        leaving = {node.name for node in piece.module.graph.nodes if _leaves(node)}
        self.outside |= {storage(x): x for name, x in by_name.items() if name in leaving}
        self.crossing |= by_name
        additions = [n for n in piece.module.graph.nodes if op_spec(n).accumulates is not None]
        adds = tuple((str(n.args[-1]), self._product(n, stage)) for n in additions)
        self.calls[stage.index, label] = FunctionMemory(self._outputs(arguments, results), *peaks, adds)
        return by_name

    def _outputs(self, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Output, ...]:
        """Return the memory of each result of a function."""
        positions = {storage(x): index for index, x in reversed(list(enumerate(arguments)))}
        on_device = any(x.device.type != "cpu" for x in arguments)
        fresh: dict[int, int] = {}
        outputs = []
        for x in results:
            memory = storage(x)
            argument = positions.get(memory, -1)
            number = fresh.setdefault(memory, len(fresh)) if argument < 0 else -1
            output = replace(_output(x, argument, number), host=memory in self.outside)
            is_count = on_device and x.device.type == "cpu" and not output.host  # such as numbers of rows
            outputs.append(replace(output, bytes=0) if is_count else output)
        return tuple(outputs)

    def _product(self, node: fx.Node, stage: StageProgram) -> int:
        """Return the bytes of a gradient that is computed before it is added; GPUs that are absent have the kernels."""
        if op_spec(node).accumulates != "product" or self.device is not None:
            return 0
        left, right = (values(n)[0] for n in node.all_input_nodes[1:3])
        spec = self.program.state[stage.gradients[str(node.args[-1])]]
        if adds_up(left.new_empty(0, dtype=spec.summed), left):
            return 0
        return left.shape[0] * right.shape[1] * left.itemsize

    def _functions(self, comm: Comm) -> KnownFunctions:
        sizes = tuple((name, size) for name, size in comm.mesh.axes if name != "pp")
        place = tuple((name, at) for name, at in comm.coordinate.items() if name != "pp")
        context = sizes, place, self.processes, self.program.expect.expert_imbalance
        return KnownFunctions(self.mode.results, context, is_opaque)

    def _received(self, name: str) -> Tensor:
        """Return a copy, in new memory, of what another stage computed."""
        return self._fake(self.crossing.get(name, self._source(name)))

    def _fake(self, x: Tensor) -> Tensor:
        return fake(x, self.device)


def _output(x: Tensor, argument: int, fresh: int) -> Output:
    return Output(argument, fresh, x.untyped_storage().nbytes(), x.is_contiguous())


def fake(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the same shape and strides in new memory, on ``device`` or where ``x`` is."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)


def stage_inputs(stage: StageProgram) -> list[fx.Node]:
    """Return the placeholders of the state and the whole-batch values that a stage's functions take."""
    wanted = {*stage.state, *stage.inputs}
    inputs: dict[str, fx.Node] = {}
    for piece in stage.pieces.values():
        for node in piece.module.graph.nodes:
            if node.op == "placeholder" and node.name in wanted:
                inputs.setdefault(node.name, node)
    return list(inputs.values())


class _DiscardGradients:
    """Accepts gradients and keeps none."""

    def accumulate(self, gradient: Tensor, value: str) -> None:
        pass

    def accumulate_matmul(self, left: Tensor, right: Tensor, value: str) -> None:
        pass


def _comm(program: DistributedProgram, stage: StageProgram, *, processes: bool) -> Comm:
    """Return the communication of the rank of a stage, as if all other ranks did the same."""
    mesh: Mesh = program.mesh
    rank = mesh.rank({"pp": program.schedule.placement[stage.index]})
    part: RankProgram = program.rank(rank)
    world = LocalWorld(mesh, program.sites)
    world.present = frozenset({rank})
    comm = Comm(SilentTransport(mesh, rank) if processes else LocalTransport(world, rank), mesh, part.coordinate)
    gradients = _DiscardGradients()
    comm.accumulate, comm.accumulate_matmul = gradients.accumulate, gradients.accumulate_matmul
    return comm


def interpret(
    module: GeneratedModule,
    arguments: Sequence[Tensor],
    comm: Comm,
    lent: Sequence[Tensor],
    away: Sequence[Tensor] = (),
    device: torch.device | None = None,
    imbalance: float = 1.0,
) -> tuple[tuple[Tensor, ...], Peaks]:
    """Return the outputs of a function, and the peaks of :class:`FunctionMemory`.

    Values die at their last use, as in generated code.

    Args:
        module: the function.
        arguments: its arguments after ``comm``.
        comm: the communication of its rank.
        lent: arguments that the caller keeps.
        away: arguments on the host.
        device: replaces the devices that the code names.
        imbalance: rows of this rank's experts, as a multiple of the mean.
    """
    dying = _last_uses(module.graph)
    env: dict[fx.Node, Any] = {}
    remaining = iter([comm, *arguments])
    borrowed = {storage(x) for x in arguments}
    on_gpu = any(x.device.type != "cpu" for x in arguments)
    memory = LiveMemory(borrowed, borrowed - {storage(x) for x in (*lent, *away)})
    for node in module.graph.nodes:
        passed: list[int] = []
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "output":
            memory.part()
            return tuple(env[n] for n in node.args[0]), (memory.working, tuple(memory.parts))
        else:
            if op_spec(node).accumulates is not None:
                memory.part()
            env[node], passed = _evaluate(node, env, device, memory, imbalance)
            memory.own |= _host_memory(node, env[node], on_gpu)
        memory.use(*_tensors(env[node]))  # no local may keep a tensor alive
        for storage_of_message in passed:
            memory.drop(storage_of_message)
        memory.note(_inside(node, env))
        for source in dying.get(node, ()):
            _drop(env.pop(source), memory)
    raise AssertionError("a generated function returns")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that it is the last to read."""
    last_users: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last_users[source] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last_users.items():
        dying.setdefault(node, []).append(source)
    return dying


def _drop(value: Any, memory: LiveMemory) -> None:
    for x in _tensors(value):
        memory.drop(storage(x))


def _host_memory(node: fx.Node, result: Any, on_gpu: bool) -> set[int]:
    """Return the memory of results that is not of the device: what is copied out, and such as counts of rows."""
    tensors = _tensors(result)
    memory = {storage(x) for x in tensors if on_gpu and x.device.type == "cpu"}
    return memory | {storage(tensors[0])} if op_spec(node).leaves_device else memory


def _inside(node: fx.Node, env: Mapping[fx.Node, Any]) -> int:
    """Return the bytes that an operator takes while it runs, in addition to its result."""
    working = WORKING.get(str(node.target))
    if working is None:
        return 0
    return working(*(env[n] if isinstance(n, fx.Node) else n for n in node.args[1:]))


def _leaves(node: fx.Node) -> bool:
    """Return whether the value ends up in memory of the host, or in a file."""
    start = node.all_input_nodes[-1] if op_spec(node).waits else node
    return op_spec(start).leaves_device


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):  # the usual case, and much faster
        return [value]
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _evaluate(
    node: fx.Node, env: Mapping[fx.Node, Any], device: torch.device | None, memory: LiveMemory, imbalance: float
) -> tuple[Any, list[int]]:
    """Return a node's result, and the memory that is in use for it alone."""
    args: Any
    kwargs: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if device is not None:
        args, kwargs = on_device((args, kwargs), device)
    if node.op == "call_function":
        return node.target(*args, **kwargs), []  # type: ignore[operator]
    receiver, *operands = args
    name = str(node.target).removeprefix("start_")
    if name == "wait":
        started = operands[0]
        return memory.communicate(started, ()) if callable(started) else (started[0], [])
    if is_opaque(name):
        result = _opaque_result(node, name, device, imbalance)
        # until it is waited for, what a start reads and what it returns are alive
        return (result if name == node.target else (result, operands)), []
    method = partial(getattr(receiver, str(node.target)), **kwargs)
    return memory.communicate(method, operands, same=name == "arrived")


def _opaque_result(node: fx.Node, name: str, device: torch.device | None, imbalance: float) -> Any:
    """Return new tensors like those that the graph says a node returns."""
    template = facts(node).value
    result = fake(template, device) if isinstance(template, Tensor) else tuple(fake(x, device) for x in template)
    if name == "dispatch" and isinstance(result, Tensor):
        return result.new_empty([math.ceil(imbalance * result.shape[0]), *result.shape[1:]])
    return result
