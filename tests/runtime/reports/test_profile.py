"""`QuantizedModel.profile`: which work is counted, what runs it, how it is printed."""

import re

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import BuildError, InputError
from intaglio.native import cpu as machine
from intaglio.native import peak_throughput as limits
from intaglio.runtime import quantized_model as runtime_model
from intaglio.runtime.reports.profile import MAX_CALLS, MAX_LINE_LENGTH, Profile, ProfiledStep
from support import nets
from support.int8_models import assert_same, built, compiled, picture

BEST = machine.isas()[0]


@pytest.fixture(scope="module")
def profile():
    return compiled(nets.Residual)[0].profile(picture(2), calls=2)


def parts_of(net, *inputs):
    return {part.name: part for part in intaglio.quantize(net, inputs, progress=False).profile(*inputs, calls=1).parts}


# -- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 16])
def test_multiply_accumulates_are_those_of_the_whole_batch(batch):
    model, lowered = compiled(nets.Residual)
    found = model.profile(picture(batch), calls=1)
    assert sum(part.macs for part in found.parts) == batch * lowered.macs[0] > 0


def test_macs_of_dynamic_image_sizes_are_symbolic():
    net, size = nn.Conv2d(3, 16, 3).eval(), torch.export.Dim("size", min=8)
    shapes = ({0: torch.export.Dim("n"), 2: size, 3: size},)
    model = intaglio.quantize(net, [picture()], dynamic_shapes=shapes, progress=False)
    for side in (9, 20):
        found = model.profile(picture(2, size=side), calls=1)
        assert sum(part.macs for part in found.parts) == 2 * 16 * (side - 2) ** 2 * 27


def test_a_transposed_convolution_counts_what_its_input_spreads():
    parts = parts_of(nn.ConvTranspose2d(3, 16, 3, stride=2).eval(), picture(2, size=5))
    assert sum(part.macs for part in parts.values()) == 2 * 5 * 5 * 3 * 16 * 9


# -- what runs it -----------------------------------------------------------------------------------------------------


def test_every_kernel_is_in_the_text_of_the_program(profile):
    """Functions of the program by their names, microkernels by the table of their family, one entry a height."""
    text = compiled(nets.Residual)[0].text("program")
    named = [re.sub(r"^tile_\d+x", "= tiles_x", part.kernel) for part in profile.parts]
    assert all(name in text if name.startswith("= ") else f"{name}(" in text for name in named)
    assert all((part.tile is None) == (part.macs == 0) for part in profile.parts)


@pytest.mark.skipif(BEST != "avx512vnni", reason="tiles of AVX512-VNNI")
def test_a_layer_has_the_largest_tile_it_uses():
    net = nn.Sequential(nn.Conv2d(3, 128, 1), nn.Conv2d(128, 128, 3, groups=128, padding=1), nn.Conv2d(128, 40, 1))
    parts = parts_of(net.eval(), picture(1, size=24))
    found = [(part.kernel, part.tile) for part in parts.values() if part.macs]
    assert found == [
        ("tile_6x4_u8", (6, 64)),
        ("depthwise_2x2_taps3x3_stride1x1_64", (4, 64)),
        ("tile_8x3_f32", (8, 48)),
    ]


def test_a_part_is_found_by_its_module():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())).eval()
    assert [part.path for part in parts_of(net, picture()).values() if part.macs] == ["0.0"]


@pytest.mark.parametrize("calls", [0, MAX_CALLS + 1])
def test_numbers_of_calls_that_cannot_be_meant_are_errors(calls):
    model = compiled(nets.Residual)[0]
    with pytest.raises(InputError, match=f"calls = {calls}; it must be 1 to 100000"):
        model.profile(picture(), calls=calls)


def test_float_islands_have_their_own_rows_in_a_profile():
    model, _ = built(lambda m, x: torch.fft.fft(m.c(x)).real + 1, picture())
    found = model.profile(picture(), calls=2)
    islands = [part for part in found.parts if part.island]
    assert len(islands) == model.coverage.islands == 1
    assert found.islands == sum(part.microseconds for part in islands) > 0
    assert islands[0].kernel == ""
    assert "1 float island " in str(found)


# -- the limit --------------------------------------------------------------------------------------------------------


