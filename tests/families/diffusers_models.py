"""Models of diffusers: U-Nets, diffusion transformers and autoencoders, with the losses that they are trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..frontier import Case
from .pieces import CLASSES, Build, Denoises, told, with_loss


def _diffusers(name: str, **options: Any) -> Build:
    def build() -> nn.Module:
        import diffusers

        found: nn.Module = getattr(diffusers, name)(**options)
        return found

    return build


class Autoencodes(nn.Module):
    """The loss of a variational autoencoder, whose latents are sampled in forward (Kingma and Welling 2014)."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        latents = self.vae.encode(x).latent_dist
        found = self.vae.decode(latents.sample()).sample
        return F.mse_loss(found, x) + 1e-3 * latents.kl().mean()


class Rebuilds(nn.Module):
    """The loss of an autoencoder that draws nothing; with a codebook, that of van den Oord et al. (2017), too."""

    def __init__(self, net: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.call(self.net, x)
        loss = F.mse_loss(found.sample, x)
        commitment = getattr(found, "commit_loss", None)
        return loss if commitment is None else loss + commitment.mean()


def _denoiser(build: Build, call: Callable[..., Any], size: int = 8, channels: int = 4) -> Case:
    return with_loss(lambda: Denoises(build(), call), size, channels)


def _autoencoder(build: Build) -> Case:
    return with_loss(lambda: Autoencodes(build()), 16)


def _rebuilder(build: Build, call: Callable[..., Any] = lambda net, x: net(x)) -> Case:
    return with_loss(lambda: Rebuilds(build(), call), 16)


def _unrounded(net: Any, x: Tensor) -> Any:
    """Without the rounding of latents to bytes that forward has in between."""
    return net.decode(net.encode(x).latents)


UNET: Mapping[str, Any] = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
KL: Mapping[str, Any] = {"latent_channels": 4, "sample_size": 16}
DOWN_UP: Mapping[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip
HEADS: Mapping[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
PLACES: Mapping[str, Any] = {"in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2}


def _film(build: Build, call: Callable[..., Any]) -> Case:
    """Films of two frames: ``[rows, channels, frames, height, width]``."""
    whole = lambda net, x, *more: call(net, x.unflatten(1, (4, 2)), *more).flatten(1, 2)  # noqa: E731
    return told(build, whole, channels=8)


def _joint(net: nn.Module, x: Tensor, t: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
    return net(x, words, pooled, t).sample  # type: ignore[no-any-return]


def _flux(net: nn.Module, x: Tensor, t: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
    height, width = x.shape[2:]
    places = torch.cartesian_prod(*(torch.arange(n).to(x.dtype) for n in (1, height, width)))
    out = net(
        x.flatten(2).transpose(1, 2), words, pooled, t / 1000, img_ids=places, txt_ids=x.new_zeros(words.shape[1], 3)
    ).sample
    found: Tensor = out.transpose(1, 2).unflatten(2, (height, width))
    return found


def _by_text(net: nn.Module, x: Tensor, t: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
    return net(x, encoder_hidden_states=words, timestep=t).sample  # type: ignore[no-any-return]


def _first_half(net: nn.Module, x: Tensor, t: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
    """Of a model that says what variance there is, too."""
    out = net(x, encoder_hidden_states=words, timestep=t, added_cond_kwargs={"resolution": None, "aspect_ratio": None})
    found: Tensor = out.sample.chunk(2, dim=1)[0]
    return found


def _frames_first(net: nn.Module, x: Tensor, t: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
    return _by_text(net, x.transpose(1, 2), t, words, pooled).transpose(1, 2)


def _controlled(net: nn.Module, x: Tensor, t: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
    """A U-Net that is steered by a picture: here by the noisy image's first channels, enlarged."""
    steered = F.interpolate(x[:, :3], scale_factor=8.0)
    down, middle = net["control"](x, t, words, steered, return_dict=False)  # type: ignore[index]
    found: Tensor = net["unet"](  # type: ignore[index]
        x, t, words, down_block_additional_residuals=down, mid_block_additional_residual=middle
    ).sample
    return found


CONDITIONED: Mapping[str, Any] = {
    **UNET, "in_channels": 4, "out_channels": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4, "cross_attention_dim": 16,
}  # fmt: skip


def _unet_and_control() -> nn.Module:
    from diffusers import ControlNetModel, UNet2DConditionModel

    unet = UNet2DConditionModel(**CONDITIONED)
    control = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 4, 4, 8))
    return nn.ModuleDict({"unet": unet, "control": control})


CASES: Mapping[str, Case] = {
    "UNet2D": _denoiser(
        _diffusers(
            "UNet2DModel", in_channels=3, out_channels=3, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, dropout=0.1, **UNET,
        ),
        lambda net, x, t, y: net(x, t).sample, channels=3,
    ),
    "UNet2DCondition": told(_diffusers("UNet2DConditionModel", **CONDITIONED), _by_text),
    "ControlNet": told(_unet_and_control, _controlled),
    "UNet1D": _denoiser(
        _diffusers(
            "UNet1DModel", in_channels=4, out_channels=4, block_out_channels=(32, 32), extra_in_channels=64,
            down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
            up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
        ),
        lambda net, x, t, y: net(x.flatten(2), t).sample.unflatten(2, (8, 8)),
    ),
    "UNet3DCondition": _film(
        _diffusers(
            "UNet3DConditionModel", in_channels=4, out_channels=4, attention_head_dim=4, cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), **UNET,
        ),
        _by_text,
    ),
    "DiT": _denoiser(
        _diffusers(
            "DiTTransformer2DModel", num_embeds_ada_norm=CLASSES, norm_num_groups=4, dropout=0.1, **HEADS, **PLACES
        ),
        lambda net, x, t, y: net(x, t, y).sample,
    ),
    "PixArt": told(
        _diffusers(
            "PixArtTransformer2DModel", cross_attention_dim=16, caption_channels=16, norm_num_groups=4,
            **HEADS, **{**PLACES, "out_channels": 8},
        ),
        _first_half,
    ),
    "MMDiT (SD3)": told(
        _diffusers(
            "SD3Transformer2DModel", joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16,
            pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm", **HEADS, **PLACES,
        ),
        _joint,
    ),
    "Flux": told(
        _diffusers(
            "FluxTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
        ),
        _flux,
    ),
    "AuraFlow": told(
        _diffusers(
            "AuraFlowTransformer2DModel", num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=16, **PLACES,
        ),
        lambda net, x, t, words, pooled: net(x, words, t / 1000).sample,
    ),
    "Sana": told(
        _diffusers(
            "SanaTransformer2DModel", cross_attention_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=8,
            caption_channels=16, **HEADS, **PLACES,
        ),
        _by_text,
    ),
    "Latte": _film(
        _diffusers(
            "LatteTransformer3DModel", caption_channels=16, cross_attention_dim=16, norm_type="ada_norm_single",
            activation_fn="gelu-approximate", video_length=2, norm_elementwise_affine=False,
            **HEADS, **PLACES,
        ),
        _by_text,
    ),
    "CogVideoX": _film(
        _diffusers(
            "CogVideoXTransformer3DModel", in_channels=4, out_channels=4, text_embed_dim=16, time_embed_dim=8,
            sample_width=8, sample_height=8, sample_frames=2, temporal_compression_ratio=1, max_text_seq_length=2,
            use_rotary_positional_embeddings=False, **HEADS,
        ),
        _frames_first,
    ),
    "Wan": _film(
        _diffusers(
            "WanTransformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=16,
        ),
        _by_text,
    ),
    "AutoencoderKL": _autoencoder(
        _diffusers("AutoencoderKL", block_out_channels=(8, 16), norm_num_groups=4, **DOWN_UP, **KL)
    ),
    "AsymmetricAutoencoderKL": _autoencoder(
        _diffusers(
            "AsymmetricAutoencoderKL", down_block_out_channels=(8, 16), up_block_out_channels=(16, 16),
            norm_num_groups=4, **DOWN_UP, **KL,
        )
    ),
    "VQModel": _rebuilder(
        _diffusers("VQModel", block_out_channels=(8, 16), norm_num_groups=4, num_vq_embeddings=16, **DOWN_UP, **KL)
    ),
    "AutoencoderTiny": _rebuilder(
        _diffusers(
            "AutoencoderTiny", encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
        ),
        _unrounded,
    ),
    "AutoencoderDC": _rebuilder(
        _diffusers(
            "AutoencoderDC", latent_channels=4, attention_head_dim=8,
            encoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 16),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_out_channels=(8, 16),
            encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        )
    ),
}  # fmt: skip
