"""Models of torchvision: classification, segmentation, and what of detection has no shapes that depend on values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..frontier import Case
from .pieces import CLASSES, Build, classifier, images, made_narrow, segmenter


def _shipped(name: str, **options: Any) -> Build:
    """As torchvision makes it, with random weights."""

    def build() -> nn.Module:
        import torchvision

        found: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        return found

    return build


def _resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=4)


def _efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2), MBConvConfig(4, 5, 2, 16, 16, 2)]
    return EfficientNet(blocks, 0.2, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=32)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.4, num_classes=CLASSES)


def _swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [2, 2], dropout=0.1, stochastic_depth_prob=0.3, num_classes=CLASSES
    )


def _swin_v2() -> nn.Module:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    return SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [2, 2], stochastic_depth_prob=0.3, num_classes=CLASSES,
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2), 8, drop_rate=0.1, num_classes=CLASSES)


def _mobilenet_v2() -> nn.Module:
    from torchvision.models import MobileNetV2

    return MobileNetV2(CLASSES, 0.25, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]])


def _mobilenet_v3() -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    blocks = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 0.5),
        InvertedResidualConfig(16, 5, 48, 24, True, "HS", 2, 1, 0.5),
        InvertedResidualConfig(24, 5, 48, 24, False, "HS", 1, 1, 0.5),
    ]
    return MobileNetV3(blocks, 32, CLASSES)


def _shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 1, 1], [8, 16, 16, 32, 32], CLASSES)


def _regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(BlockParams([1, 1], [8, 16], [4, 8], [1.0, 1.0], [2, 2], 0.25), CLASSES, stem_width=8)


def _mnasnet() -> nn.Module:
    from torchvision.models import MNASNet

    return MNASNet(0.1, CLASSES)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.2, num_classes=CLASSES)


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, attention_dropout=0.1, num_classes=CLASSES)


def _backbone() -> nn.Module:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import BasicBlock, ResNet

    body = ResNet(BasicBlock, [1, 1, 1, 1])
    return IntermediateLayerGetter(body, {"layer3": "aux", "layer4": "out"})


def _fcn() -> nn.Module:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    return FCN(_backbone(), FCNHead(512, CLASSES), FCNHead(256, CLASSES))


def _deeplab() -> nn.Module:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
    from torchvision.models.segmentation.fcn import FCNHead

    return DeepLabV3(_backbone(), DeepLabHead(512, CLASSES, (1, 2, 3)), FCNHead(256, CLASSES))


def _lraspp() -> nn.Module:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.lraspp import LRASPP

    return LRASPP(IntermediateLayerGetter(_mobilenet_v3().features, {"2": "low", "4": "high"}), 16, 96, CLASSES, 16)


class _Detects(nn.Module):
    """RetinaNet's backbone, pyramid and heads, with a target for each anchor: matching anchors with boxes, and what
    follows it, has shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.models.resnet import BasicBlock, ResNet
        from torchvision.ops import FeaturePyramidNetwork

        self.body = ResNet(BasicBlock, [1, 1, 1, 1])
        self.body.fc = nn.Identity()
        self.pyramid, self.head = FeaturePyramidNetwork([256, 512], 64), RetinaNetHead(64, 1, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        body = self.body
        x = body.layer2(body.layer1(body.maxpool(body.relu(body.bn1(body.conv1(x))))))
        middle = body.layer3(x)
        found = self.pyramid({"middle": middle, "last": body.layer4(middle)})
        out: dict[str, Tensor] = self.head(list(found.values()))
        return out["cls_logits"], out["bbox_regression"]


def _of_anchors(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    from torchvision.ops import sigmoid_focal_loss

    logits, boxes = out
    wanted = F.one_hot(y, CLASSES).to(logits.dtype)[:, None].expand_as(logits)
    loss: Tensor = sigmoid_focal_loss(logits, wanted, reduction="mean")
    return loss + F.smooth_l1_loss(boxes, torch.zeros_like(boxes))


def _of_parts(out: Any, y: Tensor) -> Tensor:
    """With auxiliary heads, as Szegedy et al. (2014) train it."""
    return F.cross_entropy(out.logits, y) + 0.3 * sum(F.cross_entropy(part, y) for part in out[1:])


CASES: Mapping[str, Case] = {
    "AlexNet": classifier(made_narrow(_shipped("alexnet")), 64),
    "VGG": classifier(made_narrow(_shipped("vgg11_bn"))),
    "SqueezeNet": classifier(made_narrow(_shipped("squeezenet1_1"))),
    "GoogLeNet": classifier(made_narrow(_shipped("googlenet", aux_logits=True, init_weights=True)), 64, _of_parts),
    "ResNet": classifier(_resnet),
    "DenseNet": classifier(_densenet),
    "ShuffleNet V2": classifier(_shufflenet, 64),
    "MobileNet V2": classifier(_mobilenet_v2),
    "MobileNet V3": classifier(_mobilenet_v3),
    "EfficientNet": classifier(_efficientnet),
    "RegNet": classifier(_regnet),
    "ConvNeXt": classifier(_convnext),
    "ViT": classifier(_vit),
    "Swin": classifier(_swin),
    "Swin V2": classifier(_swin_v2),
    "MaxViT": classifier(_maxvit),
    "FCN": segmenter(made_narrow(_fcn)),
    "DeepLabV3": segmenter(made_narrow(_deeplab)),
    "LR-ASPP": segmenter(_lraspp),
    "RetinaNet": Case(made_narrow(_Detects, 4), images(64), _of_anchors),
}

WHOLE: Mapping[str, Case] = {
    "ResNet-50": classifier(_shipped("resnet50"), 64),
    "MNASNet": classifier(_mnasnet, 64),
}
"""As deep as published, on small images."""
