"""Runs of a graph with images in the memory format channels_last give what the graph gives."""

import pytest
import torch
from torch import nn

from intaglio import stages
from intaglio.quant.calibrate.float_run import ChannelsLastRun
from support.nets import Body

aten = torch.ops.aten
CASES = {
    # PyTorch itself ends with a segmentation fault at the first two convolutions in channels_last.
    "slice": (lambda m, x: m.layer(x.narrow(1, 0, 1)), nn.Conv2d(1, 17, 1, (1, 2), (3, 1), 2), (3, 29, 5, 1)),
    "width of one": (lambda m, x: m.layer(x), nn.Conv2d(3, 1, (4, 2), 2, 3, (1, 2)), (3, 3, 8, 1)),
    "flattened": (lambda m, x: m.layer(x).flatten(1), nn.Conv2d(3, 4, 3), (2, 3, 6, 7)),
    "view": (lambda m, x: m.layer(x.view(2, 6, 35)), nn.Conv1d(6, 4, 3), (2, 6, 5, 7)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_graph(name):
    forward, layer, shape = CASES[name]
    torch.manual_seed(0)
    module = stages.capture(Body(forward, layer=layer).eval(), (x := torch.randn(shape),)).module
    with torch.no_grad():
        (found,), (expected,) = ChannelsLastRun(module).run(x), module(x)
    torch.testing.assert_close(found, expected)
