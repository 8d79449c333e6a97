"""Programs that take and return uint8 and int8 tensors: quantize and dequantize at the border are part of kernels."""

import functools

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.backends.inductor.inductor_graph import graph_for_inductor
from support.exported_c import exported
from support.slow_params import slow_params

OPS = torch.ops.quantized_decomposed
U8, U8_AFTER = (0.1, 100, 0, 255, torch.uint8), (0.05, 3, 0, 255, torch.uint8)
S8, S8_AFTER = (0.1, -28, -128, 127, torch.int8), (0.05, -125, -128, 127, torch.int8)


class Borders(nn.Module):
    """dequantize -> op, op -> quantize, both, and a convolution between both, in uint8 and in int8."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.register_buffer("weight", torch.randint(-127, 128, (4, 3, 3, 3), dtype=torch.int8, generator=draw))
        self.register_buffer("scales", torch.rand(4, generator=draw) * 0.01 + 0.001)
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, u: Tensor, s: Tensor, x: Tensor) -> dict[str, Tensor]:
        results = {}
        for name, given, before, after in (("u", u, U8, U8_AFTER), ("s", s, S8, S8_AFTER)):
            y = OPS.dequantize_per_tensor(given, *before)
            weight = OPS.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
            results[f"{name} to float"] = torch.relu(y)
            results[f"{name} from float"] = OPS.quantize_per_tensor(torch.relu(x), *after)
            results[f"{name} to {name}"] = OPS.quantize_per_tensor(torch.relu(y), *after)
            results[f"{name} conv"] = OPS.quantize_per_tensor(torch.relu(F.conv2d(y, weight, padding=1)), *after)
        return results


def inputs(batch: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    u = torch.randint(0, 256, (batch, 3, 5, 6), dtype=torch.uint8, generator=draw)
    return u, (u.int() - 128).to(torch.int8).flip(2), 5 * torch.randn(batch, 3, 5, 6, generator=draw)


@functools.cache
def built():
    reference = stages.from_qdq(stages.capture(Borders(), inputs()))
    lowered = stages.requantize(reference)
    return reference, lowered, stages.compile(lowered)


def test_integers_at_the_border_need_no_island_and_no_rounding_in_between():
    _, lowered, program = built()
    text = lowered.text()
    assert not program.coverage.islands
    assert "aten._to_copy" not in text
    read = [name for op in lowered.graph.ops for name in op.inputs] + list(lowered.graph.outputs)
    assert all(name in read for op in lowered.graph.ops for name in op.outputs)
    assert program.coverage.macs == 1


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_all_stages_give_the_same_bits(batch):
    reference, lowered, program = built()
    given = inputs(batch)
    wanted = Borders()(*given)
    for stage in (reference, lowered, program):
        found = stage(*given)
        assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in wanted.items()}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_strides_of_the_inputs_do_not_matter():
    program = built()[2]
    given = tuple(torch.cat([x, x], 3)[:, :, :, ::2] for x in inputs(3))
    strided = tuple(x.to(memory_format=torch.channels_last) for x in given)
    wanted = Borders()(*[x.contiguous() for x in given])
    for call in (given, strided):
        assert all(torch.equal(program(*call)[name], value) for name, value in wanted.items())


@pytest.mark.slow(reason="compiles an export; programs take integers above")
def test_saved_and_exported_programs_take_integers(tmp_path):
    program, given = built()[2], inputs()
    wanted = program(*given)
    program.save(tmp_path / "borders.intaglio")
    loaded = intaglio.load(tmp_path / "borders.intaglio")
    assert all(torch.equal(loaded(*given)[name], value) for name, value in wanted.items())
    outputs = exported(program, tmp_path / "c")(*given)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, wanted.values(), strict=True))


def test_inductor_reads_int8_as_uint8():
    reference, given = built()[0], inputs()
    results = graph_for_inductor(reference)(*given)
    for ours, theirs in zip(results, reference(*given).values(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert "torch.int8" not in str([node.args for node in graph_for_inductor(reference).graph.nodes
                                    if "quantize_per_tensor" in str(node.target)])  # fmt: skip


@pytest.mark.slow(reason="quantizes and saves another model; integers at borders are taken above")
def test_quantize_keeps_the_integers_of_a_partly_quantized_model(tmp_path):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, s):
            return self.layer(OPS.dequantize_per_tensor(s, *S8))

    model, given = Part().eval(), [inputs(n)[1] for n in (4, 5)]
    program = intaglio.quantize(model, given)
    assert not program.coverage.islands
    program.save(tmp_path / "part.intaglio")
    loaded = intaglio.load(tmp_path / "part.intaglio")
    assert torch.equal(loaded(given[1]), program(given[1]))
    assert (loaded(given[1]) - model(given[1])).abs().max() < 0.05 * model(given[1]).abs().max()


def test_an_input_with_other_readers_is_dequantized_by_arithmetic():
    class Both(nn.Module):
        def forward(self, u):
            return torch.relu(OPS.dequantize_per_tensor(u, *U8)), u.sum()

    x, model = inputs()[0], Both()
    program = stages.compile(stages.from_qdq(stages.capture(model, x)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(program(x), model(x), strict=True))


SCALES = torch.rand(3, generator=torch.Generator().manual_seed(5)) * 0.1 + 0.01
ZEROS = {torch.uint8: torch.tensor([0, 100, 255]), torch.int8: torch.tensor([-128, 3, 127])}
BOUNDS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


def of_channels(dtype: torch.dtype, low: int | None = None) -> tuple:
    """Return the arguments of a quantize or dequantize with a scale and a zero point for each channel."""
    first, last = BOUNDS[dtype]
    return SCALES, ZEROS[dtype].clamp(min=first if low is None else low), 1, first if low is None else low, last, dtype


PER_CHANNEL = {
    "to float": lambda q, x, how: torch.relu(OPS.dequantize_per_channel(q, *how)),
    "from float": lambda q, x, how: OPS.quantize_per_channel(torch.relu(x), *how),
    "between integers": lambda q, x, how: OPS.quantize_per_channel(
        torch.sigmoid(OPS.dequantize_per_channel(q, *how)), *how
    ),
    "dequantize": lambda q, x, how: OPS.dequantize_per_channel(q, *how),
    "quantize": lambda q, x, how: OPS.quantize_per_channel(x, *how),
    "inside": lambda q, x, how: torch.relu(OPS.dequantize_per_channel(OPS.quantize_per_channel(x, *how), *how)),
    "returned and read": lambda q, x, how: (
        y := OPS.quantize_per_channel(x, *how),
        OPS.dequantize_per_channel(y, *how) * 2,
    ),
    "narrow": lambda q, x, how: OPS.quantize_per_channel(x, *of_channels(how[-1], BOUNDS[how[-1]][0] + 1)),
    "two scales": lambda q, x, how: (
        OPS.dequantize_per_channel(q, *how),
        OPS.dequantize_per_tensor(q, 0.1, 3, *BOUNDS[how[-1]], how[-1]),
    ),
}


SIGNED = ("between integers",)
FURTHER = ("dequantize", "inside", "narrow", "quantize", "returned and read", "two scales")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.uint8) for case in PER_CHANNEL if case not in FURTHER),
        *((case, torch.int8) for case in SIGNED),
        *slow_params(
            *((case, torch.uint8) for case in FURTHER),
            reason="the same operators, without a function or with other readers",
        ),
        *slow_params(
            *((case, torch.int8) for case in PER_CHANNEL if case not in SIGNED),
            reason="signed integers at borders that the cases above have with other operators, or unsigned",
        ),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_scale_per_channel_at_the_border_needs_no_island(case, dtype, tmp_path):
    class Border(nn.Module):
        def forward(self, q, x):
            return PER_CHANNEL[case](q, x, of_channels(dtype)), q[:, :, 0, 0].numel()

    given = inputs()[dtype is torch.int8], inputs()[2]
    if case in ("from float", "quantize", "inside", "returned and read", "narrow"):
        given = given[0].float(), given[1]  # it is not read
    lowered = stages.requantize(stages.from_qdq(stages.capture(Border(), given)))
    program = stages.compile(lowered)
    assert not program.coverage.islands
    program.save(tmp_path / "border.intaglio")
    loaded = intaglio.load(tmp_path / "border.intaglio")
    for batch in (4, 7):
        q, x = (inputs(batch)[dtype is torch.int8], inputs(batch)[2])
        call = (q.to(given[0].dtype), x)
        wanted = torch.utils._pytree.tree_leaves(Border()(*call))
        found, interpreted, again = (
            torch.utils._pytree.tree_leaves(form(*call)) for form in (program, lowered, loaded)
        )
        for ours, same, kept, theirs in zip(found, interpreted, again, wanted, strict=True):
            if not isinstance(theirs, Tensor):
                continue
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, same)
            assert torch.equal(ours, kept)
            assert torch.equal(ours, theirs)
