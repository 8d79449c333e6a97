"""Joint projections become one linear layer per slice, where lengths of the input are free too."""

import torch
from torch import nn
from torch.export import Dim

import intaglio
from support.nets import randomize

DRAW = torch.Generator().manual_seed(0)


class Gated(nn.Module):
    """Strides in front of a joint projection: of 7 samples, no step would be left."""

    def __init__(self):
        super().__init__()
        self.steps, self.both = nn.Conv1d(2, 6, 16, 8), nn.Linear(6, 8)

    def forward(self, x):
        both = self.both(self.steps(x).transpose(1, 2))
        return both[..., :4] * both[..., 4:].sigmoid()


def test_a_joint_projection_behind_strides_is_split():
    model = randomize(Gated())
    batches = [torch.randn(4, 2, 64, generator=DRAW) for _ in range(2)]
    found = intaglio.quantize(model, batches, dynamic_shapes=({0: Dim.AUTO, 2: Dim.AUTO},), progress=False)
    assert not found.coverage.islands
    x = torch.cat(batches, 2)
    exact = model(x)
    assert (found(x) - exact).square().sum() < 1e-2 * exact.square().sum()
