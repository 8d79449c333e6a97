"""Convolutions and pools of one to three axes, plain and transposed: backend cases 1 and 28, calibration case 43."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import stages
from intaglio.ir.phases import phases
from intaglio.plan import plan_graph
from support.lowering import ROUNDED, assert_equal_quantized, quantized, sqnr
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import randomize
from support.slow_params import slow_params

CONVOLUTIONS = {
    "1d": (nn.Conv1d(6, 20, 3, padding=1), (6, 17)),
    "1d strided, dilated": (nn.Conv1d(6, 5, 4, stride=2, padding=3, dilation=2), (6, 23)),
    "1d same, even taps": (nn.Conv1d(6, 8, 4, padding="same"), (6, 11)),
    "1d depthwise": (nn.Conv1d(12, 12, 5, padding=2, groups=12), (12, 9)),
    "1d grouped": (nn.Conv1d(12, 18, 3, groups=3), (12, 9)),
    "3d": (nn.Conv3d(3, 20, 3, padding=1), (3, 4, 6, 5)),
    "3d of one depth": (nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)), (3, 4, 6, 5)),
    "3d of depth alone": (nn.Conv3d(3, 8, (3, 1, 1)), (3, 4, 6, 5)),
    "3d strided": (nn.Conv3d(4, 6, 3, stride=(2, 1, 2), padding=(1, 0, 1)), (4, 7, 6, 7)),
    "3d dilated": (nn.Conv3d(4, 6, 2, dilation=(2, 3, 1), padding=2), (4, 5, 6, 5)),
    "3d same": (nn.Conv3d(4, 6, (2, 3, 4), padding="same"), (4, 5, 6, 5)),
    "3d grouped": (nn.Conv3d(8, 12, 3, padding=1, groups=4), (8, 4, 5, 5)),
    "3d depthwise": (nn.Conv3d(6, 6, 3, padding=1, groups=6), (6, 4, 5, 5)),
    "transposed 1d": (nn.ConvTranspose1d(6, 10, 3, stride=2), (6, 7)),
    "transposed 1d, every option": (
        nn.ConvTranspose1d(6, 10, 4, stride=3, padding=2, output_padding=1, dilation=2, groups=2),
        (6, 7),
    ),
    "transposed 2d": (nn.ConvTranspose2d(5, 20, 3, stride=2, padding=1, output_padding=1), (5, 6, 7)),
    "transposed 2d, taps as stride": (nn.ConvTranspose2d(5, 70, 2, stride=2), (5, 6, 5)),
    "transposed 2d, stride beyond taps": (nn.ConvTranspose2d(5, 7, (1, 2), stride=(2, 3)), (5, 4, 5)),
    "transposed 2d, stride 1": (nn.ConvTranspose2d(5, 7, 3, padding=2), (5, 6, 5)),
    "transposed 2d, dilated": (nn.ConvTranspose2d(5, 7, 3, stride=2, dilation=2, padding=1), (5, 6, 5)),
    "transposed 2d, dilated by the stride's double": (nn.ConvTranspose2d(5, 7, 2, stride=2, dilation=4), (5, 6, 5)),
    "transposed 2d, padded beyond its taps": (nn.ConvTranspose2d(5, 7, 2, stride=2, padding=3), (5, 9, 8)),
    "transposed 2d, grouped": (nn.ConvTranspose2d(8, 12, 3, stride=2, groups=4, bias=False), (8, 5, 6)),
    "transposed 2d, depthwise": (nn.ConvTranspose2d(6, 6, 4, stride=2, padding=1, groups=6), (6, 5, 6)),
    "transposed 3d": (nn.ConvTranspose3d(4, 6, 2, stride=2), (4, 3, 4, 5)),
    "transposed 3d, every option": (
        nn.ConvTranspose3d(4, 6, 3, stride=(2, 1, 3), padding=1, output_padding=(1, 0, 2), groups=2),
        (4, 3, 4, 5),
    ),
    "transposed 3d, dilated": (nn.ConvTranspose3d(4, 6, (2, 2, 3), stride=2, dilation=(3, 1, 2)), (4, 3, 4, 3)),
}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Many(nn.Module):
    """Every convolution of some axes, each with an input of its own: alone, and with norm, relu and a residual sum."""

    def __init__(self, convs: list[nn.Module]):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(NORMS[conv.weight.dim() - 2](conv.out_channels) for conv in convs)

    def forward(self, *inputs):
        found = []
        for conv, norm, x in zip(self.convs, self.norms, inputs, strict=True):
            found += [conv(x), torch.relu(norm(conv(x)) + torch.relu(norm(conv(x))))]
        return tuple(found)


def many(start: str) -> tuple[nn.Module, list[tuple[int, ...]], list[str]]:
    names = [name for name in CONVOLUTIONS if name.startswith(start)]
    return randomize(Many([CONVOLUTIONS[name][0] for name in names])), [CONVOLUTIONS[n][1] for n in names], names


@pytest.mark.slow(reason="a dozen transposed convolutions; they are one partition each below")
@pytest.mark.case("backend 28")
@pytest.mark.parametrize(
    "start",
    [
        "transposed 2d",
        *slow_params(
            "1d", "3d", "transposed 1d", reason="a dozen convolutions of other axes; one of each runs in other tests"
        ),
    ],
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_reference_interpreter_and_kernels_agree(start, isa):
    net, shapes, names = many(start)
    draw = torch.Generator().manual_seed(1)
    x, again = ([torch.randn(batch, *shape, generator=draw) for shape in shapes] for batch in (3, 2))
    reference, lowered = quantized(net, *x)
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, *x)
    expected = lowered(*again)
    turned = [one.transpose(-1, -2).contiguous().transpose(-1, -2) for one in again]
    model = stages.compile(lowered, isa=isa)
    assert model.coverage.macs == 1
    for index, (found, wanted) in enumerate(zip(model(*again), expected, strict=True)):
        assert torch.equal(found, wanted), (isa, names[index // 2])
    assert all(map(torch.equal, model(*turned), expected)), isa


@pytest.mark.case("backend 28")
def test_an_accumulator_and_its_tail_are_one_partition():
    """Nothing is put between the pixels of a transposed convolution, and no copy stands before its kernel."""
    net, shapes, _ = many("transposed 2d")
    lowered = quantized(net, *[torch.randn(3, *shape) for shape in shapes], recipe=ROUNDED)[1]
    anchors = [step.partition.anchor.kind for step in plan_graph(lowered.graph).steps]
    assert set(anchors) == {"quantize", "conv_transpose2d", "dequantize"}


@settings(max_examples=5 * settings.default.max_examples)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 9))
def test_phases_of_a_transposed_convolution_cover_every_product_once(kernel, stride, padding, dilation, extra, inputs):
    """Each output reads, through its phase, exactly the (tap, input) pairs that reach it."""
    outputs = (inputs - 1) * stride - 2 * padding + dilation * (kernel - 1) + min(extra, stride - 1) + 1
    wanted = {
        (i * stride + t * dilation - padding, t, i)
        for t in range(kernel)
        for i in range(inputs)
        if 0 <= i * stride + t * dilation - padding < outputs
    }
    found, places = set(), set()
    for phase in phases(kernel, stride, padding, dilation, min(extra, stride - 1)):
        for q in range(max(inputs + phase.extra, 0)):
            output = phase.first + stride * q
            places.add(output)
            for step, tap in enumerate(phase.taps):
                read = q + phase.start + step * phase.dilation
                assert -phase.before <= read < inputs + phase.after
                if 0 <= read < inputs:
                    found.add((output, tap, read))
    assert found == wanted
    assert places == set(range(max(outputs, 0)))


POOLS = {
    "max 1d": (nn.MaxPool1d(3, 2, padding=1), (20, 17)),
    "max 1d, dilated, ceil": (nn.MaxPool1d(2, 3, dilation=3, ceil_mode=True), (5, 18)),
    "max 3d": (nn.MaxPool3d(2), (5, 4, 6, 7)),
    "max 3d, every option": (nn.MaxPool3d((3, 2, 2), (1, 2, 2), (1, 1, 0), (1, 1, 2), ceil_mode=True), (5, 4, 6, 7)),
    "average 1d": (nn.AvgPool1d(3, 2, padding=1), (70, 17)),
    "average 1d, without padding": (nn.AvgPool1d(3, 2, padding=1, count_include_pad=False, ceil_mode=True), (5, 16)),
    "average 3d": (nn.AvgPool3d(2, padding=1), (5, 4, 6, 7)),
    "average 3d, own divisor": (nn.AvgPool3d((1, 3, 2), divisor_override=5, ceil_mode=True), (5, 4, 6, 7)),
    "adaptive 1d": (nn.AdaptiveAvgPool1d(5), (5, 12)),
    "adaptive 3d": (nn.AdaptiveAvgPool3d((3, 1, 4)), (5, 4, 6, 7)),
    "global 3d": (nn.AdaptiveAvgPool3d(1), (5, 4, 6, 7)),
}


class Pooled(nn.Module):
    """Each pool between two pointwise convolutions."""

    def __init__(self, chosen: list[tuple[nn.Module, tuple[int, ...]]]):
        super().__init__()
        convs = [{2: nn.Conv1d, 4: nn.Conv3d}[len(shape)] for _, shape in chosen]
        self.pools = nn.ModuleList(pool for pool, _ in chosen)
        self.first = nn.ModuleList(conv(3, shape[0], 1) for conv, (_, shape) in zip(convs, chosen, strict=True))
        self.last = nn.ModuleList(conv(shape[0], 4, 1) for conv, (_, shape) in zip(convs, chosen, strict=True))

    def forward(self, *inputs):
        parts = zip(self.first, self.pools, self.last, inputs, strict=True)
        return tuple(last(pool(first(x))) for first, pool, last, x in parts)


@cache
def pooled():
    net = randomize(Pooled(list(POOLS.values())))
    draw = torch.Generator().manual_seed(2)
    x = [torch.randn(3, 3, *shape[1:], generator=draw) for _, shape in POOLS.values()]
    return x, *quantized(net, *x)


def test_pools_of_1d_and_3d_inputs_are_those_of_the_reference():
    x, reference, lowered = pooled()
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, *x)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_pools_of_1d_and_3d_inputs_run_in_int8(isa):
    x, _, lowered = pooled()
    for name, one, wanted in zip(POOLS, stages.compile(lowered, isa=isa)(*x), lowered(*x), strict=True):
        assert torch.equal(one, wanted), name


@pytest.mark.slow(reason="a network over one axis; its pools run below")
def test_a_1d_network_runs_in_int8_from_end_to_end():
    """Wave in, classes out: stem, residual block, pool, flatten, linear; one layout, no copy between."""
    net = randomize(
        nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=4, padding=4),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 3, padding=1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(32, 5),
        )
    )
    data = [torch.randn(8, 1, 256, generator=torch.Generator().manual_seed(3))]
    model = intaglio.quantize(net, data)
    assert model.coverage.islands == 0
    assert model.coverage.macs == 1
    kinds = [line.split(" = ")[1].split("(")[0] for line in model.text("integer").splitlines() if " = " in line]
    assert "permute" not in kinds
    with torch.no_grad():
        assert sqnr(model(data[0]), net(data[0])) > 25
