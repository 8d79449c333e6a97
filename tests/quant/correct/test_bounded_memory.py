"""Memory for quantizing: layers with many weights for each result, and the number of copies of weights."""

import subprocess
import sys

import pytest

from support.slow_params import slow_params

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
    slow_params(
        # the second is the positional convolution of wav2vec 2.0 and HuBERT
        *("nn.Linear(16384, 256), (16384,)", "nn.Conv1d(768, 768, 128, padding=64, groups=16), (768, 49)"),
        reason="needs layers so large that their matrices have gigabytes, in a process of its own",
    ),
    ids=["linear", "convolution"],
)
def test_large_layers_are_quantized_in_8_gb(layer):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(layer=layer)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]


COUNTING = """
import gc
import torch
from torch import nn
import intaglio
from intaglio import api

gc.disable()  # it runs where tensors are counted

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 176), nn.Linear(176, 48)
        self.norm.weight.data = torch.linspace(0.05, 6, 48)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def counting(name):
    original = getattr(api, name)

    def counted(prepared, *arguments, **settings):
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
        print(name, len({one.data_ptr() for one in tensors if one.shape == (176, 48)}))
        return original(prepared, *arguments, **settings)

    setattr(api, name, counted)

counting("equalize")
counting("correct")
torch.manual_seed(0)
x = torch.randn(16, 9, 48) * torch.linspace(0.1, 8, 48)
model = nn.Sequential(Block(), Block())
quantized = intaglio.quantize(model, [x, 2 * x, x + 1, x - 1], recipe="transformer", progress=False)
print(quantized.text("corrections").splitlines()[0][:17])
"""


@pytest.mark.slow(reason="a process imports PyTorch and quantizes a model")
def test_weights_that_equalization_replaces_are_freed():
    done = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, check=True)
    smoothed = "smooth: 2 values,"
    assert done.stdout.splitlines() == ["equalize 2", "correct 4", smoothed]  # those of the model, and equalized ones
