"""Corrections of layers with many weights for each result, in processes with limited memory."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
limit = 8 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import torch
from torch import nn
import intaglio

torch.manual_seed(0)
layer, shape = {layer}
model = nn.Sequential(layer, nn.ReLU()).eval()
quantized = intaglio.quantize(model, [torch.randn(2, *shape) for _ in range(4)], progress=False)
x = torch.randn(2, *shape)
expected, found = model(x).detach(), quantized(x)
noise = (found - expected).square().sum() / expected.square().sum()
assert noise < 0.001, noise
"""


@pytest.mark.parametrize(
    "layer",
    [
        # the positional convolution of wav2vec 2.0 and HuBERT
        "nn.Conv1d(768, 768, 128, padding=64, groups=16), (768, 49)",
        "nn.Linear(16384, 256), (16384,)",
    ],
    ids=["convolution", "linear"],
)
def test_large_layers_are_quantized_in_8_gb(layer):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(layer=layer)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
