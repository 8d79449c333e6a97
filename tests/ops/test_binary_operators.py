"""Sums, differences, products, concatenations: two and more activations in one operator; constants for channels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.quant.annotate.sites import Observed, Shared
from support.lowering import assert_equal_quantized, tensors
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params_except


def conv(inputs: int = 3, outputs: int = 20, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def excite(m, x):
    """Squeeze and excite, as in MobileNetV3."""
    y = m.a(x)
    return m.last(y * F.hardsigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(y, 1))))))


def shuffled(m, x):
    """A unit of ShuffleNetV2: split, one branch, cat, shuffle."""
    y = m.a(x)
    left, right = y.chunk(2, 1)
    y = torch.cat([left, m.part(right)], 1)
    n, c, h, w = y.shape
    return m.last(y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w))


def several(bodies):
    """One program of many small ones."""
    return lambda m, x: [body(m, x) for body in bodies]


DIFFERENCES = (
    lambda m, x: m.last(m.pool(m.a(x)) - m.pool(m.b(x))),
    lambda m, x: m.last(F.relu(m.a(x) - m.pool(m.b(x)))),
    lambda m, x: (lambda y: m.last(F.relu(y - m.c(y))))(m.a(x)),
    lambda m, x: (lambda y: m.last(torch.sub(m.c(y), y, alpha=2)))(m.a(x)),
    lambda m, x: (lambda y: m.last(torch.sub(y, m.c(y), alpha=3)))(m.a(x)),
    lambda m, x: (lambda y: m.last(y - y.mean((2, 3), keepdim=True)))(m.a(x)),
    lambda m, x: (lambda y: m.last(y + y))(m.pool(m.a(x))),  # backend case 40, from here on
    lambda m, x: (lambda y: m.last(y - y + y))(m.pool(m.a(x))),
    lambda m, x: (lambda y: m.last(torch.add(y, m.c(y), alpha=2)))(m.a(x)),
    lambda m, x: (lambda y: m.last(m.c(y) + y))(m.a(x)),
)
CONSTANTS = (
    lambda m, x: m.last(F.relu((m.gain * m.a(x) - m.shift) / m.gain)),
    lambda m, x: m.last(torch.add(m.shift, m.shift - m.a(x), alpha=3)),
    lambda m, x: m.rows(m.row - m.rows(m.a(x) * m.row) / m.row),  # where images and rows meet
    lambda m, x: m.rest(m.features * m.fc(m.wider(x).mean((2, 3))) + m.features),
)
SLOPES = (
    lambda m, x: m.last(m.slopes(m.a(x)) + m.slope(m.b(x))),
    lambda m, x: m.rows(m.slope(m.rows(m.a(x)))),
    lambda m, x: m.rest(m.three(m.fc(m.wider(x).mean((2, 3))))),
)
PRODUCTS = (
    lambda m, x: m.last(m.a(x) * m.b(x)),  # product
    lambda m, x: (lambda y: m.last(y * y))(m.a(x)),  # square
    lambda m, x: m.last(m.a(x) * torch.sigmoid(m.b(x))),  # gate
    excite,
    lambda m, x: m.last(m.b(x).mean((2, 3), keepdim=True) * m.a(x)),  # gate on the left
    lambda m, x: (lambda y: m.last(F.relu(y + y.mean((2, 3), keepdim=True))))(m.a(x)),  # sum with a pixel
    lambda m, x: (lambda y: m.last(y.mean((2, 3), keepdim=True).add(y, alpha=-2)))(m.a(x)),  # pixel with a sum
)
BODIES = {
    "differences": (several(DIFFERENCES), 0),
    "constants": (several(CONSTANTS), 0),
    "slopes": (several(SLOPES), 0),
    "channel shuffle": (shuffled, 0),
    "norm before activation": (lambda m, x: (lambda y: m.last(F.relu(m.norm(y))) + m.b(x)[:, :4])(m.a(x)), 0),
    "norm alone": (lambda m, x: m.wide(torch.cat([m.norm(F.max_pool2d(m.a(x), 1)), m.b(x)], 1)), 0),
    "norm of vectors": (lambda m, x: m.fc(torch.cat([m.flat(m.a(x).mean((2, 3))), m.b(x).mean((2, 3))], 1)), 0),
    "products": (several(PRODUCTS), 0),
    "cat": (lambda m, x: m.wide(torch.cat([m.a(x), m.b(x)], 1)), 0),
    "cat of one value twice": (lambda m, x: (lambda y: m.wide(torch.cat([y, y], 1)))(m.a(x)), 0),
    "cat of the input": (lambda m, x: m.odd(torch.cat([x, m.a(x)], 1)), 0),
    "cat of vectors": (lambda m, x: m.fc(torch.cat([m.a(x).mean((2, 3)), m.b(x).amax((2, 3))], 1)), 0),
    "cat, then padding": (lambda m, x: m.wide(F.max_pool2d(torch.cat([m.a(x), F.relu(m.b(x))], 1), 3, 1, 1)), 0),
}


def model(body) -> Body:
    parts = {"down": conv(20, 5, 1), "up": conv(5, 20, 1), "last": conv(20, 4), "wide": conv(40, 6), "odd": conv(23, 6)}
    parts |= {"part": conv(10, 10), "norm": nn.BatchNorm2d(20), "flat": nn.BatchNorm1d(20), "c": conv(20)}
    parts |= {"pool": nn.MaxPool2d(1), "rows": nn.Linear(9, 9), "wider": conv(3, 40), "rest": nn.Linear(3, 2)}
    parts |= {"slopes": nn.PReLU(20), "slope": nn.PReLU(), "three": nn.PReLU(3)}
    net = randomize(Body(body, a=conv(), b=conv(), fc=nn.Linear(40, 3), **parts))
    draw = torch.Generator().manual_seed(5)
    for name, shape in {"gain": (1, 20, 1, 1), "shift": (20, 1, 1), "row": (9,), "features": (3,)}.items():
        sign = 1 - 2 * torch.randint(0, 2, shape, generator=draw)
        net.register_buffer(name, (torch.rand(shape, generator=draw) + 0.5) * sign)
    return net


def all_stages(net, x):
    prepared = stages.prepare(stages.capture(net, x))
    reference = stages.convert(prepared, stages.calibrate(prepared, [torch.randn(8, *x.shape[1:])]))
    return prepared, reference, stages.requantize(reference)


@pytest.mark.case("problem 9", "frontends A9")
@pytest.mark.parametrize(
    "name",
    slow_params_except("products", "norm alone", of=BODIES, reason="other operands of the same operators"),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_operators_with_several_activations_have_a_site_each(name, isa):
    """The interpreter within one step of the reference, every instruction set equal to the interpreter."""
    body, islands = BODIES[name]
    x = torch.randn(3, 3, 7, 9)
    _, reference, lowered = all_stages(model(body), x)
    assert len(lowered.islands) == islands
    assert_equal_quantized(reference, lowered, x)
    compiled = stages.compile(lowered, isa=isa)
    for batch in (x, x[:1]):
        for found, expected in zip(tensors(compiled(batch)), tensors(lowered(batch)), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.case("frontends A9")
def test_a_concatenation_shares_one_site_and_sees_all_its_operands():
    """Frontend case A9: two convolutions, cat, max pool: one observer, which counted both convolutions."""
    x = torch.randn(2, 3, 8, 8)
    prepared, reference, _ = all_stages(model(BODIES["cat, then padding"][0]), x)
    sites = [site for site in prepared.annotations.sites if site.role == "activation"]
    a, b = (site for site in sites if site.value in ("conv2d", "relu"))
    assert isinstance(a.spec, Observed)
    assert b.spec == Shared(a.name, observed=True)
    assert prepared.observers[a.name].statistics.count == 2 * 8 * 20 * 8 * 8
    shared = [reference.qparams[name] for name, leader in prepared.annotations.leaders.items() if leader == a.name]
    assert len(shared) == 4
    assert len(set(shared)) == 1


def test_two_concatenations_of_one_value_are_one_group():
    def body(m, x):
        a, b = m.a(x), m.b(x)
        return m.wide(torch.cat([a, b], 1)) + m.wide(torch.cat([b, F.max_pool2d(a, 3, 1, 1)], 1))

    prepared, _, lowered = all_stages(model(body), torch.randn(2, 3, 6, 6))
    leaders = prepared.annotations.leaders
    sites = [site for site in prepared.annotations.sites if site.role == "activation"]
    joined = [site.name for site in sites if site.value.startswith(("cat", "conv2d", "max"))]
    assert len({leaders[name] for name in joined if not name.startswith("wide")}) == 1
    assert not lowered.islands


def test_constants_that_differ_along_two_axes_stay_in_float():
    def body(m, x):
        return m.last(m.a(x) * m.image)

    net = model(body)
    net.register_buffer("image", torch.rand(6, 6))
    _, _, lowered = all_stages(net, torch.randn(2, 3, 6, 6))
    assert any(skip.origin.operator == "aten.mul.Tensor" for skip in lowered.skipped)


def test_a_division_by_a_constant_with_a_zero_stays_in_float():
    net = model(lambda m, x: m.last(m.a(x) / m.gain))
    net.gain[0, 3] = 0
    prepared = stages.prepare(stages.capture(net, torch.randn(2, 3, 6, 6)))
    assert any(skip.origin.operator == "aten.div.Tensor" for skip in prepared.annotations.skipped)


@pytest.mark.slow(reason="quantizes a network to save it; products have a site each above")
def test_a_product_with_a_one_pixel_first_factor_is_saved_and_loaded(tmp_path):
    """As EfficientNet writes it: ``scale * x``."""
    net = model(lambda m, x: m.last(m.pool(m.a(x)).sigmoid() * m.a(x)))
    x = torch.randn(2, 3, 6, 6)
    quantized = intaglio.quantize(net, [x])
    quantized.save(tmp_path / "model.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "model.intaglio")(x), quantized(x))
