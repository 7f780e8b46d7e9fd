"""What lies between a module and its program, by name: each case trains as the plain module does, or is refused.

The tables of the tests of one area are here too: :mod:`.test_frontier_processes` runs all of them on five layouts, in
one process and on gloo processes.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from . import frontier_programs as made
from . import test_frontier_diagnoses as diagnoses
from . import test_frontier_functions as functions
from . import test_frontier_hooks as hooks
from . import test_frontier_kernels as kernels
from .changing_modules import SHAPES, changing
from .frontier import Case
from .frontier_small import Cases, Small, case_of, refused, xy
from .frontier_training_cases import training_cases
from .random_functions import NOISY

ALONE = {"plan": {"unknown_ops": "replicate"}}


def cases() -> Cases:
    """All of them."""
    return {
        **_pieces(),
        **_memory_formats(),
        **_derivatives(),
        **_states(),
        **training_cases(),
        **_masks(),
        **_operators(),
        **_language_models(),
    }


# -- pieces of generated programs


class _Loaded(random.Random):
    """Dice that show what is wanted."""

    def __init__(self, way: int) -> None:
        super().__init__(0)
        self.way = way

    def randrange(self, *limits: Any) -> int:
        return self.way

    def random(self) -> float:
        return 0.0

    def choice(self, options: Any) -> Any:
        return options[0]


def _sequences(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(8, made.LENGTH, 6, generator=dice), torch.randint(made.CLASSES, (8,), generator=dice)


def _piece(kind: type[made.Piece], way: int = 0, **more: Any) -> Case:
    def build() -> made.Mixed:
        return made.Mixed([kind(_Loaded(way)), made.Plain(_Loaded(0))], False, "logits", False, False)

    return Case(build, _sequences, F.cross_entropy, made.Mixed.before, **more)  # type: ignore[arg-type]


def _with(loss: Callable[[made.Extra], Callable[..., Tensor]]) -> Case:
    def build() -> Any:
        extra = made.Extra()
        return made.Mixed([made.Plain(_Loaded(0))], False, "logits", False, False), loss(extra), {"extra": extra}

    return Case(build, _sequences)


PYTHON = {2: "attribute 'pieces.0.calls'", 3: "attribute 'pieces.0.seen'", 4: "Python's random", 5: "Python's random"}


def _pieces() -> Cases:
    ways = {"norm": (made.Normed, 5), "own derivative": (made.Own, 5), "hook": (made.Hooked, 8),
            "dropout": (made.Dropped, 5), "in place": (made.InPlace, 6), "state": (made.Stateful, 6),
            "Python": (made.Pythonic, 7)}  # fmt: skip
    found = {f"{name}, {way}": _piece(kind, way) for name, (kind, count) in ways.items() for way in range(count)}
    found |= {f"Python, {way}": refused(found[f"Python, {way}"], "QN110", cause) for way, cause in PYTHON.items()}
    return found | {
        "checkpointed derivative": _piece(made.OwnCheckpointed, 2),
        "checkpoint, reentrant": _piece(made.Checkpointed),
        "teacher": _piece(made.Teacher),
        "frozen statistics": _piece(made.EvalNormed),
        "thawed": _piece(made.Thawed),
        "evaluates": _piece(made.Dropped, 4, evaluates=True),
        "two programs": _piece(made.Tied, others=(made.second_loss,)),
        "loss with weights, partial": _with(lambda extra: functools.partial(made.of, extra)),
        "loss with weights, bound": _with(lambda extra: extra.bound),
        "loss with weights, closure": _with(lambda extra: lambda out, y: extra(2 * out, y)),
    }


# -- memory formats


class _Image(nn.Module):
    """A convolution, GroupNorm, and a linear of what ``back`` makes of it."""

    def __init__(self, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.last, self.back = nn.Conv2d(4, 8, 1), nn.GroupNorm(4, 8), nn.Linear(8, 4), back

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.back(self.norm(self.conv(x))))


class _Attends(nn.Module):
    """A block of a U-Net: convolutions and self-attention over the places of an image, down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.up = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 2, 2), nn.Conv2d(8, 8, 1)
        self.first, self.second = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.silu(self.first(self.stem(x))))
        rows, channels, height, width = h.shape
        q, k, v = self.qkv(self.second(h).flatten(2).transpose(1, 2)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + self.out(seen).transpose(1, 2).reshape(rows, channels, height, width)
        return self.head(self.up(F.interpolate(h, scale_factor=2, mode="nearest")).mean((2, 3)))


def _images(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, 4, 4, generator=dice), torch.randint(4, (8,), generator=dice)


def _channels_last(step: int) -> tuple[Tensor, Tensor]:
    x, y = _images(step)
    return x.to(memory_format=torch.channels_last), y


def _convolutions() -> nn.Module:
    parts = (nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.Flatten(2))
    return nn.Sequential(*parts).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


BACKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda h: h.permute(0, 2, 3, 1),
    "flatten and transpose": lambda h: h.flatten(2).transpose(1, 2),
    "mean": lambda h: h.mean((2, 3)),
    "permute and relu": lambda h: h.permute(0, 2, 3, 1).relu(),
}


