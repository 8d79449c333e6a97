"""Arithmetic with sizes, by which decoders number the tokens behind a cache."""

import torch
from torch import nn
from torch.export import Dim

import intaglio
from support.nets import randomize
from support.side_by_side import SideBySide

DRAW = torch.Generator().manual_seed(0)
POSITIONS = {
    "a sum": lambda new, past: torch.arange(new) + past,
    "a difference": lambda new, past: torch.arange(20, 20 + 2 * new, 2) - past,
    "a range with a start": lambda new, past: torch.arange(past, past + new) + past,
    "a column of numbers": lambda new, past: (torch.arange(new)[:, None] + past)[:, 0],
    "a comparison": lambda new, past: (torch.arange(new) * 3 < past).long() + past,
    "a fraction": lambda new, past: (torch.arange(new).float() / past * 4).long(),
}


class Decoder(nn.Module):
    def __init__(self, positions):
        super().__init__()
        self.positions, self.table, self.layer = positions, nn.Embedding(80, 8), nn.Linear(8, 8)

    def forward(self, x, cache):
        return self.layer(x) + self.table(self.positions(x.shape[1], cache.shape[1])), cache.mean(1)


def test_the_program_computes_positions_behind_a_cache(subtests):
    """One decoder for each, side by side."""
    batch = torch.rand(4, 6, 8, generator=DRAW), torch.rand(4, 9, 8, generator=DRAW)
    model = SideBySide({name: (randomize(Decoder(positions)), batch) for name, positions in POSITIONS.items()}).eval()
    shapes = {"inputs": ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO})}
    found = intaglio.quantize(model, [batch], dynamic_shapes=shapes, progress=False)
    assert not found.coverage.islands
    for new, past in ((6, 9), (1, 12), (5, 2)):
        call = torch.rand(3, new, 8, generator=DRAW), torch.rand(3, past, 8, generator=DRAW)
        results, floats = found(*call), model(*call)
        for name in POSITIONS:
            with subtests.test(name, new=new, past=past):
                exact = floats[name][0]
                assert (results[name][0] - exact).square().sum() < 1e-2 * exact.square().sum()
