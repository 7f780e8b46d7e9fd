"""ops.op_spec, ops.catalog, ops.traits and ops.rules.work: what is declared of operators is true of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quintnet_compiler.compat.torch import operator_name, schema
from quintnet_compiler.ops.catalog import OPERATORS, name_of, op_spec, spec_of
from quintnet_compiler.ops.collectives import COLLECTIVES
from quintnet_compiler.ops.copies import BACK
from quintnet_compiler.ops.op_spec import OpSpec
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.ops.rules.work import work_of
from quintnet_compiler.ops.traits import TRAITS

from ..operator_samples import SAMPLES

aten = torch.ops.aten


def test_traits_are_fields_of_specs() -> None:
    names = {field.name for field in fields(OpSpec)}
    assert {name for traits in TRAITS.values() for name in traits} <= names


def test_a_spec_has_its_row_and_its_traits() -> None:
    for target, traits in TRAITS.items():
        spec, row = spec_of(target), OPERATORS.get(name_of(target) or "", OpSpec())
        assert {name: getattr(spec, name) for name in traits} == traits
        assert (spec.work, spec.autocast, spec.keep, spec.save) == (row.work, row.autocast, row.keep, row.save)


def test_an_operator_of_others_has_no_facts() -> None:
    assert spec_of(len) == spec_of("wait") == OpSpec()
    assert work_of(len) is None and work_of(aten.linear.default) == "matmul"


def _own() -> list[Any]:
    """Return all operators of this package."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("quintnet::"))
    return [getattr(torch.ops.quintnet, name.removeprefix("quintnet::")).default for name in names]


def _arguments(target: Any) -> list[tuple[str, str]]:
    """Return the name and type of each argument."""
    return [(argument.name, str(argument.type)) for argument in schema(target).arguments]


def test_what_is_declared_of_collectives_follows_from_their_schemas() -> None:
    """Over all operators of this package: completeness, and truth."""
    for target in _own():
        spec, name = spec_of(target), operator_name(target)
        assert spec.under_way == name.startswith("start_")
        sized = _arguments(target)[1:3] == [("axis", "str"), ("size", "int")] and not spec.is_typed_move
        assert spec.takes_size == sized
        assert spec.communicates <= spec.takes_size <= spec.on_rank
        if spec.start is not None:
            begins = spec_of(spec.start)
            assert (begins.collective, begins.way, begins.under_way) == (spec.collective, spec.way, True)
            assert _arguments(spec.start) == _arguments(target)
        if spec.collective is not None and not spec.under_way:
            assert spec.collective.op is target
            assert (spec.collective.together is not None) <= (not _takes_several(target))
        assert (spec.routing == "plan") == (name == "dispatch_plan")
        assert not spec.reorders_rows or (spec.transpose is not None and spec_of(spec.transpose).restores_rows)
        assert not spec.restores_rows or (spec.transpose is not None and spec_of(spec.transpose).reorders_rows)


def _takes_several(target: Any) -> bool:
    return str(schema(target).arguments[0].type) == "List[Tensor]"


def test_several_values_travel_together_as_they_do_alone() -> None:
    for collective in COLLECTIVES.values():
        if collective.together is not None:
            together = spec_of(collective.together).collective
            assert together is not None and _takes_several(collective.together)
            assert (together.price, together.of_state) == (collective.price, collective.of_state)


def test_copies_leave_by_the_link_by_which_they_come_back() -> None:
    back = {"to host": "from host", "to disk": "from disk"}
    assert {spec_of(away).way: spec_of(home).way for away, home in BACK.items()} == back
    assert {t for t in _own() if spec_of(t).copies_away} == set(BACK)


OTHER_PRODUCTS = {  # of which no operand is one matrix that multiplies rows
    "bilinear", "mv", "dot", "addmv", "addbmm", "baddbmm", "einsum", "convolution", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "grouped_convolution",
    "grouped_convolution_weight", "cdist", "_cdist_forward", "_cdist_backward", "scaled_matmul", "expert_linear",
    "scaled_expert_linear",
}  # fmt: skip


