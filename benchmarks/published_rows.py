"""A published row -> decoder, layout, cluster and what was measured; or the reason why it cannot be modelled."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import published_flops
from benchmarks.closed_forms.transformer import Decoder, ParallelLayout
from benchmarks.published_facts import facts_of
from benchmarks.published_models import columns_of, fields_of
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.hardware import HARDWARE, Hardware

Row = Mapping[str, str]
# By full name: a part of lower power, or with other memory or links, is another one.
GPU_NAMES = {
    "V100": "v100", "V100 32GB": "v100",
    "A100": "a100-80", "A100 80GB": "a100-80", "A100 40GB": "a100-40", "A800": "a800", "A800 80GB": "a800",
    "A100 PCIE 80GB": "a100-pcie-80", "A100 PCIE 40GB": "a100-pcie-40",
    "H100": "h100", "H100 80GB": "h100", "H800": "h800", "H800 80GB": "h800", "H200": "h200", "H200 141GB": "h200",
    "H100 PCIE": "h100-pcie", "H100 PCIE 80GB": "h100-pcie", "H100 NVL": "h100-nvl", "H100 NVL 94GB": "h100-nvl",
    "GH200 96GB": "gh200-96", "GH200 144GB": "gh200-144",
    "B200": "b200", "B200 180GB": "b200", "B300": "b300", "B300 288GB": "b300",
    "GB200": "gb200", "GB200 NVL72": "gb200", "GB300": "gb300", "GB300 NVL72": "gb300",
    "MI250X": "mi250x", "MI300X": "mi300x", "MI300X 192GB": "mi300x", "MI325X": "mi325x", "MI355X": "mi355x",
    "L40S": "l40s", "A10G": "a10g", "RTX 4090": "rtx-4090",
}  # fmt: skip
# How sources say over how many of the data ranks state is sliced, while the rest hold copies: InternEvo's zero1 (-1 is
# all), MaxText's and Megatron's FSDP (0 and 1 say whether), PyTorch's mesh.
SHARD_GROUP = re.compile(
    r"\bzero-?[123]\s*(?:size|group)?\s*(?:=|:|of)\s*(-?\d+)|\bFSDP\d?\s*(?:=|group\s*=?)\s*(\d+)"
    r"|\bshard(?:ing)?[ -]?groups?(?: size)?(?: of|\s*[=:])?\s*(\d+)",
    re.IGNORECASE,
)
# Stages per rank, where only notes have them.
VPP = re.compile(r"\bVPP? ?=? ?(\d+)|\bVP printed NA in [\d.]+ \((\d+) in ")


class Unmodelled(Exception):
    """Why a row cannot be modelled."""


@dataclass(frozen=True)
class Run:
    """One published run; seconds and GiB are None where the row does not state them."""

    id: str
    device: str
    model: Decoder
    layout: ParallelLayout
    gpus: int
    gpus_per_node: int
    seconds: float | None
    gib: float | None
    seconds_between: tuple[float, float] | None  # where a rate is stated, but not of which FLOPs
    last_stage: bool  # memory is of the last rank
    device_tool: bool  # memory as nvidia-smi shows it

    def cluster(self, hardware: Mapping[str, Hardware] = HARDWARE) -> Cluster:
        facts = facts_of(self.id)
        network = facts.network_h100 if facts.network_h100 and self.device == "h100" else facts.network
        return Cluster(
            hardware[self.device], -(-self.gpus // self.gpus_per_node), min(self.gpus, self.gpus_per_node),
            network_bytes_per_second=network,
        )  # fmt: skip


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _int(row: Row, name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    if text == "" or text is None:
        if default is None:
            raise Unmodelled(f"{name} not stated")
        return default
    return int(float(text))


def device_of(row: Row) -> str:
    """The device by its full name, in which neither the maker, SXM nor the machine's name (``(DGX-2)``) counts.

    Raises:
        Unmodelled: for any other, as ``H100-64GB`` or ``H100-80GB (500 W)``.
    """
    name = re.sub(r"\((DGX|HGX)[^)]*\)", "", row["gpu_type"].upper())
    words = [word for word in re.split(r"[^A-Z0-9()]+", name) if word]
    words = [word for word in words if not re.fullmatch(r"NVIDIA|AMD|SXM\d?", word)]
    sizes = [word for word in words if re.fullmatch(r"\d+GB", word)]
    device = GPU_NAMES.get(" ".join([word for word in words if word not in sizes] + sizes))
    if device is None:
        raise Unmodelled(f"unknown GPU type {row['gpu_type']}")
    return device


def decoder_of(row: Row) -> Decoder:
    name = row["model"].lower()
    row = {**row, **{column: text for column, text in columns_of(name).items() if not row.get(column)}}
    experts = _int(row, "n_experts", 0)
    gated = _int(row, "gated_mlp", 1 if re.search(GATED, name) else 0) == 1
    hidden = _int(row, "hidden")
    tp = _int(row, "tp", 1)
    whole = [count for count in range(tp, hidden + 1, tp) if hidden % count == 0]  # heads of about 128 elements
    heads = _int(row, "n_heads", min(whole, key=lambda count: abs(count - hidden / 128), default=hidden // 128))
    vocab = _int(row, "vocab", facts_of(row["id"]).vocab or (32000 if gated else None))
    padded = 128 * tp  # Megatron's rule; multiples of 128 stay as they are
    vocab = -(-vocab // padded) * padded
    old = row.get("flash_attention") in ("0", "") and row["id"].split("-")[0] in OLD_MEGATRON
    bare = not gated and not any(word in name for word in ("mpt", "nemotron"))
    decoder = Decoder(
        layers=_int(row, "n_layers"), hidden=hidden, ffn=_int(row, "ffn_hidden", 4 * hidden), heads=heads,
        kv_heads=_int(row, "n_kv_heads", heads), vocab=vocab, seq=_int(row, "seq_len"), gated=gated,
        experts=experts, top_k=_int(row, "top_k", 2) if experts else 0,
        moe_ffn=_int(row, "moe_ffn_hidden", _int(row, "ffn_hidden", 4 * hidden)) if experts else 0,
        tied=not gated and "nemotron" not in name, biases=bare, dropout=old, rotary=not old and "mpt" not in name,
        learned_positions=_int(row, "seq_len") if bare and "bloom" not in name else 0,
    )  # fmt: skip
    return replace(decoder, **fields_of(row["model"], row["id"].split("-")[0], decoder.layers))


def shards_of(row: Row, ranks: int) -> int:
    """Over how many of ``ranks`` data (and context) ranks state is sliced, by the column ``shard_group`` or the notes:
    0 for all, 1 for none of them (InternEvo's ``zero1=1``).

    Raises:
        Unmodelled: if the ranks do not divide into such groups.
    """
    match = SHARD_GROUP.search(row.get("notes", ""))
    stated = next((int(number) for number in match.groups() if number), 0) if match else 0
    if match and not match[1] and stated == 1:  # FSDP=1: it is on
        stated = 0
    group = _int(row, "shard_group", stated)
    if group < 1 or group >= ranks:
        return 0
    if ranks % group:
        raise Unmodelled(f"{ranks} data ranks in shard groups of {group}")
    return group


GATED = "llama|mixtral|mistral|qwen|deepseek|kimi|moonlight|gpt[- ]?oss|gemma"
OLD_MEGATRON = ("KORTH", "NARA", "VTM", "VTS", "BLOOM", "JZV100", "MLM2020", "MTNLG")


def layout_of(row: Row, model: Decoder) -> ParallelLayout:
    facts, prefix, notes = facts_of(row["id"]), row["id"].split("-")[0], row.get("notes", "")
    degrees = {name: _int(row, name, 1 if name in ("cp", "ep") else None) for name in ("dp", "tp", "cp", "pp", "ep")}
    recompute, share = row.get("recompute", "") or "none", 1.0
    if prefix == "FMS":  # some layers are recomputed whole: as many as the stated HFU and MFU say
        share = min(1.0, 3 * (float(notes.split("HFU=")[1].split(";")[0]) / float(row["mfu_or_hfu"]) - 1))
        recompute = "full"
    if recompute == "selective" and "recompute_modules=" in notes and "core_attn" not in notes:
        recompute = "none"  # modules of little arithmetic
    if recompute not in ("none", "selective", "full"):
        raise Unmodelled(f"unknown recompute {recompute!r}")
    dtype = row.get("dtype", "") or ("fp16" if prefix in OLD_MEGATRON else "bf16")
    nemo = prefix in ("DGXC", "MBR", "CARD", "ZOO", "SKILL", "MLM", "MCORE", "NEMO")
    sequence = row.get("sequence_parallel", "") or ("1" if nemo and degrees["tp"] > 1 else "0")
    zero = _int(row, "zero_stage", 1 if nemo else 0)
    shard = shards_of(row, degrees["dp"] * degrees["cp"]) if zero else 0
    gradients = facts.gradient_dtype
    if "MP=PURE" in notes or (dtype == "bf16" and gradients == "fp16"):
        gradients = "bf16" if "MP=PURE" in notes else "fp32"
    flash = row.get("flash_attention") == "1" or (row.get("flash_attention") == "" and prefix not in OLD_MEGATRON)
    etp = degrees["tp"] if model.experts and model.experts <= 8 and "ETP=1" not in notes else 1
    return ParallelLayout(
        **degrees, vpp=_int(row, "vpp", int(stages[1] or stages[2]) if (stages := VPP.search(notes)) else 1),
        microbatch=_int(row, "micro_batch_seqs"),
        global_batch=_int(row, "global_batch_seqs"), sequence_parallel=sequence == "1",
        recompute=recompute, recompute_share=share, zero=0 if shard == 1 else zero, shard=shard if shard > 1 else 0,
        expert_tp=etp,  # type: ignore[arg-type]
        dtype=dtype, gradient_dtype=gradients,
        kernels=replace(facts.kernels, flash=flash),
        overlap_dp=facts.overlap_dp, owners=facts.owners, overlap_pp=facts.overlap_pp,
        whole_sends=facts.whole_sends, holds_outputs=facts.holds_outputs,
        overlap_tp=nemo and sequence == "1" and "no TP-comm overlap" not in notes and prefix not in ("MLM", "SKILL"),
        overlap_ep="a2a overlap" in notes,
        stage_ends="embedding/head count as pipeline layers" in notes, graphs="cuda_graph=" in notes,
        blocking=facts.blocking, bucket_bytes=facts.bucket_bytes,
    )  # fmt: skip


def measured_seconds(row: Row, model: Decoder, device: str) -> tuple[float, float] | None:
    """The least and the most that a step took: equal where it is stated, or follows from tokens/s or from FLOP/s."""
    if row.get("step_time_s"):
        return float(row["step_time_s"]), float(row["step_time_s"])
    batch, gpus = _int(row, "global_batch_seqs", 0), _int(row, "gpus", 0)
    if batch and gpus and row.get("tokens_per_s_per_gpu"):
        seconds = batch * model.seq / (gpus * float(row["tokens_per_s_per_gpu"]))
        return seconds, seconds
    return published_flops.seconds_between(row, model, device)


def unstated(row: Row) -> tuple[str, ...]:
    """Which columns a row leaves open that its layout needs, and that may be several things."""
    facts, notes, columns = facts_of(row["id"]), row.get("notes", ""), []
    if row.get("recompute", "") == "" and not (
        "sets no recompute override" in notes
        or (facts.assume_none and not any(word in row["model"] for word in ("MaxText", "Paxml")))
    ):
        columns.append("recompute")
    if row.get("micro_batch_seqs", "") == "":
        columns.append("micro_batch_seqs")
    if row.get("vpp", "") == "" and facts.interleaves and _int(row, "pp", 1) > 1 and not VPP.search(notes):
        columns.append("vpp")
    return tuple(columns)


def run_of(row: Row) -> Run:
    """The run that a row describes.

    Raises:
        Unmodelled: with the reason.
    """
    model = decoder_of(row)
    if left := unstated(row):
        raise Unmodelled(f"{', '.join(left)} not stated")
    try:
        layout = layout_of(row, model)
    except CompileError as error:
        raise Unmodelled(error.message) from error
    gpus, device = _int(row, "gpus"), device_of(row)
    seconds = measured_seconds(row, model, device)
    if layout.ranks != gpus:
        raise Unmodelled(f"the layout has {layout.ranks} ranks, the run {gpus} GPUs")
    gib = float(row["memory_gib_per_gpu"]) if row.get("memory_gib_per_gpu") else None
    if seconds is None and gib is None:
        raise Unmodelled("no step time, and none follows from what is stated")
    tool = row["id"].startswith(("BLOOM", "JZV100"))
    if gib is not None and tool:
        gib *= 1e9 / 2**30 if row["id"].startswith("JZV100") else 1.0
    sure = seconds[0] if seconds and seconds[0] == seconds[1] else None
    return Run(
        row["id"], device, model, layout, gpus, _int(row, "gpus_per_node", 8), sure, gib,
        seconds if sure is None else None, "LAST rank" in row.get("notes", ""), tool,
    )  # fmt: skip
