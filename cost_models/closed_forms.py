"""Closed forms: parameters, arithmetic, activation bytes, bubble; numbers and sympy expressions from one definition.

Every function here is plain arithmetic on what it is given. Given a :class:`Decoder` it returns a number; given
:data:`SYMBOLS` it returns the sympy expression, which :func:`explain` prints with the numbers put in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import sympy

from .transformer import Decoder, ParallelLayout

Number = Any  # a number, or a sympy expression: Python has no common type for them


def attention_parameters(m: Number) -> Number:
    """Weights of one layer's query, key, value and output projections."""
    return m.hidden * m.width * (2 * m.heads + 2 * m.kv)


def dense_mlp_parameters(m: Number) -> Number:
    """Weights of one MLP: two matrices, three if gated."""
    return (2 + m.gated) * m.hidden * m.ffn


def expert_parameters(m: Number) -> Number:
    """Weights of all experts of one layer."""
    return m.experts * (2 + m.gated) * m.hidden * m.moe_ffn


def vector_parameters(m: Number) -> Number:
    """One layer's norms and biases: LayerNorms have a bias where products have one."""
    biases = m.biases * (m.width * (m.heads + 2 * m.kv) + 2 * m.hidden + (1 + m.gated) * m.ffn)
    return (2 + 2 * m.biases) * m.hidden + biases


def layer_parameters(m: Number) -> Number:
    """All parameters of one layer; experts come with a router."""
    mlp = expert_parameters(m) + m.hidden * m.experts if m.experts else dense_mlp_parameters(m)
    return attention_parameters(m) + mlp + vector_parameters(m)


def embedding_parameters(m: Number) -> Number:
    """The table of tokens and the learned positions."""
    return m.hidden * (m.vocab + m.learned_positions)


def parameters(m: Number) -> Number:
    """All parameters: layers, embedding, final norm, and a head unless it is tied to the embedding."""
    head = (1 - m.tied) * m.hidden * m.vocab
    return m.layers * layer_parameters(m) + embedding_parameters(m) + (1 + m.biases) * m.hidden + head


def layer_forward_flops(m: Number) -> Number:
    """Products of one layer for one sequence, forward; 2 per multiply-add, scores not halved for causality.

    Narayanan et al. 2021, appendix: 24 s h^2 + 4 s^2 h for a plain layer.
    """
    mlp = (
        m.top_k * (2 + m.gated) * m.moe_ffn * m.hidden + m.hidden * m.experts if m.experts else dense_mlp_parameters(m)
    )
    return 2 * m.seq * (attention_parameters(m) + mlp) + 4 * m.seq**2 * m.heads * m.width


def forward_flops(m: Number) -> Number:
    """Products of the whole model for one sequence, forward, with the head's."""
    return m.layers * layer_forward_flops(m) + 2 * m.seq * m.hidden * m.vocab


def step_flops(m: Number, batch: Number) -> Number:
    """Model FLOPs of a step: backward is twice forward. For full recompute add another forward of the layers."""
    return 3 * batch * forward_flops(m)


def narayanan_flops(m: Number, batch: Number) -> Number:
    """Narayanan et al. 2021, equation 3: with full recompute, 96 B s l h^2 (1 + s/6h + V/16lh)."""
    return 96 * batch * m.seq * m.layers * m.hidden**2 * (
        1 + m.seq / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden)
    )  # fmt: skip


def korthikanti_activations(
    m: Number, microbatch: Number, tp: Number, sequence_parallel: bool, recompute: str
) -> Number:
    """Bytes of activations of one layer, 16 bit with dropout (Korthikanti et al. 2022, table 2 and equations 1-6)."""
    sbh = m.seq * microbatch * m.hidden
    if recompute == "full":
        return 2 * sbh
    whole = sbh * (10 / tp if sequence_parallel else 10)
    scores = 0 if recompute == "selective" else 5 * m.heads * m.seq / (m.hidden * tp)
    return whole + sbh * (24 / tp + scores)


def bubble_share(pp: Number, microbatches: Number, vpp: Number = 1) -> Number:
    """Idle time over busy time of a pipeline of equal stages (Narayanan et al. 2021, section 2.2)."""
    return (pp - 1) / (vpp * microbatches)


