"""Initial values are those of the unsplit module with the same seed, on every layout, in one process and in many."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.weights.own_values import values_of_build

pytestmark = pytest.mark.usefixtures("shared_captures")
Layout = tuple[dict[str, int], dict[str, Any]]
LAYOUTS: list[Layout] = [({"dp": 2}, {"zero": 3}), ({"tp": 2}, {}), ({"pp": 2}, {}), ({"dp": 2, "tp": 2}, {"zero": 3})]


class Net(nn.Module):
    """Tensors that reset functions give values to, and others that only the constructor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.empty(16))
        self.table = nn.Parameter(torch.randn(4, 16) * 0.5)
        self.register_buffer("waves", torch.arange(16.0).sin(), persistent=False)
        self.factor = torch.linspace(0.5, 1.5, 16)
        self.reset_parameters()
        self.up.apply(self._small)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.scale, mean=1.0, std=0.1)
        nn.init.orthogonal_(self.down.weight)

    def _small(self, module: nn.Module) -> None:
        nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x + self.table + self.waves)).relu()) * self.scale * self.factor


BATCH = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4, 16)


def _program(axes: dict[str, int], plan: dict[str, Any]) -> tuple[nn.Module, quintnet.CompiledProgram]:
    with torch.device("meta"):
        model = Net()
    return model, quintnet.compile(model, Mesh(**axes), BATCH, loss_fn=F.mse_loss, check="off", **plan)


def _built() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def _reset(module: nn.Module) -> nn.Module:
    """As on one device: the reset functions of every module, in the order of ``apply``."""
    torch.manual_seed(6)
    return module.apply(lambda m: getattr(m, "reset_parameters", lambda: None)())


def _unequal(program: quintnet.CompiledProgram, model: nn.Module, expected: nn.Module) -> list[str]:
    """The tensors of a program that are not those of ``expected``."""
    own, buffers = dict(expected.named_parameters()), dict(model.named_buffers())
    wrong = [n for n, p in program.named_parameters() if not torch.equal(p.full_tensor(), own[n].detach())]  # type: ignore[attr-defined]
    wrong += [n for n, x in expected.named_buffers() if not torch.equal(buffers[n], x)]
    loss = program.step(BATCH)
    return wrong if torch.allclose(loss, F.mse_loss(expected(BATCH[0]), BATCH[1])) else [*wrong, "loss"]


def _wrong(axes: dict[str, int], plan: dict[str, Any]) -> list[str]:
    """The tensors that differ after each of two ways to initialise a module."""
    model, program = _program(axes, plan)
    program.initialize(Net, seed=5)
    wrong = _unequal(program, model, _built())
    program.initialize(seed=6)  # the table keeps its values
    return wrong + _unequal(program, model, _reset(_built()))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("axes", "plan"), LAYOUTS)
def test_values_of_the_modules_own_code(axes: dict[str, int], plan: dict[str, Any]) -> None:
    assert _wrong(axes, plan) == []


def _in_a_process(layouts: list[Layout]) -> list[list[str]]:
    torch.set_num_threads(1)
    found = [_wrong(axes, plan) for axes, plan in layouts]

    def build() -> nn.Module:
        net = Net()
        net.scale.data.mul_(torch.distributed.get_rank())
        return net

    _, program = _program(*layouts[0])
    try:
        program.initialize(build)
    except quintnet.RunError as error:
        return found if error.code == "QN403" else [*found, [error.code]]
    return [*found, ["ranks with other values were not told"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, LAYOUTS[0:3:2]),
        pytest.param(2, LAYOUTS[1:2], marks=pytest.mark.slow),
        pytest.param(4, LAYOUTS[3:], marks=pytest.mark.slow),
    ],
)
def test_values_in_processes(world: int, layouts: list[Layout]) -> None:
    for found in quintnet.launch(_in_a_process, world, args=(layouts,)):
        assert found == [[]] * len(layouts)


# -- Hugging Face


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
def test_values_of_a_hugging_face_model() -> None:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    with torch.device("meta"):
        model, empty = _llama(), _llama()
    program = quintnet.compile(model, Mesh(dp=2, tp=2), batch, zero=3, check="off")
    program.initialize(seed=5)
    empty.to_empty(device="cpu")
    torch.manual_seed(5)
    empty.init_weights()
    for name, p in program.named_parameters():
        assert torch.equal(p.full_tensor(), empty.state_dict()[name]), name  # type: ignore[attr-defined]
    assert torch.equal(model.model.rotary_emb.inv_freq, empty.model.rotary_emb.inv_freq)
    program.initialize(_llama, seed=5)
    torch.manual_seed(5)
    built = _llama()
    for name, p in program.named_parameters():
        assert torch.equal(p.full_tensor(), built.state_dict()[name]), name  # type: ignore[attr-defined]


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": 64, **_SIZES}
_IMAGES = {**_SIZES, "image_size": 32, "patch_size": 8}
_SOUND = {"conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2, **_SIZES}
_ENCODER_DECODER = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "ViT": _IMAGES,
    "T5": _ENCODER_DECODER,
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Bert": _TEXT,
    "Mixtral": {**_TEXT, "num_local_experts": 4, "num_key_value_heads": 2},
    "Mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
    "Swin": _WINDOWS,
    "Wav2Vec2": _SOUND,
    "DebertaV2": _TEXT,
    "CLIP": {"text_config": _TEXT, "vision_config": _IMAGES},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_constructors_of_hugging_face_models(family: str) -> None:
    def build() -> Any:
        return getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**FAMILIES[family]))

    def tensors(model: Any) -> dict[str, Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    torch.manual_seed(5)
    expected, own = tensors(build()), values_of_build(build)
    found = {name: x.clone() for name, x in own.values(expected, 5)}
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name


# -- by name


@pytest.mark.slow
def test_functions_by_name() -> None:
    small = partial(nn.init.trunc_normal_, std=0.02)
    values = {"*": nn.init.zeros_, "*weight": small, "up.*": quintnet.Constant(0.5), "table": nn.init.xavier_uniform_}
    values |= {"waves": lambda x: x.copy_(torch.arange(16.0).sin()), "factor": lambda x: torch.linspace(0.5, 1.5, 16)}
    expected = Net()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in expected.named_parameters():
            if name == "table":
                nn.init.xavier_uniform_(p)
            elif name.startswith("up"):
                p.fill_(0.5)
            else:
                small(p) if name.endswith("weight") else nn.init.zeros_(p)
    model, program = _program(*LAYOUTS[3])
    program.initialize(values, seed=5)
    assert _unequal(program, model, expected) == []


def test_what_nothing_gives_values_to_is_refused() -> None:
    _, program = _program({"dp": 2}, {})
    with pytest.raises(quintnet.CompileError, match=r"(?s)QN604.*values to factor\n.*values to table\n.*to waves\n"):
        program.initialize()
    with pytest.raises(quintnet.RunError, match=r"QN604.*\n.*down.bias.*\n.*initialize\(\).*\(build\)"):
        program.step(BATCH)
    program.initialize({"*": quintnet.Normal(0.02)})
    with pytest.raises(quintnet.RunError, match=r"QN604.*\n  values are missing for factor, waves\n"):
        program.step(BATCH)  # a glob is for parameters
    for wrong in (Net(), "modle", lambda: nn.Linear(16, 32)):
        with pytest.raises(quintnet.CompileError, match="QN604"):
            program.initialize(wrong)  # type: ignore[arg-type]
    program.initialize(Net)
    assert program.step(BATCH).isfinite()
    with pytest.raises(quintnet.CompileError, match="QN204"):
        program.initialize({"nothing.*": nn.init.zeros_})
