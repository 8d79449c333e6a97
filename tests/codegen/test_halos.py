"""Every step whose result a padded convolution reads fills the values around it, in each run again."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from intaglio import stages
from support.lowering import quantized
from support.nets import Body, randomize
from support.slow_params import slow_params_except

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
BACKWARDS = torch.arange(11, -1, -1)
BODIES = {
    "rows by index": lambda m, h: h.relu().index_select(2, BACKWARDS),
    "channels by index": lambda m, h: h.relu()[:, torch.tensor([3, 0, 7, 7, 1, 2, 4, 5])],
    "blocks of pixels by index": lambda m, h: h.relu()[:, :, torch.tensor([[0, 1], [2, 3]])].flatten(2, 3),
    "gathered": lambda m, h: h.relu().gather(2, h.argsort(2)),
    "scattered": lambda m, h: h.relu().scatter(2, h.argsort(2), h.sigmoid()),
    "embeddings": lambda m, h: m.table(h.argmax(1)).permute(0, 3, 1, 2),
    "attention": lambda m, h: F.scaled_dot_product_attention(h, h, h),
    "products": lambda m, h: h @ h.sigmoid(),
    "rows of a linear layer": lambda m, h: m.layer(h),
    "a norm": lambda m, h: m.norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "a recurrent layer": lambda m, h: m.recurrent(h.flatten(0, 1))[0].view_as(h),
    "softmax": lambda m, h: h.softmax(1),
    "pooling": lambda m, h: F.max_pool2d(h, 3, 1, 1) + F.avg_pool2d(h, 3, 1, 1),
    "upsampling": lambda m, h: F.interpolate(F.interpolate(h, scale_factor=2), scale_factor=2, mode="bilinear"),
    "channels of two values": lambda m, h: torch.cat([h[:, :4].relu(), h[:, 4:].sigmoid()], 1),
    "pixels as channels": lambda m, h: F.pixel_unshuffle(F.pixel_shuffle(torch.cat([h] * 4, 1), 2), 2)[:, :8],
    "an expanded row": lambda m, h: h.mean(2, keepdim=True).expand(-1, -1, 12, -1),
    "another shape": lambda m, h: h.relu().reshape(h.shape[0], 8, 9, 16),
    "a float part": lambda m, h: torch.linalg.inv(h[..., :3, :3] + 9 * torch.eye(3)),
}


@pytest.mark.parametrize(
    "name", slow_params_except("rows by index", of=BODIES, reason="one program for each kind of producer")
)
def test_the_program_and_the_interpreter_pad_the_same_values(name):
    parts = {"first": nn.Conv2d(3, 8, 3, padding=1), "last": nn.Conv2d(8, 8, 3, padding=1), "norm": nn.LayerNorm(8)}
    parts |= {"table": nn.Embedding(8, 8), "layer": nn.Linear(12, 12), "recurrent": nn.GRU(12, 12, batch_first=True)}
    model = randomize(Body(lambda m, x: m.last(BODIES[name](m, m.first(x))), **parts))
    _, lowered = quantized(model, X)
    program = stages.compile(lowered)
    program(torch.full_like(X, 9.0))  # leaves other values in the memory of the program
    assert torch.equal(program(X), lowered(X))
