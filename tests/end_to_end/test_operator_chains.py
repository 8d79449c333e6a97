"""Conformance cases of the native backend that go through many operators: norms, activations, sums, padding."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import nets
from support.activation_calls import CALLS
from support.lowering import assert_equal_quantized, kinds, quantized, sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4, kernel: int = 3, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **rest)


NORMS = {
    "linear": (nn.Linear(8, 8), nn.BatchNorm1d(8), X[:, 0, 0]),
    "conv2d": (conv(3, 8), nn.BatchNorm2d(8), X),
    "conv2d, strided and grouped": (conv(3, 6, stride=2, groups=3), nn.BatchNorm2d(6), X),
    "conv1d": (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), X[:, :, 0]),
    "conv3d": (nn.Conv3d(3, 8, (1, 2, 3)), nn.BatchNorm3d(8), X[:, :, None]),
    "conv_transpose1d": (nn.ConvTranspose1d(3, 8, 3, 2), nn.BatchNorm1d(8), X[:, :, 0]),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 8, 3, 2), nn.BatchNorm2d(8), X),
    "conv_transpose3d": (nn.ConvTranspose3d(3, 8, 2), nn.BatchNorm3d(8), X[:, :, None]),
}


@pytest.mark.case("backend 24")
@pytest.mark.parametrize(
    "name",
    slow_params_except("linear", of=NORMS, reason="other anchors of the same fold"),
)
def test_a_folded_norm_equals_quantizing_the_folded_model(name):
    """Case 24: the same integers as the model whose weights were folded by hand, in float64."""
    anchor, norm, x = NORMS[name]
    model = nets.randomize(nn.Sequential(anchor, norm, nn.ReLU()))
    reference, lowered = quantized(model, x)
    by_hand, _ = quantized(nn.Sequential(folded(anchor, norm), nn.ReLU()), x)
    assert "norm" not in lowered.text()
    (found,), (expected,) = ([b for b in r.module.buffers() if b.dtype is torch.int8] for r in (reference, by_hand))
    assert torch.equal(found, expected)
    assert_equal_quantized(reference, lowered, x)


def folded(anchor: nn.Module, norm: nn.Module) -> nn.Module:
    made = copy.deepcopy(anchor)
    with torch.no_grad():
        scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
        lead = [1] if "Transpose" in type(anchor).__name__ else []  # its weights have the outputs on axis 1
        spread = scale.reshape(*lead, -1, *[1] * (anchor.weight.dim() - 1 - len(lead)))
        made.weight.copy_(anchor.weight.double() * spread)
        made.bias.copy_((anchor.bias.double() - norm.running_mean.double()) * scale + norm.bias.double())
    return made


INPLACE = {
    "relu": lambda x: F.relu_(x),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu_(x),
    "sigmoid": lambda x: x.sigmoid_(),
    "tanh": lambda x: x.tanh_(),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "elu": lambda x: F.elu_(x),
    "abs": lambda x: x.abs_(),
    "square": lambda x: x.square_(),
    "round": lambda x: (x.mul_(8)).round_(),
    "exp": lambda x: x.exp_(),
    "clamp": lambda x: x.clamp_(-1, 0.5),
    "clamp from below": lambda x: x.clamp_(min=-0.5),
    "clamp from above": lambda x: x.clamp_(max=0.5),
    "clamp to infinity": lambda x: x.clamp_(-torch.inf, 0.7),
    "hardsigmoid times x": lambda x: x * F.hardsigmoid(x),
    "selu": lambda x: F.selu_(x),
}
"""Activations as they write over their operand."""
FEW_CALLS = ("relu", "leaky_relu", "sigmoid", "hardswish", "elu", "round", "clamp", "clamp from above",
             "hardsigmoid times x")  # fmt: skip


@pytest.mark.slow(reason="a program with a branch for each activation; fusion has tests of each")
@pytest.mark.case("backend 25")
@pytest.mark.parametrize(
    "anchor",
    [lambda: conv(8, 8, 1), *slow_params(lambda: nn.Linear(8, 8), reason="a linear layer takes the same functions")],
    ids=["conv2d", "linear"],
)
@pytest.mark.parametrize(
    "calls",
    [
        {name: INPLACE[name] for name in FEW_CALLS},
        *slow_params(INPLACE, CALLS, reason="functions that become tables or bounds as the few do"),
    ],
    ids=["few", "in place", "new"],
)
def test_every_activation_after_every_layer_runs_in_int8(anchor, calls):
    """Case 25: one branch an activation, so that one capture sees them all."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([m.last[i](call(m.first[i](x))) for i, call in enumerate(calls.values())], 1)

    parts = {name: nn.ModuleList(anchor() for _ in calls) for name in ("first", "last")}
    model = nets.randomize(Body(body, **parts))
    x = torch.randn(4, 8, 5, 5) if isinstance(model.first[0], nn.Conv2d) else torch.randn(16, 8)
    reference, lowered = quantized(model, x)
    assert not lowered.islands, [str(skip) for skip in lowered.skipped]
    assert kinds(lowered).count("conv2d") + kinds(lowered).count("linear") == 2 * len(calls)
    assert_equal_quantized(reference, lowered, x)


SUMS = {
    "swapped": lambda m, x: m.d(x) + m.c(x),
    "one value twice": lambda m, x: (lambda y: m.e(y + y))(m.c(x)),
    "alpha 2": lambda m, x: torch.add(m.c(x), m.d(x), alpha=2),
    "alpha 2, swapped": lambda m, x: torch.add(x, m.c(x), alpha=2),
    "its own input": lambda m, x: F.relu(m.c(x) + x),
    "its own input in place": lambda m, x: F.relu_(m.c(x).add_(x)),
    "in place on the input": lambda m, x: m.e((y := m.d(x)).add_(m.c(y))),
}


@pytest.mark.case("backend 40")
@pytest.mark.parametrize("name", SUMS)
def test_sums_match_in_every_order_with_alpha_and_a_shared_operand(name):
    """Case 40: equal to the reference, and no tensor of the caller is written."""
    model = nets.randomize(Body(SUMS[name], c=conv(3, 3), d=conv(3, 3), e=conv(3, 3)))
    x = X.clone()
    reference, lowered = quantized(model, x)
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, x)
    assert sqnr(lowered(x), model(x.clone())) > 25
    assert torch.equal(x, X)


PADDED = {
    f"{axes}d {mode}": (getattr(nn, f"Conv{axes}d"), axes, mode)
    for axes in (1, 2, 3)
    for mode in ("reflect", "replicate", "circular")
}


@pytest.mark.case("backend 40")
@pytest.mark.parametrize(
    "name",
    slow_params_except("1d reflect", "3d replicate", of=PADDED, reason="other modes and axes of the same copies"),
)
def test_padding_that_copies_pixels_stays_in_integers(name):
    """Case 40: the border holds quantized values of the image; nothing is rounded on the way."""
    kind, axes, mode = PADDED[name]
    first, second = (kind(i, 4, 3, padding=(1, 2, 1)[:axes], padding_mode=mode) for i in (3, 4))
    model = nets.randomize(nn.Sequential(first, nn.ReLU(), second))
    x = torch.randn(2, 3, *(4, 5, 6)[:axes])
    reference, lowered = quantized(model, x)
    assert not lowered.islands, [str(skip) for skip in lowered.skipped]
    assert_equal_quantized(reference, lowered, x)
    assert sqnr(lowered(x), model(x)) > 25
