"""The notation of sharding rules: what it reads, what it refuses and how it fits the shapes of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintnet
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ops.rules.notation import Factors, Notation, Rule, rule, table
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.strategies.rule_book import RuleBook, split_factor

from ..one_operator import Sample, call, operator_program, reference
from ..operator_samples import f, ints

NO_NAME = (
    "is not a name; every tensor, in a list or tuple too, is one group of names between commas; a dim of several "
    "factors is (h d), one of known size a number"
)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("m k, k n", {}, "write inputs -> outputs, with one '->'"),
        ("m -> n -> k", {}, "write inputs -> outputs, with one '->'"),
        ("m ... -> m", {}, "'...' may only come first"),
        ("m -> m ...", {}, "'...' may only come first"),
        ("m 1.5 -> m", {}, f"'1.5' {NO_NAME}"),
        ("m-k -> m", {}, f"'m-k' {NO_NAME}"),
        ("m (k -> m", {}, f"'(k' {NO_NAME}"),
        ("(m k) m -> k", {}, "a factor stands twice in one tensor"),
        ("m m -> m", {}, "a factor stands twice in one tensor"),
        ("m -> m m", {}, "a factor stands twice in one tensor"),
        ("... b1 -> ... b1", {}, "'b1' is a name of a dim of '...'; use another"),
        ("m -> m", {"whole": "k"}, "'k' is not a factor of it"),
        ("m -> m", {"whole": "..."}, "'...' is not a factor of it"),
        ("m -> m", {"contiguous": "k"}, "'k' is not a factor of it"),
        ("m -> m", {"linear": [[1]]}, "there is no input 1"),
        ("m, m -> m", {"linear": [[0], [0, 2]]}, "there is no input 2"),
        ("m -> m", {"linear": [[-1]]}, "there is no input -1"),
        ("m k, k -> m", {"additive": [2]}, "there is no input 2"),
    ],
)
def test_malformed_rules_are_refused(text: str, options: dict[str, Any], message: str) -> None:
    """Each mistake has a sentence of its own, behind the rule that has it."""
    with pytest.raises(ValueError) as caught:
        rule("op", text, **options)
    assert str(caught.value) == f"rule {text!r}: {message}"


@pytest.mark.parametrize(
    ("text", "given", "made", "message"),
    [
        ("m -> m", [(4,), (4,)], [(4,)], "does not fit 2 inputs and 1 outputs"),
        ("m -> m", [(4,)], [(4,), (4,)], "does not fit 1 inputs and 2 outputs"),
        ("m -> m", [(4, 6)], [(4,)], "does not fit a tensor of shape (4, 6)"),
        ("... m n -> ... m n", [(4,)], [(4,)], "does not fit a tensor of shape (4,)"),
        ("m k, k n -> m n", [(4, 6), (5, 2)], [(4, 2)], "factor k is both 6 and 5"),
        ("... -> ...", [(4, 6)], [(4, 5)], "factor b0 is both 6 and 5"),
        ("m 3 -> m", [(4, 5)], [(4,)], "3 is 3, and a dim there has size 5"),
        ("(h d), h -> h", [(9,), (4,)], [(4,)], "the sizes of d in (h d) of size 9"),
        ("(h d) -> (d h)", [(12,)], [(12,)], "the sizes of h, d in (h d) of size 12"),
        ("... -> ...", [(4, 6)], [(4, 1)], "factor b0 is 6, but 1 in the result"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    text: str, given: list[tuple[int, ...]], made: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Notation.parse(text).fit(given, made)
    assert message in str(caught.value)


def test_factors_of_a_contraction() -> None:
    found = Notation.parse("n, m k, k n -> m n", additive=[0], linear=[[1], [2]]).fit([(2,), (4, 6), (6, 2)], [(4, 2)])
    assert found.inputs == ((("n",),), (("m",), ("k",)), (("k",), ("n",)))
    assert found.outputs == ((("m",), ("n",)),)
    assert found.sizes == {"n": 2, "m": 4, "k": 6}
    assert found.names == ("m", "n", "k")
    assert (found.additive, found.linear) == (frozenset({0}), ((1,), (2,)))


def test_leading_dims_are_counted_from_the_last_and_broadcast() -> None:
    found = Notation.parse("..., ... -> ...").fit([(2, 4, 6), (4, 1)], [(2, 4, 6)])
    assert found.inputs == ((("b2",), ("b1",), ("b0",)), (("b1",), ()))
    assert found.outputs == ((("b2",), ("b1",), ("b0",)),)


def test_leading_dims_may_be_none() -> None:
    found = Notation.parse("... i, o i -> ... o").fit([(6,), (4, 6)], [(4,)])
    assert found.inputs == ((("i",),), (("o",), ("i",)))


def test_leading_dims_can_be_whole() -> None:
    found = Notation.parse("... n -> ... n", whole="...").fit([(2, 4, 6)], [(2, 4, 6)])
    assert found.whole == {"b0", "b1"}


def test_scalars_have_no_dims() -> None:
    assert Notation.parse("k, k -> ").fit([(6,), (6,)], [()]).outputs == ((),)


def test_a_dim_may_have_several_factors_and_a_number_a_size() -> None:
    """A fused weight of queries, keys and values, and its three parts, as a tuple."""
    notation = Notation.parse("(3 h d) i, 1 -> [h d i, h d i, h d i]", whole="d")
    found = notation.fit([(24, 6), (1,)], [(4, 2, 6)] * 3)
    assert found.inputs == ((("3", "h", "d"), ("i",)), ((),))
    assert found.outputs == ((("h",), ("d",), ("i",)),) * 3
    assert found.sizes == {"3": 3, "h": 4, "d": 2, "i": 6}
    assert found.whole == {"3", "d"}
    assert found.offset(found.inputs[0], "h") == (0, 3)


def test_the_missing_factor_of_a_dim_follows_from_its_size() -> None:
    found = Notation.parse("b (h d), h -> b d h").fit([(2, 12), (4,)], [(2, 3, 4)])
    assert found.sizes == {"b": 2, "h": 4, "d": 3}


def test_last_inputs_may_be_missing_with_their_options() -> None:
    notation = Notation.parse("... i, o i, o -> ... o", additive=[2], linear=[[0], [0, 2]])
    found = notation.fit([(4, 6), (2, 6)], [(4, 2)])
    assert (found.additive, found.linear) == (frozenset(), ((0,),))


def test_offset_is_the_product_of_the_factors_outside() -> None:
    found = Factors(((("h", "d"), ("e",)),), ((("d",),),), {"h": 3, "d": 4, "e": 5})
    assert found.offset(found.inputs[0], "h") == (0, 1)
    assert found.offset(found.inputs[0], "d") == (0, 3)
    assert found.offset(found.inputs[0], "e") == (1, 1)
    assert found.offset(found.outputs[0], "e") is None


def test_factors_need_sizes() -> None:
    with pytest.raises(AssertionError, match="factor k has no size"):
        Factors(((("k",),),), (), {})


def test_a_split_factor_leaves_what_is_outside_and_inside_the_cut() -> None:
    """Behind a cut of 3, two ranks take half of each third: the next axis sees (3, half)."""
    found = Factors(((("m",),),), ((("m",),),), {"m": 12}, whole=frozenset({"m"}))
    assert split_factor(found, "m", 1, 2).sizes == {"mi": 6}
    behind = split_factor(found, "m", 3, 2)
    assert behind.sizes == {"mo": 3, "mi": 2}
    assert behind.inputs == ((("mo", "mi"),),)
    assert behind.whole == {"mo", "mi"}


def test_an_operator_has_one_rule() -> None:
    one, other = rule("op", "m -> m"), rule("other", "m -> m")
    assert table(one, [other]) == {"op": one, "other": other}
    with pytest.raises(ValueError, match="two rules for op"):
        table(one, rule("op", "... -> ..."))


def test_a_rule_reads_the_call() -> None:
    """From the node of a graph: its tensor inputs in order, whatever else it is given."""
    sample = call(aten.embedding.default, f(8, 4), ints(8, 3), 2)
    found = _factors(sample, quintnet.rule(aten.embedding.default, "v e, ... -> ... e", contiguous="v"))
    assert found.inputs == ((("v",), ("e",)), (("b0",),))
    assert found.outputs == ((("b0",), ("e",)),)
    assert found.contiguous == {"v"}


def test_a_rule_that_does_not_fit_names_the_operator() -> None:
    with pytest.raises(quintnet.CompileError, match=r"aten.relu.default does not fit here: rule 'm -> m'") as caught:
        _factors(call(aten.relu.default, f(4, 6)), rule(aten.relu.default, "m -> m"))
    assert caught.value.code == "QN202"


def _factors(sample: Sample, one: Rule) -> Factors:
    program = operator_program(sample, reference(sample, torch.Generator().manual_seed(0)))
    return RuleBook({**RULES, one.target: one}).factors(program.program.graph)[program.node]