def _mean(out: Tensor, y: Tensor) -> Tensor:
    return out.mean() + out.square().mean()


def _of_first(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[:, 0], y)


def _memory_formats() -> Cases:
    found = {f"GroupNorm, {name}": Case(lambda f=f: _Image(f), _images, _mean) for name, f in BACKS.items()}  # type: ignore[misc]
    return found | {
        "GroupNorm, first token": Case(lambda: _Image(BACKS["flatten and transpose"]), _images, _of_first),
        "GroupNorm, channels_last": Case(_convolutions, _channels_last, _mean),
        "a block of a U-Net": Case(_Attends, _images, F.cross_entropy),
        "a block of a U-Net, channels_last": Case(_Attends, _channels_last, F.cross_entropy),
    }


# -- derivatives and hooks of the author's own


def _derivatives() -> Cases:
    tables = {**functions.FUNCTIONS, **{f"hook {name}": f for name, f in functions.HOOKS.items()}}
    found = {f"derivative: {name}": Case(lambda f=f: functions.net(f), (functions.X,)) for name, f in tables.items()}  # type: ignore[misc]
    return found | {
        f"hook of a module, {name}": Case(lambda f=f: hooks.net(f), (hooks.X,))  # type: ignore[misc]
        for name, f in {**hooks.MODULES, **hooks.HOOKS}.items()
    }


# -- state that forward changes


def _divides_in_evaluation(net: Small, x: Tensor) -> Tensor:
    if not net.training:
        x /= 255
    return net.hidden(x)


def _ignores_labels(net: Small, x: Tensor, y: Tensor) -> Tensor:
    y[y == 0] = -100
    return F.cross_entropy(net.hidden(x), y)


def _own_statistics(net: Small, x: Tensor) -> Tensor:
    h = net.hidden(x)
    net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
    return (h - net.mean).square().mean()


def _divides(net: Small, x: Tensor) -> Tensor:
    x /= 255
    return net.hidden(x).square().mean()


def _sets_data(net: Small, x: Tensor) -> Tensor:
    net.a.weight.data = net.a.weight.data * 0.5
    return net.hidden(x).square().mean()


def _constant(net: Small, x: Tensor) -> Tensor:
    net.table += 1
    return (net.hidden(x) * net.table).mean()


def _keeps(net: Small, x: Tensor) -> Tensor:
    net.kept = net.hidden(x)
    return net.kept.square().mean()


def _numpy(net: Small, x: Tensor) -> Tensor:
    return net.hidden(x).square().mean() * float(np.random.rand())


def _states() -> Cases:
    def spectral() -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 4))

    def statistics() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    evaluated = Case(lambda: Small(_divides_in_evaluation), xy, F.cross_entropy, evaluates=True)
    return {
        "changes its batch in evaluation": refused(evaluated, "QN110", r"batch\[0\]"),
        "changes its labels": refused(case_of(_ignores_labels, xy), "QN110", r"batch\[1\]"),
        "changes its batch": refused(case_of(_divides), "QN110", r"batch\[0\]"),
        "statistics of its own": case_of(_own_statistics),
        "assigns .data": case_of(_sets_data),
        "a constant in place": refused(case_of(_constant), "QN110", "neither a buffer"),
        "keeps a tensor": refused(case_of(_keeps), "QN110", "attribute 'kept'"),
        "numpy": refused(case_of(_numpy), "QN110", "state of numpy.random"),
        "spectral_norm": Case(spectral, xy, F.cross_entropy),
        "BatchNorm": Case(statistics, xy, F.cross_entropy),
        **{f"state: {kind.__name__}": changing(kind) for kind in SHAPES},
    }


# -- random masks


def _drop_path(net: Small, x: Tensor) -> Tensor:
    return (x + F.dropout(x.new_ones(x.shape[0], 1), 0.5, net.training) * net.hidden(x)).square().mean()


