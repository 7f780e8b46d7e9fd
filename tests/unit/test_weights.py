"""weights: files of safetensors, initial values, buffers of models on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.weights.initialize import Constant, Normal, Uniform, key_of, match_names
from quintnet_compiler.weights.meta_buffers import computed_buffers, with_buffers
from quintnet_compiler.weights.safetensors_writer import TensorEntry, files_of, storable, write_weights


def _entry(name: str, count: int, dtype: torch.dtype = torch.float32) -> TensorEntry:
    return TensorEntry(name, name, (count,), dtype)


def test_files_are_filled_up_in_order() -> None:
    entries = [_entry("a", 2), _entry("b", 1), _entry("big", 100), _entry("c", 1)]
    assert [entry.bytes for entry in entries] == [8, 4, 400, 4]
    files = files_of(entries, 12)
    assert {name: [e.name for e in group] for name, group in files.items()} == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["big"],
        "model-00003-of-00003.safetensors": ["c"],
    }
    assert list(files_of(entries, 1000)) == ["model.safetensors"]


def test_wide_dtypes_come_first_in_a_file() -> None:
    (group,) = files_of([_entry("byte", 3, torch.uint8), _entry("double", 1, torch.float64)], 100).values()
    assert [entry.name for entry in group] == ["double", "byte"]
    assert storable(torch.bfloat16) and not storable(torch.qint8)


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(True), "c": torch.ones(2, dtype=torch.bfloat16)}
    entries = [TensorEntry(name, name, tuple(x.shape), x.dtype) for name, x in tensors.items()]
    files = files_of(entries, 1)
    write_weights(tmp_path, files, (tensors[e.source] for group in files.values() for e in group))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 1 + 4 and set(index["weight_map"]) == set("abc")
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / file)[name]
        assert found.dtype == tensors[name].dtype and torch.equal(found, tensors[name])
    with pytest.raises(FileExistsError):  # nothing is overwritten
        write_weights(tmp_path, files, iter(()))


def test_later_patterns_win() -> None:
    names = ["a.weight", "a.bias", "b.weight"]
    found = match_names({"*": Constant(1.0), "*.weight": Normal(0.02)}, names)
    assert found == {"a.weight": Normal(0.02), "a.bias": Constant(1.0), "b.weight": Normal(0.02)}
    with pytest.raises(CompileError, match=r"'c\.\*' matches no parameter"):
        match_names({"c.*": Constant(0.0)}, names)


def test_a_part_has_the_values_that_the_whole_has_there() -> None:
    whole, part = [torch.arange(4), torch.arange(6)], [torch.tensor([1, 3]), torch.tensor([5])]
    for init in (Normal(2.0, 1.0), Uniform(-1.0, 3.0), Constant(0.5)):
        x = init.draw(whole, [4, 6], key_of(0, 2), torch.float64)
        assert torch.equal(init.draw(part, [4, 6], key_of(0, 2), torch.float64), x[[1, 3]][:, [5]])
        assert x.shape == (4, 6) and (init == Constant(0.5) or not torch.equal(x, x.flip(0)))
    drawn = Uniform(-1.0, 3.0).draw(whole, [4, 6], key_of(0, 2), torch.float64)
    assert float(drawn.min()) >= -1 and float(drawn.max()) < 3


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.zeros(2), persistent=False)


def test_buffers_that_nothing_can_compute_stay_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary())
    assert computed_buffers(model, ["0.frequencies"]) == {}  # no Hugging Face model around it
    assert with_buffers(model, {"0.frequencies": model[0].frequencies})["0.frequencies"].is_meta


def test_buffers_of_files_and_of_real_devices_stay() -> None:
    real = nn.BatchNorm1d(2)
    tensors = dict(real.named_buffers())
    assert with_buffers(real, tensors) == tensors
    meta = nn.BatchNorm1d(2, device="meta")
    assert with_buffers(meta, dict(meta.named_buffers())).keys() == tensors.keys()
