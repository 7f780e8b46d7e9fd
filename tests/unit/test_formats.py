"""checkpoint.formats, part by part: pickles read as data, keys of other tools, names, conversions in one process."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import quintnet
from quintnet_compiler.checkpoint import dtensors, tied
from quintnet_compiler.checkpoint.formats import convert as conversion
from quintnet_compiler.checkpoint.formats.contents import Contents, OptimizerContents
from quintnet_compiler.checkpoint.formats.convert import Choices, convert, format_of
from quintnet_compiler.checkpoint.formats.dcp_folder import read_dcp, write_dcp
from quintnet_compiler.checkpoint.formats.dcp_keys import layout_of
from quintnet_compiler.checkpoint.formats.dcp_metadata import read_dcp_metadata
from quintnet_compiler.checkpoint.formats.format import Format
from quintnet_compiler.checkpoint.formats.megatron import as_hugging_face, is_megatron
from quintnet_compiler.checkpoint.formats.quintnet_folder import read_quintnet, write_quintnet
from quintnet_compiler.checkpoint.formats.safetensors_folder import read_safetensors, write_safetensors
from quintnet_compiler.checkpoint.parts import SavedPart
from quintnet_compiler.checkpoint.stores.disk_folder import DiskFolder
from quintnet_compiler.checkpoint.stores.new_folder import new_folder
from quintnet_compiler.cli.convert import convert as verb
from quintnet_compiler.compat.distributed import interleaved_shard
from quintnet_compiler.core import slices
from quintnet_compiler.core.errors import CheckpointError
from quintnet_compiler.core.pickle_records import Pickled, records_in
from quintnet_compiler.core.sharding import I
from quintnet_compiler.core.sharding import Shard as ShardType

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def refused(code: str, call: Callable[[], object], *said: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        call()
    assert raised.value.code == code
    assert all(text in str(raised.value) for text in said), raised.value


class Acts:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_a_pickle_is_read_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    index = dcp.metadata.MetadataIndex("a", torch.Size([1]))
    found = records_in(io.BytesIO(pickle.dumps({"x": [index, Acts()], "n": (1, 2.5, None)})))
    assert found["n"] == (1, 2.5, None) and all(isinstance(x, Pickled) for x in found["x"])
    assert found["x"][0].state["fqn"] == "a" and found["x"][0].kind[1] == "MetadataIndex"
    assert not Path("executed").exists()
    # a class of this process that a pickle names and changes stays as it is
    before = dict(vars(dcp.metadata.Metadata))
    changed = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x05\x00\x00\x00wrongK\x01s\x86b."
    with pytest.raises(ValueError, match="damaged"):
        records_in(io.BytesIO(changed))
    assert dict(vars(dcp.metadata.Metadata)) == before
    for damaged in (b"", b"garbage", pickle.dumps([1, 2])[:-2], b"\x80\x02Qx."):
        with pytest.raises(ValueError, match="damaged"):
            records_in(io.BytesIO(damaged))


def model_and_optimizer(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    return model, optimizer


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(x, other[key]) for key, x in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("options", [StateDictOptions(), FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("place", ["model", "app.model", ""])
def test_keys_of_other_tools(place: str, options: StateDictOptions, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    if place == "app.model":
        state = {"app": {"model": model.state_dict(), "optim": state["optimizer"]}, "note": "kept"}
    elif place:
        state |= {"model": model.state_dict()}
    else:  # as torchtitan has it
        state |= {**model.state_dict(), "train_state": {"step": torch.tensor(7)}, "lr_scheduler": {"last_epoch": 7}}
    found = read_dcp(saved(tmp_path / "dcp", state), None)
    assert same(dict(found.model), dict(model.state_dict()))
    assert found.optimizer is not None
    assert same(found.optimizer.state, get_optimizer_state_dict(model, optimizer)["state"])
    assert {one["lr"] for one in found.optimizer.options.values()} == {0.25}
    assert found.step == (0 if place else 7)
    assert found.left_out == {"model": (), "app.model": ("note",), "": ("lr_scheduler.last_epoch",)}[place]


def test_what_keys_do_not_say_is_refused(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    numbered = saved(tmp_path / "a", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    refused("QN602", lambda: read_dcp(numbered, None), "belongs to no parameter", "get_optimizer_state_dict")
    refused("QN602", lambda: read_dcp(numbered, "other"), "'other.'", "--model-key")
    refused("QN601", lambda: read_safetensors(numbered), f"quintnet convert {numbered} NEW_FOLDER --to safetensors")
    twice = {"one": {"param_groups": [{"lr": 1}]}, "two": {"param_groups": [{"lr": 1}]}, "x": torch.ones(1)}
    refused("QN602", lambda: read_dcp(saved(tmp_path / "b", twice), None), "several optimizers: one, two")
    kinds = {"model.x": TensorStorageMetadata(TensorProperties(), torch.Size([1]), []), "note": BytesStorageMetadata()}
    assert layout_of(kinds, None, own="quintnet").model == "model."


def test_nested_state_of_an_optimizer_keeps_its_form(tmp_path: Path) -> None:
    x = torch.rand(2, 3)
    state = {"w": {"exp.avg": x, "factors": {"a": {"b": x + 1}}, "blocks": [x + 2, x + 3], "seen": 4}}
    contents = Contents({"w": x + 9}, OptimizerContents("Own", state, {"w": {"lr": 0.1, "betas": [0.9, 0.99]}}), 3)
    write_dcp(tmp_path / "dcp", contents)
    write_quintnet(tmp_path / "own", contents)
    for found in (read_dcp(tmp_path / "dcp", None), read_quintnet(DiskFolder(tmp_path / "own"), None)):
        assert found.optimizer is not None and found.optimizer.kind == "Own" and found.step == 3
        assert same(found.optimizer.state, state)
        assert {key: list(x) if key == "betas" else x for key, x in found.optimizer.options["w"].items()} == {
            "lr": 0.1,
            "betas": [0.9, 0.99],
        }


def _program(seed: int, axes: dict[str, int]) -> tuple[quintnet.CompiledProgram, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    program = quintnet.compile(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
        quintnet.Mesh(**axes),
        BATCH,
        loss_fn=nn.functional.mse_loss,
    )
    return program, torch.optim.Adam(program.parameters(), lr=0.1)


BATCH = (torch.rand(4, 4), torch.rand(4, 2))


def test_a_program_round_trips_through_all_formats(tmp_path: Path) -> None:
    program, optimizer = _program(0, {"dp": 2})
    program.step(BATCH)
    optimizer.step()
    program.save(tmp_path / "own", step=5, optimizer=optimizer, extra={"epoch": 1})
    report = convert(tmp_path / "own", tmp_path / "dcp", Format.DCP)
    assert (report.tensors, report.optimizer, report.step, report.left_out) == (4, 4, 5, ())
    convert(tmp_path / "dcp", tmp_path / "again", Format.QUINTNET)
    other, its = _program(1, {"tp": 2})
    refused(
        "QN601", lambda: other.load(tmp_path / "dcp"), f"quintnet convert {tmp_path / 'dcp'} NEW_FOLDER --to quintnet"
    )
    found = other.load(tmp_path / "again", optimizer=its)
    assert (found.step, found.extra) == (5, {"epoch": 1})
    assert same(its.state_dict(), optimizer.state_dict()) and same(dict(other.state_dict()), dict(program.state_dict()))
    report = convert(tmp_path / "again" / "step-00000005", tmp_path / "weights", Format.SAFETENSORS)
    assert report.left_out == ("the optimizer's state",) and "the optimizer's state" in str(report)
    assert same(load_file(tmp_path / "weights" / "model.safetensors"), dict(program.state_dict()))
    third, _ = _program(2, {"dp": 2})
    third.load_pretrained(tmp_path / "weights")
    assert same(dict(third.state_dict()), dict(program.state_dict()))
    # a plain module and its optimizer read the folder, too
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    adam = torch.optim.Adam(plain.parameters(), lr=0.5)
    for options in (StateDictOptions(), FLAT):
        state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, adam, options=options)}
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        set_optimizer_state_dict(plain, adam, state["optimizer"], options=options)
        assert same(adam.state_dict(), optimizer.state_dict()) and same(plain.state_dict(), dict(program.state_dict()))


@pytest.mark.slow
def test_a_program_is_stateful(tmp_path: Path) -> None:
    program, _ = _program(0, {"dp": 2})
    dcp.save({"model": program}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    other = quintnet.compile(empty, quintnet.Mesh(tp=2), BATCH, loss_fn=nn.functional.mse_loss, device="cpu")
    dcp.load({"model": other}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(dict(other.state_dict()), dict(program.state_dict()))
    assert abs(float(other.evaluate(BATCH)) - float(program.evaluate(BATCH))) < 1e-5  # it has values now


def test_an_optimizer_of_an_unknown_class_must_have_the_same_options(tmp_path: Path) -> None:
    program, optimizer = _program(0, {"dp": 1})
    program.step(BATCH)
    optimizer.step()
    model = {name: x.clone() for name, x in program.state_dict().items()}
    names = dict(program.named_parameters())
    state = {name: dict(optimizer.state[p]) for name, p in names.items()}
    options = {key: x for key, x in optimizer.param_groups[0].items() if key != "params"}
    write_quintnet(tmp_path / "own", Contents(model, OptimizerContents("", state, dict.fromkeys(names, options))))
    program.load(tmp_path / "own", optimizer=optimizer)
    sgd = torch.optim.SGD(program.parameters(), lr=0.1)
    refused("QN602", lambda: program.load(tmp_path / "own", optimizer=sgd), "options", "betas")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


def test_tied_parameters_have_all_their_names_elsewhere(tmp_path: Path) -> None:
    ids = (torch.arange(8).view(4, 2),)
    program = quintnet.compile(Tied(), quintnet.Mesh(dp=2), ids)
    program.save(tmp_path / "own", step=1)
    convert(tmp_path / "own", tmp_path / "dcp", Format.DCP)
    whole = program.state_dict()
    assert same(dict(read_dcp(tmp_path / "dcp", None).model), dict(whole)) and "head.weight" in whole
    other = quintnet.compile(Tied(), quintnet.Mesh(dp=2), ids)
    for name in ("both", "first", "second"):
        kept = {"both": whole.keys(), "first": ["table.weight"], "second": ["head.weight"]}[name]
        write_quintnet(tmp_path / name, Contents({key: whole[key].clone() + 1 for key in kept}, step=1))
        program.load(tmp_path / "own")
        other.load(tmp_path / name)
        assert torch.equal(other.state_dict()["head.weight"], program.state_dict()["table.weight"] + 1)
    torn = {key: whole[key].clone() + i for i, key in enumerate(whole)}
    write_quintnet(tmp_path / "torn", Contents(torn))
    before = other.state_dict()["head.weight"].clone()
    refused("QN602", lambda: other.load(tmp_path / "torn"), "head.weight and table.weight are tied", "differ")
    assert torch.equal(other.state_dict()["head.weight"], before)
    part = SavedPart.whole(torch.ones(2))
    assert tied.under_stored_names({"a": part}, {"b": "a"}, {"b"}) == {"b": part}


def _saved_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        write_quintnet(folder, Contents({"w": torch.full((2,), float(step))}, step=step))


@pytest.mark.parametrize("name", ["best-00000004", "my best\n", "latest", "."])
def test_one_checkpoint_is_read_whatever_its_name_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never another one, whose step the name may say."""
    _saved_steps(tmp_path, 3, 4)
    source, named = tmp_path / "step-00000003", tmp_path / name
    if name == "latest":
        named.symlink_to(source)
    elif name == ".":
        monkeypatch.chdir(source)
        named = Path()
    else:
        shutil.copytree(source, named)
    (tmp_path / ".leaving.json").write_text(json.dumps({"step": 1, "sha256": ""}))
    report = convert(named, tmp_path / "out", Format.SAFETENSORS)
    assert report.step == 3 and load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [3, 3]
    assert convert(named, tmp_path / "own", Format.QUINTNET, Choices(step=7)).step == 7
    assert [path.name for path in (tmp_path / "own").glob("step-*")] == ["step-00000007"]
    (source / "state.json").write_text("{}")
    if name in ("latest", "."):
        refused("QN601", lambda: convert(named, tmp_path / "more", Format.DCP), "state.json")