def test_products_have_their_operands_where_they_say() -> None:
    """Of all operators whose rules say that they are products."""
    matmuls = {target for target in RULES if work_of(target) == "matmul"}
    assert {name_of(target) for target in matmuls if spec_of(target).product is None} == OTHER_PRODUCTS
    for target in (target for target in TRAITS if spec_of(target).product is not None):
        product = spec_of(target).product
        assert product is not None
        for weight_dims in (2, 3) if product.weight_dims is None else (product.weight_dims,):
            rows, bias = torch.rand(5, 2, 3) if weight_dims == 3 else torch.rand(2, 3), torch.rand(4)
            weight = torch.rand(5, 3, 4) if weight_dims == 3 else torch.rand(3, 4)
            operands = {product.rows: rows, product.weight: weight.mT if product.transposed else weight}
            args = [x for _, x in sorted((operands | ({} if product.bias is None else {product.bias: bias})).items())]
            assert product.operands(args)[:2] == (args[product.rows], args[product.weight])
            expected = rows @ weight + (0 if product.bias is None else bias)
            torch.testing.assert_close(target(*args), expected)


def test_permutations_of_dims() -> None:
    x = torch.rand(2, 3)
    arguments = {aten.t.default: (), aten.transpose.int: (0, 1), aten.permute.default: ([1, 0],)}
    assert {target for target in TRAITS if spec_of(target).permutes is not None} == set(arguments)
    for target, args in arguments.items():
        assert torch.equal(target(x, *args), x.T)


def test_generated_code_calls_operators_by_their_names() -> None:
    graph = fx.Graph()
    comm, named_so = graph.placeholder("comm"), graph.placeholder("wait")
    assert op_spec(named_so) == op_spec(graph.call_method("linear", (comm,))) == OpSpec()
    for target in (target for target in _own() if spec_of(target).on_rank):
        assert op_spec(graph.call_method(operator_name(target), (comm,))) == spec_of(target)
    assert op_spec(graph.call_method("accumulate", (comm,))).accumulates == "value"


def _all(field: str) -> set[Any]:
    """Return the operators of which a trait is declared."""
    return {target for target, traits in TRAITS.items() if field in traits}


def test_what_keeps_values_keeps_them() -> None:
    x = torch.rand(4, 6).T
    shaped = {
        aten.reshape.default: ([2, 12],), aten.view.default: ([2, 2, 6],), aten._unsafe_view.default: ([2, 2, 6],),
        aten._reshape_alias.default: ([4, 6], [6, 1]),
    }  # fmt: skip
    assert _all("reshapes") == set(shaped)
    for target, (sizes, *rest) in shaped.items():
        source = x if target is aten.reshape.default else x.contiguous()
        assert torch.equal(target(source, sizes, *rest), x.reshape(sizes))
    assert _all("clones") == {aten.clone.default} and _all("relayouts") == {aten.contiguous.default}
    clone, dense = aten.clone.default(x), aten.contiguous.default(x)
    assert torch.equal(clone, x) and clone.data_ptr() != x.data_ptr()
    assert (
        torch.equal(dense, x)
        and dense.is_contiguous()
        and aten.contiguous.default(dense).data_ptr() == dense.data_ptr()
    )
    (cast,) = _all("casts")
    assert torch.equal(cast(x, dtype=torch.float64), x.double())
    (alias,) = _all("aliases")
    assert torch.equal(alias(x), x) and alias(x).data_ptr() == x.data_ptr()
    (slices,) = _all("slices")
    assert torch.equal(slices(x, 1, 1, 4, 2), x[:, 1:4:2])


def test_what_is_taken_apart_is_joined_again() -> None:
    x = torch.rand(4, 6)
    (join,) = _all("joins")
    parts = {"sizes": ([1, 5], 1), "each": (1,)}
    for target in _all("splits"):
        results = target(x, *parts[spec_of(target).splits or ""])
        columns = [part if part.dim() == 2 else part[:, None] for part in results]
        assert torch.equal(join(columns, 1), x) and (len(results) == 6) == (spec_of(target).splits == "each")


def test_rows_are_in_their_order_again_once_ungrouped() -> None:
    named = {spec_of(target).routing: target for target in _own()}
    ids, rows = torch.tensor([2, 0, 1, 0]), torch.rand(4, 3)
    order, ends = named["group plan"](ids, 3, None, True)
    grouped = named["group"](rows, order, ends)
    assert torch.equal(grouped, rows[ids.argsort(stable=True)])
    assert torch.equal(named["ungroup"](grouped, order, ends), rows)


def test_sums_of_two() -> None:
    a, b = torch.rand(2, 3, 4).unbind()
    for target in _all("adds"):
        assert torch.equal(target(a, b), a + b) and torch.equal(target(a, 2), a + 2)


