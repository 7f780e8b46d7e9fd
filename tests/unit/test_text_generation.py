"""What generation gives to the compiler: an operator with its rule, what a rank runs, and methods of programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quintnet
from quintnet import Mesh
from quintnet_compiler.features import FEATURES
from quintnet_compiler.features.program_parts import ProgramParts
from quintnet_compiler.features.text_generation import rules
from quintnet_compiler.features.text_generation.feature import TEXT_GENERATION
from quintnet_compiler.features.text_generation.methods import LATENCY_DECISIONS, generation
from quintnet_compiler.features.text_generation.ops import paged_attention
from quintnet_compiler.features.text_generation.rank_methods import attend_to_pages
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ops.catalog import spec_of
from quintnet_compiler.ops.extensions import extension_of_method
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.ops.rules.work import work_of
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.execute.extensions import RankMethod
from quintnet_compiler.runtime.transport.local import LocalWorld


def test_it_is_listed_with_its_operator_and_its_methods() -> None:
    assert TEXT_GENERATION in FEATURES and TEXT_GENERATION.methods.keys() == {"generate", "generation"}
    spec = spec_of(paged_attention)
    assert spec.on_rank and spec.unpadded and spec.caches == (3, 4) and spec.attention is not None
    assert not spec.attention.of_models and work_of(paged_attention) == "attention"
    assert RULES[paged_attention].factors is rules.paged_attention
    assert extension_of_method("paged_attention", RankMethod) == RankMethod(attend_to_pages)
    Plan().changed(LATENCY_DECISIONS)  # they are decisions of a plan


def test_layers_of_a_call_share_what_they_read() -> None:
    comm = Comm(LocalWorld(Mesh(), ["here"]).transport(0), Mesh(), {})
    q, k = torch.randn(2, 2, 1, 4), torch.randn(2, 1, 1, 4)
    keys, values = torch.zeros(1, 5, 2, 1, 4), torch.zeros(1, 5, 2, 1, 4)
    table, places = torch.tensor([[1], [2]]), torch.zeros(2, 1, dtype=torch.int64)
    first = comm.paged_attention(q, k, k, keys, values, table, places, 0.5, 0, 0)
    (access,) = comm.shared.values()
    comm.paged_attention(q, k, k, keys, values, table, places, 0.5, 0, 0)
    assert list(comm.shared.values()) == [access]
    torch.testing.assert_close(first, k.expand(2, 2, 1, 4))  # one token sees itself alone
    torch.testing.assert_close(keys[0, 1, 0, 0], k[0, 0, 0])


def test_numbers_of_texts_are_checked_before_anything_runs() -> None:
    nothing: Any = None
    parts = ProgramParts(nothing, Mesh(), Plan(), nothing, nothing, nothing, nothing, "program", {})
    with pytest.raises(quintnet.InputError, match="max_pages is 0"):
        generation(parts, 1, max_pages=0)
    assert not parts.kept


def test_a_method_of_no_feature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from quintnet_compiler import features
    from quintnet_compiler.api import program_generation

    monkeypatch.setattr(features, "FEATURES", ())
    program: Any = SimpleNamespace()
    with pytest.raises(quintnet.InputError, match=r"program\.generate belongs to a feature that is not installed"):
        program_generation.ProgramGeneration._method(program, "generate")
