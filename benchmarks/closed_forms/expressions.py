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

from .transformer import Decoder, ParallelLayout, stage_layers

Number = Any  # a number, or a sympy expression: Python has no common type for them


def attention_parameters(m: Number) -> Number:
    """Weights of one layer's query, key, value and output projections."""
    if not m.kv_rank:
        return m.hidden * m.width * (2 * m.heads + 2 * m.kv)
    rows, ranks = m.heads * m.width, m.query_rank
    query = ranks * (m.hidden + rows) if ranks else m.hidden * rows
    keys = m.hidden * (m.kv_rank + m.rotary_width) + m.kv_rank * m.heads * (m.width - m.rotary_width + m.value)
    return query + keys + m.heads * m.value * m.hidden


def dense_mlp_parameters(m: Number) -> Number:
    """Weights of one MLP: two matrices, three if gated."""
    return (2 + m.gated) * m.hidden * m.ffn


def expert_parameters(m: Number) -> Number:
    """Weights and biases of one layer's routed experts."""
    biases = m.biases * (m.hidden + (1 + m.gated) * m.moe_ffn)
    return m.experts * ((2 + m.gated) * m.hidden * m.moe_ffn + biases)


def shared_parameters(m: Number) -> Number:
    """Weights of what stands beside one layer's routed experts: their router, and the experts of all tokens."""
    return (2 + m.gated) * m.hidden * m.shared_ffn + m.hidden * (m.experts + m.shared_gate) + m.biases * m.experts


def vector_parameters(m: Number, dense: bool = True) -> Number:
    """One layer's norms and biases: LayerNorms, of layers without a gate, have a bias where products have one."""
    attention = m.width * (m.heads + 2 * m.kv) + m.hidden
    biases = m.biases * (attention + (m.hidden + (1 + m.gated) * m.ffn if dense else 0))
    inside = 2 * m.head_norms * m.width + (m.query_rank + m.kv_rank if m.kv_rank else 0) + m.sinks * m.heads
    return 2 * (1 + m.biases * (1 - m.gated)) * m.hidden + biases + inside


def layer_parameters(m: Number, dense: bool | None = None) -> Number:
    """All parameters of one layer, with an MLP (``dense``) or with experts: by default as most of the model's have."""
    dense = not m.experts if dense is None else dense
    mlp = dense_mlp_parameters(m) if dense else expert_parameters(m) + shared_parameters(m)
    return attention_parameters(m) + mlp + vector_parameters(m, dense)


def embedding_parameters(m: Number) -> Number:
    """The table of tokens and the learned positions."""
    return m.hidden * (m.vocab + m.learned_positions)


def predicted_parameters(m: Number) -> Number:
    """Return the parameters that predict one further token: a layer, two norms and a product of both inputs."""
    return layer_parameters(m) + 2 * m.hidden**2 + 3 * m.hidden


def parameters(m: Number) -> Number:
    """All parameters: layers, embedding, final norm, and a head unless it is tied to the embedding."""
    head = (1 - m.tied) * m.hidden * m.vocab
    layers = _of_layers(m, lambda dense: layer_parameters(m, dense)) + m.predicted * predicted_parameters(m)
    return layers + embedding_parameters(m) + (1 + m.biases * (1 - m.gated)) * m.hidden + head


def products(m: Decoder, joined: bool) -> int:
    """Return the number of weights of one layer's products; ``joined``: queries, keys and values have one together."""
    return (2 if joined else 4) + 2 + m.gated


def held_parameters(model: Decoder, layout: ParallelLayout, stage: int) -> tuple[float, float]:
    """Return the parameters that one rank of a stage computes with: of dense parts and of routed experts."""
    counts, last = stage_layers(model, layout), layout.pp - 1
    first = sum(counts[:stage])
    kinds = list(model.kinds[first : first + counts[stage]])
    dense: float = 0
    if stage == 0:
        dense += embedding_parameters(model)
    if stage == last:
        dense += model.vocab * model.hidden * (layout.pp > 1 or not model.tied)
        dense += model.predicted * (2 * model.hidden + 3) * model.hidden
        kinds += [model.kinds[-1]] * model.predicted
    routed = sum(not kind.dense for kind in kinds) * expert_parameters(model)
    dense += sum(layer_parameters(model, kind.dense) for kind in kinds) - routed
    return dense / layout.tp, routed / (layout.ep * layout.expert_tp)


