"""Settings of the process, and modules that compute their attributes: guards see changes of what forward reads."""

from __future__ import annotations

import contextvars
import decimal
import gc
import locale
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.guards.process_settings import ContextValues, readers_of

_VARIABLE = contextvars.ContextVar("scale", default=1.0)
_DEFAULT = {"scale": 1.0}
_DEFAULTED = contextvars.ContextVar("defaulted", default=_DEFAULT)
_KEYS = {type("Key", (), {})(): 0}
_GENERATOR = torch.Generator().manual_seed(1)
_MODULES = types.SimpleNamespace()


class Scaled(nn.Module):
    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.read()).mean()


# what forward reads, and what changes it; pytest's monkeypatch puts it back
SETTINGS: dict[str, tuple[Callable[[], float], Callable[[pytest.MonkeyPatch], Any]]] = {
    "decimal precision": (
        lambda: float(decimal.Decimal(1) / 3),
        lambda patch: patch.setattr(decimal.getcontext(), "prec", 3),
    ),
    "context": (
        lambda: dict(contextvars.copy_context()).get(_VARIABLE, 1.0),
        lambda patch: _VARIABLE.set(2.0),
    ),
    "default of a context variable": (
        lambda: _DEFAULTED.get()["scale"],
        lambda patch: patch.setitem(_DEFAULT, "scale", 2.0),
    ),
    "key of a dict": (
        lambda: sum(getattr(key, "scale", 1.0) for key in _KEYS),
        lambda patch: patch.setattr(next(iter(_KEYS)), "scale", 2.0, raising=False),
    ),
    "seed of a generator": (lambda: float(_GENERATOR.initial_seed()), lambda patch: _GENERATOR.manual_seed(2)),
    "function of a layer that forward makes": (
        lambda: nn.GELU()(torch.ones(2)),  # type: ignore[arg-type,return-value]
        lambda patch: patch.setattr(nn.functional, "gelu", torch.relu),
    ),
    "environment": (
        lambda: float(os.environ.get("QUINTNET_TEST_SCALE", "1")),
        lambda patch: patch.setenv("QUINTNET_TEST_SCALE", "2"),
    ),
    "getenv": (
        lambda: float(os.getenv("QUINTNET_TEST_SCALE", "1")),
        lambda patch: patch.setenv("QUINTNET_TEST_SCALE", "2"),
    ),
    "folder": (lambda: float(len(os.getcwd())), lambda patch: patch.chdir("/")),
    "recursion limit": (
        lambda: float(sys.getrecursionlimit()),
        lambda patch: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    ),
    "name of the thread": (
        lambda: float(len(threading.current_thread().name)),
        lambda patch: patch.setattr(threading.current_thread(), "name", "another name"),
    ),
    "errors of NumPy": (
        lambda: float(numpy.geterr()["divide"] == "warn"),
        lambda patch: numpy.seterr(divide="ignore"),
    ),
    "number format": (
        lambda: float(len(locale.localeconv()["decimal_point"])),
        lambda patch: patch.setitem(locale._override_localeconv, "decimal_point", ",,"),  # type: ignore[attr-defined]
    ),
}


def _holds_after(model: nn.Module, change: Callable[[], object]) -> bool:
    guards = capture(model, (torch.ones(2),)).guards
    assert guards is not None
    assert guards.hold()
    change()
    return guards.hold()


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_forward_names_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = SETTINGS[name]
    limit, context = sys.getrecursionlimit(), contextvars.copy_context()
    with numpy.errstate():
        assert not context.run(_holds_after, Scaled(read), lambda: change(monkeypatch))
    sys.setrecursionlimit(limit)


def test_settings_that_nobody_names_are_not_read() -> None:
    assert readers_of({"scale", "forward"}) == ()
    assert len(readers_of({"isenabled", "get_num_threads"})) == 2
    assert gc.isenabled in readers_of({"isenabled"})


def test_values_of_a_context_are_compared_as_objects() -> None:
    values = ContextValues.read()
    assert values == ContextValues.read()
    token = _VARIABLE.set(3.0)
    assert values != ContextValues.read()
    _VARIABLE.reset(token)
    assert values != 1


def _import(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Any:
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for part in (name.partition(".")[0], name):
        monkeypatch.delitem(sys.modules, part, raising=False)
    __import__(name)
    return sys.modules[name]


_GETATTR = """_scale = 1.0
def __getattr__(name):
    if name == 'SCALE':
        return _scale
    raise AttributeError(name)
"""
_PROPERTY = """import sys, types
_scale = 1.0
class Computed(types.ModuleType):
    @property
    def SCALE(self):
        return self._scale
sys.modules[__name__].__class__ = Computed
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("quintnet_test_a", _GETATTR), ("quintnet_test_b", _PROPERTY), ("quintnet_test_c.inner", "SCALE = 1.0\n")],
    ids=["a function", "a property", "a package without a file"],
)
def test_attributes_that_modules_compute_are_compared(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _MODULES.module = module = _import(tmp_path, monkeypatch, name, text)
    read_by = "SCALE" if "SCALE" in vars(module) else "_scale"
    space: dict[str, Any] = {"module": module, "__name__": "__main__"}
    exec("def read():\n    return module.SCALE\n", space)
    assert not _holds_after(Scaled(space["read"]), lambda: setattr(module, read_by, 2.0))


def test_a_list_in_a_slice_is_compared() -> None:
    ends = [2]
    part = slice(0, ends)
    model = Scaled(lambda: float(part.stop[0]))
    assert not _holds_after(model, lambda: ends.append(3) or ends.__setitem__(0, 5))  # type: ignore[func-returns-value]
