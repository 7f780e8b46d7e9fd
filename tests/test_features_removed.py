"""Without the folder of a feature, and its line in the list of features, the rest of the compiler is as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintnet_compiler.features import FEATURES, Feature

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "quintnet_compiler"

# of each field of plans that a feature reads, a value that asks for the feature
VALUES = {
    "fp8_recipe": "rowwise", "fp8_skip": ["head"],
    "loss_chunks": 2,
    "async_tp": True,
    "offload": ["activations"], "offload_folder": "/tmp",
    "hot_experts": {"weight": [0]},
}  # fmt: skip
ARGUMENTS = {"generate": "torch.zeros(1, 1, dtype=torch.int64)"}  # of methods that a feature gives programs

PROGRAM = """
import copy
import importlib.util
import json
import sys

import torch
from torch import nn

import quintnet
import quintnet_compiler
from quintnet_compiler.features import FEATURES

name, folder = sys.argv[1:]
assert quintnet_compiler.__file__.startswith(folder), quintnet_compiler.__file__
assert name not in [feature.name for feature in FEATURES]
assert importlib.util.find_spec(f"quintnet_compiler.features.{name}") is None


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.weight = nn.Linear(16, 2), nn.Parameter(torch.randn(2, 16, 16, dtype=torch.float64) / 4)
        self.head = nn.Linear(16, 4)

    def forward(self, x, y):
        probabilities, ids = self.gate(x).softmax(-1).max(-1)
        x = quintnet.expert_linear(x, ids, self.weight) * probabilities[:, None]
        return nn.functional.cross_entropy(self.head(x), y)


torch.manual_seed(0)
model, batch = Mixture().double(), (torch.randn(8, 16).double(), torch.randint(0, 4, (8,)))
reference = copy.deepcopy(model)
plain = torch.optim.SGD(reference.parameters(), lr=0.5)
program = quintnet.compile(model, quintnet.Mesh(dp=2, ep=2, tp=2), batch, zero=3)
optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
for _ in range(3):
    plain.zero_grad()
    expected = reference(*batch)
    expected.backward()
    plain.step()
    torch.testing.assert_close(program.step(batch).detach(), expected.detach(), rtol=1e-10, atol=0)
    optimizer.step()
    program.zero_grad()
program = quintnet.compile(model.float(), quintnet.Mesh(tp=2), (batch[0].float(), batch[1]), precision="bf16")
program.step((batch[0].float(), batch[1]))
half = batch[0].float(), batch[1]
for call in json.load(sys.stdin):
    try:
        eval(call)
    except (quintnet.CompileError, quintnet.InputError) as error:
        assert "belongs to a feature that is not installed" in str(error), error
    else:
        raise AssertionError(f"{call} does something")
assert not [module for module in sys.modules if module.startswith(f"quintnet_compiler.features.{name}")]
print("as before")
"""


def _without(feature: str, folder: Path) -> None:
    """Link the packages of the product in ``folder``, with a list of features that lacks one."""
    package = folder / "quintnet_compiler"
    (package / "features").mkdir(parents=True)
    for path in PRODUCT.iterdir():
        if path.name not in ("features", "__pycache__"):
            (package / path.name).symlink_to(path.resolve())
    for path in (PRODUCT / "features").iterdir():
        if path.name not in (feature, "__init__.py", "__pycache__"):
            (package / "features" / path.name).symlink_to(path)
    text = (PRODUCT / "features/__init__.py").read_text()
    for line in (f"from .{feature} import {feature.upper()}\n", f"    add_feature({feature.upper()}),\n"):
        assert line in text
        text = text.replace(line, "")
    assert feature not in text.lower()
    (package / "features/__init__.py").write_text(text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])
def test_a_feature_can_be_removed(feature: Feature, tmp_path: Path) -> None:
    name = feature.name
    values = {"precision": feature.precisions} | {field: [VALUES[field]] for field in feature.plan_fields}
    calls = [
        f"quintnet.compile(model, quintnet.Mesh(), half, {field}={value!r})"
        for field, field_values in values.items()
        for value in field_values
    ]
    calls += [f"program.{method}({ARGUMENTS.get(method, '')})" for method in feature.methods]
    _without(name, tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(tmp_path)], input=json.dumps(calls), text=True,
        env=environment, cwd=tmp_path, capture_output=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout == "as before\n", result.stderr[-3000:]
