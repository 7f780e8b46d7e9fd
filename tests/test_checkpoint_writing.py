"""What a save promises: every tensor comes back, nothing outside of the folder changes, errors say what is there."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint import background, commit, manifest
from quintnet_compiler.checkpoint.background import SaveLine
from quintnet_compiler.checkpoint.folder import MARK
from quintnet_compiler.checkpoint.formats.convert import convert
from quintnet_compiler.checkpoint.formats.format import Format
from quintnet_compiler.checkpoint.lock import NAME
from quintnet_compiler.checkpoint.stores import disk_folder
from quintnet_compiler.checkpoint.stores.object_folder import ObjectFolder
from quintnet_compiler.checkpoint.stores.places import folder_at
from quintnet_compiler.checkpoint.training_state import write
from quintnet_compiler.checkpoint.values import stored_extra

BATCH = (torch.randn(8, 6), torch.randn(8, 3))
STEPS = ["step-00000010", "step-00000020", "step-00000030"]


def _program(model: nn.Module | None = None, *, check: Literal["first", "off"] = "first") -> CompiledProgram:
    torch.manual_seed(0)
    model = nn.Linear(6, 3) if model is None else model
    return quintnet.compile(model, quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss, check=check)


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return _program()


def _there(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != NAME)


# -- every tensor comes back


class _Keeping(nn.Module):
    """Has a tensor that no operator reads."""

    def __init__(self, x: Tensor, *, parameter: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        if parameter:
            self.kept: Tensor = nn.Parameter(x)
        else:
            self.register_buffer("kept", x)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (self.kept.sum() if isinstance(self.kept, nn.Parameter) else 0)


def _bits(x: Tensor) -> bytes:
    x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return x.flatten().view(torch.uint8).numpy().tobytes()


_BYTES = torch.arange(1, 49, dtype=torch.uint8)
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32,
    torch.uint16, torch.uint8,
]  # fmt: skip
KINDS: dict[str, Tensor] = {
    **{str(dtype): _BYTES.clone().view(dtype) for dtype in DTYPES},
    "bool": torch.tensor([True, False, True]),
    "no elements": torch.empty(0),
    "no rows": torch.empty(0, 5),
    "no columns": torch.empty(4, 0),
    "no elements of complex128": torch.empty(2, 0, dtype=torch.complex128),
    "one number": torch.tensor(3),
    "one of complex128": torch.tensor(3 + 4j, dtype=torch.complex128),
    "columns first": torch.arange(12.0).view(3, 4).t(),
    "every second of complex128": torch.arange(12.0).to(torch.complex128)[::2],
    "expanded": torch.ones(1).expand(5),
    "one of every second": torch.arange(12.0)[::2][:1],
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_comes_back(kind: str, place: str) -> None:
    saved = _program(_Keeping(KINDS[kind].detach()), check="off")  # torch compares no float4 and no complex32
    saved.save(place, step=1, extra={"kept": KINDS[kind]})
    other = _program(_Keeping(torch.zeros_like(KINDS[kind], memory_format=torch.contiguous_format)), check="off")
    restored = other.load(place)
    saved.load(place)
    for found in (other.state_dict()["kept"], restored.extra["kept"], saved.state_dict()["kept"]):
        assert found.dtype == KINDS[kind].dtype and found.shape == KINDS[kind].shape
        assert _bits(found) == _bits(KINDS[kind])


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0)])
def test_parameters_without_elements_and_their_state_come_back(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = _Keeping(torch.empty(shape), parameter=True)
    saved = _program(model)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved.step(BATCH)
    optimizer.step()
    saved.save(tmp_path / "run", step=1, optimizer=optimizer)
    convert(tmp_path / "run", tmp_path / "dcp", Format.DCP)
    convert(tmp_path / "dcp", tmp_path / "back", Format.QUINTNET)
    for folder in ("run", "back"):
        other = _program(_Keeping(torch.empty(shape), parameter=True))
        restored = torch.optim.AdamW(other.parameters())
        other.load(tmp_path / folder, optimizer=restored)
        for p, q in zip(saved.parameters(), other.parameters(), strict=True):
            assert optimizer.state[p].keys() == restored.state[q].keys()
            assert restored.state[q]["exp_avg"].shape == q.shape
        other.step(BATCH)
        restored.step()
    convert(tmp_path / "run", tmp_path / "weights", Format.SAFETENSORS)
    _program(_Keeping(torch.empty(shape), parameter=True)).load_pretrained(tmp_path / "weights")


def test_what_earlier_versions_left_out_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _program(_Keeping(torch.empty(0)))
    with monkeypatch.context() as patch:
        patch.setattr("quintnet_compiler.checkpoint.storage._agreed", lambda ranks: {
            name: kind for name, kind in ranks[0].items() if 0 not in kind[1]
        })  # fmt: skip
        plain.save(tmp_path, step=1)
    assert plain.load(tmp_path).step == 1


REFUSED = {
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "int4": lambda: torch.empty(3, dtype=torch.int4),
    "bits8": lambda: torch.empty(3, dtype=torch.bits8),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(kind: str) -> None:
    from quintnet_compiler.checkpoint.parts import SavedPart
    from quintnet_compiler.checkpoint.training_state import Snapshot

    part = SavedPart.whole(REFUSED[kind]())
    with pytest.raises(quintnet.CheckpointError, match=f"model/odd is torch.{kind}, which") as raised:
        Snapshot({"model/odd": part}, {})
    assert raised.value.code == "QN603"
    with pytest.raises(quintnet.CheckpointError, match=f"extra:odd is torch.{kind}, which"):
        stored_extra({"odd": REFUSED[kind]()})


class _Labelled(Tensor):
    """A class that its users want back."""


def _without_memory() -> Tensor:
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


OF_ANOTHER_CLASS = {
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "NestedTensor": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "MaskedTensor": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "_Labelled": lambda: torch.ones(3).as_subclass(_Labelled),
    "UninitializedParameter": nn.UninitializedParameter,
    "Tensor without memory": _without_memory,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("kind", OF_ANOTHER_CLASS)
def test_a_tensor_of_another_class_is_refused_by_name_before_anything_is_written(
    kind: str, program: CompiledProgram, tmp_path: Path
) -> None:
    """Its numbers alone would come back as another thing."""
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    optimizer.state[next(iter(program.parameters()))]["mean"] = OF_ANOTHER_CLASS[kind]()
    for options in ({"extra": {"odd": [OF_ANOTHER_CLASS[kind]()]}}, {"optimizer": optimizer}):
        for save in (program.save, program.save_async):
            with pytest.raises(quintnet.CheckpointError, match=f"(odd|mean).* is a .*{kind}") as raised:
                save(tmp_path / "run", step=1, **options)
            assert raised.value.code == "QN603" and not (tmp_path / "run").exists()


def test_a_state_without_values_is_refused_by_name(tmp_path: Path) -> None:
    program = _program(check="off")
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    optimizer.state[next(iter(program.parameters()))]["mean"] = torch.empty(3, device="meta")
    with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)weight/mean is on the device meta"):
        program.save(tmp_path, step=1, optimizer=optimizer)


def test_a_checkpoint_that_lacks_a_part_is_not_published(
    program: CompiledProgram, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.save(place, step=1)
    from quintnet_compiler.checkpoint.parts import SavedPart

    real = SavedPart.__create_chunk_list__
    monkeypatch.setattr(SavedPart, "__create_chunk_list__", lambda part: [] if part.local.dim() == 1 else real(part))
    with pytest.raises(quintnet.CheckpointError, match="model/bias: its boxes do not cover") as raised:
        program.save(place, step=2)
    assert raised.value.code == "QN603"
    assert [entry.step for entry in folder_at(place).named()] == [1]


def test_a_load_waits_for_the_save_that_its_program_began(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find the checkpoint before, or none."""
    asked, waited = threading.Event(), SaveLine.wait

    def write_when_asked(*arguments: Any) -> Path | str:
        assert asked.wait(60)
        return write(*arguments)

    def wait(line: SaveLine) -> None:
        asked.set()
        waited(line)

    monkeypatch.setattr(background, "write", write_when_asked)
    saving = program.save_async(tmp_path, step=1)
    monkeypatch.setattr(SaveLine, "wait", wait)
    assert program.load(tmp_path).step == 1 and saving.done()