def zero_bubble_share(pp: Number, microbatches: Number, vpp: Number = 1) -> Number:
    """As :func:`bubble_share` where backwards are in two halves as long as a forward each: ZB-H1 with one stage per
    rank (Qi et al. 2023), ZB-V with two (Qi et al. 2024)."""
    return bubble_share(pp, microbatches, vpp) / 3


def tensor_parallel_bytes(m: Number, microbatch: Number, tp: Number) -> Number:
    """What one rank sends for one layer, forward and backward: 4 ring all-reduces of a 16-bit activation."""
    return 4 * 2 * (tp - 1) / tp * 2 * m.seq * microbatch * m.hidden


def data_parallel_bytes(parameter_count: Number, dp: Number, element: Number) -> Number:
    """What one rank sends to settle gradients once: a ring all-reduce, or its two halves around the optimizer."""
    return 2 * (dp - 1) / dp * element * parameter_count


@dataclass(frozen=True)
class _Symbols:
    """A decoder whose numbers are symbols; flags keep their values, since they choose terms."""

    model: Decoder

    def __getattr__(self, name: str) -> Number:
        found = getattr(self.model, name)
        if isinstance(found, bool):
            return int(found)
        if name in ("experts", "learned_positions") and not found:
            return 0
        return sympy.Symbol(SHORT.get(name, name), positive=True)


SHORT: Mapping[str, str] = MappingProxyType(
    {"layers": "L", "hidden": "h", "ffn": "f", "heads": "a", "kv": "k", "width": "d", "vocab": "V", "seq": "s",
     "experts": "E", "moe_ffn": "f_e", "top_k": "K", "learned_positions": "P"}
)  # fmt: skip


@dataclass(frozen=True)
class ClosedForm:
    """A quantity, the expression behind it, and the numbers that go in."""

    name: str
    unit: str
    expression: sympy.Expr
    numbers: tuple[tuple[str, float], ...]

    @property
    def value(self) -> float:
        numbers = dict(self.numbers)
        return float(self.expression.subs({symbol: numbers[str(symbol)] for symbol in self.expression.free_symbols}))

    def __str__(self) -> str:
        used = {str(symbol) for symbol in self.expression.free_symbols}
        given = ", ".join(f"{name}={number:g}" for name, number in self.numbers if name in used)
        return f"{self.name} = {self.expression} = {self.value:.6g} {self.unit}" + (f"  ({given})" if given else "")


def explain(model: Decoder, layout: ParallelLayout) -> tuple[ClosedForm, ...]:
    """The closed forms of a model and a layout, each with its expression and its numbers.

    >>> gpt = Decoder(layers=2, hidden=8, ffn=32, heads=2, vocab=10, seq=4)
    >>> print(explain(gpt, ParallelLayout(pp=2, global_batch=4))[-1])
    bubble = (p - 1)/(m*v) = 0.25 of the busy time  (p=2, v=1, m=4)
    """
    m: Number = _Symbols(model)
    b, t, p, v, n, batch, dp = sympy.symbols("b t p v m B D", positive=True)
    numbers = {
        **{SHORT[f.name]: getattr(model, f.name) for f in fields(model) if f.name in SHORT},
        "k": model.kv, "d": model.width, "b": layout.microbatch, "t": layout.tp, "p": layout.pp, "v": layout.vpp,
        "m": layout.microbatches, "B": layout.global_batch, "D": layout.dp,
    }  # fmt: skip
    forms: tuple[tuple[str, str, Callable[[], Number]], ...] = (
        ("parameters", "parameters", lambda: parameters(m)),
        ("model FLOPs of a step", "FLOP", lambda: step_flops(m, batch)),
        ("activations of a layer", "bytes", lambda: korthikanti_activations(
            m, b, t, layout.sequence_parallel, layout.recompute)),
        ("tensor-parallel traffic of a layer", "bytes", lambda: tensor_parallel_bytes(m, b, t)),
        ("data-parallel traffic of a step", "bytes", lambda: data_parallel_bytes(parameters(m) / (t * p), dp, 4)),
        ("bubble", "of the busy time", lambda: bubble_share(p, n, v)),
    )  # fmt: skip
    return tuple(ClosedForm(name, unit, sympy.sympify(make()), tuple(numbers.items())) for name, unit, make in forms)
