"""A decoder of megatron-core itself, saved by it as ``torch_dist``, computes the same as what transformers loads."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import quintnet
from quintnet_compiler.checkpoint.formats.convert import Choices, convert
from quintnet_compiler.checkpoint.formats.format import Format

IDS = (torch.arange(10).view(1, 10) * 3) % 32


def write_by_megatron(folder: Path) -> None:
    """Write a checkpoint, and beside it the logits of what is in it."""
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.synchronize = lambda *_: None  # it asks for a GPU in places where it needs none
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    parallel_state.initialize_model_parallel(1, 1)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=32,
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", bias_activation_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, apply_rope_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
        folder.mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        later = torch.triu(torch.ones(1, 1, 10, 10, dtype=torch.bool), 1)
        save_file({"logits": model(IDS, torch.arange(10).view(1, 10), later)}, folder.with_suffix(".safetensors"))


@pytest.mark.slow
def test_a_checkpoint_of_megatron_core(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core (and psutil, which it needs) is not installed")
    command = [sys.executable, "-m", "tests.test_megatron_format", str(tmp_path / "megatron")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1], timeout=240)
    logits = load_file(tmp_path / "megatron.safetensors")["logits"]
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, rms_norm_eps=1e-5, max_position_embeddings=16, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "config")
    choices = Choices(config=tmp_path / "config")
    convert(tmp_path / "megatron", tmp_path / "llama", Format.SAFETENSORS, choices)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(IDS).logits
    assert float((found - logits).abs().max()) < 1e-5 < float(logits.abs().max())
    convert(tmp_path / "megatron", tmp_path / "own", Format.QUINTNET, choices)
    empty = transformers.LlamaForCausalLM(config)
    program = quintnet.compile(empty, quintnet.Mesh(tp=2), {"input_ids": IDS, "labels": IDS})
    program.load(tmp_path / "own")
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in program.state_dict().items())


if __name__ == "__main__":  # in a process of its own: it starts others, and asks for a process group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    write_by_megatron(Path(sys.argv[1]))
