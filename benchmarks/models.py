"""The models of the time-model suite: CNNs with every kind of branch, transformers, a text encoder, a recurrent net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 200  # CUB-200's, as in the paper


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[Any], Any]  # the suite's options -> a batch, on the CPU


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def _images(args: Any) -> Any:
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    return images, torch.randint(0, CLASSES, (args.batch_size,))


def _tokens(args: Any) -> Any:
    return torch.randint(0, 30522, (args.batch_size, args.tokens)), torch.randint(0, CLASSES, (args.batch_size,))


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, num_classes=CLASSES)

    return make


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return make


class Encoder(nn.Module):
    """A text encoder of BERT-base's size in plain torch: 12 layers, width 768, learned positions, 110 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30522, 768)
        self.positions = nn.Parameter(torch.randn(1, 128, 768) * 0.02)
        self.norm = nn.LayerNorm(768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.classify = nn.Linear(768, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classify(self.layers(self.norm(self.tokens(tokens) + self.positions[:, : tokens.shape[1]]))[:, 0])


class Recurrent(nn.Module):
    """Two LSTM layers over token embeddings, as in text classification."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30522, 256)
        self.first = nn.LSTM(256, 512, batch_first=True)
        self.second = nn.LSTM(512, 512, batch_first=True)
        self.classify = nn.Linear(512, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classify(self.second(self.first(self.tokens(tokens))[0])[0][:, -1])


CASES = {
    case.name: case
    for case in (
        Case("resnet50", _torchvision("resnet50"), _images),
        Case("mobilenet_v2", _torchvision("mobilenet_v2"), _images),
        Case("vgg16", _torchvision("vgg16"), _images),
        Case("vit_s", _timm("vit_small_patch16_224", dynamic_img_size=True), _images),
        Case("efficientnet_lite0", _timm("tf_efficientnet_lite0"), _images),
        Case("densenet121", _torchvision("densenet121"), _images),
        Case("convnext_t", _torchvision("convnext_tiny"), _images),
        Case("swin_t", _torchvision("swin_t"), _images),
        Case("bert_base", Encoder, _tokens),
        Case("lstm", Recurrent, _tokens),
    )
}
