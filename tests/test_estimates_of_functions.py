"""Activations, poolings, paddings, norms and losses in a small network: each is priced, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .every_loss import LOSSES, WithLoss, all_cases, batch

ROWS, WIDTH, CLASSES = 8, 8, 4
CLUSTER = quintnet.Cluster("a100", nodes=1, gpus_per_node=2)
LAYOUT = {"mesh": {"dp": 2}}
Function = Callable[[Tensor], Tensor]


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


def _inside(x: Tensor) -> Tensor:
    return x[..., 1:-1, 1:-1]


def _padded(mode: str) -> Function:
    return lambda x: _inside(F.pad(x, (1, 1, 1, 1), mode=mode))


def _resized(mode: str) -> Function:
    return lambda x: F.interpolate(F.interpolate(x, scale_factor=2, mode=mode), scale_factor=0.5, mode=mode)


# Each takes and returns an image of 8 channels and 8 x 8 pixels.
FUNCTIONS: Mapping[str, Function] = {
    **{
        function.__name__: function
        for function in (
            F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.softplus, F.softsign,
            F.logsigmoid, F.hardtanh, F.hardsigmoid, F.hardswish, F.tanhshrink, F.softshrink, F.hardshrink,
            torch.tanh, torch.sigmoid, torch.erf, torch.sinc, F.instance_norm, F.normalize, torch.tril,
        )
    },
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "glu": lambda x: torch.cat([F.glu(x, 1)] * 2, 1),
    "prelu": lambda x: F.prelu(x, torch.full((WIDTH,), 0.25)),
    "dropout": lambda x: F.dropout(x, 0.1),
    "softmax": lambda x: F.softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsumexp": lambda x: x + x.logsumexp(1, keepdim=True),
    "max_pool2d": lambda x: _doubled(F.max_pool2d(x, 2)),
    "avg_pool2d": lambda x: _doubled(F.avg_pool2d(x, 2)),
    "lp_pool2d": lambda x: _doubled(F.lp_pool2d(x, 2, 2)),
    "adaptive_avg_pool2d": lambda x: x + F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: x + F.adaptive_max_pool2d(x, 1),
    **{f"{mode} pad": _padded(mode) for mode in ("constant", "reflect", "replicate", "circular")},
    **{f"{mode} resize": _resized(mode) for mode in ("nearest", "bilinear", "bicubic", "area")},
    "grid_sample": lambda x: F.grid_sample(x, torch.full((x.shape[0], 8, 8, 2), 0.3), align_corners=False),
    "pixel_shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "unfold and fold": lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1),
    "group_norm": lambda x: F.group_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[3:]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "conv2d of each channel": lambda x: F.conv2d(x, torch.ones(WIDTH, 1, 3, 3), padding=1, groups=WIDTH),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(WIDTH, WIDTH, 3, 3), padding=1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cdist": lambda x: x + torch.cdist(x, x),
    "einsum": lambda x: torch.einsum("bchw,bcwv->bchv", x, x),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(WIDTH, WIDTH, WIDTH)),
    "cosine_similarity": lambda x: x + F.cosine_similarity(x, x + 1, dim=1)[:, None],
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: F.pad(x.topk(4, -1)[0], (0, 4)),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "var": lambda x: x / (x.var(1, keepdim=True) + 1),
    "amax": lambda x: x + x.amax(1, keepdim=True),
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "atan2": lambda x: torch.atan2(x, x + 1),
    "power": lambda x: (x.abs() + 1) ** 1.5,
    "determinant": lambda x: x + torch.linalg.det(x)[..., None, None],
    "inverse": lambda x: torch.linalg.inv(x @ x.mT + 10 * torch.eye(8)),
    "fft": lambda x: torch.fft.fft(x).real,
}  # fmt: skip


class Network(nn.Module):
    """The function between two convolutions, so that gradients pass through it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.function = function

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.after(self.function(self.before(image))).mean((2, 3)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_priced(name: str) -> None:
    images = torch.randn(ROWS, 3, 8, 8), torch.randint(0, CLASSES, (ROWS,))
    found = quintnet.estimate(Network(FUNCTIONS[name]), CLUSTER, images, LAYOUT, loss_fn=F.cross_entropy)
    assert 0 < found.seconds < 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in all_cases() if name.endswith("mean")])
def test_a_loss_is_priced(name: str) -> None:
    model = WithLoss(*all_cases()[name]).double()
    assert 0 < quintnet.estimate(model, CLUSTER, batch(), LAYOUT).seconds < 1


def test_sixty_functions_and_twenty_losses() -> None:
    assert len(FUNCTIONS) >= 60 and len(LOSSES) >= 20