def test_no_checkpoint_is_put_into_another(program: CompiledProgram, tmp_path: Path) -> None:
    """That one would count as damaged."""
    path = Path(program.save(tmp_path / "run", step=3))
    for put in (lambda: program.save(path, step=4), lambda: program.reserve(path)):
        with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)is a checkpoint, which would count"):
            put()
    with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)is in the checkpoint .*step-00000003"):
        program.save_pretrained(path / "weights" / "new")
    with pytest.raises(quintnet.CheckpointError, match=r"QN601(?s:.*)it is one checkpoint"):
        program.load(path)
    assert program.load(tmp_path / "run").step == 3


# -- nothing outside of the folder


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_at_once(kind: str, program: CompiledProgram, tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    if kind == "link":
        other.write_text("mine")
    if kind.startswith("link"):
        (folder / NAME).symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(folder / NAME)
    else:
        (folder / NAME).mkdir()
    with pytest.raises(quintnet.CheckpointError, match="is a link, or not a plain file") as raised:
        program.save(folder, step=1)
    assert raised.value.code == "QN603"
    assert other.read_text() == "mine" if kind == "link" else not other.exists()


def test_a_lock_with_another_name_is_replaced(tmp_path: Path) -> None:
    """As in a copy of the folder that was made with hard links."""
    program = _program()
    program.save(tmp_path / "run", step=1)
    text = (tmp_path / "run" / NAME).read_bytes()
    program.close()
    os.link(tmp_path / "run" / NAME, tmp_path / "copy")
    other = _program()
    other.save(tmp_path / "run", step=2)
    assert (tmp_path / "copy").read_bytes() == text and not os.path.samefile(tmp_path / "copy", tmp_path / "run" / NAME)


def test_the_lock_has_the_mode_that_the_process_asks_for(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        _program().save(tmp_path, step=1)
    finally:
        os.umask(before)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o664


def test_links_to_folders_are_removed_and_not_followed(program: CompiledProgram, tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    for step in (3, 4, 5):
        program.save(other, step=step)
    kept = _there(other)
    program.save(run, step=90)
    (run / "abandoned-01").symlink_to(other)
    (run / ".step-00000007.0123abcd.tmp").symlink_to(other / kept[0])
    (run / "step-00000080").symlink_to(other / kept[1])
    program.save(run, step=91, keep=1)
    assert _there(other) == kept
    assert program.load(other, step=3).step == 3
    program.save(run, step=10)  # sets 91 aside, and not into what a link leads to
    assert _there(other) == kept and (run / "abandoned-02" / "step-00000091").is_dir()


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_file_that_is_none_does_not_hold_up_a_load(
    name: str, kind: str, program: CompiledProgram, tmp_path: Path
) -> None:
    first = Path(program.save(tmp_path, step=1))
    (first / name).rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(first / name)
    else:
        (first / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(quintnet.CheckpointError, match=r"plain file|not followed"):
        program.load(tmp_path, step=1)


def _trainer(program: CompiledProgram, folder: Path | str | None, log: Path | None = None) -> quintnet.Trainer:
    data = DataLoader(TensorDataset(*BATCH), batch_sampler=quintnet.BatchSampler(8, 8, seed=0))
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    return quintnet.Trainer(
        program, optimizer, data, epochs=3, checkpoint_folder=folder, log_folder=log, log_every=1, console=False
    )


def test_logs_are_not_written_through_links(tmp_path: Path) -> None:
    outside, log = tmp_path / "outside", tmp_path / "log"
    log.mkdir()
    outside.write_text("mine")
    for name in ("metrics.jsonl", "time.json", ".time.json.part", "timeline.json"):
        (log / name).symlink_to(outside)
    with pytest.warns(quintnet.LogWarning, match="metrics.jsonl cannot be written .*not followed"):
        _trainer(_program(), None, log).fit()
    assert outside.read_text() == "mine" and not (log / "time.json").is_symlink()


def test_a_log_with_another_name_is_copied_first(tmp_path: Path) -> None:
    (tmp_path / "copy").write_text('{"step": 1}\n')
    os.link(tmp_path / "copy", tmp_path / "metrics.jsonl")
    _trainer(_program(), None, tmp_path).fit()
    assert (tmp_path / "copy").read_text() == '{"step": 1}\n'
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1}\n{"time"')


# -- in which order


def _failing(monkeypatch: pytest.MonkeyPatch, call: str, code: int, when: Callable[..., bool]) -> None:
    """Let a function of os fail where ``when`` says so of its arguments."""
    real = getattr(os, call)

    def failing(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_save_without_its_name_changes_nothing(
    code: int, program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        program.save(tmp_path, step=step)
    with monkeypatch.context() as patch:
        _failing(patch, "rename", code, lambda source, to: str(to).endswith("step-00000001"))
        with pytest.raises(quintnet.CheckpointError, match=f"this save changed no other checkpoint in {tmp_path}"):
            program.save(tmp_path, step=1)
    assert _there(tmp_path) == STEPS
    assert program.load(tmp_path).step == 30


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("step", [1, 20])
def test_a_fault_after_the_name_says_that_the_checkpoint_is_there(
    step: int, exchanged: bool, program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (10, 20, 30):
        program.save(tmp_path, step=each)
    with monkeypatch.context() as patch:
        if not exchanged:
            patch.setattr(disk_folder.ctypes, "CDLL", lambda *_, **__: object())
        real = disk_folder.sync

        def sync(folder: Path) -> None:
            if folder == tmp_path and (tmp_path / f"step-{step:08}").stat().st_mtime_ns > newest:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(folder)

        newest = max(path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name.startswith("step"))
        patch.setattr(disk_folder, "sync", sync) if step == 20 else None
        if step == 1:
            patch.setattr(disk_folder.DiskFolder, "set_aside", _raise)
        with pytest.raises(quintnet.CheckpointError, match=f"of step {step} is whole and has its name") as raised:
            program.save(tmp_path, step=step, extra={"new": True})
    assert "this save changed no other checkpoint" not in str(raised.value) and raised.value.code == "QN603"
    found = program.load(tmp_path)
    assert found.step == step and found.extra == {"new": True}
    program.save(tmp_path, step=step + 1)  # finishes it
    assert [entry.step for entry in folder_at(tmp_path).named()] == ([2, 1] if step == 1 else [21, 20, 10])
    assert not [name for name in _there(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("has_name", [True, False])
def test_a_disk_that_is_gone_leaves_the_name_unknown(
    has_name: bool, program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename fails, before or after it is done, and nothing can be read from then on: what was written stays."""
    program.save(tmp_path, step=1)
    rename = os.rename

    def fail(source: Path, to: Path) -> None:
        if has_name:
            rename(source, to)
        patch.setattr(disk_folder, "open_folder_to_read", _raise)
        _raise()

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(
            quintnet.CheckpointError, match=r"whether the checkpoint of step 2 has its name .*not known"
        ):
            program.save(tmp_path, step=2)
    assert program.load(tmp_path).step == 2 and (tmp_path / "step-00000002").exists() == has_name
    program.save(tmp_path, step=3)
    assert _there(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("keep", [None, 1])
def test_a_checkpoint_that_cannot_be_read_again_stays(
    keep: int | None, program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes back, and every file that is read after its checkpoint has its name is an error."""
    program.save(tmp_path, step=2)
    with monkeypatch.context() as patch:
        real = disk_folder.DiskFolder.publish

        def publish(folder: disk_folder.DiskFolder, made: Any, step: int) -> Any:
            final = real(folder, made, step)
            patch.setattr(disk_folder, "open_folder_to_read", _raise)
            return final

        patch.setattr(disk_folder.DiskFolder, "publish", publish)
        program.save(tmp_path, step=0, keep=keep)
    assert program.load(tmp_path).step == 0
    assert _there(tmp_path) == ["abandoned-01", "step-00000000"]


def _raise(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_replacement_that_fails_between_two_names_gives_the_first_back(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange names."""
    program.save(tmp_path, step=1, extra={"new": False})
    with monkeypatch.context() as patch:
        patch.setattr(disk_folder.ctypes, "CDLL", lambda *_, **__: object())
        _failing(patch, "rename", errno.EIO, lambda source, to: str(source).endswith(".tmp"))
        with pytest.raises(quintnet.CheckpointError, match="this save changed no other checkpoint"):
            program.save(tmp_path, step=1, extra={"new": True})
    assert _there(tmp_path) == ["step-00000001"] and program.load(tmp_path).extra == {"new": False}


def test_readers_meanwhile_take_the_run_that_goes_on(
    program: CompiledProgram, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the name of the new checkpoint and the move of the last later one."""
    for step in (10, 20, 30):
        program.save(place, step=step)
    reader, seen = _program(), []
    kind = ObjectFolder if "://" in place else disk_folder.DiskFolder
    real = kind.set_aside

    def set_aside(folder: Any, entries: Any) -> None:
        seen.append(reader.load(place).step)
        real(folder, entries[1:])
        seen.append(reader.load(place).step)
        real(folder, entries[:1])

    monkeypatch.setattr(kind, "set_aside", set_aside)
    program.save(place, step=15)
    assert seen == [15, 15] and program.load(place).step == 15
    program.save(place, step=20)  # a step of the run that was left, again
    assert program.load(place).step == 20


def test_a_mark_from_a_stranger_does_no_harm(program: CompiledProgram, tmp_path: Path) -> None:
    program.save(tmp_path, step=2)
    for text in ("[", "[" * 4000, "{}", '{"step": 1e999, "sha256": ""}', '{"step": 1, "sha256": null}'):
        (tmp_path / ".leaving.json").write_text(text)
        assert program.load(tmp_path).step == 2
    program.save(tmp_path, step=3)
    assert _there(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_folder_without_a_checkpoint_names_those_that_were_set_aside(tmp_path: Path) -> None:
    program = _program()
    _trainer(program, tmp_path).fit()
    (tmp_path / "abandoned-01").mkdir()
    for name in _there(tmp_path):
        if name.startswith("step"):
            (tmp_path / name).rename(tmp_path / "abandoned-01" / name)
    with pytest.raises(quintnet.CheckpointError, match="abandoned-01, which has 3") as raised:
        program.load(tmp_path)
    assert raised.value.code == "QN601"
    with pytest.raises(quintnet.CheckpointError, match="no checkpoint to go on from") as raised:
        _trainer(_program(), tmp_path).fit()
    assert raised.value.code == "QN601" and "abandoned-01 with step 3" in str(raised.value)
    for name in _there(tmp_path / "abandoned-01"):
        (tmp_path / "abandoned-01" / name).rename(tmp_path / name)
    assert _trainer(_program(), tmp_path).fit().resumed_from == 3


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_trainer_does_not_begin_anew_beside_what_it_cannot_read(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / "step-00000003").write_text("x")
    else:
        (tmp_path / "step-00000003").symlink_to(tmp_path / "gone")
    with pytest.raises(quintnet.CheckpointError, match="step-00000003, which is no folder"):
        _trainer(_program(), tmp_path).fit()


def _put(kind: str, path: Path) -> None:
    """Let ``path`` be a file, a pipe, or a link to a file or to nothing."""
    target = path.parent.parent / "target"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to(target)
    else:
        (target if kind == "link" else path).write_text("mine")
        path.symlink_to(target) if kind == "link" else None


def _is_put(kind: str, path: Path) -> bool:
    """Return whether ``path`` still is what it was, and what a link leads to, too."""
    if kind.startswith("link"):
        target = path.readlink()
        return path.is_symlink() and (target.read_text() == "mine" if kind == "link" else not target.exists())
    return path.is_fifo() if kind == "pipe" else path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "link to nothing"])
def test_what_has_a_checkpoints_name_and_is_none_is_not_replaced(
    kind: str, program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it gets that name while the new checkpoint is written."""
    folder, real = tmp_path / "run", manifest.write_manifest
    program.save(folder, step=4)
    for step in (2, 3):

        def write_manifest(*arguments: Any, step: int = step) -> str:
            if step == 2:
                _put(kind, folder / "step-00000002")
            return real(*arguments)

        monkeypatch.setattr(commit, "write_manifest", write_manifest)
        _put(kind, folder / "step-00000003") if step == 3 else None
        with pytest.raises(quintnet.CheckpointError, match="would be replaced by one: move it away") as raised:
            program.save(folder, step=step)
        assert raised.value.code == "QN603" and _is_put(kind, folder / f"step-{step:08}")
    program.save(folder, step=5)
    assert program.load(folder).step == 5
    assert _there(folder) == [f"step-{step:08}" for step in (2, 3, 4, 5)]


@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing"])
def test_a_mark_that_is_no_file_is_refused(kind: str, program: CompiledProgram, tmp_path: Path) -> None:
    program.save(tmp_path / "run", step=4)
    _put(kind, tmp_path / "run" / MARK)
    with pytest.raises(quintnet.CheckpointError, match=r"is not followed|is not a plain file") as raised:
        program.save(tmp_path / "run", step=3)
    assert raised.value.code == "QN603" and _is_put(kind, tmp_path / "run" / MARK)
    assert _there(tmp_path / "run") == [MARK, "step-00000004"]


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "link to nothing"])
def test_what_has_the_folders_name_and_is_none_is_refused(kind: str, program: CompiledProgram, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    _put(kind, tmp_path / "all" / "run")
    with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)File exists"):
        program.save(tmp_path / "all" / "run", step=3)
    assert _is_put(kind, tmp_path / "all" / "run") and os.listdir(tmp_path / "all") == ["run"]