def _of_layers(m: Number, each: Callable[[bool], Number]) -> Number:
    """Sum over layers of what those with an MLP and those with experts have ``each``."""
    if not m.experts:
        return m.layers * each(True)
    return m.plain * each(True) + (m.layers - m.plain) * each(False)


def layer_forward_flops(m: Number, dense: bool | None = None) -> Number:
    """Products of one layer for one sequence, forward; 2 per multiply-add, scores not halved for causality.

    Narayanan et al. 2021, appendix: 24 s h^2 + 4 s^2 h for a plain layer.
    """
    dense = not m.experts if dense is None else dense
    routed = m.top_k * (2 + m.gated) * m.moe_ffn * m.hidden
    shared = (2 + m.gated) * m.hidden * m.shared_ffn + m.hidden * (m.experts + m.shared_gate)
    mlp = dense_mlp_parameters(m) if dense else routed + shared
    return 2 * m.seq * (attention_parameters(m) + mlp) + _scores(m, m.seq**2)


def _scores(m: Number, count: Number) -> Number:
    return 2 * count * m.heads * (m.width + m.value)


def score_flops(m: Number) -> Number:
    """Return the FLOPs of attention in the whole model for one sequence, forward.

    A layer with a window has twice what the causal mask and the window leave, as the others' count twice, too.
    """
    whole = (m.layers + m.predicted) * _scores(m, m.seq**2)
    return whole - m.short * _scores(m, (m.seq - m.window) ** 2)


def forward_flops(m: Number) -> Number:
    """Products of the whole model for one sequence, forward, with the heads'."""
    layers = _of_layers(m, lambda dense: layer_forward_flops(m, dense) - _scores(m, m.seq**2))
    further = m.predicted * (layer_forward_flops(m) - _scores(m, m.seq**2) + 4 * m.seq * m.hidden**2)
    return layers + further + score_flops(m) + (1 + m.predicted) * 2 * m.seq * m.hidden * m.vocab


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
    """Return what one rank sends for one layer, forward and backward: 4 ring all-reduces of a 16-bit activation."""
    return 4 * 2 * (tp - 1) / tp * 2 * m.seq * microbatch * m.hidden


def data_parallel_bytes(parameter_count: Number, dp: Number, element: Number) -> Number:
    """Return what one rank sends to sum gradients once: a ring all-reduce, or its two halves around the optimizer."""
    return 2 * (dp - 1) / dp * element * parameter_count


@dataclass(frozen=True)
class _Symbols:
    """A decoder whose numbers are symbols; flags keep their values, since they choose terms."""

    model: Decoder

    def __getattr__(self, name: str) -> Number:
        value = getattr(self.model, name)
        if isinstance(value, bool):
            return int(value)
        if name == "value" and not self.model.value_width:
            return self.width
        if name in ABSENT and not value:
            return 0
        return sympy.Symbol(SHORT.get(name, name), positive=True)


SHORT: Mapping[str, str] = MappingProxyType(
    {"layers": "L", "hidden": "h", "ffn": "f", "heads": "a", "kv": "k", "width": "d", "vocab": "V", "seq": "s",
     "experts": "E", "moe_ffn": "f_e", "top_k": "K", "learned_positions": "P", "shared_ffn": "f_s",
     "plain": "L_d", "short": "L_w", "window": "w", "query_rank": "r_q", "kv_rank": "r_k", "rotary_width": "d_r",
     "value": "d_v", "predicted": "L_p"}
)  # fmt: skip
# What most models do not have: it leaves no symbol behind.
ABSENT = frozenset({"experts", "learned_positions", "shared_ffn", "plain", "short", "query_rank", "kv_rank",
                    "predicted"})  # fmt: skip


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
        numbers = ", ".join(f"{name}={number:g}" for name, number in self.numbers if name in used)
        return f"{self.name} = {self.expression} = {self.value:.6g} {self.unit}" + (f"  ({numbers})" if numbers else "")


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
        "k": model.kv, "d": model.width, "d_v": model.value, "L_w": model.short, "L_d": model.plain,
        "b": layout.microbatch, "t": layout.tp, "p": layout.pp, "v": layout.vpp,
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
