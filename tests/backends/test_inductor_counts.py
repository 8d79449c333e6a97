"""What Inductor's passes match in references: by the counters of PyTorch's own tests, on fixtures of their shapes."""

from collections import Counter
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn
from torch.export import Dim

from intaglio import stages
from support.lowering import ROUNDED
from support.nets import Body

pytestmark = pytest.mark.slow(reason="counts torch's own passes, which change with torch only")


class Lowered(BaseException):
    """All passes have run, and nothing is to be generated."""


def lowered(model, x, monkeypatch, free=()):
    """Counts of PyTorch's counters, and of the lowerings in the last graph. ``free``: axes with sizes of any call."""
    # Every process that collects the tests would import Inductor.
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor_config

    from intaglio.backends.inductor import inductor_model

    found = []

    def stop(graph):
        found.extend(getattr(getattr(node.target, "func", node.target), "__name__", "") for node in graph.nodes)
        raise Lowered

    @contextmanager
    def configured_inductor():
        with torch.no_grad(), inductor_config.patch({**inductor_model.SETTINGS, "post_grad_custom_post_pass": stop}):
            yield []

    monkeypatch.setattr(inductor_model, "configured_inductor", configured_inductor)
    sizes = dict.fromkeys(free, Dim.AUTO)
    shapes = ((sizes,),) if isinstance(model, Body) else (sizes,)
    prepared = stages.prepare(stages.capture(model.eval(), x, dynamic_shapes=shapes), stages.Quantizer(ROUNDED))
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    counters.clear()
    with suppress(Lowered):
        inductor_model.InductorModel(reference)._compiled([x], free=True)
    assert found
    kinds = "dequant_promotion", "weight_prepack", "unary", "binary"
    counted = counters["inductor"].items()
    matched = [sum(n for name, n in counted if f"{kind}_matcher_count" in name) for kind in kinds]
    return tuple(matched), Counter(found)


def conv(inputs=8, outputs=8, **settings):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **settings)


def linear():
    return nn.Linear(16, 16)


def two_sums(layer, last):
    def body(m, x):
        y = last(m.a(x) + m.b(x))
        return last(m.c(y) + m.d(y))

    return Body(body, a=layer(), b=layer(), c=layer(), d=layer())


def one_sum(layer):
    def body(m, x):
        y = m.a(x)
        return m.b(y) + m.c(y)

    return Body(body, a=layer(), b=layer(), c=layer())


def concatenated():
    def body(m, x):
        return torch.cat([m.a(x), m.b(x), m.c(torch.relu(m.d(x)))], 1)

    return Body(body, a=conv(), b=conv(), c=conv(), d=conv())


def read_twice():
    """Each operand of the sums is read by a convolution too."""

    def body(m, x):
        y = m.a(x)
        return (m.b(x) + y) + m.c(y)

    return Body(body, a=conv(), b=conv(), c=conv())


def basic(inputs, outputs, projected):
    def body(m, x):
        y = torch.relu(m.first_norm(m.first(x)))
        return torch.relu(m.second_norm(m.second(y)) + m.shortcut(x))

    shortcut = nn.Conv2d(inputs, outputs, 1) if projected else nn.Identity()
    return Body(
        body,
        first=conv(inputs, outputs),
        first_norm=nn.BatchNorm2d(outputs),
        second=conv(outputs, outputs),
        second_norm=nn.BatchNorm2d(outputs),
        shortcut=shortcut,
    )


def attention():
    """A block of a transformer: what reads the sizes of a layer's result is no second reader of the result."""

    def body(m, x):
        query, key, value = (layer(x) for layer in (m.query, m.key, m.value))
        heads = [y.view(*y.shape[:2], 2, 8).transpose(1, 2) for y in (query, key, value)]
        y = m.norm(m.last(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)))
        return m.down(nn.functional.gelu(m.up(y))) + y

    layers = {name: linear() for name in ("query", "key", "value", "last", "up", "down")}
    return Body(body, **layers, norm=nn.LayerNorm(16))


IMAGES, ROWS, TEXTS = (2, 8, 8, 8), (2, 16), (2, 5, 16)
SIZES = {IMAGES: (0, 2, 3), ROWS: (0,), TEXTS: (0, 1)}
"""Axes that calls may decide."""


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize(
    ("build", "shape", "wanted"),
    [
        (lambda: nn.Sequential(conv(), conv(groups=2), conv()), IMAGES, (0, 3, 2, 0)),
        (lambda: nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU()), IMAGES, (0, 2, 2, 0)),
        (lambda: two_sums(conv, nn.Identity()), IMAGES, (2, 4, 2, 2)),
        (lambda: two_sums(conv, nn.ReLU()), IMAGES, (2, 4, 2, 2)),
        (lambda: one_sum(conv), IMAGES, (1, 3, 2, 1)),
        (lambda: nn.Sequential(linear(), linear()), ROWS, (0, 2, 1, 0)),
        # PyTorch's: unary 1, no binary. The sum's other operand has quantized values of its own here, so the layer that
        # makes it ends in a quantize, and the last one takes the sum
        (lambda: one_sum(linear), ROWS, (1, 3, 2, 1)),
        (lambda: two_sums(linear, nn.Identity()), ROWS, (2, 4, 2, 2)),
        # PyTorch's: unary 3. All four convolutions end in a quantize here: the last one, too, gives the quantized
        # values that the concatenation shares
        (concatenated, IMAGES, (1, 4, 4, 0)),
        # PyTorch's: binary 1. Here both sums have quantized values of their own and every reader a dequantize of its
        # own, so neither call writes what another reads
        (read_twice, IMAGES, (2, 3, 1, 2)),
        # Not among PyTorch's
        (lambda: nn.Sequential(conv(), nn.Upsample(scale_factor=2), conv()), IMAGES, (0, 2, 1, 0)),
        (lambda: one_sum(linear), TEXTS, (1, 3, 2, 1)),
        (lambda: two_sums(linear, nn.ReLU()), TEXTS, (2, 4, 2, 2)),
        (attention, TEXTS, (2, 6, 4, 1)),
    ],
    ids=[
        "conv_conv_conv",
        "conv_relu",
        "conv_add",
        "conv_add_relu",
        "conv_sum",
        "linear_linear",
        "linear_sum",
        "linear_add",
        "concatenated",
        "read_twice",
        "upsampled",
        "texts_sum",
        "texts_add_relu",
        "attention",
    ],
)
def test_inductor_matches_the_expected_patterns_of_small_networks(build, shape, wanted, free, monkeypatch):
    """Promotion, prepack, unary, binary. Equal to the counts in PyTorch's own tests where no line says otherwise;
    layers that end in a quantize count as unary, with or without a function in front of it. Free sizes take nothing."""
    torch.manual_seed(0)
    assert lowered(build(), torch.randn(shape), monkeypatch, SIZES[shape] if free else ())[0] == wanted


@pytest.mark.parametrize("free", [(), (0,)], ids=["fixed", "free"])
def test_a_small_residual_network_runs_in_int8(free, monkeypatch):
    """As PyTorch's, but for one quantize less: quantized values in front of the pool are those behind it."""
    torch.manual_seed(0)
    net = nn.Sequential(
        conv(),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        basic(8, 8, False),
        basic(8, 16, True),
        basic(16, 16, True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    _, made = lowered(net, torch.randn(IMAGES), monkeypatch, free)
    assert [made[name] for name in ("qconv", "qconv_binary", "qlinear", "qmaxpool2d")] == [6, 3, 1, 1]
    assert made["quantize_per_tensor.default"] == 2
