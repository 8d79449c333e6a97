"""Trained networks on real images. The data is not part of the project: without it these tests skip."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intaglio import stages
from support.project_files import ROOT

DATA = Path(os.environ.get("INTAGLIO_DATA", ROOT.resolve().parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / "cifar10_jpeg.npz").exists(), reason="needs the folder INTAGLIO_DATA names")
IMAGES = 1024


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.stride, self.grow = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.grow, self.grow))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """ResNet-20 or -56 with option-A shortcuts; He et al. 2015, section 4.2."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in (1, 2, 3):
            first = Block(widths[stage - 1], widths[stage], 1 if stage == 1 else 2)
            rest = [Block(widths[stage], widths[stage], 1) for _ in range((depth - 2) // 6 - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(first, *rest))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.avg_pool2d(x, x.shape[3]).flatten(1))


def images(split: str, key: str, count: int) -> Tensor:
    pixels = torch.from_numpy(np.load(DATA / f"cifar10_{split}.npz")[key][:count].copy())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


def decibels(got: Tensor, wanted: Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum()))


@needs_data
@pytest.mark.slow(reason="a trained network over a thousand images")
@pytest.mark.parametrize("depth", [20, 56])
def test_integers_are_as_good_as_the_float_simulation(depth):
    """The int8 program against its own Q/DQ reference: within 0.2 dB, all MACs in int8, no island."""
    model = CifarResNet(depth)
    model.load_state_dict(torch.load(DATA / f"resnet{depth}_cifar10.pt", weights_only=True))
    model.eval()
    calibration, test = images("lossless", "train_images", 256), images("jpeg", "test_images", IMAGES)
    prepared = stages.prepare(stages.capture(model, (calibration[:2],)))
    reference = stages.convert(prepared, stages.calibrate(prepared, calibration.split(128)))
    int8 = stages.compile(reference)
    int8.assert_int8(macs=1.0)
    assert int8.coverage.islands == 0
    with torch.no_grad():
        wanted = torch.cat([model(batch) for batch in test.split(128)])
    simulated = torch.cat([reference(batch) for batch in test.split(128)])
    got = torch.cat([int8(batch) for batch in test.split(128)])
    print(f"ResNet-{depth}: simulation {decibels(simulated, wanted):.2f} dB, int8 {decibels(got, wanted):.2f} dB")
    assert abs(decibels(got, wanted) - decibels(simulated, wanted)) < 0.2
    assert torch.equal(int8(test[:16]), stages.requantize(reference)(test[:16]))
