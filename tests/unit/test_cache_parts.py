"""The cache of programs: what a key has, what a file is, and when neither is used."""

from __future__ import annotations

import functools
import json
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.compat.torch_settings import active_modes, files_of_kernels, root_of_build, settings_of_torch
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.sharding import AxisType, Shard, parse_type
from quintnet_compiler.driver import cache_key
from quintnet_compiler.driver.cache_folder import CacheFolder, opened, sealed
from quintnet_compiler.driver.cache_key import key_of, sources_digest
from quintnet_compiler.driver.cache_report import CacheReport, surplus
from quintnet_compiler.driver.captured_text import NotCacheable, captured_text
from quintnet_compiler.driver.compiler import Runner, compile_program
from quintnet_compiler.driver.pipeline import Request
from quintnet_compiler.driver.plain_data import restored, to_plain_data
from quintnet_compiler.driver.program_cache import ProgramCache
from quintnet_compiler.driver.stored_program import program_data, read_program
from quintnet_compiler.ir.distributed_program import StateSpec
from quintnet_compiler.ir.generated import StoredModule
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import Captured
from quintnet_compiler.ops.rules.notation import table
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.schedules.schedule import Action

BATCH = (torch.ones(4, 6),)


class Net(nn.Module):
    """A loss, with a number that its code reads."""

    def __init__(self, factor: float = 2.0, build: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.factor, self.build = nn.Linear(6, 8), nn.Linear(8, 1), factor, build

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.build(self.first(x)) * self.factor).mean()


def _request(**changes: Any) -> Request:
    usual: dict[str, Any] = {
        "mesh": Mesh(tp=2), "plan": Plan(), "batch_size": 4, "device": torch.device("cpu"), "rules": RULES
    }  # fmt: skip
    return Request(**{**usual, **changes})


@functools.cache
def _captured() -> Captured:
    return capture(Net(), BATCH)


def _key(captured: Captured, **changes: Any) -> str:
    return key_of(captured, _request(**changes), training=True)


def test_equal_traces_have_one_key() -> None:
    assert _key(capture(Net(), BATCH)) == _key(_captured())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda: Net(3.0), BATCH),
        (lambda: Net(2), BATCH),  # an int, and not a float
        (lambda: Net(build=torch.relu), BATCH),
        (lambda: Net().requires_grad_(False), BATCH),
        (lambda: Net().double(), (torch.ones(4, 6, dtype=torch.float64),)),
        (Net, (torch.ones(4, 3, 6),)),
        (lambda: nn.Sequential(Net()), BATCH),  # other names
    ],
)
def test_other_traces_have_other_keys(model: Callable[[], nn.Module], batch: Any) -> None:
    assert _key(capture(model(), batch)) != _key(_captured())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": Mesh(dp=2)},
        {"mesh": Mesh(tp=2, dp=1)},
        {"plan": Plan(seed=1)},
        {"plan": Plan(zero=1)},
        {"batch_size": 8},
        {"device": torch.device("cuda")},
        {"lengths": {"length0": 3}},
        {"held": {("cache", "tp"): Shard(1)}},
    ],
    ids=str,
)
def test_what_is_asked_for_is_in_the_key(changes: dict[str, Any]) -> None:
    captured = _captured()
    assert _key(captured, **changes) != _key(captured)


@pytest.mark.slow
def test_settings_and_files_are_in_the_key() -> None:
    captured = _captured()
    usual = _key(captured)
    with mock.patch.object(cache_key, "sources_digest", lambda: "other"):
        assert _key(captured) != usual
    with mock.patch.object(cache_key, "FORMAT", 2):
        assert _key(captured) != usual
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert _key(captured) != usual
    torch.use_deterministic_algorithms(True)
    try:
        assert _key(captured) != usual
    finally:
        torch.use_deterministic_algorithms(False)
    assert _key(captured) == usual
    assert settings_of_torch() == settings_of_torch()
    assert any(file.startswith(root_of_build()) for file in files_of_kernels()) and len(root_of_build()) > 3


def test_devices_of_ranks_have_one_key() -> None:
    captured = _captured()
    keys = {_key(captured, device=torch.device("cuda", index)) for index in range(2)}
    assert len(keys) == 1