def test_no_gradient_flows_through_what_detaches() -> None:
    for target in _all("detaches"):
        x = torch.rand(3, requires_grad=True) * 2
        made = target(x)
        assert not made.requires_grad and torch.equal(made, x.detach())
        in_place = spec_of(target).detaches == "in place"
        assert schema(target).is_mutable == in_place == (not x.requires_grad)


def _results(target: Any, *, strided: bool) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield inputs and results of the sample calls of an operator; inputs may be transposed in memory."""
    dice = torch.Generator().manual_seed(0)
    for sample in SAMPLES[target]:
        inputs = [x.draw(dice, x.shape) for x in sample.inputs]
        inputs = [x.mT.contiguous().mT if strided and x.dim() > 1 else x for x in inputs]
        made = sample.call(inputs, lambda operator, *args, **kwargs: operator(*args, **kwargs))
        yield inputs, [made] if isinstance(made, Tensor) else [x for x in made if isinstance(x, Tensor)]


@pytest.mark.parametrize("field", ["new_memory", "contiguous"])
def test_the_memory_of_results(field: str) -> None:
    without_samples = {"embedding_rows", "embedding_rows_backward", "embedding_dense_backward"}  # write to new_empty
    targets = {target for target in _all(field) if name_of(target) not in without_samples}
    assert len(targets) > 5
    for target in targets:
        for inputs, results in _results(target, strided=True):
            if field == "new_memory":
                assert not {x.untyped_storage().data_ptr() for x in inputs} & {
                    x.untyped_storage().data_ptr() for x in results
                }
            else:
                assert all(x.is_contiguous() for x in results)


def test_all_attention_says_what_kind_it_is() -> None:
    priced = {getattr(getattr(torch.ops, space), name) for name, row in OPERATORS.items() if row.work == "attention"
              for space in ("aten", "quintnet") if name in dir(getattr(torch.ops, space))}  # fmt: skip
    ruled = {target for target in RULES if work_of(target) == "attention"}
    declared = _all("attention") | {target for target in ruled if spec_of(target).attention is not None}
    assert {packet.default for packet in priced} | ruled == declared
    for target in declared:
        kind, names = spec_of(target).attention, [name for name, _ in _arguments(target)]
        assert kind is not None and work_of(target) == "attention"
        assert kind.backward == names[0].startswith("grad") and names[kind.backward] in ("q", "query", "axis")
        assert kind.masked == ("mask" in names)
        assert (kind.positions == "ring") == spec_of(target).communicates
        assert kind.fused == operator_name(target).startswith("_scaled_dot_product")


def test_draws_have_the_number_of_a_random_operator() -> None:
    assert {target for target in _own() if spec_of(target).random} == _all("random")
    for target in _own():
        names = {name for name, _ in _arguments(target)}
        assert (spec_of(target).random is not None) == ("op" in names)
        assert (spec_of(target).random == "numbers") == ("kind" in names)


def test_operators_write_to_the_caches_that_they_say() -> None:
    """Keys and values of earlier positions; a schema cannot say it, as these are inputs of the program, too."""
    for target in _own():
        names = [name for name, _ in _arguments(target)]
        caches = {"keys", "values"} if "keys" in names else set()
        assert {names[position] for position in spec_of(target).caches} == caches


def test_lookups_return_rows_of_their_first_input() -> None:
    table, ids = torch.rand(5, 3), torch.tensor([[4, 0], [2, 2]])
    for target in _all("looks_up"):
        assert [kind for _, kind in _arguments(target)][:2] == ["Tensor", "Tensor"]
    assert torch.equal(aten.embedding.default(table, ids), table[ids])


def test_convolutions_are_all_that_torch_calls_so() -> None:
    assert _all("convolves") == {target for target in RULES if (name_of(target) or "").startswith("conv")}


def test_of_some_inputs_only_the_shape_is_read() -> None:
    for target in _all("shape_only"):
        names = [name for name, kind in _arguments(target) if kind == "Tensor"]
        assert names[spec_of(target).shape_only or 0] == "self"
        for sample in SAMPLES.get(target, ()):
            dice = torch.Generator().manual_seed(0)
            inputs = [x.draw(dice, x.shape) for x in sample.inputs]
            others = [x + 1 if place == spec_of(target).shape_only else x for place, x in enumerate(inputs)]
            made, again = (sample.call(x, lambda f, *args, **kwargs: f(*args, **kwargs)) for x in (inputs, others))
            assert made.shape == again.shape and ("empty" in str(target) or torch.equal(made, again))


def test_lookups_read_as_much_as_they_return() -> None:
    """At most as many elements of the first input have a gradient as the result has, or as rows are labelled."""
    for target in (target for target in _all("reads_result_size") if target in SAMPLES):
        for sample in SAMPLES[target]:
            dice = torch.Generator().manual_seed(0)
            table, *others = (x.draw(dice, x.shape) for x in sample.inputs)
            table = table.clone().requires_grad_()
            made = sample.call([table, *others], lambda f, *args, **kwargs: f(*args, **kwargs))
            result = made if isinstance(made, Tensor) else made[0]
            (read,) = torch.autograd.grad(result.sum(), table)
            assert int((read != 0).sum()) <= max(result.numel(), others[0].numel())


def test_losses_say_over_what_they_average() -> None:
    """Of all operators of torch with a reduction; CTC's mean is weighted, and others are parts of these."""
    reducing = set()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or "backward" in packet or packet.endswith("_forward") or packet == "ctc_loss":
            continue
        target = getattr(getattr(aten, packet), overload or "default")
        if ("reduction", "int") in _arguments(target) and not schema(target).is_mutable:
            reducing.add(target)
    assert _all("averages") == reducing


