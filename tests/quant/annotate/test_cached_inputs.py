"""Inputs that hold results of earlier calls: quantized by the setting `cache`, between the calls too."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intaglio import Recipe, Setting, stages
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.fxgraph.node_info import origin
from intaglio.ir import DType
from intaglio.quant.recipes.quantizer import Quantizer
from support.slow_params import slow_params


class Heads(nn.Module):
    """Attention of one new token to those before, whose keys and values are arguments and results."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
        return self.o(y.transpose(1, 2).flatten(2)), k, v


CACHED = {1: 1, 2: 2}
SHAPES = ({0: torch.export.Dim.AUTO}, *[{0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}] * 2)


def calls(seed: int = 0) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(size, generator=draw) for size in ((4, 1, 32), *[(4, 2, 5, 16)] * 2)) for _ in range(4)]


def reference_of(recipe: Recipe, cached=CACHED) -> stages.Reference:
    torch.manual_seed(0)
    captured = stages.capture(Heads().eval(), calls()[0], dynamic_shapes=SHAPES)
    prepared = stages.prepare(captured, Quantizer(recipe, cached_inputs=cached))
    return stages.convert(prepared, stages.calibrate(prepared, calls(), progress=False))


INT8 = Recipe(default=Setting(cache="int8"))


def as_stored(reference: stages.Reference, call: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The arguments of a call in the types that the model takes."""
    kinds = [entry.type.q for entry in reference.signature.inputs]
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor
    return tuple(
        x if q is None else quantize(x, q.step, q.zero, q.qmin, q.qmax, torch.uint8)
        for x, q in zip(call, kinds, strict=True)
    )


def types(reference: stages.Reference) -> list[DType]:
    return [entry.type.dtype for entry in reference.signature.inputs]


def test_no_input_is_quantized_by_default():
    assert types(reference_of(Recipe())) == [DType.F32] * 3


def test_reference_interpreter_and_kernel_take_and_return_quantized_values():
    reference, floats = reference_of(INT8), reference_of(Recipe())
    assert types(reference) == [DType.F32, DType.U8, DType.U8]
    lowered, (call, *_) = stages.requantize(reference), calls(seed=7)
    model, stored = stages.compile(lowered), as_stored(reference, call)
    for wanted, ours, kernel in zip(reference(*stored), lowered(*stored), model(*stored), strict=True):
        assert ours.dtype is kernel.dtype is wanted.dtype
        assert np.array_equal(ours.numpy(), kernel.numpy())
    y, keys, values = model(*stored)
    assert (keys.dtype, values.dtype) == (torch.uint8, torch.uint8)
    wanted = stages.compile(floats)(*call)
    assert torch.equal(y, wanted[0])
    assert torch.equal(keys, as_stored(reference, (call[0], *wanted[1:]))[1])


@pytest.mark.parametrize(
    "given",
    [
        *slow_params(Setting(cache="int8", activations="float"), reason="layers in float beside the same cache"),
        Setting(cache="int8", bits=7),
    ],
    ids=str,
)
def test_the_cache_is_quantized_whatever_else_is(given):
    reference = reference_of(Recipe(default=given))
    assert types(reference) == [DType.F32, DType.U8, DType.U8]
    stored = as_stored(reference, calls(seed=7)[0])
    model = stages.compile(reference)
    for wanted, found in zip(reference(*stored)[1:], model(*stored)[1:], strict=True):
        assert torch.equal(wanted, found)


def test_layers_left_in_float_keep_a_float_cache():
    recipe = Recipe.of({"op:aten.cat": None}, Setting(cache="int8"))
    assert types(reference_of(recipe)) == [DType.F32] * 3


def test_inputs_can_come_from_another_model():
    reference = reference_of(INT8, {1: None})
    assert types(reference) == [DType.F32, DType.U8, DType.F32]
    assert [result.dtype for result in reference(*as_stored(reference, calls()[0]))] == [torch.float32] * 3


@pytest.mark.parametrize("cached", [{3: 0}, {-1: 0}, {1: 3}, {1: -1}])
def test_positions_that_do_not_exist_are_errors(cached):
    with pytest.raises(SelectorError, match=r"(?s)the model has 3 inputs and 3 results.*count tensors from 0"):
        reference_of(INT8, cached)


def test_another_data_type_is_an_error_with_a_remedy():
    with pytest.raises(UnsupportedError, match=r"(?s)the cache would be stored as s8.*leave out cache = 'int8'"):
        reference_of(Recipe(default=Setting(cache="int8", activations_dtype="s8")))
    reference_of(Recipe(default=Setting(activations_dtype="s8")))


def dynamic_layers(quantizer: Quantizer) -> set[str]:
    """The layers that quantize what they read at run time."""
    captured = stages.capture(Heads().eval(), calls()[0], dynamic_shapes=SHAPES)
    annotations = stages.annotate(captured, quantizer)
    return {origin(region.anchor).path for region in annotations.regions if region.dynamic}


LAYERS = {"q", "k", "v", "o"}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(), LAYERS),
        (INT8, LAYERS),
        (Recipe.named("accurate"), LAYERS),
        (Recipe.named("transformer"), set()),
        (Recipe(default=Setting(activations="static")), set()),
        (Recipe.of({"*": {"activations": "static"}}), set()),
        (Recipe.of({"type:Linear": {"activations": "static"}}), set()),
        (Recipe.of({"k": {"activations": "static"}}), LAYERS - {"k"}),
        (Recipe.of({"k": None}), LAYERS - {"k"}),
    ],
)
def test_linear_layers_beside_a_cache_have_scales_per_token(recipe, expected):
    assert dynamic_layers(Quantizer(recipe, cached_inputs=CACHED)) == expected
    assert dynamic_layers(Quantizer(recipe, decoder=True)) == expected, "their cache may be outside of the graph"


def test_linear_layers_without_a_cache_are_calibrated():
    assert dynamic_layers(Quantizer()) == set()


def test_the_text_of_a_decoder_has_its_decided_recipe():
    captured = stages.capture(Heads().eval(), calls()[0], dynamic_shapes=SHAPES)
    texts = stages.prepare(captured, Quantizer(decoder=True)).model_info.texts
    assert 'activations = "token"' in texts["quantizer"]
    again = stages.prepare(captured, Quantizer.from_toml(texts["quantizer"]))
    assert again.model_info.texts["sites"] == texts["sites"]


def test_the_text_of_a_quantizer_keeps_cached_inputs():
    quantizer = Quantizer(INT8, cached_inputs={4: 1, 6: None})
    found = Quantizer.from_toml(quantizer.to_toml())
    assert (found.recipe, found.cached_inputs) == (quantizer.recipe, quantizer.cached_inputs)
    with pytest.raises(SelectorError, match="cached inputs are not valid"):
        Quantizer.from_toml("\n[cached_inputs]\na = 1\n")
