"""Hugging Face folders: what is read is what is there, part by part; what is written loads again bit by bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quintnet
from quintnet import CheckpointError, Mesh
from quintnet_compiler.weights.files import open_weights
from quintnet_compiler.weights.names import assign
from quintnet_compiler.weights.sources import Join, Stack, Stored, Swap, runs_of

from .models import CASES, build

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "use_cache": False}


def _config(name: str) -> Any:
    if name == "gpt2":
        return transformers.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0)
    if name == "qwen3":
        return transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    if name == "mixtral":
        return transformers.MixtralConfig(**SIZES, num_local_experts=12)
    return transformers.LlamaConfig(**SIZES)


def _model(name: str, *, meta: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(_config(name))
    if not meta:  # no two weights are equal, also where they begin as zeros and ones
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) * 0.1)
    return model


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _program(model: Any, axes: dict[str, int]) -> quintnet.CompiledProgram:
    return quintnet.compile(model, Mesh(**axes), _batch(), microbatches=1)


def _folder(path: Path, name: str, shard: str = "1GB") -> Path:
    _model(name).save_pretrained(path / name, max_shard_size=shard)
    return path / name


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# -- round trips


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "shard"),
    [
        ("gpt2", {"tp": 2}, "20KB"),  # fused q, k and v; a tied head; files of uneven size
        ("gpt2", {"pp": 2, "dp": 2}, "1GB"),
        ("llama", {"pp": 2, "tp": 2}, "9KB"),
        ("qwen3", {"dp": 2, "tp": 2}, "30KB"),
        ("mixtral", {"ep": 2}, "20KB"),  # experts one by one in the files
    ],
)
def test_a_meta_model_gets_the_weights_of_a_folder_and_writes_them_again(
    name: str, axes: dict[str, int], shard: str, tmp_path: Path
) -> None:
    folder, model = _folder(tmp_path, name, shard), _model(name)
    program = _program(_model(name, meta=True), axes)
    program.load_pretrained(folder)
    for key, parameter in program.named_parameters():
        assert torch.equal(parameter.full_tensor(), model.state_dict()[key]), key  # type: ignore[attr-defined]
    with torch.no_grad():
        torch.testing.assert_close(program.evaluate(_batch()), model.eval()(**_batch()).loss, rtol=1e-5, atol=0)
    program.save_pretrained(tmp_path / "again", max_file_bytes=25_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    _equal(again.state_dict(), model.state_dict())
    assert type(again) is type(model) and len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_training_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    program = _program(_model("gpt2"), {"tp": 2, "dp": 2})
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    program.step(_batch())
    optimizer.step()
    program.save_pretrained(tmp_path / "saved")
    expected = program.evaluate(_batch())
    other = _program(_model("gpt2", meta=True), {"pp": 2})
    other.load_pretrained(tmp_path / "saved")
    torch.testing.assert_close(other.evaluate(_batch()), expected, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)],
)
def test_a_wider_dtype_takes_the_values_as_they_are(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model = _model("llama").to(stored)
    model.save_pretrained(tmp_path / "x")
    program = _program(_model("llama", meta=True).to(wanted), {"tp": 2})
    program.load_pretrained(tmp_path / "x")
    for key, parameter in program.named_parameters():
        assert torch.equal(parameter.full_tensor(), model.state_dict()[key].to(wanted)), key  # type: ignore[attr-defined]
    program.save_pretrained(tmp_path / "y")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "y")
    assert {x.dtype for x in again.state_dict().values()} == {wanted}


@pytest.mark.slow
def test_a_plain_module_round_trips_without_transformers_knowing(tmp_path: Path) -> None:
    case = CASES["vit"]
    program = quintnet.compile(build("vit"), Mesh(tp=2), case.batch(4), loss_fn=case.loss_fn)
    program.save_pretrained(tmp_path / "vit")
    assert os.listdir(tmp_path / "vit") == ["model.safetensors"]
    _equal(load_file(tmp_path / "vit/model.safetensors"), dict(build("vit").state_dict()))
    with torch.device("meta"):
        empty = type(build("vit"))().double()
    other = quintnet.compile(empty, Mesh(tp=4), case.batch(4), loss_fn=case.loss_fn)
    other.load_pretrained(tmp_path / "vit")
    torch.testing.assert_close(other.evaluate(case.batch(4)), program.evaluate(case.batch(4)))


@pytest.mark.slow
def test_a_base_models_files_and_a_new_head(tmp_path: Path) -> None:
    """Files of the model without its head have names without the prefix; the head is new."""
    base = _model("llama").model
    base.save_pretrained(tmp_path / "base")
    program = _program(_model("llama", meta=True), {"tp": 2})
    with pytest.raises(CheckpointError, match=r"(?s)QN602.*lm_head.weight: missing"):
        program.load_pretrained(tmp_path / "base")
    program.load_pretrained(tmp_path / "base", missing=["lm_head.*"])
    with pytest.raises(quintnet.RunError, match=r"QN604[^\n]*\n[^\n]* lm_head.weight\n"):
        program.step(_batch())
    program.initialize({"lm_head.weight": quintnet.Normal(0.02)})
    assert program.step(_batch()).isfinite()
    with pytest.raises(CheckpointError, match="missing='head' matches nothing"):
        program.load_pretrained(tmp_path / "base", missing=["lm_head.*", "head"])


# -- real processes


def _in_a_process(folder: str) -> dict[str, bool]:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    os.umask(0o077)
    program = _program(_model("gpt2", meta=True), {"pp": 2, "tp": 2})
    try:
        program.step(_batch())
        refused = False
    except quintnet.RunError as error:
        refused = error.code == "QN604"
    program.load_pretrained(Path(folder) / "gpt2")
    whole = _model("gpt2").state_dict()
    same = all(torch.equal(p.full_tensor(), whole[n]) for n, p in program.named_parameters())  # type: ignore[attr-defined]
    program.save_pretrained(Path(folder) / "again", max_file_bytes=20_000)
    try:
        program.save_pretrained(Path(folder) / "again")
        told = False
    except CheckpointError as error:
        told = "exists" in error.message and "rank 0" in error.message
    odd = torch.distributed.get_rank() == 1
    if odd:  # this rank has another version of the same model
        shutil.copytree(Path(folder) / "gpt2", Path(folder) / "other")
        path = sorted((Path(folder) / "other").glob("*.safetensors"))[0]
        stored = path.read_bytes()
        path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    try:
        program.load_pretrained(Path(folder) / ("other" if odd else "gpt2"))
        differ = False
    except quintnet.RunError as error:
        differ = error.code == "QN403" and "weights: rank 1" in error.message
    torch.distributed.barrier()
    if odd:
        (Path(folder) / "gpt2").rename(Path(folder) / "gone")
    torch.distributed.barrier()
    try:
        program.load_pretrained(Path(folder) / "gpt2")
        lost = False
    except CheckpointError as error:
        lost = error.code == "QN601"
    local = sum(p.to_local().numel() for p in program.parameters())  # type: ignore[attr-defined]
    few = local < 0.5 * sum(x.numel() for x in whole.values())
    return {"refused": refused, "same": same, "told": told, "lost": lost, "few": few, "differ": differ}


@pytest.mark.slow
def test_four_processes_load_their_parts_and_write_one_folder(tmp_path: Path) -> None:
    _folder(tmp_path, "gpt2", "20KB")
    for found in quintnet.launch(_in_a_process, 4, (str(tmp_path),), timeout=120):
        assert found == dict.fromkeys(found, True)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    _equal(again.state_dict(), _model("gpt2").state_dict())


# -- parts of tensors


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_experts_stored_one_by_one_are_read_in_part(name: str, tmp_path: Path) -> None:
    model, folder = _model(name), _folder(tmp_path, name, "20KB")
    with open_weights(folder) as weights:
        found = assign(_model(name, meta=True), weights.stored)
        assert found.sources.keys() == model.state_dict().keys() and not found.problems and not found.unexpected
        if name == "mixtral":
            assert any("experts.11.w1" in stored for stored in weights.stored)
        for key, x in model.state_dict().items():
            positions = [torch.arange(1, size) for size in x.shape]
            positions[-1] = torch.cat([torch.arange(3), torch.arange(7, 9)])
            part = x
            for dim, chosen in enumerate(positions):
                part = part.index_select(dim, chosen)
            out = torch.empty_like(part)
            found.sources[key].read([runs_of(p) for p in positions], out)
            assert torch.equal(out, part), key


def test_a_missing_expert_is_not_made_up_for_by_the_others(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with open_weights(folder) as weights:
        (problem,) = assign(_model("mixtral", meta=True), weights.stored).problems
    assert "experts.0.w2.weight" in problem and "not 0 to 10, each once" in problem


def test_only_the_slices_of_a_part_are_read() -> None:
    x, read = torch.arange(48.0).reshape(12, 4), list[tuple[int, ...]]()

    def load(slices: tuple[slice, ...]) -> Tensor:
        read.append(tuple(x[slices].shape))
        return x[slices]

    source = Stored("file", "x", (12, 4), torch.float32, load)
    out = torch.empty(6, 4)
    source.read([((0, 2), (4, 6), (8, 10)), ((0, 4),)], out)  # S(0,3): a fused q, k and v
    assert torch.equal(out, x[[0, 1, 4, 5, 8, 9]]) and read == [(2, 4)] * 3
    out = torch.empty(2, 4, 5)
    Swap(Stack(0, (source, source)), 1, 2).read([((0, 2),), ((0, 4),), ((5, 10),)], out)
    assert torch.equal(out, x[5:10].T.expand(2, 4, 5))
    out = torch.empty(5, 1)
    Join(0, (source, source)).read([((10, 15),), ((3, 4),)], out)
    assert torch.equal(out, torch.cat([x, x])[10:15, 3:4])


# -- what does not fit, and what means harm


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _shape(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(96, 32)
    tensors["transformer.ln_f.bias"] = torch.zeros(31)
    save_file(tensors, folder / "model.safetensors")


def _names(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors["transformer.h.7.ln_1.weight"] = tensors.pop("transformer.h.0.ln_1.weight")
    tensors["a\nb\x1b[2J"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")


def _dtype(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].double()
    tensors["transformer.ln_f.bias"] = tensors["transformer.ln_f.bias"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors")


def _tie(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    save_file(tensors, folder / "model.safetensors")


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _bin(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(folder / "executed"), "w")

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm()))


def _index(place: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = _tensors(folder)
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        text = json.dumps({"weight_map": dict.fromkeys(tensors, place.format(outside=folder.parent))})
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def _raw_index(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def _promised(folder: Path) -> None:
    names = [*_tensors(folder), "transformer.h.9.attn.c_attn.weight"]
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")})
    (folder / "model.safetensors.index.json").write_text(text)


def _twice(folder: Path) -> None:
    tensors = _tensors(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"transformer.ln_f.bias": torch.ones(32)}, folder / "b.safetensors")
    places = {**dict.fromkeys(tensors, "a.safetensors"), "transformer.ln_f.bias": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "shapes": (
        _shape,
        r"QN602.*c_attn.weight: \(32, 96\) in the model, \(96, 32\) from .* in model.safetensors.*ln_f.bias",
    ),
    "names": (
        _names,
        r"QN602.*h.0.ln_1.weight: missing.*a\\nb\\x1b\[2J in.*unexpected.*h.7.ln_1.weight in .*unexpected",
    ),
    "dtypes": (_dtype, r"QN602.*(?=.*ln_f.bias: torch.float32 in the model cannot hold torch.int32).*wpe.*float64"),
    "tied weights that differ": (_tie, r"QN602.*wte.weight: tied in the model, but"),
    "truncated": (_truncated, r"QN601.*model.safetensors: .*"),
    "pickle": (_bin, r"QN601.*pytorch_model.bin is a pickle"),
    "parent": (_index("../outside.safetensors"), r"QN601.*'../outside.safetensors' is not the name of a safetensors"),
    "absolute": (_index("{outside}/outside.safetensors"), r"QN601.*outside.safetensors' is not the name"),
    "inner": (_index("x/../../outside.safetensors"), r"QN601.*is not the name"),
    "backslash": (_index("..\\outside.safetensors"), r"QN601.*is not the name"),
    "NUL": (_index("outside\0.safetensors"), r"QN601.*is not the name"),
    "other type": (_index("outside.bin"), r"QN601.*is not the name"),
    "no file": (_index("model-2.safetensors"), r"QN601.*there is no file model-2.safetensors"),
    "no JSON": (_raw_index("{"), r"QN601.*index.json: JSONDecodeError"),
    "deep": (_raw_index("[" * 100_000), r"QN601.*RecursionError"),
    "list": (_raw_index("[]"), r"QN601.*index.json"),
    "numbers": (_raw_index('{"weight_map": {"a": 1}}'), r"QN601.*does not map names to files"),
    "promised": (_promised, r"QN601.*part.safetensors: has no tensor transformer.h.9.attn"),
    "stored twice": (_twice, r"QN601.*b.safetensors: the tensor transformer.ln_f.bias is also in a.safetensors"),
}


@pytest.fixture(scope="module")
def program() -> quintnet.CompiledProgram:
    return _program(_model("gpt2"), {"tp": 2})


@pytest.mark.sample(11)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_and_hostile_folders_change_nothing(what: str, program: quintnet.CompiledProgram, tmp_path: Path) -> None:
    folder = _folder(tmp_path, "gpt2")
    change, message = WRONG[what]
    change(folder)
    before = {n: p.full_tensor().clone() for n, p in program.named_parameters()}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        program.load_pretrained(folder)
    _equal(before, {n: p.full_tensor() for n, p in program.named_parameters()})  # type: ignore[attr-defined]
    assert not (folder / "executed").exists()


def test_files_that_are_not_there(program: quintnet.CompiledProgram, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="QN601"):
        program.load_pretrained(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"QN601.*\n.*no model.safetensors"):
        program.load_pretrained(tmp_path)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in ("file", "link", "."):
        with pytest.raises(CheckpointError, match="QN603"):
            program.save_pretrained(tmp_path / taken)
    assert (tmp_path / "file").read_text() == "precious" and not (tmp_path / "elsewhere").exists()


# -- the meta device


class Waves(nn.Module):
    """A buffer that is in no file, or two that are."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("waves", torch.arange(8.0), persistent=persistent)
        self.register_buffer("kept", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.waves + self.kept
        return out


def test_buffers_that_nothing_can_compute_are_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        models = Waves(False), Waves(True)
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    program = quintnet.compile(models[0], Mesh(dp=2), batch, loss_fn=F.mse_loss)
    save_file(dict(Waves(False).state_dict()), tmp_path / "model.safetensors")
    program.load_pretrained(tmp_path)
    with pytest.raises(quintnet.RunError, match=r"(?s)QN604.*missing for waves\n"):
        program.step(batch)
    program.initialize(lambda: Waves(False))
    program.load_pretrained(tmp_path)
    assert program.step(batch).isfinite()
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    program = quintnet.compile(models[1], Mesh(dp=2), batch, loss_fn=F.mse_loss)
    with pytest.raises(quintnet.RunError, match=r"(?s)QN604.*kept, linear.bias, linear.weight, waves\n"):
        program.step(batch)
    with pytest.raises(CheckpointError, match=r"(?s)QN604.*kept has no values"):
        program.save_pretrained(tmp_path / "x")
    save_file(dict(Waves(True).state_dict()), tmp_path / "model.safetensors")
    program.load_pretrained(tmp_path)
    assert program.step(batch).isfinite()


@pytest.mark.slow
def test_rotary_frequencies_are_computed_exactly() -> None:
    model, empty = _model("llama"), _model("llama", meta=True)
    before = torch.random.get_rng_state()
    program = _program(empty, {"tp": 2})
    found = program._state().tensors["model.rotary_emb.inv_freq"]  # type: ignore[attr-defined]
    assert torch.equal(found, model.model.rotary_emb.inv_freq)
    assert torch.equal(before, torch.random.get_rng_state())
    assert empty.model.rotary_emb.inv_freq is found  # the module has it from now on


@pytest.mark.slow
def test_verify_needs_values() -> None:
    with pytest.raises(quintnet.CompileError, match="QN604"):
        _program(_model("llama", meta=True), {"tp": 2}).verify()
