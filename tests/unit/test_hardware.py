"""Devices: figures that datasheets can have, names in full, and descriptions in numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from benchmarks.published_rows import Unmodelled, device_of
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.collectives import collective_seconds
from quintnet_compiler.cost_models.hardware import HARDWARE, Hardware, hardware, hardware_by_product
from quintnet_compiler.cost_models.hardware_numbers import described

GPUS = {name: device for name, device in HARDWARE.items() if device.gpu}
V5E = {
    "name": "TPU v5e", "tflops": {"bf16": 197, "fp32": 49}, "memory_gb": 16, "memory_gb_per_second": 819,
    "link_gb_per_second": 200, "network_gb_per_second": 3.1, "watts": 200,
}  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_those_of_a_gpu(name: str) -> None:
    device = GPUS[name]
    rates = {dtype: rate / 1e12 for dtype, rate in device.flops}
    assert 8 <= rates["fp32"] <= 200 and 60 <= rates["fp16"] <= 3000
    assert rates["bf16"] in (rates["fp16"], rates["fp32"])
    assert rates["fp32"] <= rates.get("tf32", rates["fp32"]) <= rates["fp16"]
    assert rates.get("fp8", 2 * rates["fp16"]) == pytest.approx(2 * rates["fp16"], rel=0.02)
    assert rates.get("fp4", 1e9) > rates.get("fp8", 0)
    assert 15e9 <= device.memory_bytes <= 300e9 and 0.3e12 <= device.memory_bytes_per_second <= 8e12
    assert 16e9 <= device.link_bytes_per_second <= 900e9
    assert device.network_bytes_per_second <= max(device.link_bytes_per_second, 50e9)
    assert device.bridge_bytes_per_second == 0 or device.bridge_bytes_per_second > device.link_bytes_per_second
    assert 30 <= device.multiprocessors <= 320
    # what all of these have in common since 2017: arithmetic for a byte of memory, and for a joule
    assert 50 <= rates["fp16"] * 1e12 / device.memory_bytes_per_second <= 450
    assert 0.2 <= rates["fp16"] / device.watts <= 2.5


@pytest.mark.parametrize(
    "names",
    [("v100", "a100", "h100-pcie", "h100-nvl", "h100", "b200", "gb200"), ("mi250x", "mi300x", "mi355x"),
     ("t4", "a10g", "l4", "l40s"), ("rtx-3090", "rtx-4090", "rtx-5090"), ("rtx-a6000", "rtx-6000-ada")],
)  # fmt: skip
def test_newer_and_larger_parts_compute_faster(names: tuple[str, ...]) -> None:
    rates = [hardware(name).flops_per_second("fp16") for name in names]
    assert rates == sorted(rates) and len(set(rates)) == len(rates)


def test_variants_differ_in_what_their_names_say() -> None:
    sxm, pcie, nvl = (hardware(name) for name in ("h100-sxm", "h100-pcie", "h100-nvl"))
    assert sxm is hardware("h100") and (sxm.watts, pcie.watts, nvl.watts) == (700, 350, 400)
    assert pcie.memory_bytes_per_second < sxm.memory_bytes_per_second < nvl.memory_bytes_per_second
    assert hardware("gh200-144").memory_bytes == 1.5 * hardware("gh200-96").memory_bytes
    assert hardware("a100-pcie-80").watts < hardware("a100-80").watts


def test_names_are_taken_in_full_and_never_by_a_part_of_them() -> None:
    assert hardware("H100 PCIe") is hardware("nvidia h100 pcie") is HARDWARE["h100-pcie"]
    assert hardware_by_product("NVIDIA H100 80GB HBM3") is HARDWARE["h100"]
    assert hardware_by_product("NVIDIA H100 80GB HBM3e") is None
    for name, device in HARDWARE.items():
        for known in device.products:
            assert hardware(known) is HARDWARE[name] or name in ("a100-80", "h100-sxm")
    called = [name for device in {id(d): d for d in HARDWARE.values()}.values() for name in device.products]
    assert len(set(called)) == len(called)


@pytest.mark.parametrize(
    ("name", "near"),
    [("gh200", "gh200-96, gh200-144"), ("4090", "rtx-4090"), ("l40", "l40s"), ("rtx a6000 nv", "rtx-a6000-nvlink"),
     ("h10o", "h100, "), ("NVIDIA A100-SXM-64GB", "a100-40, a100, "), ("", "v100, ")],
)  # fmt: skip
def test_other_names_are_refused_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(CompileError, match=rf"QN210.*\n.*unknown hardware '{name}'\n.*use one of {near}"):
        quintnet.Cluster(name)


def test_rows_of_publications_name_variants_in_full() -> None:
    def found(name: str) -> str:
        return device_of({"gpu_type": name})

    assert found("H100-80GB") == found("NVIDIA H100 SXM5 80GB") == "h100" and found("H100 PCIe") == "h100-pcie"
    assert found("A100 (DGX-A100)") == "a100-80" and found("A100-SXM4-40GB") == "a100-40"
    for other in ("H100-80GB (500 W)", "H100-64GB", "A100X", "H100e"):
        with pytest.raises(Unmodelled, match="unknown GPU type"):
            found(other)


def test_a_bridge_joins_pairs_and_pcie_the_rest() -> None:
    bridged, plain = (quintnet.Cluster(name, 2, 8) for name in ("h100-pcie-nvlink", "h100-pcie"))
    assert [level.name for level in bridged.levels] == ["bridge", "PCIe", "leaf"]
    assert [(hop.level.name, hop.members, hop.lanes) for hop in bridged.group(16).hops] == [
        ("bridge", 2, 1), ("PCIe", 4, 1), ("leaf", 2, 8)
    ]  # fmt: skip
    assert bridged.group_of(range(16)) == bridged.group(16)
    for ranks, same in ((2, False), (8, True)):
        times = [collective_seconds("all_reduce", one.group(ranks), 1e9) for one in (bridged, plain)]
        assert times[0] == pytest.approx(times[1], rel=0.01) if same else times[0] < times[1] / 4
    four = quintnet.Cluster("rtx-4090", 1, 4)
    assert [level.name for level in four.levels] == ["PCIe"]
    assert [level.name for level in quintnet.Cluster("gh200-96", 4).levels] == ["NVLink", "leaf"]


def test_a_device_in_numbers(tmp_path: Path) -> None:
    path = tmp_path / "v5e.json"
    path.write_text(json.dumps(V5E))
    device = quintnet.Cluster(V5E, nodes=2).device
    assert device == described(V5E) == quintnet.Cluster(path).device == quintnet.Cluster(str(path)).device
    assert device.flops_per_second("bf16") == 197e12 and device.memory_bytes == 16e9 and device.watts == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [({"tflops": {"bf16": 197}}, "tflops: give fp32"), ({"memory_gb": -1}, "memory_gb: Input should be greater than 0"),
     ({"wats": 3}, "wats: Extra inputs"), ({"tflops": {"fp32": float("inf"), "bf16": 1}}, "tflops.fp32: .*finite"),
     ({"efficiency": {"matmul": 2}}, "efficiency.matmul: .*less than or equal to 1"), ({"name": 3}, "name: .*string")],
)  # fmt: skip
def test_numbers_that_describe_no_device_are_refused(change: Mapping[str, Any], said: str) -> None:
    with pytest.raises(CompileError, match=f"QN210.*\n.*describes no device: {said}"):
        quintnet.Cluster({**V5E, **change})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"QN210.*\n.*none.json cannot be read"):
        quintnet.Cluster(tmp_path / "none.json")


@pytest.mark.slow
def test_every_device_has_prices_for_a_step() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))
    batch = (torch.randn(16, 64), torch.randint(0, 16, (16,)))
    mesh = quintnet.Mesh(dp=2, tp=2)
    program = quintnet.compile(model, mesh, batch, loss_fn=F.cross_entropy, check="off")
    seconds = {name: program.simulate(quintnet.Cluster(name, 2, 2)).seconds for name in HARDWARE}
    assert all(1e-5 < found < 1e-1 for found in seconds.values())
    assert seconds["h100"] < seconds["h100-pcie"] < seconds["t4"]
    named: list[Hardware] = [HARDWARE[name] for name in ("rtx-4090", "mi250x")]
    for cluster in (*(quintnet.Cluster(one, 2, 2) for one in named), quintnet.Cluster(V5E, 2, 2)):
        plan = {"mesh": {"dp": 2, "tp": 2}, "precision": "bf16"}
        found = quintnet.estimate(model, cluster, batch, plan, loss_fn=F.cross_entropy)
        assert 1e-5 < found.seconds < 1e-1