def _locked(net: Small, x: Tensor) -> Tensor:
    h = net.hidden(x)
    return (h * F.dropout(torch.ones(1, 4), 0.5, net.training) * F.dropout(torch.ones_like(h), 0.3)).square().mean()


def _indexed(net: Small, ids: Tensor) -> Tensor:
    return (net.b.weight.flatten()[ids] * F.dropout(torch.ones(ids.shape[0]), 0.5, net.training)).sum() + (
        net.hidden(net.b.weight.new_ones(1, 4)).square().sum()
    )


def _masks() -> Cases:
    found = {}
    for count in (1, 2, 4):
        more = {"options": {"microbatches": count}}
        found[f"drop path, {count} microbatches"] = case_of(_drop_path, **more)
        found[f"masks of constants, {count} microbatches"] = case_of(_locked, **more)
        found[f"masks beside indices, {count} microbatches"] = case_of(_indexed, (torch.arange(16) % 9,), **more)
    for name, body in diagnoses.RANDOM.items():
        case = case_of(lambda net, x, body=body: body(net, x).square().mean(), options=ALONE)
        found[f"random: {name}"] = refused(case, "QN105", "draws random numbers")
    for name, noisy in NOISY.items():
        found[f"random: {name}"] = case_of(lambda net, x, noisy=noisy: noisy(net.hidden(x)).square().mean())
    return found


# -- operators, and losses that couple samples or do not


def _spectrum(net: Small, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(net.hidden(x)), n=4).square().mean()


def _lowered_inside(net: Small, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net.a(x)
    with torch.autocast("cpu", enabled=False):
        return net.b(torch.tanh(h)).square().mean()


def _normalised() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 4))


def _operators() -> Cases:
    found: Cases = {}
    for name, (f, *batch) in diagnoses.APART.items():
        for count in (1, 2):
            case = Case(lambda f=f: diagnoses.net_of(f), tuple(batch), options={"microbatches": count})  # type: ignore[misc]
            found[f"apart, {count} microbatches: {name}"] = case
    for name, (f, cause) in diagnoses.COUPLED.items():
        case = Case(lambda f=f: diagnoses.Net(f), (diagnoses.X,), options={"microbatches": 2})  # type: ignore[misc]
        found[f"coupled: {name}"] = refused(case, "QN104", cause)
    for name, build in {**kernels.DERIVATIVES, **kernels.ODD}.items():
        found[f"operator: {name}"] = Case(build, (kernels.X, kernels.SIGNS))
    for name, loss in kernels.LOSSES.items():
        found[f"replicated: {name}"] = Case(lambda: nn.Linear(4, 4), (kernels.X, kernels.SIGNS), loss, options=ALONE)
    return found | {
        "replicated: rfft": case_of(_spectrum, options=ALONE),
        "operator: LSTM": Case(diagnoses.Recurrent, (diagnoses.X.reshape(8, 2, 2).repeat(1, 1, 2),)),
        "operator: a weight on the left": Case(
            diagnoses.Left, (torch.ones(8, 6, 16).cumsum(1).sin(), torch.ones(8, 6, 16)), F.mse_loss
        ),
        "operator: weight_norm": Case(_normalised, xy, F.cross_entropy),
        "autocast inside": case_of(_lowered_inside),
    }


# -- language models


class _Packed(nn.Module):
    """A decoder's logits; all of it computes in the dtype of its parameters, where torch's own loss is beside it."""

    def __init__(self, of_config: Mapping[str, Any], **of_call: Any) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **of_config)
        self.model, self.of_call = transformers.LlamaForCausalLM(config), of_call
        for part in list(self.model.modules()):
            for name, child in list(part.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":  # computes in float32
                    setattr(part, name, nn.RMSNorm(16, 1e-6))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, position_ids=places, **self.of_call).logits
        return logits.flatten(0, 1)


def _of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.flatten())


def _language_models() -> Cases:
    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, labels = torch.randint(0, 32, (2, 4, 8), generator=torch.Generator().manual_seed(step)).unbind()
        return ids, torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).repeat(4, 1), labels

    called = Case(lambda: _Packed({}, use_cache=False), batch, _of_tokens)
    return {
        "packed documents": Case(lambda: _Packed({}), batch, _of_tokens),
        "packed documents, no cache": Case(lambda: _Packed({"use_cache": False}), batch, _of_tokens),
        "packed documents, called without cache": refused(called, "QN111", "sdpa_attention"),
    }
