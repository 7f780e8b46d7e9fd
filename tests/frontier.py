"""The plain module and the program of it, trained side by side.

Used by the tests of what lies between a module and its program: modes, hooks, custom derivatives, state that forward
changes, values that ranks disagree about. The module is the specification; nothing of the compiler is asked here but
which dropout masks a program draws.
"""

from __future__ import annotations

import gc
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintnet
from quintnet_compiler.equivalence.reference import same_numbers

LAYOUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"dp1": {"dp": 1}, "dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}
)
TWO_RANKS: Mapping[str, Mapping[str, int]] = MappingProxyType({name: LAYOUTS[name] for name in ("dp2", "tp2", "pp2")})
LIMIT = 1e-9  # relative to the largest element of a tensor; a floor is 1e-3 of the largest of all gradients, or values
STEPS = 3
SEED = 0  # of dropout masks

Build = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A module and how it trains.

    ``build`` makes the module, the same one at every call (it is seeded); or, where the loss function uses trainable
    modules or parameters, a triple: the module, its loss function, and those by name (a loss function that is a
    module itself need not be among them). ``batch``: a tuple or a dict, or ``batch(step)``. ``before(module, step)``
    changes the module in front of a step; ``after(program, parameters)`` the gradients behind it (the program is None
    for the plain module). ``refuses``: layouts that are refused, and the code of the error that says so; ``apart``:
    those that are refused on processes alone; ``cause``: a regular expression that its text matches. ``options`` are
    those of :func:`quintnet.compile`. ``others``: further loss functions, each with a program of its own on the same
    module, compiled for the batch of its own first step: steps take turns. ``evaluates``: between two steps both sides
    evaluate. ``of_module``: the program's optimizer has the parameters of the module.
    """

    build: Build
    batch: Any
    loss_fn: Callable[..., Tensor] | None = None
    before: Callable[[nn.Module, int], None] | None = None
    refuses: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[Callable[..., Tensor]] = ()
    evaluates: bool = False
    after: Callable[[Any, Sequence[Tensor]], None] | None = None
    apart: Mapping[str, str] = field(default_factory=dict)
    cause: str = ""
    of_module: bool = False


@dataclass(frozen=True)
class Verdict:
    """What training side by side found. ``kind``: ``"equal"``, ``"refused"`` (then ``error``), ``"different"`` or
    ``"raw"`` (an exception that is not a QuintNetError). ``seen``: the tensors of this process that were compared.
    ``worst``: the largest difference."""

    kind: str
    text: str = ""
    code: str = ""
    seen: frozenset[str] = frozenset()
    expected: frozenset[str] = frozenset()
    error: BaseException | None = field(default=None, compare=False)
    worst: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.text}".strip()


def trains_equally(
    build: Build,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    meshes: Mapping[str, Mapping[str, int]] = LAYOUTS,
    *,
    before: Callable[[nn.Module, int], None] | None = None,
    refuses: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> dict[str, Verdict]:
    """Three steps of SGD with momentum of the module and of its program, in float64, on each of ``meshes`` in this
    process: losses, every gradient of each step (zeros for None), parameters, buffers and the batch are equal.

    ``refuses`` (as in :class:`Case`) is checked too, and never covers all of ``meshes``. The verdicts, by layout.
    """
    case = Case(build, batch, loss_fn, before, refuses, options)
    found = {name: compare(case, axes) for name, axes in meshes.items()}
    report(case, found)
    return found


def refused(
    build: Build,
    batch: Any,
    code: str,
    *,
    cause: str = "",
    loss_fn: Callable[..., Tensor] | None = None,
    meshes: Mapping[str, Mapping[str, int]] = LAYOUTS,
    before: Callable[[nn.Module, int], None] | None = None,
    **options: Any,
) -> dict[str, str]:
    """On each of ``meshes``, compiling or a step raises ``code`` with ``cause`` (a regular expression) in its text,
    and until then the program does what the module does. The texts, by layout."""
    texts = {}
    for name, axes in meshes.items():
        found = compare(Case(build, batch, loss_fn, before, {}, options), axes)
        assert found.kind == "refused", f"{name}: expected {code}, found {found}"
        assert found.code == code, f"{name}: expected {code}, found {found}"
        assert re.search(cause, found.text), f"{name}: {cause!r} is not in: {found.text}"
        texts[name] = found.text
    return texts


def on_processes(
    cases: Callable[[], Mapping[str, Case]],
    *,
    meshes: Mapping[str, Mapping[str, int]] = TWO_RANKS,
    where: Mapping[str, str] = MappingProxyType({}),
    timeout: float = 240,
) -> dict[str, dict[str, Verdict]]:
    """All cases on all ``meshes`` (those in ``where`` on that layout alone), which have equally many ranks, in one
    launch over gloo. ``cases``: a function at the top level of a module. The verdicts, by case and layout.
    """
    (size,) = {math.prod(axes.values()) for axes in meshes.values()}
    ranks = quintnet.launch(_all_here, size, (cases, dict(meshes), dict(where)), timeout=timeout, collective_timeout=60)
    return {
        name: {where: joined([rank[name][where] for rank in ranks]) for where in found}
        for name, found in ranks[0].items()
    }


def report(case: Case, found: Mapping[str, Verdict]) -> None:
    """Asserts that all layouts are equal, but those that the case says are refused."""
    equal = [where for where, verdict in found.items() if verdict.kind == "equal"]
    lines = [line for where, verdict in found.items() if (line := otherwise(case, where, verdict))]
    assert not lines, "\n".join([*lines, f"equal: {', '.join(equal) or 'none'}"])
    assert equal, f"nothing was compared: {dict(found)}"


def otherwise(case: Case, where: str, verdict: Verdict, *, processes: bool = False) -> str:
    """What is not as the case says, "" if all is."""
    code = {**case.refuses, **(case.apart if processes else {})}.get(where, "")
    if code:
        said = verdict.kind == "refused" and verdict.code == code and re.search(case.cause, verdict.text)
    else:
        said = verdict.kind == "equal"
    expected = f"{code} {case.cause!r}" if code else "equal"
    return "" if said else f"{where}: expected {expected}, found {verdict}"


def compare(case: Case, axes: Mapping[str, int], *, limit: float = LIMIT, each_step: bool = False) -> Verdict:
    """Train both; the first difference, or the refusal, or that all is equal. A refusal leaves the module as it was.

    ``each_step``: the program's parameters and buffers become the plain module's in front of each step, so that what
    rounding did to a step is not in the next one. Large networks with batch norms need it: three steps of ResNet-50
    make of a change by 2e-16 one by 1e-8, in the plain module alone.
    """
    sides = _Sides(*_built(case), *_built(case)[:2])
    try:
        return _compare(case, axes, sides, limit, each_step)
    except quintnet.QuintNetError as error:
        now = {} if torch.distributed.is_initialized() else _values(sides.model)
        changed = [n for n, x in now.items() if n not in sides.kept or not _gap(x, sides.kept[n], 0.0) <= LIMIT]
        if changed:
            return Verdict("different", f"refused, and {', '.join(changed)} changed nevertheless: {error}")
        return Verdict("refused", str(error), error.code, error=error)
    except AssertionError:
        raise
    except Exception as error:
        return Verdict("raw", f"{type(error).__name__}: {str(error)[:600]}", error=error)


@dataclass
class _Sides:
    """``kept``: what the compiled module holds by right."""

    plain: nn.Module
    loss_of: Callable[..., Tensor] | None
    beside: Mapping[str, nn.Module | nn.Parameter]
    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    kept: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = _values(self.model)


def _compare(case: Case, axes: Mapping[str, int], sides: _Sides, limit: float, each_step: bool) -> Verdict:
    plain, model, beside = sides.plain, sides.model, sides.beside
    options = {"seed": SEED, **case.options}
    mesh = quintnet.Mesh(**axes)
    programs = [
        quintnet.compile(model, mesh, _batch(case, i), loss_fn=one, **options)
        for i, one in enumerate((sides.loss_fn, *case.others))
    ]
    losses = (sides.loss_of, *case.others)
    theirs = dict(plain.named_parameters())
    for name, one in beside.items():
        more = {name: one} if isinstance(one, nn.Parameter) else {f"{name}.{n}": p for n, p in one.named_parameters()}
        theirs |= more
    ours = {_known(name, theirs): p for program in programs for name, p in program.named_parameters()}
    trained = list(model.parameters() if case.of_module else ours.values())
    none = [nn.Parameter(torch.zeros(()))]  # a stage may have no parameters
    optimizers = [torch.optim.SGD(ps or none, lr=0.05, momentum=0.9) for ps in (list(theirs.values()), trained)]
    seen, differences, worst = set[str](), list[str](), 0.0

    def same(what: str, name: str, found: Tensor, expected: Tensor, floor: float = 0.0) -> None:
        nonlocal worst
        seen.add(f"{what} {name}".strip())
        gap = _gap(_full(found), expected, floor)
        worst = max(worst, gap)
        if not gap <= limit:
            differences.append(f"step {step}: {what} {name} differs by {gap:.1e}")

    for step in range(STEPS):
        program, loss_of = programs[step % len(programs)], losses[step % len(losses)]
        if case.before is not None:
            case.before(plain, step)
            case.before(model, step)
            sides.kept = _values(plain)
        if each_step:
            model.load_state_dict(plain.state_dict())
        given, asked = _batch(case, step), _batch(case, step)
        random.seed(step)
        torch.manual_seed(step)
        expected, parts = torch.zeros(()).double(), _parts(asked, axes, options)
        for i, part in enumerate(parts):
            with same_numbers(options["seed"], step // len(programs) * len(parts) + i):  # each counts its own steps
                one = _plainly(lambda: _loss(plain, loss_of, part)) / len(parts)  # noqa: B023 -- called at once
                _plainly(one.backward)
            expected = expected + one.detach()
        random.seed(step)
        torch.manual_seed(step)
        loss = program.step(given)
        same("loss", "", loss, expected)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.items()}
        floor = 1e-3 * _largest(gradients.values())
        for name, parameter in ours.items():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            same("gradient", name, grad, gradients[name], floor)
        if case.after is not None:
            case.after(None, [p for p in theirs.values() if p.grad is not None])
            case.after(program, [p for p in ours.values() if p.grad is not None])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        sides.kept = _values(plain)
        floor = 1e-3 * _largest(theirs.values())  # a bias in front of a norm is nothing but rounding
        for name, parameter in ours.items():
            same("parameter", name, parameter, theirs[name], floor)
        if case.evaluates and step == 1:
            given, asked = _batch(case, 7), _batch(case, 7)
            random.seed(step)
            with same_numbers(options["seed"], step // len(programs) + 1):
                expected = _evaluated(plain, loss_of, asked)
            random.seed(step)
            same("evaluation", "", program.evaluate(given), expected)
        there = dict(model.named_buffers())
        floor = 1e-3 * _largest(x for x in plain.buffers() if x.is_floating_point())  # so is a mean behind one
        for name, buffer in plain.named_buffers():
            same("buffer", name, there[name], buffer, floor if buffer.is_floating_point() else 0.0)
        for i, (a, b) in enumerate(zip(_tensors(given), _tensors(asked), strict=True)):
            same("batch", str(i), a, b)
        if differences:
            return Verdict("different", "; ".join(differences[:6]), seen=frozenset(seen), worst=worst)
    wanted = {"loss", *(f"parameter {n}" for n, p in theirs.items() if p.requires_grad)}
    if torch.distributed.is_initialized():
        return Verdict("equal", "", "", frozenset(seen), frozenset(wanted), worst=worst)  # a stage has some of them
    if not wanted <= seen:
        return Verdict("different", f"the program does not have {', '.join(sorted(wanted - seen))}")
    return Verdict("equal", "", "", frozenset(seen), frozenset(wanted), worst=worst)


def _built(
    case: Case,
) -> tuple[nn.Module, Callable[..., Tensor] | None, Mapping[str, nn.Module | nn.Parameter]]:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        made = case.build()
    finally:
        torch.set_default_dtype(torch.float32)
    model, loss_fn, beside = made if isinstance(made, tuple) else (made, case.loss_fn, {})
    if isinstance(loss_fn, nn.Module):
        beside = {"loss_fn": loss_fn, **beside}
    for module in (model, *beside.values()):
        if isinstance(module, nn.Module):
            module.double()
    return model, loss_fn, beside


def _batch(case: Case, step: int) -> Any:
    """A batch of its own: forward may change it."""
    made = case.batch(step) if callable(case.batch) else case.batch

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        kept = x.detach().clone()
        return kept.double() if x.is_floating_point() else kept

    return pytree.tree_map(own, made)


def _parts(batch: Any, axes: Mapping[str, int], options: Mapping[str, Any]) -> list[Any]:
    """What the plain module is called with in a step: the batch, or one microbatch after the other, where each is a
    batch of its own. It has the same rows of every data rank's share."""
    if options.get("batch_statistics", "batch") == "batch":
        return [batch]
    ranks, count = axes.get("dp", 1), options.get("microbatches", 1)
    split = lambda x, i: x.unflatten(0, (ranks, count, -1))[:, i].flatten(0, 1)  # noqa: E731
    return [pytree.tree_map_only(Tensor, lambda x: split(x, i), batch) for i in range(count)]  # noqa: B023