class _Sees(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_cannot_be_known_has_no_key() -> None:
    captured = _captured()
    with _Sees(), pytest.raises(NotCacheable, match="_Sees"):
        _key(captured)
    with torch.device("cpu"):
        assert active_modes() == []
    own = {**RULES, **table([quintnet.rule(torch.ops.aten.tanh.default, "... -> ...")])}
    with pytest.raises(NotCacheable, match=r"aten\.tanh"):
        _key(captured, rules=own)
    with pytest.raises(NotCacheable, match="inductor"):
        _key(captured, fused=True)
    with mock.patch.object(cache_key, "_stamps", lambda: []), pytest.raises(NotCacheable, match="changed"):
        sources_digest()


def test_operators_of_others_have_no_key() -> None:
    with torch.library._scoped_library("cachetest", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("cachetest::twice", torch.empty_like, lib=library)
        captured = capture(Net(build=lambda x: torch.ops.cachetest.twice(x.detach())), BATCH)
        with pytest.raises(NotCacheable, match="cachetest"):
            captured_text(captured)


def test_replaced_operators_have_no_key() -> None:
    captured = _captured()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("tanh", lambda x: x, "AutogradCPU")
        with pytest.raises(NotCacheable, match="kernels of its own for PyTorch's operators"):
            _key(captured)


def test_passes_read_nothing_of_a_trace_that_its_text_lacks() -> None:
    captured = _captured()
    bare = replace(captured, tensors=MappingProxyType({}), guards=None)
    programs = [compile_program(one, _request(), Runner()).program for one in (captured, bare)]
    assert programs[0].digest == programs[1].digest


# -- files


def test_a_folder_is_its_owners(tmp_path: Path) -> None:
    folder, text = CacheFolder(tmp_path / "a" / "cache"), sealed("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.read("00") is None
        folder.write("00", text)
        assert folder.read("00") == text
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (file,) = folder.path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert opened(text) == "{}" and opened(text + " ") is None and opened("") is None
    assert opened(sealed("[]", {"model": "a\nb"})) == "[]"


def _warns(folder: CacheFolder, words: str) -> None:
    with pytest.warns(quintnet.CacheWarning, match=words):
        assert folder.read("00") is None


@pytest.mark.parametrize("mode", [0o770, 0o705, 0o701])
def test_a_folder_of_several_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = CacheFolder(tmp_path / "cache")
    folder.write("00", sealed("{}"))
    folder.path.chmod(mode)
    _warns(folder, "others may use the folder")
    with pytest.warns(quintnet.CacheWarning, match="not written"):
        folder.write("01", sealed("{}"))


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache")
    folder.write("00", sealed("{}"))
    (file,) = folder.path.iterdir()
    file.chmod(0o660)
    _warns(folder, "others may use 00.program")
    file.unlink()
    file.symlink_to(tmp_path)
    _warns(folder, "not read")


@pytest.mark.parametrize("damage", [b"", b"x", b"quintnet program", bytes(range(256))])
def test_damaged_files_are_not_read(tmp_path: Path, damage: bytes) -> None:
    folder, text = CacheFolder(tmp_path / "cache"), sealed('{"a": 1}')
    folder.write("00", text)
    (file,) = folder.path.iterdir()
    for data in (damage, text.encode()[:-1], text.encode().replace(b"1", b"2")):
        file.write_bytes(data)
        _warns(folder, "damaged")


def test_what_is_used_last_stays_longest(tmp_path: Path) -> None:
    folder, names = CacheFolder(tmp_path / "cache"), ["a" * 64, "b" * 64, "c" * 64]
    for age, name in enumerate(names):
        folder.write(name, sealed("{}", {"model": name[0]}))
        os.utime(folder.path / f"{name}.program", (1000.0 - age, 1000.0 - age))
    assert [file.about["model"] for file in folder.files()] == ["a", "b", "c"]
    assert folder.read(names[2]) is not None
    files = folder.files()
    assert [file.about["model"] for file in files] == ["c", "a", "b"]
    gone = surplus(files, before=0.0, most=2.5 * files[0].size)
    folder.remove(gone)
    folder.remove(gone)  # somebody else may have been faster
    report = CacheReport.of_folder(str(folder.path), files, gone)
    assert [file.name[0] for file in folder.files()] == ["c", "a"] == [file.name[0] for file in report.files]
    assert "removed: 1 program" in str(report) and json.loads(report.to_json())["removed"][0]["about"] == {"model": "b"}


@pytest.mark.parametrize("text", ["x", "quintnet program\n[1]\n", "quintnet program 00\n{nothing\n"])
def test_a_file_that_is_no_program_is_shown_as_that(tmp_path: Path, text: str) -> None:
    folder = CacheFolder(tmp_path / "cache")
    folder.write("0" * 64, text)
    (file,) = folder.files()
    assert file.about == {} and "not a whole program" in str(CacheReport.of_folder("cache", [file], ()))


# -- plain data


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Mesh(pp=2, tp=3), Mesh),
        ((1, 2), tuple[int, ...]),
        ({0: "a", 1: "b"}, Mapping[int, str]),
        (None, torch.dtype | None),
        (parse_type("S(0,2,64)"), AxisType),
        (Action.parse("2SF0>3"), Action),
        (25, float),
    ],
)  # fmt: skip
def test_data_comes_back(value: Any, kind: Any) -> None:
    data = json.loads(json.dumps(to_plain_data(value, kind)))
    assert restored(data, kind) == value


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("a", int), (True, int), (1, str), ("nn", torch.dtype), ("Tensor", torch.dtype), ({}, tuple[int, ...]),
        ([1], tuple[int, int]), (["x"], StateSpec), ([[1, 2, 3]], Mapping[int, int]), (None, int),
    ],
)  # fmt: skip
def test_data_of_another_form_is_refused(data: Any, kind: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        restored(data, kind)


# -- programs


def _compiled(folder: Path) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(Net(), Mesh(tp=2), BATCH, cache=folder, check="off")


def _read(program: quintnet.CompiledProgram) -> bool:
    return program.compile_seconds.keys() == {ProgramCache.__name__}


def test_stored_functions_are_checked_before_they_run() -> None:
    good = "def forward(self, args):\n    comm, x, = args\n    args.clear()\n    y = torch.neg(x)\n    return (y,)\n"
    module = StoredModule(good, "forward", lambda: pytest.fail("compiled"))
    given = [None, torch.ones(2)]
    assert module.forward(given)[0].tolist() == [-1, -1] and given == []
    bad = StoredModule(good.replace("torch.neg(x)", "open('x')"), "forward", lambda: pytest.fail("compiled"))
    with pytest.raises(quintnet.CompileError, match="QN701"):
        _ = bad.forward


def test_a_program_that_was_changed_is_refused() -> None:
    captured = _captured()
    program = compile_program(captured, _request(), Runner()).program
    data = json.loads(json.dumps(program_data(program)))
    same = read_program(data, captured, "", lambda: program)
    assert same.digest == program.digest and same.source is program.source
    piece = data["stages"][0]["pieces"]["forward"]
    piece["code"] = piece["code"].replace("2.0", "3.0")
    with pytest.raises(ValueError, match="not the program"):
        read_program(data, captured, "", lambda: program)


@pytest.mark.slow
def test_a_file_of_another_key_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert [_read(_compiled(folder)) for _ in range(2)] == [False, True]
    (file,) = folder.iterdir()
    other = json.loads(opened(file.read_text()) or "")
    file.write_text(sealed(json.dumps({**other, "key": "f" * 64})))
    with pytest.warns(quintnet.CacheWarning, match="another key"):
        assert not _read(_compiled(folder))
    assert _read(_compiled(folder))
    file.write_text("damaged")
    with pytest.warns(quintnet.CacheWarning, match="damaged"):
        assert not _read(_compiled(folder))
    assert _read(_compiled(folder)) and len(list(folder.iterdir())) == 1


def test_another_program_than_before_is_no_graph_of_this_one() -> None:
    captured = _captured()
    program = compile_program(captured, _request(), Runner()).program
    other = compile_program(captured, _request(mesh=Mesh(dp=2)), Runner()).program
    with pytest.raises(quintnet.CompileError, match="QN209"):
        _ = read_program(json.loads(json.dumps(program_data(program))), captured, "", lambda: other).source
