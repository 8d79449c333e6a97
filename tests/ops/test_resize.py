"""Upsampling: which values torch reads for an output, and whole models of it."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from intaglio import stages
from intaglio.lower import Lowered
from intaglio.ops import check_graph
from intaglio.ops.images.resize import linear, nearest
from intaglio.runtime import QuantizedModel
from support.lowering import assert_equal_quantized, kinds, quantized, tensors
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import threads
from support.slow_params import slow_params_except

SIZES = st.integers(1, 40)
FACTORS = st.one_of(st.sampled_from([1.0, 1.5, 2.0, 3.0, 0.5]), st.floats(0.3, 4.0, allow_nan=False))


def ramp(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)[None, None]


@given(SIZES, SIZES)
def test_nearest_values_of_a_size_are_those_torch_copies(size, result):
    assert np.array_equal(nearest(size, result, None), F.interpolate(ramp(size), size=result).flatten().numpy())


@given(SIZES, FACTORS)
def test_nearest_values_of_a_factor_are_those_torch_copies(size, factor):
    """Images of same and double size are another case."""
    if int(size * factor):
        found = F.interpolate(ramp(size), scale_factor=factor).flatten().numpy()
        assert np.array_equal(nearest(size, len(found), factor), found)
        deep = F.interpolate(ramp(size)[None, None], scale_factor=(1.0, 1.0, factor)).flatten().numpy()
        assert np.array_equal(nearest(size, len(found), factor), deep)
        image = F.interpolate(ramp(size)[None], scale_factor=(1.0, factor)).flatten().numpy()
        assert np.array_equal(nearest(size, len(found), factor, images=True), image)


def test_nearest_resize_rounds_differently_for_images():
    assert not np.array_equal(nearest(2, 2, 1.25), nearest(2, 2, 1.25, images=True))


@given(SIZES, SIZES, FACTORS, st.booleans(), st.booleans())
def test_weights_give_the_means_torch_gives(size, result, factor, align, by_factor):
    """To the last bits: torch may fuse what we round."""
    given = {"scale_factor": factor} if by_factor and not align and int(size * factor) else {"size": result}
    x = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(size))
    found = F.interpolate(x, **given, mode="linear", align_corners=align).flatten().numpy()
    index, weight = linear(size, len(found), given.get("scale_factor"), align)
    means = (x.flatten().numpy()[index] * weight).sum(1)
    np.testing.assert_allclose(means, found, rtol=1e-4, atol=2e-5)
    assert index.min() >= 0
    assert index.max() < size


def test_the_comparison_of_indices_detects_a_wrong_size():
    """Where a factor is given torch steps by it, not by the ratio of sizes."""
    found = F.interpolate(ramp(7), scale_factor=1.7).flatten().numpy()
    assert np.array_equal(nearest(7, len(found), 1.7), found)
    assert not np.array_equal(nearest(7, len(found), None), found)


def volumes(m, x):
    y = m.deep(x[:, :, None].expand(-1, -1, 3, -1, -1))
    return m.last(F.interpolate(y, size=(5, 9, 13)))


def lines(m, x):
    y = m.line(x[:, :, 0])
    longer = F.interpolate(y, scale_factor=2), F.interpolate(y, size=17, mode="linear")
    aligned = F.interpolate(y, size=17, mode="linear", align_corners=True)
    return [m.next(part) for part in (*longer, aligned)]


def images(m, x):
    """A pyramid of features, as a decoder joins them; 20 channels are one whole vector and a rest."""
    y = F.relu(m.image(x))
    low = m.step(y)
    sized = F.interpolate(low, size=y.shape[2:], mode="bilinear")
    return m.join(torch.cat([sized + y, F.interpolate(low, scale_factor=2)], 1))


def sizes(m, x):
    y = m.image(x)
    found = [F.interpolate(y, scale_factor=(2, 3)), F.interpolate(y, size=(3, 11)), F.interpolate(y, scale_factor=1.7)]
    found += [F.interpolate(y, scale_factor=(1.5, 2), mode="bilinear"), F.interpolate(y, (5, 16), mode="bilinear")]
    found += [F.interpolate(y, (9, 1), mode="bilinear", align_corners=True)]
    return [m.step(part) for part in found]


MODELS = {
    "volumes": Body(volumes, deep=nn.Conv3d(3, 5, 3, padding=1), last=nn.Conv3d(5, 3, 3)),
    "lines": Body(lines, line=nn.Conv1d(3, 20, 3), next=nn.Conv1d(20, 4, 3, padding=1)),
    "images": Body(
        images, image=nn.Conv2d(3, 20, 3, padding=1), step=nn.Conv2d(20, 20, 3, 2, 1), join=nn.Conv2d(40, 4, 3)
    ),
    "sizes": Body(sizes, image=nn.Conv2d(3, 20, 3, padding=1), step=nn.Conv2d(20, 6, 3, 2, 1)),
}


@pytest.mark.parametrize("name", slow_params_except("lines", of=MODELS, reason="other axes of the same kernel"))
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_upsampling_runs_in_int8(name, isa):
    """No island, the interpreter within one step of the reference, every instruction set equal to the interpreter."""
    x = torch.randn(3, 3, 6, 8, generator=torch.Generator().manual_seed(2))
    reference, lowered = quantized(randomize(MODELS[name]), x)
    assert not lowered.islands, lowered.skipped
    check_graph(lowered.graph)
    assert_equal_quantized(reference, lowered, x)
    compiled = stages.compile(lowered, isa=isa)
    for batch in (x, x[:1], x[:0]):
        pairs = zip(tensors(compiled(batch)), tensors(lowered(batch)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@cache
def free_bilinear(channels: int, isa: str) -> tuple[Lowered, QuantizedModel]:
    """Bilinear upsampling of an image of any size, from the integer graph and compiled."""
    model = randomize(
        Body(
            lambda m, x: F.interpolate(m.image(x), scale_factor=(2, 3), mode="bilinear"),
            image=nn.Conv2d(3, channels, 1),
        )
    )
    free = (({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},),)
    prepared = stages.prepare(stages.capture(model, (x := torch.randn(2, 3, 5, 6),), dynamic_shapes=free))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [x])))
    return lowered, stages.compile(lowered, isa=isa)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize("channels", [5, 33, 64, 2100])
@settings(max_examples=10)
@given(data=st.data())
def test_any_number_of_channels_and_pixels_is_interpolated(channels, isa, data):
    """Rows are computed in parts, and vectors reach into the next pixel. Two threads share the rows."""
    lowered, compiled = free_bilinear(channels, isa)
    width = data.draw(st.integers(1, 3 if channels > 64 else 60))
    x = torch.randn(data.draw(st.integers(1, 2)), 3, data.draw(st.integers(1, 7)), width)
    with threads(2):
        assert torch.equal(compiled(x), lowered(x)), x.shape


def test_nearest_resizes_share_parameters_and_means_have_their_own():
    def body(m, x):
        y = m.image(x)
        return m.step(F.interpolate(y, scale_factor=2)), m.step(F.interpolate(y, scale_factor=2, mode="bilinear"))

    model = randomize(Body(body, image=nn.Conv2d(3, 4, 3), step=nn.Conv2d(4, 2, 1)))
    _, lowered = quantized(model, torch.randn(2, 3, 6, 8))
    types, found = lowered.graph.types, {op.kind: op for op in lowered.graph.ops}
    assert types[found["upsample_nearest2d"].output].q == types[found["upsample_nearest2d"].inputs[0]].q
    assert types[found["upsample_bilinear2d"].output].q != types[found["upsample_bilinear2d"].inputs[0]].q
    assert "table" not in kinds(lowered)


@pytest.mark.parametrize(("mode", "factor"), [("bicubic", 2), ("nearest-exact", 1.5)])
def test_other_modes_stay_in_float_with_a_reason(mode, factor):
    def body(m, x):
        return m.last(F.interpolate(m.image(x), scale_factor=factor, mode=mode))

    model = Body(body, image=nn.Conv2d(3, 4, 3), last=nn.Conv2d(4, 2, 1))
    _, lowered = quantized(randomize(model), torch.randn(2, 3, 6, 8))
    assert any("no int8 kernel" in skip.reason for skip in lowered.skipped)


def test_a_graph_with_out_of_bounds_lookup_tables_is_refused():
    """No model gives one, a changed file may."""

    def body(m, x):
        return m.step(F.interpolate(m.image(x), scale_factor=2))

    model = randomize(Body(body, image=nn.Conv2d(3, 4, 3), step=nn.Conv2d(4, 2, 1)))
    graph = quantized(model, torch.randn(2, 3, 6, 8))[1].graph
    (table,) = (op.inputs[1] for op in graph.ops if op.kind == "upsample_nearest2d")
    outside = graph.replace(constants={**graph.constants, table: graph.constants[table] + 1})
    with pytest.raises(ValueError, match="indices outside"):
        check_graph(outside)


def test_resizing_to_the_same_size_is_removed():
    class Same(nn.Module):
        def forward(self, x):
            same = (
                F.interpolate(x, size=x.shape[2:], mode="bilinear"),
                F.interpolate(x, (6, 5), mode="bilinear", align_corners=True),
                F.interpolate(x, (6, 5)),
                F.interpolate(x, scale_factor=1.0, mode="bicubic"),
            )
            return sum(same) + F.interpolate(x, scale_factor=1.1)

    x = torch.randn(2, 3, 6, 5)
    captured = stages.capture(Same(), x)
    resized = [str(node.target) for node in captured.module.graph.nodes if "upsample" in str(node.target)]
    assert resized == ["aten.upsample_nearest2d.vec"]
    torch.testing.assert_close(captured.module(x)[0], Same()(x))
