"""Models of torchvision, timm and diffusers, and how each trains: unmodified, with random weights, on small images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .frontier import Case

ROWS, CLASSES = 8, 7


class Denoises(nn.Module):
    """The loss of a diffusion model: noise and times are drawn in forward (Ho et al. 2020, algorithm 1)."""

    def __init__(self, net: nn.Module, call: Callable[..., Any], steps: int = 50) -> None:
        super().__init__()
        self.net, self.call, self.steps = net, call, steps
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.randint(self.steps, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t][:, None, None, None]
        found = self.call(self.net, kept.sqrt() * x + (1 - kept).sqrt() * noise, t, y)
        return F.mse_loss(found, noise)


class Autoencodes(nn.Module):
    """The loss of a variational autoencoder, whose latents are sampled in forward (Kingma and Welling 2014)."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        latents = self.vae.encode(x).latent_dist
        found = self.vae.decode(latents.sample()).sample
        return F.mse_loss(found, x) + 1e-3 * latents.kl().mean()


def _images(size: int, channels: int = 3) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, channels, size, size, generator=dice)
        return x, torch.randint(CLASSES, (ROWS,), generator=dice)

    return batch


def _classifier(build: Callable[[], nn.Module], size: int = 32) -> Case:
    return Case(build, _images(size), F.cross_entropy)


def _loss(build: Callable[[], nn.Module], size: int, channels: int = 3) -> Case:
    return Case(build, _images(size, channels))


# -- torchvision


def _narrow_resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=4)


def _narrow_efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2), MBConvConfig(4, 5, 2, 16, 16, 2)]
    return EfficientNet(blocks, 0.2, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=32)


def _narrow_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.4, num_classes=CLASSES)


def _narrow_swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [2, 2], dropout=0.1, stochastic_depth_prob=0.3, num_classes=CLASSES
    )


def _narrow_densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2), 8, drop_rate=0.1, num_classes=CLASSES)


# -- timm


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    found: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return found


# -- diffusers


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8, dropout=0.1,
    )  # fmt: skip
    return Denoises(net, lambda net, x, t, y: net(x, t).sample)


class _Conditions(nn.Module):
    """A UNet that is told the class by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DConditionModel

        self.words = nn.Embedding(CLASSES, 2 * 16)
        self.unet = UNet2DConditionModel(
            sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=4, attention_head_dim=4,
            cross_attention_dim=16,
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.unet(x, t, self.words(y).unflatten(1, (2, 16))).sample
        return found


def _conditional_unet() -> nn.Module:
    return Denoises(_Conditions(), lambda net, x, t, y: net(x, t, y))


def _autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return Autoencodes(
        AutoencoderKL(
            3, 3, ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2, (8, 16), latent_channels=4, sample_size=16,
            norm_num_groups=4,
        )
    )  # fmt: skip


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, norm_num_groups=4,
        sample_size=8, patch_size=2, num_embeds_ada_norm=CLASSES, dropout=0.1,
    )  # fmt: skip
    return Denoises(net, lambda net, x, t, y: net(x, t, y).sample)


MODELS: Mapping[str, Mapping[str, Case]] = MappingProxyType(
    {
        "torchvision": {
            "ResNet": _classifier(_narrow_resnet),
            "EfficientNet": _classifier(_narrow_efficientnet),
            "ConvNeXt": _classifier(_narrow_convnext),
            "Swin": _classifier(_narrow_swin),
            "DenseNet": _classifier(_narrow_densenet),
        },
        "timm": {
            "ConvNeXt": _classifier(
                lambda: _timm(
                    "convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), drop_path_rate=0.4, drop_rate=0.1
                ),
                64,
            ),
            "ViT": _classifier(
                lambda: _timm(
                    "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2,
                    drop_path_rate=0.3,
                )
            ),
            "EfficientNet": _classifier(lambda: _timm("test_efficientnet", drop_path_rate=0.3)),
        },
        "diffusers": {
            "UNet": _loss(_unet, 8),
            "conditional UNet": _loss(_conditional_unet, 8, 4),
            "VAE": _loss(_autoencoder, 16),
            "DiT": _loss(_dit, 8, 4),
        },
    }
)  # fmt: skip
