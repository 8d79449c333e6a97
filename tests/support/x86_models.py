"""Models for the x86 quantizer, and what it makes of them."""

import torch
import torch.nn.functional as F
from torch import nn

from intaglio import stages
from intaglio.annotation import (
    get_linear_dynamic_fp16_config,
    get_symmetric_quantization_config,
)
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from support import nets
from support.annotators import conv
from support.nets import Body

DYNAMIC = get_symmetric_quantization_config(is_dynamic=True)


HALF = get_linear_dynamic_fp16_config()


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


ROWS = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(2))


def linear(inputs: int = 16, outputs: int = 16) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def scores(m, x):
    return torch.matmul(torch.softmax(torch.matmul(m.q(x), m.k(x).transpose(-1, -2)), -1), m.v(x))


def sums(m, x):
    y = m.a(x)
    y = F.relu(m.b(y) + m.c(y))
    return F.relu(m.d(y) + y)


def joined(m, x):
    return F.max_pool2d(torch.cat([m.a(x), m.b(x)], 1), 2)


MODELS = {
    "convolution": (Body(lambda m, x: m.a(x), a=conv()), "1:1:1"),
    "function and pool": (Body(lambda m, x: F.max_pool2d(m.f(m.a(x)), 2), a=conv(), f=nn.Hardswish()), "3:3:1"),
    "a sum with one convolution": (Body(lambda m, x: m.a(x) + F.relu(x), a=conv(3, 3)), "2:2:1"),
    "a sum of two convolutions": (Body(lambda m, x: m.a(x) + m.b(x), a=conv(), b=conv()), "2:3:2"),
    "sums in series": (Body(sums, a=conv(), b=conv(4), c=conv(4), d=conv(4)), "4:6:4"),
    "pool and power": (Body(lambda m, x: F.max_pool2d(m.a(x), 2) ** 2, a=conv()), "3:3:1"),
    "flatten, then int8": (
        Body(lambda m, x: (lambda y: torch.cat([y, y], 1).t())(torch.flatten(m.a(x), 1)), a=conv()),
        "4:4:1",
    ),
    "flatten, then float": (Body(lambda m, x: torch.flatten(m.a(x), 1).t(), a=conv()), "1:1:1"),
    "concatenation and pool": (Body(lambda m, x: m.c(joined(m, x)), a=conv(), b=conv(), c=conv(8)), "5:6:3"),
    "a tensor twice": (Body(lambda m, x: (lambda y: torch.cat([y, y], 1))(m.a(x)), a=conv()), "3:3:1"),
    "linear": (Body(lambda m, x: m.a(x), a=linear()), "1:1:1"),
    "linear and function": (Body(lambda m, x: F.relu(m.a(x)), a=linear()), "1:1:1"),
    "a sum of two linear": (Body(lambda m, x: m.a(x) + m.b(x), a=linear(), b=linear()), "1:2:2"),
    "linear in series": (
        Body(lambda m, x: m.d(m.c(m.a(x) + m.b(x))), a=linear(), b=linear(), c=linear(), d=linear()),
        "3:4:4",
    ),
    "a linear called twice": (Body(lambda m, x: m.a(m.a(x)), a=linear()), "2:2:2"),
    "attention": (Body(scores, q=linear(), k=linear(), v=linear()), "1:3:3"),
    "attention with products": (Body(scores, q=linear(), k=linear(), v=linear()), "5:7:3"),
    "convolution of one axis and function": (
        Body(lambda m, x: F.relu(m.a(x.flatten(2))), a=nn.Conv1d(3, 4, 3)),
        "1:1:1",
    ),
    "a product of equal shapes": (Body(lambda m, x: m.a(x) * torch.sin(m.b(x)), a=linear(), b=linear()), "3:4:2"),
    "a product that broadcasts": (Body(lambda m, x: m.a(x) * m.a(x).mean(-1, keepdim=True), a=linear()), "1:2:2"),
    "a product with a number": (Body(lambda m, x: m.a(x) * 3, a=linear()), "1:1:1"),
}
"""Model -> quantize : dequantize : dequantize of weights. All are those of torchao's quantizer in tests of its own but
for "concatenation and pool": there two inputs are convolved, here it is one, which is quantized once."""


def example(model) -> torch.Tensor:
    return ROWS if isinstance(next(model.children()), nn.Linear) else IMAGE


def reference(model, quantizer):
    stage = prepare(stages.capture(nets.randomize(model), example(model)), quantizer)
    stage(example(model))
    return convert(stage)


TRAINING = {
    "convolution and norm": (lambda m, x: m.b(m.a(x)), "2:2:1"),
    "function and pool": (lambda m, x: F.max_pool2d(F.relu(m.b(m.a(x))), 2), "3:3:1"),
    "function": (lambda m, x: F.silu(m.b(m.a(x))), "2:2:1"),
    "sum": (lambda m, x: m.b(m.a(x)) + torch.exp(x[:, :1]).expand(-1, 4, -1, -1), "3:3:1"),
    "sum and function": (lambda m, x: F.relu(m.b(m.a(x)) + torch.exp(x[:, :1]).expand(-1, 4, -1, -1)), "3:3:1"),
    "no norm": (lambda m, x: m.a(x), "1:1:1"),
}