def test_shares_of_the_limit_use_the_rates_of_the_threads_used(profile):
    if not limits.int8_rates(BEST, 1, 0.001):
        pytest.skip("this CPU has no probe")
    for part in profile.parts:
        share = part.gmacs / profile.limit if part.macs else None
        assert part.of_limit == (share and pytest.approx(share))


@pytest.mark.parametrize("isa", machine.isas())
def test_every_thread_has_a_rate_where_there_is_a_probe(isa):
    rates = limits.int8_rates(isa, 2, 0.001)
    assert len(rates) == (0 if isa == "portable" else 2)
    assert all(rate > 0 for rate in rates)


def test_instruction_sets_this_cpu_lacks_have_no_rates(monkeypatch):
    monkeypatch.setattr(machine, "isas", lambda: ("portable",))
    limits.int8_counter.cache_clear()
    assert limits.int8_rates("avx2", 1, 0.001) == []
    limits.int8_counter.cache_clear()


@pytest.mark.parametrize("problem", ["portable", "no compiler"])
def test_a_profile_without_a_limit_has_no_shares(problem, monkeypatch):
    model, lowered = compiled(nets.Residual)
    if problem == "portable":
        model = stages.compile(lowered, isa="portable")
    else:

        def refuse(*_):
            raise BuildError("limit", None, "no C++ compiler")

        monkeypatch.setattr(runtime_model, "int8_rates", refuse)
    found = model.profile(picture(), calls=1)
    assert found.limit is None
    assert {part.of_limit for part in found.parts} == {None}
    assert "peak throughput" not in str(found)


# -- the whole call ---------------------------------------------------------------------------------------------------


def test_the_overhead_of_a_call_is_never_negative():
    parts = tuple(ProfiledStep(name, "add", "", 10.0, 0) for name in "ab")
    assert Profile(parts, 1, call_microseconds=25.0).overhead == 5
    assert Profile(parts, 1, call_microseconds=15.0).overhead == 0
    assert "waits between timed steps" in str(Profile(parts, 1, call_microseconds=15.0))
    assert "waits between timed steps" not in str(Profile(parts, 1, call_microseconds=25.0))


def test_profiling_leaves_inputs_as_they_are():
    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.c(x)
        x.add_(1)
        return y

    model, _ = built(body, picture())
    x = picture()
    model.profile(x, calls=2)
    assert_same(x, picture())
    assert len(model.step_times(x)) == len(model.artifact.program.steps)
    assert_same(x, picture())


# -- how it reads -----------------------------------------------------------------------------------------------------


def test_the_profile_text_has_one_line_per_part_slowest_first(profile):
    head, left, names, *lines = str(profile).splitlines()
    assert head.endswith("GMAC/s") == (profile.limit is not None)
    assert left.startswith(f"{len(profile.parts)} steps")
    assert names.split() == ["us", "share", "GMAC/s", "peak", "tile", "kernel", "step"]
    assert [line.split()[0] for line in lines] == [f"{part.microseconds:.1f}" for part in profile.worst()]
    assert max(map(len, (head, left, names, *lines))) <= MAX_LINE_LENGTH


def test_long_names_are_cut_and_columns_stay_in_line():
    short = ProfiledStep("a", "conv2d", "", 2.0, 4000, "", "tile_6x4_u8", (6, 64), 0.5)
    text = str(
        Profile((short, ProfiledStep("b" * 200, "add", "", 1.0, 0, "", "p01_" + "b" * 200)), 1, 3.0, 4.0, "avx2")
    )
    *_, first, second = text.splitlines()
    assert first == "      2.0   66.7     2.0   50 %  6x64     tile_6x4_u8  a: conv2d, "
    assert second.startswith("      1.0   33.3                          p01_bbbbbb…  bbb")
    assert len(second) == MAX_LINE_LENGTH


def test_profile_rows_are_dictionaries_of_every_part(profile):
    assert [row["name"] for row in profile.rows()] == [part.name for part in profile.parts]
    assert all(row["gmacs"] == part.gmacs for row, part in zip(profile.rows(), profile.parts, strict=True))


def test_kinds_add_up_the_most_first(profile):
    kinds = profile.by_kind()
    assert sum(kinds.values()) == pytest.approx(profile.microseconds)
    assert list(kinds.values()) == sorted(kinds.values(), reverse=True)
