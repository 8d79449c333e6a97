"""Inputs declared images: bytes are quantized values, floats become the same bytes, convolutions absorb scale and
offset."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import Image, stages
from intaglio.errors import ArtifactError, InputError, SelectorError, UnsupportedError
from intaglio.ir import DType, TensorType
from intaglio.lower import Lowered, requantize
from intaglio.ops import OPS, interpret
from intaglio.quant.annotate.sites import Fixed
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.runtime import QuantizedModel
from intaglio.runtime.saved import archive
from intaglio.runtime.saved import model_file as files
from intaglio.tracing import Captured, capture
from support import nets
from support.int8_models import assert_same, compiled
from support.lowering import assert_equal_quantized, kinds, sqnr
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS
from support.nets import Body

IMAGENET = Image(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = Image(mean=0.5, std=0.5)
IMAGES = {"imagenet": IMAGENET, "half": HALF, "unit": Image(), "white is zero": Image(mean=1, std=(0.2, 0.9, 0.01))}


def photos(batch: int = 4, channels: int = 3, height: int = 12, width: int = 13, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, channels, height, width), dtype=torch.uint8, generator=draw)


def every_byte(channels: int = 3) -> Tensor:
    """[1, channels, 16, 16] with each byte once in each channel."""
    return torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, channels, 1, 1)


def conv(inputs: int = 3, outputs: int = 8, kernel: int = 3, padding: int = 1, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=padding, **rest)


def one(module: nn.Module) -> nn.Module:
    return nets.randomize(Body(lambda m, x: m.c(x), c=module))


def lowered(
    model: nn.Module | Captured, image: Any, *batch: Tensor, recipe: Recipe | None = None
) -> tuple[Reference, Lowered]:
    """To the integer graph, calibrated on one batch of floats."""
    captured = model if isinstance(model, Captured) else capture(model, batch)
    prepared = prepare(captured, Quantizer(recipe or Recipe(), input=image))
    reference = convert(prepared, calibrate(prepared, lambda run: run(*batch)))
    return reference, requantize(reference)


def q_values(graph: Lowered, x: Tensor) -> np.ndarray:
    """What an input of the integer graph becomes."""
    seen: dict[str, np.ndarray] = {}
    interpret(graph.graph, [x.numpy()], OPS, watch=seen.setdefault)
    return next(seen[op.output] for op in graph.graph.ops if op.kind in ("pixels", "quantize"))


@cache
def residual(image: Image | None = IMAGENET) -> tuple[nn.Module, Reference, Lowered]:
    model = nets.randomize(nets.Residual())
    return model, *lowered(model, image, IMAGENET.normalize(photos(8, width=12)))


# ---- which byte


@cache
def captured_conv() -> Captured:
    return capture(one(conv()), torch.zeros(4, 3, 16, 16))


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_every_byte_of_every_channel_survives_normalization(image):
    pixels = every_byte()
    _, graph = lowered(captured_conv(), image, image.normalize(pixels))
    np.testing.assert_array_equal(q_values(graph, image.normalize(pixels)), pixels.numpy())
    np.testing.assert_array_equal(q_values(graph, pixels), pixels.numpy())


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-3, 10)), min_size=1, max_size=5))
@settings(max_examples=5 * settings.default.max_examples)
def test_every_byte_survives_normalization_with_any_mean_and_deviation(parameters):
    image, pixels = Image(*zip(*parameters, strict=True)), every_byte(len(parameters))
    way = image.pixels(len(parameters))
    gain, shift, zeros = (torch.as_tensor(v).reshape(1, -1, 1, 1) for v in (way.gain, way.shift, way.zero_points))
    found = torch.round(image.normalize(pixels) * gain + shift) + zeros
    assert torch.equal(found, pixels.float())


def test_values_are_those_of_the_usual_transforms():
    pixels = photos()
    mean, std = torch.tensor(IMAGENET.mean), torch.tensor(IMAGENET.std)
    expected = (pixels.double() / 255 - mean[:, None, None].double()) / std[:, None, None].double()
    torch.testing.assert_close(IMAGENET.normalize(pixels), expected.float(), rtol=0, atol=1e-6)


def test_values_between_bytes_go_to_the_nearest_and_those_outside_to_the_ends():
    pixels = every_byte()
    _, graph = lowered(captured_conv(), IMAGENET, IMAGENET.normalize(pixels))
    near = IMAGENET.normalize(pixels.float() + torch.rand(256).sub(0.5).mul(0.98).reshape(16, 16))
    np.testing.assert_array_equal(q_values(graph, near), pixels.numpy())
    far = torch.full((1, 3, 16, 16), 100.0)
    assert (q_values(graph, far) == 255).all()
    assert (q_values(graph, -far) == 0).all()


def test_the_input_needs_no_statistics():
    prepared = prepare(captured_conv(), Quantizer(input=IMAGENET))
    (site,) = [site for site in prepared.annotations.sites if site.role == "activation" and "input" in site.name]
    assert site.spec == Fixed(1.0, (124, 116, 104))
    assert site.name not in prepared.observers
    assert convert(prepared, calibrate(prepared, [IMAGENET.normalize(every_byte())])).qparams[site.name].axis == 1


# ---- what a convolution makes of it


CONVOLUTIONS = {
    "plain": conv(),
    "without bias": conv(bias=False),
    "strided": conv(stride=2),
    "wide": conv(kernel=7, padding=3),
    "dilated": conv(dilation=2, padding=2),
    "grouped": conv(4, 8, groups=2),
    "depthwise": conv(3, 6, groups=3),
    "uneven": nn.Conv2d(3, 8, 4, padding="same"),
}


@cache
def absorbed(name: str) -> tuple[nn.Conv2d, Image, Tensor, Reference, Lowered]:
    module = CONVOLUTIONS[name]
    channels = module.in_channels
    image = Image(np.linspace(0.1, 0.7, channels), np.linspace(0.2, 0.4, channels))
    x = image.normalize(photos(2, channels))
    return module, image, x, *lowered(one(module), image, x)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_only_weights_are_rounded_where_no_padding_is_read(name):
    """Against the convolution in float64 with the weights the integers stand for: inside off by what rounding the bias
    and its share of the offset gives, and at the border by what half a byte weighs there."""
    module, image, x, reference, graph = absorbed(name)
    found, channels = graph(x).double(), module.in_channels
    weight = _stored_weight(reference, image, channels, module.groups)
    bias = None if module.bias is None else module.bias.double()
    rest = (module.stride, module.padding, module.dilation, module.groups)
    expected = F.conv2d(x.double(), weight, bias, *rest)
    way = image.pixels(channels)
    most = (way.shift / way.gain).abs().double().reshape(1, -1, 1, 1)
    outside = F.conv2d(torch.ones_like(x).double() * most, weight.abs(), None, *rest)
    beyond = outside.amax((0, 2, 3), keepdim=True) - outside
    scales = torch.tensor(reference.qparams["c.weight"].scales).double().reshape(1, -1, 1, 1)
    error, rounding = (found - expected).abs(), scales * (0.5 + weight[0].numel() / 4) + 1e-6 * expected.abs().max()
    assert (error <= beyond + rounding).all()
    assert (error > rounding).any(), "a test that sees no border"


def _stored_weight(reference: Reference, image: Image, channels: int, groups: int) -> Tensor:
    """The weight of normalised pixels that the integer weight of bytes stands for, float64."""
    buffers = dict(reference.module.named_buffers())
    weight = next(b for b in buffers.values() if b.dtype is torch.int8).double()
    scales = torch.tensor(reference.qparams["c.weight"].scales).double().reshape(-1, 1, 1, 1)
    gain = image.pixels(channels).gain.double().reshape(groups, 1, -1)
    return weight * scales * gain.expand(-1, len(weight) // groups, -1).reshape(len(weight), -1, 1, 1)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_integers_equal_the_reference(name):
    _, _, x, reference, graph = absorbed(name)
    assert_equal_quantized(reference, graph, x)


def test_byte_inputs_are_at_least_as_accurate_as_observed_ranges():
    model, x = one(conv(3, 16, 7, 3, stride=2)), IMAGENET.normalize(photos(8, height=32, width=32))
    inputs, results = [], []
    for image in (IMAGENET, None):
        reference, graph = lowered(model, image, x)
        q = next(iter(reference.qparams.values()))
        real = torch.from_numpy(q_values(graph, x)) - torch.tensor(q.zeros).reshape(1, -1, 1, 1)
        way = IMAGENET.pixels(3)
        exact = (real - way.shift.reshape(1, -1, 1, 1)) / way.gain.reshape(1, -1, 1, 1)
        inputs.append(sqnr(exact if image else real * q.step, x))
        results.append(sqnr(graph(x), model(x)))
    assert inputs[0] > 120 > 60 > inputs[1]
    assert results[0] > results[1]


def test_all_convolutions_that_read_an_image_absorb_it():
    model = nets.randomize(Body(lambda m, x: (m.c(x), m.d(x), m.c(F.relu(m.c(x)))), c=conv(3, 3), d=conv(3, 5, 1, 0)))
    x = IMAGENET.normalize(photos())
    reference, graph = lowered(model, IMAGENET, x)
    assert kinds(graph).count("pixels") == 1
    assert_equal_quantized(reference, graph, x)
    for found, expected in zip(graph(x), model(x), strict=True):
        assert sqnr(found, expected) > 30


def test_a_model_may_have_parameters_of_any_name():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x_gain, self.x_shift = nn.Parameter(torch.zeros(4, 3, 3, 3)), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.x_gain, self.x_shift, padding=1)

    model, x = nets.randomize(Named()), IMAGENET.normalize(photos())
    assert sqnr(lowered(model, IMAGENET, x)[1](x), model(x)) > 30


@pytest.mark.slow(reason="a residual network that takes bytes; convolutions absorb an image above")
def test_a_batch_norm_after_the_convolution_is_folded_too():
    model, reference, graph = residual()
    x = IMAGENET.normalize(photos(8, width=12))
    assert_equal_quantized(reference, graph, x)
    assert sqnr(graph(x), model(x)) >= sqnr(residual(None)[2](x), model(x)) - 1


# ---- programs

MEMORY = {
    "rows of planes": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "decoded": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a part of a larger one": lambda x: F.pad(x, (3, 4, 1, 2))[:, :, 1:-2, 3:-4],
    "every second column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "some of the channels": lambda x: torch.cat([x, x], 1).to(memory_format=torch.channels_last)[:, : x.shape[1]],
    "one image many times": lambda x: x[:1].expand(5, -1, -1, -1),
    "no image": lambda x: x[:0],
}


SHAPES = ((1, 1, 1), (2, 0, 1), (3, 1, 1), (4, 2, 2), (5, 1, 5), (20, 3, 1))
"""Channels, padding and groups of the convolutions of one model, each with an image of its own."""
WIDE = [Image(np.linspace(0.05, 0.95, channels), np.linspace(0.1, 0.6, channels)) for channels, *_ in SHAPES]


@cache
def stems(isa: str = RUNNABLE_ISAS[0]) -> tuple[Lowered, QuantizedModel]:
    """A convolution for each of `SHAPES`."""
    each = ((channels, 5 * groups, 3, padding, groups) for channels, padding, groups in SHAPES)
    convs = {f"c{i}": conv(*rest, groups=groups) for i, (*rest, groups) in enumerate(each)}
    model = Body(lambda m, *images: tuple(getattr(m, f"c{i}")(x) for i, x in enumerate(images)), **convs)
    declared = {f"args_{i}": image for i, image in enumerate(WIDE)}
    graph = lowered(nets.randomize(model), declared, *normalized(wide_photos()))[1]
    return graph, stages.compile(graph, isa=isa)


def wide_photos() -> list[Tensor]:
    return [photos(3, channels, 5, 70) for channels, *_ in SHAPES]


def normalized(pixels: list[Tensor]) -> list[Tensor]:
    return [image.normalize(x) for image, x in zip(WIDE, pixels, strict=True)]


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize("view", MEMORY.values(), ids=MEMORY)
def test_floats_and_bytes_in_any_memory_give_the_bits_of_the_integer_graph(isa, view):
    graph, model = stems(isa)
    pixels = [view(x) for x in wide_photos()]
    expected = graph(*[x.contiguous() for x in pixels])
    assert_same(model(*pixels), expected)
    assert_same(model(*[view(x) for x in normalized(wide_photos())]), expected)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize("name", ["rows of planes", "channels last", "transposed"])
def test_floats_that_are_no_pixels_give_the_bits_of_the_integer_graph(isa, name):
    graph, model = stems(isa)
    draw = np.random.default_rng(0)
    batch = []
    for channels, *_ in SHAPES:
        x = draw.normal(size=(3, channels, 5, 70)).astype(np.float32) * 3
        strange = draw.random(x.shape) < 0.1
        x[strange] = draw.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, -0.0, 1e-40], int(strange.sum()))
        batch.append(torch.from_numpy(x))
    assert_same(model(*map(MEMORY[name], batch)), graph(*batch))


def test_a_network_gives_the_same_bits_for_floats_and_bytes_with_any_threads():
    _, _, graph = residual()
    model, pixels, threads = stages.compile(graph), photos(5, width=12, seed=3), torch.get_num_threads()
    expected = graph(pixels)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_same((model(pixels), model(IMAGENET.normalize(pixels))), (expected, expected))
    finally:
        torch.set_num_threads(threads)


def test_bytes_with_channels_last_give_results_with_channels_last():
    model, pixels = stems()[1], wide_photos()
    assert all(y.is_contiguous() for y in model(*pixels))
    pixels[2] = MEMORY["decoded"](pixels[2])
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in model(*pixels))


@pytest.mark.slow(reason="quantizes a model of two images")
def test_several_inputs_are_declared_by_name():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.a(left) + self.b(right)

    model, pixels = nets.randomize(Two()), photos()
    x, y = IMAGENET.normalize(pixels), HALF.normalize(pixels.flip(0))
    _, graph = lowered(model, {"left": IMAGENET, "right": HALF}, x, y)
    found, expected = stages.compile(graph), graph(x, y)
    for call in ((pixels, y), (x, pixels.flip(0)), (pixels, pixels.flip(0))):
        assert_same(found(*call), expected)
    only = lowered(model, {"right": HALF}, x, y)[1]
    assert_same(only(x, pixels.flip(0)), only(x, y))
    with pytest.raises(
        InputError, match=r"input 'left': its data type is torch\.uint8; the model takes torch\.float32"
    ):
        only(pixels, y)
    with pytest.raises(SelectorError, match="one Image is given, but the model has 2 tensor inputs"):
        lowered(model, HALF, x, y)
    with pytest.raises(SelectorError, match="nearest: left"):
        lowered(model, {"lefft": HALF}, x, y)


@pytest.mark.slow(reason="quantizes and saves a residual network")
def test_quantized_and_loaded_models_accept_bytes(tmp_path):
    model, pixels = nets.randomize(nets.Residual()), photos(4, width=12)
    x = IMAGENET.normalize(pixels)
    quantized = intaglio.quantize(model, [(x, torch.zeros(4))], input=IMAGENET)
    quantized.save(tmp_path / "net.intaglio", example=pixels)
    loaded = intaglio.load(tmp_path / "net.intaglio")
    assert_same((loaded(pixels), loaded(x)), (quantized(pixels), quantized(pixels)))
    loaded.verify()


# ---- where bytes cannot be read


def _written(m: nn.Module, x: Tensor) -> Tensor:
    y = m.c(x)
    x.copy_(y)
    return y


FALLBACKS = {
    "a residual sum": (lambda m, x: m.c(x) + x, "aten.add.Tensor"),
    "a concatenation": (lambda m, x: m.c(torch.cat([m.c(x), x], 1)[:, :3]), "aten.cat.default"),
    "a pool": (lambda m, x: m.c(F.max_pool2d(x, 2)), "aten.max_pool2d.default"),
    "an island": (lambda m, x: m.c(x) * torch.erf(x), "aten.erf.default"),
    "the result": (lambda m, x: (m.c(x), x), "output"),
    "a computed weight": (lambda m, x: F.conv2d(x, m.c.weight * m.c(x).mean()), "computed while the model runs"),
    "the model itself": (_written, "the model writes into it"),
}


@pytest.mark.parametrize(("body", "text"), FALLBACKS.values(), ids=FALLBACKS)
def test_float_readers_of_an_image_input_keep_the_observed_range(body, text):
    model, x = nets.randomize(Body(body, c=conv(3, 3))), IMAGENET.normalize(photos(height=12, width=12))
    captured = capture(model, x.clone())
    graph = lowered(captured, IMAGENET, x.clone())[1]
    (note,) = [note for note in graph.model_info.notes if "is an Image" in note]
    assert note.startswith("input '")
    assert text in note
    assert graph.text() == lowered(captured, None, x.clone())[1].text()
    with pytest.raises(InputError, match=r"the model takes torch\.float32"):
        graph(photos(height=12, width=12))


def test_a_convolution_that_stays_in_float_reads_floats():
    model = nets.randomize(Body(lambda m, x: m.d(m.c(x)), c=conv(3, 3), d=conv(3, 3)))
    graph = lowered(model, IMAGENET, IMAGENET.normalize(photos()), recipe=Recipe().with_selection(skip=["c"]))[1]
    assert any("the recipe leaves it in float" in note for note in graph.model_info.notes)
    assert "pixels" not in kinds(graph)


# ---- what does not fit

WRONG = {
    "too few means": ({"mean": (0.5, 0.5)}, "mean has 2 values, but the input has 3 channels"),
    "too many deviations": ({"std": (1, 1, 1, 1)}, "std has 4 values, but the input has 3 channels"),
    "a deviation of zero": (
        {"std": (0.2, 0.0, 0.2)},
        r"std is \(0\.2, 0\.0, 0\.2\); all of its values must be finite and above 0",
    ),
    "a negative deviation": ({"std": -1}, "above 0"),
    "no number": ({"std": float("nan")}, "above 0"),
    "a mean of bytes": ({"mean": (123.7, 116.3, 103.5)}, "pixels that were divided by 255"),
    "nothing": ({"mean": ()}, "its values must be between 0 and 1"),
}


@pytest.mark.parametrize(("parameters", "text"), WRONG.values(), ids=WRONG)
def test_invalid_image_parameters_are_refused(parameters, text):
    with pytest.raises(UnsupportedError, match=text):
        lowered(captured_conv(), Image(**parameters), IMAGENET.normalize(every_byte()))


def test_an_input_that_is_not_an_image_is_refused():
    model = nets.randomize(nets.Linears())
    with pytest.raises(UnsupportedError, match=r"an Image must be f32\[batch, channels, height, width\]"):
        lowered(model, IMAGENET, nets.example(model))


def test_bytes_for_a_model_without_image_name_the_remedy():
    for call in (compiled(nets.Residual)[0], *residual(None)[1:]):
        with pytest.raises(InputError, match=r"takes torch.float32\n.*input=intaglio\.Image\(mean, std\)"):
            call(photos(width=12))


def test_other_types_are_refused_where_bytes_are_taken():
    with pytest.raises(InputError, match=r"data type is torch\.int8; the model takes torch\.float32 or torch\.uint8"):
        stems()[1](*[x.to(torch.int8) for x in wide_photos()])


def test_a_file_whose_gains_are_not_one_per_channel_is_refused(tmp_path):
    stems()[1].save(tmp_path / "net.intaglio", library=False)
    saved = files.decode(tmp_path / "net.intaglio", archive.read(tmp_path / "net.intaglio"))
    name = next(name for name, kind in saved.graph.types.items() if "gain" in name and kind.shape == (3,))
    types = {**saved.graph.types, name: TensorType((2,), DType.F32)}
    constants = {**saved.graph.constants, name: saved.graph.constants[name][:2]}
    files.save(replace(saved, graph=replace(saved.graph, types=types, constants=constants)), tmp_path / "bad", "x")
    with pytest.raises(ArtifactError, match=r"c gains and shifts, but got .*, \(2,\) and \(3,\)"):
        intaglio.load(tmp_path / "bad")


@pytest.mark.slow(reason="quantizes a network to find that nothing is declared")
def test_an_equalized_input_without_a_declaration_takes_no_bytes():
    """Its channels have scales of their own too, but nobody said what bytes stand for."""
    model = nets.randomize(nets.ConvBnRelu())
    x = nets.example(model, 4)
    quantized = intaglio.quantize(model, [x])
    assert next(op.kind for op in quantized.graph.ops) == "pixels"
    with pytest.raises(InputError, match=r"data type is torch\.uint8"):
        quantized(torch.zeros(x.shape, dtype=torch.uint8))
