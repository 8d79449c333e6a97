"""Operators that intaglio has never heard of, with what a user would say of them."""

import numpy as np
import torch
from torch import Tensor

from intaglio.patterns import OpDef, Roles, dequantize, quantize


@torch.library.custom_op("intaglio_tests::mirror_add", mutates_args=())
def mirror_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x + y.flip(1) * scale


@mirror_add.register_fake
def _(x, y, scale):
    return torch.empty_like(x)


@torch.library.custom_op("intaglio_tests::weigh", mutates_args=())
def weigh(weight: Tensor, x: Tensor) -> Tensor:
    return weight.view(-1, 1, 1) * x


@weigh.register_fake
def _(weight, x):
    return torch.empty_like(x)


@torch.library.custom_op("intaglio_tests::soft_sign", mutates_args=())
def soft_sign(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


@soft_sign.register_fake
def _(x):
    return torch.empty_like(x)


def real(quantized, kind):
    return dequantize(quantized, np.float32(kind.qparams.step), kind.qparams.zero)


def quantized(values, kind):
    q = kind.qparams
    return quantize(values.astype(np.float32), q.step, q.zero, q.qmin, q.qmax).astype(np.uint8)


def mirror_add_reference(op, args, types, out):
    x, y = (real(array, kind) for array, kind in zip(args, types, strict=True))
    return quantized(x + y[:, ::-1] * np.float32(op.attrs["scale"]), out)


MIRROR_ADD = OpDef(
    name="mirror_add",
    targets=("intaglio_tests.mirror_add.default",),
    operands=("x", "y"),
    roles=Roles(x=(0, 1)),
    bind=lambda call: {"scale": call.arguments["scale"]},
    reference=mirror_add_reference,
)
WEIGH = OpDef(
    name="weigh",
    targets=("intaglio_tests.weigh.default",),
    operands=("weight", "x"),
    roles=Roles(x=(1,)),
    infer=lambda attrs, shapes: shapes[1],
    reference=lambda op, args, types, out: quantized(args[0].reshape(-1, 1, 1) * real(args[1], types[1]), out),
)
SOFT_SIGN = OpDef(
    name="soft_sign",
    targets=("intaglio_tests.soft_sign.default",),
    operands=("x",),
    function=lambda x, attrs: x / (1 + np.abs(x)),
)
SWISH = OpDef(
    name="swish", operands=("x",), reference=lambda op, args, types, out: quantized(swish(real(args[0], types[0])), out)
)
"""Of a pattern: ``x * sigmoid(x)``."""


def swish(x):
    return x / (1 + np.exp(-x))
