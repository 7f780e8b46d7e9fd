"""core: files, HTML, progress, versions, parameters without memory, places of code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from quintnet_compiler.core.axes import AXES, DATA_AXES, SHARDED_AXES
from quintnet_compiler.core.code_origin import PACKAGE, STDLIB, TORCH, version_of
from quintnet_compiler.core.empty_storage import device_of, hollow_parameters, of_other_ranks, plain_parameters
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.files import open_folder, save_text, write_file
from quintnet_compiler.core.html import table
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.progress import bar, hushed, seen, working


def test_axes_of_a_mesh_are_outermost_first() -> None:
    assert AXES == ("pp", "dp", "ep", "cp", "tp")
    assert AXES[1:] == SHARDED_AXES and DATA_AXES == ("dp", "ep")
    mesh = Mesh(**dict.fromkeys(AXES, 2))
    assert mesh.names == AXES and mesh.coordinate(1) == {"pp": 0, "dp": 0, "ep": 0, "cp": 0, "tp": 1}


def test_places_of_code() -> None:
    assert torch.nn.__file__.startswith(TORCH) and os.__file__.startswith(STDLIB)
    assert version_of.__code__.co_filename.startswith(PACKAGE) and not __file__.startswith(PACKAGE)


def test_versions_of_packages() -> None:
    assert version_of("torch").split("+")[0] == torch.__version__.split("+")[0]
    assert version_of("no-such-package-anywhere") == ""


def test_a_file_is_written_whole_and_replaces_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    (tmp_path / "a").symlink_to(secret)
    with open_folder(tmp_path) as folder:
        write_file(folder, "a", "text\n")
    assert secret.read_text() == "kept" and not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_text() == "text\n" and sorted(os.listdir(tmp_path)) == ["a", "secret"]


def test_a_text_is_saved_whole_where_a_person_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device, a pipe and an open descriptor are written to; anything but a file would be gone otherwise."""
    kept, path = tmp_path / "kept", tmp_path / "new" / "a"
    kept.write_text("kept")
    save_text(path, "first")
    path.unlink()
    path.symlink_to(kept)
    save_text(path, "second\n")
    assert path.read_text() == "second\n" and not path.is_symlink() and kept.read_text() == "kept"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save_text(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    with kept.open("w") as file:
        save_text(Path(f"/dev/fd/{file.fileno()}"), "third")
    assert kept.read_text() == "third" and Path("/dev/fd").is_symlink()
    save_text(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
    for folder in (path.parent, Path("."), Path("..")):
        with pytest.raises(CompileError, match="is a folder"):
            save_text(folder, "")

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".temporary")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        save_text(path, "fourth")
    assert path.read_text() == "second\n" and os.listdir(path.parent) == ["a"]


def test_a_folder_is_made_and_a_link_within_another_is_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path / "x/y") as outer, open_folder(Path("z"), outer):
        assert (tmp_path / "x/y/z").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "file").write_text("")
    with open_folder(tmp_path) as outer:
        for name in ("link", "file"):
            with pytest.raises(CompileError, match="is not a folder"), open_folder(Path(name), outer):
                raise AssertionError("opened")
        with pytest.raises(CompileError, match="'x' is a folder"):
            write_file(outer, "x", "")


def test_tables_escape_what_they_hold() -> None:
    found = table(["<"], [[1, "a&b"]], "x\x00y")
    assert "<th>&lt;</th>" in found and "<td>1</td><td>a&amp;b</td>" in found and "\x00" not in found
    assert table([], []) == "<table><tbody></tbody></table>"


def test_progress_is_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    assert seen()
    with hushed():
        assert not seen()
        with working("this"), bar("that") as told:
            told(1, 2)
    monkeypatch.setenv("RANK", "1")
    assert not seen()
    assert capsys.readouterr() == ("", "")


def test_parameters_are_hollow_inside_and_themselves_again_outside() -> None:
    model = nn.Linear(3, 2)
    twin = nn.Sequential(model, nn.Linear(2, 3))
    twin[1].weight = model.weight  # tied, whatever the shape says
    weight = model.weight
    with hollow_parameters(twin) as real:
        inside = model.weight
        assert inside is twin[1].weight and inside is not weight and real[id(inside)] is weight
        assert inside.shape == weight.shape and inside.untyped_storage().size() == 0
        assert isinstance(inside, nn.Parameter) and len(real) == 3
    assert model.weight is weight and twin[1].weight is weight


def test_a_parameter_of_another_rank_says_where_it_is() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert device_of(model) == torch.device("meta") and device_of(nn.Identity()) == torch.device("cpu")
    of_other_ranks(model.weight, torch.device("cpu"))
    assert device_of(model) == torch.device("cpu")


def test_parameters_of_a_loss_are_plain_inside() -> None:
    class Trained(nn.Parameter):
        pass

    x = nn.Parameter(torch.ones(1))
    x.__class__ = Trained
    with plain_parameters([x]):
        assert type(x) is nn.Parameter
    assert type(x) is Trained
