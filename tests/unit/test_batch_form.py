"""What batches have in common that one capture serves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.ir.batch_form import ROWS, BatchForm, FlatBatch, batch_size_of
from quintnet_compiler.training.buckets import pad_to_bucket


def _batch(rows: int = 4, length: int = 6, **more: Any) -> dict[str, Any]:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return {"ids": ids, "labels": ids.clone(), "scale": torch.ones(3), "deep": True, **more}


def test_only_rows_vary_at_first() -> None:
    form = BatchForm.of_batch(_batch(), 4)
    assert form.varying_sizes(FlatBatch.flatten(_batch(8))) == {ROWS: 8} and not form.has_lengths
    assert form.varying_sizes(FlatBatch.flatten(_batch(length=7))) is None
    assert (
        form.varying_sizes(FlatBatch.flatten(_batch(deep=False))) is None
        and form.varying_sizes(FlatBatch.flatten(_batch(deep=1))) is None
    )
    assert form.varying_sizes(FlatBatch.flatten(_batch(scale=torch.ones(4)))) is None
    assert form.varying_sizes(FlatBatch.flatten(_batch(scale=torch.ones(3).double()))) is None
    assert form.varying_sizes(FlatBatch.flatten(tuple(_batch().values()))) is None


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((8, 8), 8), ((8, 5), 8), ((1, 8), 8), ((8, 1), 8), ((5, 8, 8), 8), ((6, 8, 5, 8), 8), ((1,), 1), ((1, 1), 1),
        ((8, 16, 16, 8), 8), ((1, 5, 1), 1),
    ],
)  # fmt: skip
def test_rows_of_tensors_that_disagree(sizes: tuple[int, ...], rows: int) -> None:
    assert batch_size_of(tuple(torch.zeros(size, 2) for size in sizes)) == rows


def test_rows_where_a_trace_found_them() -> None:
    batch = (torch.zeros(5), torch.zeros(8, 2))
    given = FlatBatch.flatten(batch)
    found = FlatBatch.flatten(batch, {given.structure: 1})
    assert given.rows == 5 and found.rows == 8 and BatchForm.of_batch(batch, 8).rows_in(batch) == 8


def test_a_tensor_has_rows_as_in_the_first_batch() -> None:
    first = BatchForm.of_batch(_batch(scale=torch.ones(8)), 4)
    later = BatchForm.of_batch(_batch(8, scale=torch.ones(8)), 8, first)
    assert later == first and first.varying_sizes(FlatBatch.flatten(_batch(8, scale=torch.ones(8)))) == {ROWS: 8}
    assert BatchForm.of_batch(_batch(8, scale=torch.ones(8)), 8) != first


def test_one_name_for_lengths_that_change_together() -> None:
    form = BatchForm.of_batch(_batch(), 4)
    wider = form.widened(BatchForm.of_batch(_batch(length=9), 4))
    assert wider is not None and wider.has_lengths
    assert wider.varying_sizes(FlatBatch.flatten(_batch(2, 5))) == {ROWS: 2, "length0": 5}
    assert wider.varying_sizes(FlatBatch.flatten(_batch(2, 5, labels=torch.zeros(2, 6, dtype=torch.int64)))) is None
    # code often does something else with one position
    assert wider.varying_sizes(FlatBatch.flatten(_batch(2, 1))) is None
    limited = BatchForm(wider.structure, wider.leaves, {**wider.limits, "length0": (2, 16)})
    assert limited.varying_sizes(FlatBatch.flatten(_batch(4, 16)))
    assert limited.varying_sizes(FlatBatch.flatten(_batch(4, 17))) is None
    assert form.widened(form) is None
    assert form.widened(BatchForm.of_batch(_batch(deep=False), 4)) is None
    assert form.widened(BatchForm.of_batch(_batch(scale=torch.ones(3, 1)), 4)) is None
    further = wider.widened(BatchForm.of_batch(_batch(length=9, scale=torch.ones(5)), 4))
    assert further is not None and further.varying_sizes(FlatBatch.flatten(_batch(4, 8, scale=torch.ones(7)))) == {
        ROWS: 4, "length0": 8, "length1": 7,
    }  # fmt: skip


def test_what_differs_is_told() -> None:
    form = BatchForm.of_batch(_batch(), 4)
    assert BatchForm.of_batch(_batch(length=7, deep=False), 4).difference_from(form) == (
        "batch['ids'] is int64[rows, 7], and was int64[rows, 6]; "
        "batch['labels'] is int64[rows, 7], and was int64[rows, 6]; batch['deep'] is False, and was True"
    )
    told = BatchForm.of_batch((torch.zeros(4, 2),), 4).difference_from(form)
    assert told.startswith("the batch is (float32[rows, 2],), and the first one was {'ids': int64[rows, 6], ")


def test_the_size_of_a_batch() -> None:
    assert batch_size_of((1, torch.tensor(2.0), torch.zeros(5, 2))) == 5
    with pytest.raises(quintnet.CompileError, match="QN102"):
        batch_size_of({"x": 1})


def _padded(batch: Any, buckets: Any = 8, **options: Any) -> Any:
    return pad_to_bucket(batch, buckets, **options)


def test_padding_to_buckets() -> None:
    ids = torch.arange(10).reshape(2, 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones(2, 5), "labels": ids, "kind": torch.ones(2), "flag": True}
    found = _padded(batch, values={"input_ids": 7})
    assert found["input_ids"].tolist() == [[0, 1, 2, 3, 4, 7, 7, 7], [5, 6, 7, 8, 9, 7, 7, 7]]
    assert found["labels"][0].tolist() == [0, 1, 2, 3, 4, -100, -100, -100]
    assert found["attention_mask"].sum() == 10 and found["kind"] is batch["kind"] and found["flag"] is True
    assert _padded({"input_ids": ids}, [4, 6, 16])["input_ids"].shape == (2, 6)
    assert _padded({"input_ids": ids}, 5)["input_ids"] is ids
    features, labels = _padded((torch.ones(2, 5, 3), torch.ones(2)), values={0: 0})
    assert features.shape == (2, 8, 3) and float(features.sum()) == 30 and labels.shape == (2,)


@pytest.mark.parametrize(
    ("batch", "buckets", "code"),
    [
        ((torch.ones(2),), 8, "QN102"),
        ((torch.ones(2, 9),), [4, 8], "QN102"),
        ((torch.ones(2, 9),), 0, "QN108"),
        ((torch.ones(2, 9),), [], "QN108"),
        ((torch.ones(2, 9), torch.ones(2, 9)), 16, r"QN108[\s\S]*whether 1 of the batch"),
        ((torch.ones(2, 9), {"labels": torch.ones(2, 9)}), 16, r"QN108[\s\S]*collate_fn"),
    ],
)
def test_what_cannot_be_padded(batch: tuple[Tensor, ...], buckets: Any, code: str) -> None:
    with pytest.raises(quintnet.QuintNetError, match=code):
        pad_to_bucket(batch, buckets, values={0: 0})


def test_what_is_a_sequence_is_told() -> None:
    ids, masks = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, 5)
    with pytest.raises(quintnet.CompileError, match=r"nothing says what of the batch .0, 1. is a sequence"):
        pad_to_bucket((ids, ids), 8)
    for batch, text in (
        ({"input_ids": ids, "features": masks}, "whether 'features'"),
        ({"input_ids": ids, "attention_mask": masks}, "whether 'attention_mask'"),
        ({"input_ids": ids, "labels": torch.ones(2, 5)}, "whether 'labels'"),
        ({"input_ids": ids, "labels": torch.ones(2, 4, dtype=torch.int64)}, "whether 'labels'"),
    ):
        with pytest.raises(quintnet.CompileError, match=text):
            pad_to_bucket(batch, 8)
    found = _padded({"input_ids": ids, "labels": torch.ones(2, 5)}, values={"labels": None})
    assert found["input_ids"].shape == (2, 8) and found["labels"].shape == (2, 5)
    with pytest.raises(quintnet.CompileError, match="values names 'y'"):
        pad_to_bucket({"input_ids": ids}, 8, values={"y": 0})


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (0.0, -0.0, False),
        (1.0, 1, False),
        (1, True, False),
        (math.nan, float("nan"), True),
        (complex(0.0, -0.0), 0j, False),
        (2.0, np.float64(2.0), False),
        ("a", "a", True),
    ],
)
def test_numbers_are_the_same_if_code_cannot_tell_them_apart(one: Any, two: Any, same: bool) -> None:
    form, other = BatchForm.of_batch(_batch(scale=one), 4), _batch(scale=two)
    assert form.varying_sizes(FlatBatch.flatten(_batch(scale=one))) == {ROWS: 4}
    assert form.varying_sizes(FlatBatch.flatten(other)) == ({ROWS: 4} if same else None)
    assert bool(BatchForm.of_batch(other, 4).difference_from(form)) is not same
    assert (form.widened(BatchForm.of_batch(_batch(length=9, scale=two), 4)) is not None) is same


@pytest.mark.parametrize("x", [np.zeros((4, 6)), np.bool_(True), np.int64(1), np.float32(1)], ids=repr)
def test_what_is_of_numpy_is_refused_with_its_place(x: Any) -> None:
    why = rf"QN102 [\s\S]*batch\['scale'\] is a numpy\.{type(x).__name__}[\s\S]*as_tensor"
    with pytest.raises(quintnet.CompileError, match=why):
        BatchForm.of_batch(_batch(scale=x), 4)


def test_a_step_refuses_what_is_of_numpy() -> None:
    program = quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), _pair(), loss_fn=nn.functional.mse_loss)
    with pytest.raises(quintnet.CompileError, match=r"QN102 [\s\S]*batch\[1\] is a numpy\.ndarray"):
        program.step((_pair()[0], _pair()[1].numpy()))
    assert torch.isfinite(program.step(_pair()))


def _pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)