def _loss(model: nn.Module, loss_fn: Callable[..., Tensor] | None, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        out = model(**batch)
    else:
        out = loss_fn(model(*batch[:-1]), batch[-1]) if loss_fn is not None else model(*batch)
    if isinstance(out, dict):
        out = out["loss"]
    return out if isinstance(out, Tensor) else out.loss


def _plainly(call: Callable[[], Any]) -> Any:
    """What the plain module does must work."""
    try:
        return call()
    except Exception as error:
        raise AssertionError(f"the case is not valid: the plain module fails with {error}") from error


def _evaluated(model: nn.Module, loss_fn: Callable[..., Tensor] | None, batch: Any) -> Tensor:
    both = (model, loss_fn) if isinstance(loss_fn, nn.Module) else (model,)
    modes = [(module, module.training) for one in both for module in one.modules()]
    for one in both:
        one.eval()
    with torch.no_grad():
        found = _loss(model, loss_fn, batch)
    for module, was in modes:
        module.training = was
    return found


def _known(name: str, theirs: Mapping[str, Tensor]) -> str:
    """A parameter of the loss function may have another path in the program, with the same end."""
    if name in theirs:
        return name
    ends = {one: _common_end(name.split("."), one.split(".")) for one in theirs}
    found = [one for one, length in ends.items() if length == max(ends.values()) > 0]
    assert len(found) == 1, f"the program trains {name}, and the module has {', '.join(theirs)}"
    return found[0]


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {n: _full(x).clone() for n, x in (*model.named_parameters(), *model.named_buffers())}


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _full(x: Tensor) -> Tensor:
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach()


def _gap(found: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference, relative to the largest expected element or to ``floor``."""
    expected = expected.detach()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    difference = float((found.double() - expected.double()).abs().max())
    size = max(float(expected.double().abs().max()), floor)
    return difference / size if size else float("inf")


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(x.detach().abs().max()) for x in tensors if x.numel()), default=0.0)


def _all_here(
    cases: Callable[[], Mapping[str, Case]], meshes: Mapping[str, Mapping[str, int]], where: Mapping[str, str]
) -> dict[str, dict[str, Verdict]]:
    torch.set_num_threads(1)
    found: dict[str, dict[str, Verdict]] = {}
    for name, case in cases().items():
        found[name] = {}
        for layout in [where[name]] if name in where else meshes:
            axes = meshes[layout]
            found[name][layout] = replace(compare(case, axes), error=None)  # what it refers to stays here
        gc.collect()  # programs hold each other in cycles, and process groups
    return found


def joined(ranks: list[Verdict]) -> Verdict:
    """What all ranks say together: each parameter was compared by one of them."""
    kinds = {one.kind for one in ranks}
    if kinds != {"equal"}:
        if len(kinds) == 1 and len({one.code for one in ranks}) == 1:
            return ranks[0]
        worst = "different" if "different" in kinds or "equal" in kinds else "raw"
        return Verdict(worst, "; ".join(f"rank {i}: {one}" for i, one in enumerate(ranks)))
    seen, expected = (frozenset().union(*(getattr(one, what) for one in ranks)) for what in ("seen", "expected"))
    if not expected <= seen:
        return Verdict("different", f"no rank has {', '.join(sorted(expected - seen))}")
    return Verdict("equal", seen=seen, expected=expected)
