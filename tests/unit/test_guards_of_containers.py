"""Guards of what a trace may have read unseen: containers, modules and classes by name, and state that nobody reads."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from quintnet_compiler.compat.torch import unwritten_guard
from quintnet_compiler.driver.unread_state import UnreadState
from quintnet_compiler.guards.by_name import is_users, spaces_by_name
from quintnet_compiler.guards.columns import Absent, Constants, Kinds, PlainValues, SameObjects
from quintnet_compiler.guards.containers import (
    ContainerSnapshot,
    Numbers,
    fields_of,
    is_unchanged,
    names_of,
    reading_of,
)
from quintnet_compiler.guards.function_reads import Variable
from quintnet_compiler.guards.guards import Guards, TraceReads, global_modes, guards_of
from quintnet_compiler.guards.module_contents import STEPS_BEFORE_CPP, DictVersions, Namespaces, Parts, Registered
from quintnet_compiler.guards.reach import Unread, children, container_guards, is_observable, reachable
from quintnet_compiler.guards.stand_ins import Tripwire, UnreadStateUsed, touched
from quintnet_compiler.guards.trial import Trial


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = 1


class Settings:
    pass


class OwnReads:
    def __init__(self) -> None:
        self.a = 1

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def _snapshot(value: Any) -> ContainerSnapshot:
    reading = reading_of(value)
    assert reading is not None
    return ContainerSnapshot("c", value, reading)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"k": 1.0}, lambda c: c.update(k=2.0)),
        ({"a": 1.0, "b": 2.0}, lambda c: c.update(a=c.pop("a"))),
        (OrderedDict(k=1.0), lambda c: c.update(k=2.0)),
        ([1.0], lambda c: c.append(1.0)),
        (deque([1.0], 1), lambda c: c.append(2.0)),
        ({1, 2}, lambda c: c.add(3)),
        (types.SimpleNamespace(k=1.0), lambda c: setattr(c, "k", 2.0)),
        ({"k": 1}, lambda c: c.update(k=1.0)),
        ({"k": torch.ones(1)}, lambda c: c.update(k=torch.ones(1))),
    ],
)
def test_a_container_that_changes(value: Any, change: Any) -> None:
    snapshot = _snapshot(value)
    assert snapshot.holds() and snapshot.broken() == []
    change(value)
    assert not snapshot.holds() and snapshot.broken()


def test_equal_plain_values_are_the_same() -> None:
    held = {"k": 1.5}
    snapshot = _snapshot(held)
    held["k"] = float("1.5")
    assert snapshot.holds()
    assert is_unchanged(2, 2) and not is_unchanged(2, 2.0) and not is_unchanged(torch.ones(1), torch.ones(1))


def test_arrays_are_compared_by_their_values() -> None:
    array = numpy.ones(3)
    numbers = Numbers("a", array)
    assert numbers.holds()
    array[1] = 2
    assert not numbers.holds() and numbers.broken() == ["a has other values than it had"]


def test_attributes_in_slots() -> None:
    owner = Slotted()
    assert names_of(owner) == ["a"] and fields_of(owner) == [1]
    assert is_observable(owner) and not is_observable(OwnReads()) and not is_observable(types.SimpleNamespace())


def test_what_can_be_reached() -> None:
    inner = OwnReads()
    labels = dict(reachable([("x", {"a": [inner, 3]})], lambda value: False, {}))
    assert set(labels) == {"x", "x['a']", "x['a'][0]"} and labels["x['a'][0]"] is inner
    assert children("m", nn.Identity(), lambda value: False) == []
    guards = container_guards([("x", [inner])], lambda value: False, {})
    assert guards.hold()
    inner.a = 2
    assert not guards.hold()


def test_variables_of_modules_and_classes_by_name() -> None:
    config = types.ModuleType("config")
    config.__file__ = __file__
    config.SCALE = 2.0  # type: ignore[attr-defined]
    space, *_ = spaces_by_name([("config", config)], {"SCALE", "OTHER"})
    assert space.present == ("SCALE",) and space.absent == {"OTHER"}
    assert [space.present for space in spaces_by_name([("S", Slotted)], {"a"})] == [("a",)]
    assert is_users(Slotted) and not is_users(nn.Linear)


def test_columns() -> None:
    space = {"a": 1, "b": object()}
    plain, same = PlainValues.of([("a", space, "a", 1)]), SameObjects((("b", space, "b", space["b"]),))
    absent = Absent((("c", space, "c"),), (), (("d", frozenset("d"), space),))
    assert plain.hold() and same.hold() and absent.hold()
    space.update(a=True, b=object(), c=1, d=2)
    assert plain.broken() == ["a is True and was 1"] and same.broken() == ["b is another object"]
    assert absent.broken() == ["c is 1 and was nothing", "d.d is 2 and was nothing"]


def test_constants_with_other_memory() -> None:
    x = torch.ones(2)
    constants = Constants.of([(x, x._version)])
    assert constants.hold()
    x.data = torch.ones(2)
    assert not constants.hold()


def _guards(held: Any) -> Guards:
    return guards_of(TraceReads([], variables=[Variable("c", "c", {"c": held})], modes=global_modes()))


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda x: defaultdict(list, x)])
def test_what_a_dict_has_beside_what_is_read(kind: Any) -> None:
    held = kind({"k": 1.0})
    guards = _guards(held)
    held["log"] = 1
    trial = Trial.of(guards)
    assert trial is not None
    space: Any = guards.source.variables[0].space
    assert space["c"] is not held and space["c"]["k"] == 1.0 and space["c"].get("other") is None
    trial.put_back()
    assert space["c"] is held and trial.unread == {id(held): Unread(only=("k", "other"))}
    narrow = guards.without(trial.unread)
    held["log"] = 2
    assert narrow.hold()
    held["other"] = 1
    assert not narrow.hold()


def test_a_dict_that_is_read_as_a_whole() -> None:
    held = {"k": 1.0}
    guards = _guards(held)
    held["log"] = 1
    trial = Trial.of(guards)
    assert trial is not None
    space: Any = guards.source.variables[0].space
    list(space["c"].values())
    trial.put_back()
    assert trial.unread is None


def test_a_dict_that_is_read_by_other_ways_than_its_methods() -> None:
    held = {"k": 1.0}
    guards = _guards(held)
    held["log"] = 1
    trial = Trial.of(guards)
    assert trial is not None
    space: Any = guards.source.variables[0].space
    assert space["c"]["k"] == 1.0
    with pytest.raises(UnreadStateUsed):
        sum(dict.values(space["c"]))
    trial.put_back()
    assert trial.unread is None


def test_a_tripwire() -> None:
    wire: Any = Tripwire(list)
    assert isinstance(wire, list) and not touched(wire)
    for use in (len, iter, lambda x: x[0], lambda x: x.append, lambda x: x == 1, bool):
        fresh: Any = Tripwire(list)
        with pytest.raises(UnreadStateUsed):
            use(fresh)
        assert touched(fresh)


def test_no_trial_without_a_change() -> None:
    guards = _guards({"k": 1.0})
    assert Trial.of(guards) is None
    now: Any = types.SimpleNamespace(guards=guards)
    assert UnreadState().without(now, lambda: pytest.fail("it was traced")) is None


def test_a_read_of_a_name_that_changed_ends_a_trial() -> None:
    held = {"k": 1.0, "log": 0}
    guards = _guards(held)
    space: Any = guards.source.variables[0].space
    state, traces = UnreadState(), list[str]()

    def trace() -> Any:
        traces.append("begun")
        space["c"]["k"]
        traces.append("read")

    now: Any = types.SimpleNamespace(guards=guards)
    for k in (2.0, 3.0):  # it is known the second time
        held["k"] = k
        assert state.without(now, trace) is None and traces == ["begun"] and space["c"] is held
    held.update(k=1.0, log=1)
    assert state.without(now, trace) is None and traces == ["begun", "begun", "read"]


def test_an_equal_value_holds_unless_it_can_change_in_place() -> None:
    space: dict[str, Any] = {"number": 1.5, "one": (frozenset({1}),), "list": [1]}
    plain = PlainValues.of([(name, space, name, value) for name, value in space.items()])
    space["number"] = float("1.5")
    assert plain.hold() and plain.hold()
    changes = {1}
    space["one"] = (changes,)  # equal to what was there, but others may change it
    assert not plain.hold() and plain.broken() == ["one is ({1},) and was (frozenset({1}),)"]
    space["one"] = (frozenset({1}),)
    assert plain.hold()
    space["list"].append(2)
    assert not plain.hold() and plain.broken() == ["list is [1, 2] and was [1]"]


def _count_in_a_loop(owner: Any) -> None:
    for number in range(100):  # Python writes to attributes by a shorter way in loops
        owner.number = number


@pytest.mark.parametrize(
    "write",
    [
        lambda owner: setattr(owner, "new", 1),
        lambda owner: setattr(owner, "number", 2),
        lambda owner: delattr(owner, "number"),
        lambda owner: vars(owner).update(number=2),
        lambda owner: vars(owner).pop("number"),
        lambda owner: vars(owner).setdefault("new", 2),
        lambda owner: vars(owner).clear(),
        lambda owner: vars(owner).__ior__({"number": 2}),
        lambda owner: setattr(owner, "__dict__", dict(vars(owner))),
        _count_in_a_loop,
    ],
)
@pytest.mark.parametrize("kind", [Settings, nn.Identity])
def test_a_write_makes_another_version(write: Callable[[Any], None], kind: Callable[[], Any]) -> None:
    owner = kind()
    owner.number = 1.5
    versions = DictVersions.current(Namespaces.current([("", owner)]), [])
    numbers, unwritten = versions.read(), unwritten_guard(versions.owners, versions.dicts)
    assert numbers[:1] == [type(owner)] and versions.read() == numbers and unwritten()
    assert versions.ids == {id(owner), id(vars(owner))}
    write(owner)
    assert versions.read() != numbers and not unwritten()


class Derived(Settings):
    """Has the layout of its base, whose objects may become its own."""


@pytest.mark.parametrize("steps", [1, 2 * STEPS_BEFORE_CPP])
@pytest.mark.parametrize("write", ["attribute", "class", "dict"])
def test_a_write_is_seen_after_any_number_of_steps(write: str, steps: int) -> None:
    owner, space = Settings(), {"a": 1}
    versions = DictVersions.current(Namespaces.current([("", owner)]), [space])
    for _ in range(2):  # what compares in C++ is made again
        assert not versions.hold()
        versions.remember()
        assert all(versions.hold() for _ in range(steps))
        assert (versions.unwritten is not None) == (steps > STEPS_BEFORE_CPP)
        if write == "attribute":
            owner.number = object()
        elif write == "class":
            owner.__class__ = Derived if type(owner) is Settings else Settings
        else:
            space["a"] += 1
        assert not versions.hold()
        versions.remember()
        space["a"] += 1


def test_kinds_compare_objects_that_have_no_versions() -> None:
    seen, unseen = Settings(), Settings()
    kinds = Kinds.of([("seen", seen), ("unseen", unseen)])
    holds = kinds.outside(frozenset([id(seen)]))
    seen.__class__ = Derived
    assert holds() and not kinds.hold()
    unseen.__class__ = Derived
    assert not holds() and kinds.broken() == [f"{name} is a Derived and was a Settings" for name in ("seen", "unseen")]


def test_what_is_in_no_dict_is_compared_each_time() -> None:
    space: dict[str, Any] = {"a": 1.5, "b": [1], "c": print}
    own = nn.Linear(2, 2)
    plain = PlainValues.of([("a", space, "a", 1.5), ("b", space, "b", [1])])
    same, absent = SameObjects((("c", space, "c", print),)), Absent((("d", space, "d"),), (), ())
    guards = plain, same, absent
    here, elsewhere = ([guard.outside(ids) for guard in guards] for ids in (frozenset([id(space)]), frozenset[int]()))
    assert all(holds() for holds in (*here, *elsewhere))
    space.update(a=1, c=len, d=1)
    assert all(holds() for holds in here) and not any(holds() for holds in elsewhere)
    space["b"].append(2)
    assert not here[0]()
    parts = Parts.current([("", vars(own))])
    assert parts.hold() and parts.outside(frozenset()) == parts.hold
    holds = parts.outside(frozenset([id(vars(own))]))
    assert holds()
    own.add_module("new", nn.ReLU())
    assert not holds()
    assert DictVersions.current(Namespaces.current([]), [space, OrderedDict()]).dicts == (space,)


def test_parts_of_modules() -> None:
    first, second, empty = nn.Sequential(nn.Identity(), nn.ReLU()), nn.Sequential(nn.Tanh()), nn.ModuleList()
    parts = Parts.current([("first", vars(first)), ("second", vars(second)), ("empty", vars(empty))])
    assert parts.hold()
    moved = vars(first)["_modules"].pop("1")
    assert not parts.hold() and parts.broken() == ["first has other parts than it had"]
    first.append(nn.ReLU())
    assert not parts.hold()
    vars(first)["_modules"]["1"] = moved
    assert parts.hold()
    vars(empty)["_modules"] = {"0": nn.ReLU()}
    assert not parts.hold() and parts.broken() == ["empty has other parts than it had"]


def test_namespaces_that_were_replaced() -> None:
    plain, slotted, layer = OwnReads(), Slotted(), nn.Linear(2, 2)
    namespaces = Namespaces.current([("plain", plain), ("slotted", slotted), ("layer", layer), ("class", Slotted)])
    assert [owner for _, owner, _ in namespaces.rows] == [plain, layer]
    assert namespaces.hold() and namespaces.broken() == []
    plain.__dict__ = dict(vars(plain))
    assert not namespaces.hold() and namespaces.broken() == ["plain has another __dict__"]


def test_parameters_are_counted_where_they_are_now() -> None:
    layer = nn.Linear(2, 2)
    registered = Registered.current([vars(layer)])
    layer._parameters = dict(layer._parameters)
    assert registered.hold()
    layer._parameters["more"] = layer.weight
    assert not registered.hold()


def test_a_hook_of_a_parameter_that_a_graph_holds_is_seen() -> None:
    layer = nn.Linear(2, 2)
    loss = layer(torch.ones(1, 2)).sum()
    layer.bias.requires_grad_(False)
    guards = guards_of(TraceReads([("", layer)], modes=global_modes()))
    assert guards.hold()
    handles = [layer.weight.register_hook(lambda gradient: gradient)]
    assert not guards.hold() and loss.requires_grad
    handles.pop().remove()
    assert guards.hold()
    for parameter in layer.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
        assert not guards.hold()
        parameter.requires_grad_(not parameter.requires_grad)
    assert guards.hold()


class Options(dict[str, Any]):
    frozen = False


def test_attributes_of_a_dict_whose_namespace_was_read_are_compared() -> None:
    options = Options(k=1.0)
    guards = guards_of(TraceReads([], whole=[options], modes=global_modes()))
    assert guards.hold()
    vars(options)["frozen"] = True
    assert not guards.hold()


def test_a_class_with_another_kind_of_module_name() -> None:
    class Described(metaclass=type("Meta", (type,), {"__module__": property(lambda kind: 3)})):  # type: ignore[misc]
        pass

    assert Described.__module__ == 3
    assert is_users(Described)