@pytest.mark.parametrize("to", Format)
def test_a_destination_that_cannot_be_written_is_told(
    to: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left, also where somebody else makes the destination meanwhile."""
    source, out = tmp_path / "run", tmp_path / "out"
    _saved_steps(source, 1)
    (tmp_path / "file").write_text("")
    refused("QN603", lambda: convert(source, tmp_path / "file" / "out", to))
    assert convert(source, tmp_path / ("n" * 250), to).step == 1

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused("QN603", lambda: convert(source, out, to), str(out), "No space left")
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        refused("QN603", lambda: convert(source, out, to), str(out), f"a part is left in {tmp_path}/.out.")
        patch.undo()
        for left in tmp_path.glob(".out.*"):
            shutil.rmtree(left)

    def make_theirs(real: Callable[..., None], *args: Any) -> None:
        if args[-1] == out:
            (out / "theirs").mkdir(parents=True)
        real(*args)

    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *args: make_theirs(rename, *args))
    refused("QN603", lambda: convert(source, out, to), "not empty")
    assert os.listdir(out) == ["theirs"] and len(os.listdir(tmp_path)) == 4


def test_a_new_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new") as part:
        (part / "file").write_text("")
        assert not (tmp_path / "new").exists()
    assert os.listdir(tmp_path / "new") == ["file"]
    with new_folder(tmp_path / "others", writes=False) as part:
        assert not part.exists()

    def fill() -> None:
        with new_folder(tmp_path / "new"):
            pass

    refused("QN603", fill, "is not an empty folder")
    assert os.listdir(tmp_path) == ["new"]


def test_names_are_changed_by_their_beginnings() -> None:
    x = torch.ones(1)
    contents = Contents(
        {"module.a": x, "module.b": x}, OptimizerContents("", {"module.a": {"s": x}}, {"module.a": {"lr": 1}})
    )
    found = contents.renamed([("module.", ""), ("a", "c")])
    assert set(found.model) == {"c", "b"} and found.optimizer is not None
    assert set(found.optimizer.state) == set(found.optimizer.options) == {"c"}
    refused("QN602", lambda: contents.renamed([("missing.", "")]), "missing.")
    refused("QN602", lambda: contents.renamed([("module.a", "x"), ("module.b", "x")]), "one name")


def test_folders_that_are_damaged_or_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    whole = saved(tmp_path / "whole", {"model": model.state_dict()})
    assert format_of(whole) is Format.DCP and read_dcp_metadata(whole).metadata.state_dict_metadata
    refused("QN601", lambda: format_of(tmp_path), "is no checkpoint")
    metadata = pickle.loads((whole / ".metadata").read_bytes())
    first = next(iter(metadata.storage_data))

    def outside(m: Any) -> None:
        m.storage_data[first].relative_path = "../whole/__0_0.distcp"

    def negative(m: Any) -> None:
        m.storage_data[first].offset = -1

    def hole(m: Any) -> None:
        m.state_dict_metadata["model.0.weight"].chunks[0].sizes = torch.Size([1, 3])

    def bomb(m: Any) -> None:
        m.state_dict_metadata["model.0.weight"].size = torch.Size([2**40, 3])
        m.state_dict_metadata["model.0.weight"].chunks[0].sizes = torch.Size([2**40, 3])

    def behind(m: Any) -> None:
        m.storage_data[first].offset = 2**40

    def nowhere(m: Any) -> None:
        del m.storage_data[first]

    def object_array(m: Any) -> None:
        m.state_dict_metadata["model.0.weight"].properties.dtype = torch.strided

    def other(m: Any) -> None:
        m.state_dict_metadata["model.0.weight"] = Path("x")

    for number, (change, said) in enumerate(
        {
            outside: "not a file of the folder",
            negative: "-1 is no size",
            hole: "do not cover",
            bomb: "bytes, of which",
            behind: "behind the end",
            nowhere: "in no file",
            object_array: "",
            other: "neither a tensor nor bytes",
        }.items()
    ):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        made = pickle.loads((whole / ".metadata").read_bytes())
        change(made)
        (folder / ".metadata").write_bytes(pickle.dumps(made))
        refused("QN601", lambda folder=folder: read_dcp(folder, None), ".metadata", said)  # type: ignore[misc]
    data = next(whole.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-200])
    refused("QN601", lambda: read_dcp(whole, None))
    refused("QN601", lambda: convert(whole, tmp_path / "new", Format.QUINTNET))
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


@pytest.mark.parametrize("note", [{"step": "\x1b[31m"}, {"extra": 3}, {"run": 3}, [1]], ids=str)
def test_a_note_of_others_in_a_folder_is_checked(note: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "quintnet": json.dumps(note)})
    with pytest.raises(CheckpointError) as raised:
        convert(folder, tmp_path / "out", Format.QUINTNET)
    assert "\x1b" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]


def test_values_that_would_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = {"w": torch.ones(2)}
    options = {"state": {"w": {"s": torch.ones(2)}}, "param_groups": [{"lr": Acts(), "params": ["w"]}]}
    folder = saved(tmp_path / "acts", {"model": x, "optimizer": options})
    refused("QN601", lambda: read_dcp(folder, None), "lr")
    assert not Path("executed").exists()


def test_safetensors_with_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    made = Contents({"b": torch.ones(2), "a": torch.zeros(1, dtype=torch.int64)})
    (tmp_path / "out").mkdir()
    write_safetensors(tmp_path / "out", made, tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert same(dict(read_safetensors(tmp_path / "out").model), dict(made.model))
    complexes = Contents({"z": torch.ones(1, dtype=torch.complex128)})
    refused("QN603", lambda: write_safetensors(tmp_path / "out", complexes, None), "complex128")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    answer = verb(tmp_path, tmp_path / "renamed", Format.DCP, rename=["a=layer.weight"])
    assert json.loads(answer.document)["tensors"] == 1 and answer.text.startswith("safetensors -> dcp: 1 tensors")
    assert set(read_dcp(tmp_path / "renamed", None).model) == {"layer.weight"}
    with pytest.raises(typer.BadParameter, match="OLD=NEW"):
        verb(tmp_path, tmp_path / "again", Format.DCP, rename=["a"])
    report = convert(tmp_path, tmp_path / "own", Format.QUINTNET, Choices(step=4))
    assert report.step == 4 and (tmp_path / "own" / "step-00000004").is_dir()
    refused("QN603", lambda: convert(tmp_path, tmp_path / "own", Format.DCP), "not an empty folder")
    refused(
        "QN603", lambda: convert(tmp_path, tmp_path / "n", Format.SAFETENSORS, Choices(config=tmp_path / "out" / "x"))
    )
    assert conversion.format_of(tmp_path / "own") is Format.QUINTNET


def _megatron(llama: dict[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """A Llama's tensors (4 heads of 2 features in 2 groups, 2 layers) as Megatron-core stores them."""
    layers = []
    for at in range(2):
        one = {name.removeprefix(f"model.layers.{at}."): x for name, x in llama.items() if f"layers.{at}." in name}
        q, k, v = (one[f"self_attn.{key}_proj.weight"] for key in "qkv")
        rows = [x for i in range(2) for x in (q[4 * i : 4 * i + 4], k[2 * i : 2 * i + 2], v[2 * i : 2 * i + 2])]
        layers.append(
            {
                "self_attention.linear_qkv.layer_norm_weight": one["input_layernorm.weight"],
                "self_attention.linear_qkv.weight": torch.cat(rows),
                "self_attention.linear_proj.weight": one["self_attn.o_proj.weight"],
                "mlp.linear_fc1.layer_norm_weight": one["post_attention_layernorm.weight"],
                "mlp.linear_fc1.weight": torch.cat([one["mlp.gate_proj.weight"], one["mlp.up_proj.weight"]]),
                "mlp.linear_fc2.weight": one["mlp.down_proj.weight"],
            }
        )
    found = {
        "embedding.word_embeddings.weight": torch.cat([llama["model.embed_tokens.weight"], torch.zeros(3, 8)]),
        "decoder.final_layernorm.weight": llama["model.norm.weight"],
        "output_layer.weight": torch.cat([llama["lm_head.weight"], torch.zeros(3, 8)]),
    }
    if stacked:
        return found | {f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    return found | {f"decoder.layers.{i}.{name}": x for i, one in enumerate(layers) for name, x in one.items()}


@pytest.mark.parametrize("stacked", [True, False])
def test_megatrons_names_of_a_llama(stacked: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=5, intermediate_size=6)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    llama = {name: torch.rand_like(x) for name, x in transformers.LlamaForCausalLM(config).state_dict().items()}
    theirs = _megatron(llama, stacked=stacked)
    assert is_megatron(theirs) and not is_megatron(llama)
    assert same(as_hugging_face(theirs, tmp_path), llama)
    refused("QN602", lambda: as_hugging_face({**theirs, "mtp.x": torch.ones(1)}, tmp_path), "mtp.x", "no such tensor")
    fewer = {name: x for name, x in theirs.items() if "layers.1" not in name} if not stacked else theirs
    transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 3}, vocab_size=5).save_pretrained(tmp_path / "other")
    refused("QN602", lambda: as_hugging_face(fewer, tmp_path / "other"), "layers")
    transformers.LlamaConfig(**sizes, vocab_size=5, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    refused("QN602", lambda: as_hugging_face(theirs, tmp_path / "tied"), "ties the embeddings")
    one = {name: x for name, x in theirs.items() if name != "output_layer.weight"}
    assert torch.equal(as_hugging_face(one, tmp_path / "tied")["lm_head.weight"], llama["model.embed_tokens.weight"])
    transformers.GPT2Config().save_pretrained(tmp_path / "gpt2")
    refused("QN602", lambda: as_hugging_face(theirs, tmp_path / "gpt2"), "gpt2")
    saved(tmp_path / "dcp", {**theirs, "optimizer": {"state": {"exp_avg": {"x": torch.ones(1)}}}})
    refused("QN602", lambda: convert(tmp_path / "dcp", tmp_path / "new", Format.QUINTNET), "--config config.json")
    report = convert(tmp_path / "dcp", tmp_path / "new", Format.QUINTNET, Choices(config=tmp_path))
    assert report.tensors == len(llama) and report.left_out == ("optimizer.state.exp_avg.x",)


@pytest.mark.parametrize(
    ("parts", "size", "unit"), [(1, 12, 1), (3, 24, 1), (2, 16, 1), (3, 15, 1), (1, 12, 4), (2, 18, 3), (1, 4, 4)]
)
def test_a_packed_weight_is_several_boxes(parts: int, size: int, unit: int) -> None:
    """For every rank of a mesh of two axes: where it says its part lies is where the compiler cut it; heads that do not
    divide (``unit``), too."""
    cut = ShardType(0, parts, unit), interleaved_shard(0, parts, size // (parts * unit) if unit > 1 else 0)
    whole = torch.arange(size * 4.0).view(size, 4)
    for rank in range(4):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            for kinds, placements in (
                ((None, cut[0]), (Replicate(), cut[1])),
                ((ShardType(1), cut[0]), (Shard(1), cut[1])),
            ):
                sharding = tuple(kind or I for kind in kinds)
                at = slices.positions(whole.shape, sharding, (2, 2), (rank // 2, rank % 2))
                at = [indices[indices >= 0] for indices in at]
                local = whole[at[0]][:, at[1]]
                x: DTensor = DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )
                part = dtensors.interleaved_part(x)
                assert part is not None
                covered = 0
                for offset, box in part.boxes.items():
                    there = tuple(slice(a, a + n) for a, n in zip(offset, box.shape, strict=True))
                    assert torch.equal(whole[there], box)
                    covered += box.numel()
                assert covered == local.numel()
        finally:
            torch.distributed.destroy_process_group()