def test_reductions_are_sums_or_means() -> None:
    x = torch.tensor([[1.0, 0, 2], [3, 4, 0]])
    computed = {"sum": (x.sum(), (x != 0).sum()), "mean": (x.mean(),)}
    for target in _all("reduces"):
        kind, name = spec_of(target).reduces, name_of(target)
        if kind == "bins":
            assert int(target(x, 4, 0.0, 4.0).sum()) == x.numel()
            continue
        dims = [[0, 1]] if len(_arguments(target)) > 1 and "List" in _arguments(target)[1][1] else []
        assert target(x, *dims) in computed[kind or ""], name


def test_zeros_stay_zeros() -> None:
    for target in _all("keeps_zero"):
        zeros = [torch.zeros(3, requires_grad=True) for name, kind in _arguments(target) if kind == "Tensor"]
        made = target(*zeros)
        assert not made.any() and all(x.isfinite().all() for x in torch.autograd.grad(made.sum(), zeros))


def test_gradients_of_slices() -> None:
    for target in _all("slice_gradient"):
        x = torch.rand(4, 6, requires_grad=True)
        part = aten.slice.Tensor(x, 1, 1, 5, 2)
        grad = torch.rand(part.shape)
        assert torch.equal(target(grad, [4, 6], 1, 1, 5, 2), *torch.autograd.grad(part, x, grad))


def test_operators_that_overwrite_read_nothing_of_it() -> None:
    for target in _all("overwrites"):
        x = torch.full([3], torch.nan)
        others = [torch.tensor(2.0) if kind == "Tensor" else 2.0 for _, kind in _arguments(target)[1:2]]
        assert schema(target).is_mutable and not target(x, *others).isnan().any()


def test_operators_that_take_strides() -> None:
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()]
    strided = [getattr(aten, name).default for name in names if name.startswith("as_strided") and "." not in name]
    assert _all("takes_strides") == set(strided)


def test_operators_that_add_at_indices() -> None:
    """Of all operators that write at indices: those that add where an index comes twice."""
    x, source = torch.zeros(3), torch.ones(2)
    index, twice = torch.tensor([1, 1]), torch.tensor([0.0, 2, 0])
    writing = {target for target in RULES if name_of(target) in ("index_add", "index_copy", "scatter", "scatter_add")}
    sources = {target for target in writing if len(_arguments(target)) > 3 and _arguments(target)[3][1] == "Tensor"}
    assert len(sources) > 3
    assert _all("adds_at_indices") == {t for t in sources if torch.equal(t(x, 0, index, source), twice)}


def test_what_finds_returns_the_positions_that_are_not_zero() -> None:
    for target in (target for target in TRAITS if spec_of(target).finds):
        results = target(torch.tensor([0, 2, 0, 3]))
        parts = [results] if isinstance(results, Tensor) else list(results)
        assert torch.cat([part.flatten() for part in parts]).tolist() == [1, 3]
