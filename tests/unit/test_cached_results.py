"""Functions that keep their results: a trace leaves none in them, and a program uses those that are there."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import compile_compatible_method_lru_cache

import quintnet
from quintnet import Mesh
from quintnet_compiler.capture.changes import cached_results
from quintnet_compiler.capture.changes.cached_results import CachedResults

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()


@functools.cache
def positions(size: int) -> Tensor:
    return torch.arange(size).double()


@functools.lru_cache(8)
def waves(size: int) -> tuple[Tensor, str]:
    return positions(size).sin(), "waves"


class Tables:
    def __init__(self, size: int) -> None:
        self.waves = positions(size).cos()


@functools.cache
def tables(size: int) -> Tables:
    return Tables(size)


class Net(nn.Module):
    def __init__(self, table: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.table = nn.Linear(6, 6).double(), table

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.table(x)).square().mean()


TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "cache": lambda x: positions(x.shape[1]),
    "lru_cache, in a tuple": lambda x: waves(x.shape[1])[0],
    "cache, in an object": lambda x: tables(x.shape[1]).waves,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("before", [False, True], ids=["", "kept before"])
@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("name", TABLES)
def test_the_module_and_further_traces_find_no_tensors_of_a_trace(name: str, check: str, before: bool) -> None:
    positions.cache_clear()
    waves.cache_clear()
    tables.cache_clear()
    model, table = Net(TABLES[name]), TABLES[name]
    unsplit = copy.deepcopy(model)
    if before:
        table(X)
    program = quintnet.compile(model, Mesh(dp=2), (X,), check=check)
    for x in (X, X[:, :1].expand(4, 6), X[:2]):
        torch.testing.assert_close(program.step((x,)), unsplit(x).detach())
    assert type(positions(6)) is Tensor
    assert float(unsplit(X)) == float(Net(table)(X))


def test_what_was_kept_before_stays_where_a_trace_adds_nothing() -> None:
    kept = positions(6)
    quintnet.compile(Net(TABLES["cache"]), Mesh(dp=2), (X,), check="off").prepare((X,))
    assert positions(6) is kept


def test_only_functions_that_a_trace_called_are_cleared() -> None:
    @functools.cache
    def own(size: int) -> Tensor:
        return torch.zeros(size)

    @functools.cache
    def other(size: int) -> Tensor:
        return torch.zeros(size)

    def trace() -> None:
        with torch._subclasses.FakeTensorMode():
            own(3)
        other(4)

    CachedResults.of_process().kept_from(trace)()
    assert own.cache_info().currsize == 0
    assert other.cache_info().currsize == 1


class Named(NamedTuple):
    table: object


class Held:
    def __init__(self, x: object) -> None:
        self.x = x


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda x: x,
        lambda x: (1, [x]),
        lambda x: {"table": (x, "name")},
        lambda x: Named(x),
        lambda x: Named(Held([x])),
        lambda x: (Held(0), Held({"table": x})),
        lambda x: [Named(0), Held(Named(x))],
    ],
    ids=["itself", "sequences", "mapping", "namedtuple", "attribute of a part", "second of a type", "nested attribute"],
)
def test_results_of_a_trace_are_found_beside_others_of_the_same_types(wrapped: Callable[[object], object]) -> None:
    """What was seen of an object's type says nothing of its parts or attributes."""

    @functools.cache
    def own(size: int) -> object:
        return wrapped(torch.zeros(size) if size == 3 else size)

    for size in range(3):
        own(size)
    search = CachedResults.of_process()

    def trace() -> None:
        own(4)
        with torch._subclasses.FakeTensorMode():
            own(3)
        own(5)

    search.kept_from(trace)()
    assert own.cache_info().currsize == 0
    search = CachedResults.of_process()
    search.kept_from(lambda: own(4))()
    assert own.cache_info().currsize == 1


def test_an_estimate_leaves_none_of_its_trace() -> None:
    positions.cache_clear()
    model = Net(TABLES["cache"])
    quintnet.estimate(model, quintnet.Cluster("h100"), (X,), {"mesh": {"dp": 2}})
    assert type(positions(6)) is Tensor
    assert type(model(X)) is Tensor


@pytest.fixture
def frozen() -> Iterator[list[object]]:
    """An object that the garbage collector does not look at."""
    made = list[object]()
    gc.freeze()
    yield made
    gc.unfreeze()


@pytest.mark.slow
def test_functions_are_found_that_a_program_has_frozen(frozen: list[object]) -> None:
    @functools.cache
    def own(size: int) -> Tensor:
        return torch.zeros(size)

    assert {own, positions} <= CachedResults.of_process().missed.keys()
    assert not any(x is frozen for x in gc.get_objects())


def test_all_objects_are_looked_at_again_only_where_a_function_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()

    def looked() -> list[object]:
        looks.append(1)
        return gc.get_objects()

    CachedResults.of_process()
    monkeypatch.setattr(cached_results, "all_objects", looked)
    before = CachedResults.of_process().missed
    assert not looks
    first, second = functools.cache(positions), functools.lru_cache(4)(waves)
    assert CachedResults.of_process().missed.keys() == {*before, first, second}
    assert len(looks) == 1
    first(3)
    assert CachedResults.of_process().missed[first] == 1
    del second
    assert CachedResults.of_process().missed.keys() == {*before, first}
    assert len(looks) == 1


class Keeps(nn.Module):
    """A table that the first call makes, in an attribute or a dictionary."""

    def __init__(self, *, one: bool) -> None:
        super().__init__()
        self.linear, self.one = nn.Linear(6, 6).double(), one
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        if self.one:
            if self.table is None:
                self.table = torch.arange(size).double()
            return (self.linear(x) + self.table).square().mean()
        if size not in self.tables:
            self.tables[size] = torch.arange(size).double()
        return (self.linear(x) + self.tables[size]).square().mean()


@pytest.mark.parametrize("one", [False, True], ids=["dictionary", "attribute"])
def test_a_table_of_the_module_is_there_after_one_call(one: bool) -> None:
    model = Keeps(one=one)
    with pytest.raises(quintnet.CompileError, match=r"QN110 [\s\S]*fix: .*model\(\*batch\) once under"):
        quintnet.compile(model, Mesh(dp=2), (X,))
    with torch.no_grad():
        expected = model(X)
    torch.testing.assert_close(quintnet.compile(model, Mesh(dp=2), (X,)).step((X,)), expected)


def test_sizes_that_vary_are_no_keys() -> None:
    with pytest.raises(quintnet.CompileError, match=r"QN101 [\s\S]*functools.lru_cache is a size that varies"):
        quintnet.compile(Net(lambda x: positions(x.shape[0]).sum()), Mesh(dp=2), (X,))
    model = Net(lambda x: positions.__wrapped__(x.shape[0]).sum())
    expected = model(X).detach()
    torch.testing.assert_close(quintnet.compile(model, Mesh(dp=1), (X,)).step((X,)), expected)


def test_methods_of_hugging_face_models_compute_their_tables_in_a_trace() -> None:
    class Positions(nn.Module):
        @compile_compatible_method_lru_cache(maxsize=1)
        def table(self, shape: torch.Size) -> Tensor:
            return torch.ones(shape).double().cumsum(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.shape)

    class Known(Net):
        def __init__(self) -> None:
            super().__init__(Positions())
            self.config = PreTrainedConfig()

    model = Known()
    expected = model(X).detach()
    torch.testing.assert_close(quintnet.compile(model, Mesh(dp=2), (X,)).step((X,)), expected)
