"""Every activation function as people call it."""

import torch
import torch.nn.functional as F

CALLS = {
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "celu": lambda x: F.celu(x, 0.6),
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
    "log_sigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.3, -0.5),
    "abs": torch.abs,
    "neg": lambda x: -x,
    "square": torch.square,
    "softshrink": lambda x: F.softshrink(x, 0.4),
    "hardshrink": lambda x: F.hardshrink(x, 0.4),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "round": torch.round,
    "add_number": lambda x: x + 0.75,
    "sub_number": lambda x: x - 0.3,
    "rsub_number": lambda x: 2 - x,
    "mul_number": lambda x: 3 * x,
    "div_number": lambda x: x / 0.4,
    "pow_number": lambda x: x**3,
}
