"""Every microkernel, through the loops that call it, against the reference of the operators. Compiled once."""

import os
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from intaglio.codegen.winograd_packing import TRANSFORM
from intaglio.kernels import ISAS, TileSpec, permutation, winograd_sizes
from intaglio.kernels.tile_spec import PACKED_RESULTS, RESULTS
from intaglio.native.units import HEADER_FOLDER
from intaglio.plan import BufferLifetime
from intaglio.plan.arena import first_fit
from support.matmul_cases import Case, case_data, cases, run
from support.matmul_library import HAS_VBMI, RUNNABLE_ISAS, SOFTWARE_ISAS, int4_specs, kernels
from support.slow_params import slow_params, slow_params_except

SIZE_LIMIT = 1 << 21
TESTED_ISAS = [*RUNNABLE_ISAS, *SOFTWARE_ISAS]
TESTED_RESULTS = [(isa, result) for isa in TESTED_ISAS for result in RESULTS]


def check(isa: str, case: Case) -> None:
    drawn = case_data(case)
    result = run(isa, case, drawn)
    assert np.array_equal(result.values, drawn.expected, equal_nan=True)
    assert drawn.remainder is None or np.array_equal(result.remainder, drawn.remainder)
    assert not result.stray, "bytes outside the result changed"
    assert (result.halo == case.zero_points[1]).all()


@pytest.mark.parametrize(
    "isa",
    slow_params_except(
        *(isa for isa in TESTED_ISAS if isa != "portable"),
        of=TESTED_ISAS,
        reason="portable code takes longest, and each of its kernels is compared below",
    ),
)
@settings(max_examples=5 * settings.default.max_examples)
@given(st.data())
def test_random_convolutions_match_the_reference_on_any_schedule(isa, data):
    case = data.draw(cases(isa))
    taps = case.taps[0] * case.taps[1]
    work = case.images * case.height * case.width * case.per_group * case.per_group_out * case.groups * taps
    assume(work < 30 * SIZE_LIMIT)
    check(isa, case)


@pytest.mark.parametrize("isa", [isa for isa in TESTED_ISAS if ISAS[isa].row_taps > 1])
@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_random_convolutions_whose_taps_of_a_row_share_pixels_match_the_reference(isa, data):
    case, taps = data.draw(cases(isa)), ISAS[isa].row_taps
    start, end = case.padding[2:]
    case = replace(
        case,
        blocks=1,
        rows=data.draw(st.integers(1, ISAS[isa].max_tile_rows[1])),
        row_taps=taps,
        groups=1,
        per_group=4 * data.draw(st.integers(1, 9)),
        taps=(case.taps[0], taps),
        stride=(case.stride[0], 1),
        dilation=(case.dilation[0], 1),
        width=max(taps - start - end, 0) + data.draw(st.integers(1, 80)),
        remainder=False,
        residual_remainder=False,
        result="f32" if case.result == "rows" else case.result,
    )
    assume(case.images * case.height * case.width * case.per_group * case.per_group_out * 21 < 30 * SIZE_LIMIT)
    check(isa, case)


@pytest.mark.parametrize("isa", [isa for isa in TESTED_ISAS if ISAS[isa].widens])
@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_random_convolutions_by_winograds_method_match_the_reference(isa, data):
    """Images have any height and width. With an odd one, the last squares of 2 by 2 results are partly outside of the
    image. Long lines, and those of many channels, are computed in parts."""
    case = data.draw(cases(isa))
    padding = data.draw(st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 2)]))
    case = replace(
        case,
        transformed=True,
        groups=1,
        per_group=16 * data.draw(st.sampled_from([1, 2, 3, 5, 40])),
        taps=(3, 3),
        stride=(1, 1),
        dilation=(1, 1),
        padding=padding,
        height=max(3 - padding[0] - padding[1], 0) + data.draw(st.integers(1, 12)),
        width=max(3 - padding[2] - padding[3], 0) + data.draw(st.sampled_from([1, 2, 5, 13, 28, 60, 250])),
    )
    assume(case.images * case.height * case.width * case.per_group * case.per_group_out * 9 < 30 * SIZE_LIMIT)
    check(isa, case)


def case_of_kernel(spec: TileSpec, seed: int, panels: int, missing: int) -> Case:
    """A line as wide as a few tiles are high: one call of the kernel and one of a lower one."""
    draw = np.random.default_rng(seed)
    zero_points, bounds = draw.choice([0, 1, 128, 254, 255], 3), np.sort(draw.integers(0, 256, 2))
    if spec.saturates:
        zero_points[1:], bounds = 0, np.array([0, 255])
    inputs, step = int(draw.integers(1, 70)), 16 if spec.sums else 4 if spec.row_taps > 1 or spec.widened else 1
    return Case(
        images=2,
        height=3,
        width=spec.rows * (1 + seed) + 2,
        taps=(3 if spec.sums else 1 if spec.row_taps == 1 else 2, 3),
        row_taps=spec.row_taps,
        per_group=-(-inputs // step) * step,
        widened=spec.widened,
        transformed=spec.sums,
        only=spec.widened or spec.sums,
        per_group_out=16 * spec.blocks * panels - missing,
        zero_points=tuple(map(int, zero_points)),
        bounds=(0, 255) if seed % 2 else tuple(map(int, bounds)),
        extreme=spec.clamps_float and seed == 3,
        exponent=int(draw.integers(-20, 21)) if spec.clamps_float else None,
        result=spec.result,
        blocks=spec.blocks,
        rows=spec.rows,
        saturates=spec.saturates,
        guard=spec.clamps_float,
        seed=seed,
        table="kernel" if spec.looks_up else "none",
        remainder=spec.remainder,
        residual_remainder=spec.residual_remainder,
        levels=1 + seed % 2,
    )


@pytest.mark.parametrize("isa", TESTED_ISAS)
def test_every_kernel_matches_its_reference(isa, subtests):
    """Check whole panels and parts of one: every column, every mask. After a crash, the name is the last in `-s`."""
    for spec in ISAS[isa].specs():
        if spec.looks_up and not HAS_VBMI:
            continue
        print(f"{isa} {spec.name}")
        with subtests.test(kernel=spec.name):
            for seed, (panels, missing) in enumerate([(2, 5), (1, 11), (2, 0), (1, 0)]):
                check(isa, case_of_kernel(spec, seed, panels, missing))


@pytest.mark.case("problem 14", "backend 27")
@pytest.mark.parametrize(("isa", "result"), TESTED_RESULTS)
def test_accumulators_at_their_extremes_do_not_saturate(isa, result):
    """255 times +-127 in every product, where 16-bit sums of pairs would overflow."""
    case = Case(height=3, width=9, per_group=64, per_group_out=70, taps=(3, 3), extreme=True, result=result)
    for zero_x in (0, 255):
        for blocks, max_tile_rows in ISAS[isa].max_tile_rows.items():
            check(isa, replace(case, zero_points=(zero_x, 3, 250), exponent=-22, blocks=blocks, rows=max_tile_rows))


@pytest.mark.parametrize("isa", TESTED_ISAS)
def test_threads_and_blocking_do_not_change_a_bit(isa):
    blocks, max_tile_rows = max(ISAS[isa].max_tile_rows.items())
    case = Case(
        images=2,
        height=7,
        width=23,
        per_group=9,
        per_group_out=150,
        taps=(3, 3),
        padding=(1, 1, 1, 1),
        zero_points=(7, 9, 0),
        blocks=blocks,
        rows=max_tile_rows,
    )
    drawn = case_data(case)
    for threads in (1, 2, 3, 8):
        for split in (0, 1 << 40):
            for chunk in (1, 1000, 1 << 30):
                schedule = {"threads": threads, "split_channels_below": split, "chunk_bytes": chunk}
                assert np.array_equal(run(isa, replace(case, **schedule), drawn).values, drawn.expected), schedule


@pytest.mark.parametrize("isa", [isa for isa in TESTED_ISAS if ISAS[isa].widens])
@pytest.mark.parametrize(
    "sizes",
    [
        {"per_group": 40, "width": 1700},
        {"per_group": 40, "width": 1700, "padding": (0, 0, 1, 1), "taps": (1, 3), "dilation": (1, 2)},
        {"per_group": 40, "width": 1700, "height": 3, "padding": (0, 0, 1, 1), "taps": (1, 3), "images": 2},
        {"per_group": 40, "width": 1700, "padding": (1, 1, 1, 1), "taps": (3, 3)},
        {"per_group": 64, "width": 300, "height": 9, "stride": (2, 2), "padding": (1, 1, 1, 1), "taps": (3, 3)},
        {"per_group": 8, "groups": 4, "width": 70},
        {"per_group": 6, "width": 70},
    ],
    ids=[
        "chunks of a line",
        "chunks of a padded line",
        "chunks of padded lines",
        "too large a line",
        "chunks of lines",
        "groups",
        "channels of no whole step",
    ],
)
def test_inputs_of_any_size_are_widened_or_multiplied_as_they_are(isa, sizes):
    case = Case(widened=True, per_group_out=40, rows=ISAS[isa].max_tile_rows[1], zero_points=(3, 5, 0), **sizes)
    drawn = case_data(case)
    for threads, split in ((1, 0), (2, 0), (3, 1 << 40)):
        result = run(isa, replace(case, threads=threads, split_channels_below=split), drawn)
        assert np.array_equal(result.values, drawn.expected)
        assert not result.stray


@pytest.mark.parametrize(("isa", "result"), [case for case in TESTED_RESULTS if ISAS[case[0]].has_setup])
@pytest.mark.parametrize("width", [1, 7, 14, 16, 17])
def test_tiles_of_several_lines_match_the_reference(isa, result, width):
    """Also with 16 bits, with a table after the tile, with a halo, and with lines that are left at the end."""
    for blocks, rows in ISAS[isa].max_tile_rows.items():
        case = Case(
            images=2,
            height=7,
            width=width,
            per_group=20,
            per_group_out=16 * blocks + 11,
            taps=(3, 3),
            padding=(1, 1, 1, 1),
            halos=(0, 1, 1),
            zero_points=(7, 9, 5),
            result=result,
            blocks=blocks,
            rows=rows,
            lines=rows // 16,
        )
        for stride in (1, 2):
            strided = replace(case, stride=(stride, stride), height=7 * stride, width=width * stride)
            check(isa, strided)
            check(
                isa,
                replace(
                    strided, halos=(0, 0, 0), residual_remainder=result == "add", remainder=result in PACKED_RESULTS
                ),
            )
            check(isa, replace(strided, threads=3, table="after" if result == "u8" else "none"))


@pytest.mark.parametrize(("isa", "result"), TESTED_RESULTS)
@pytest.mark.parametrize("inputs", [512, 513, 700])
def test_activations_that_exceed_the_first_cache_match_the_reference(isa, result, inputs):
    """Kernels for AMX load them by another instruction if no tap reads them again."""
    for blocks, max_tile_rows in ISAS[isa].max_tile_rows.items():
        case = Case(
            width=2 * max_tile_rows + 3,
            per_group=inputs,
            per_group_out=16 * blocks + 5,
            zero_points=(7, 9, 5),
            result=result,
            blocks=blocks,
            rows=max_tile_rows,
        )
        check(isa, case)
        check(isa, replace(case, taps=(1, 2), width=max_tile_rows + 1))


@pytest.mark.parametrize(("isa", "result"), TESTED_RESULTS)
def test_results_may_end_at_the_end_of_a_memory_page(isa, result):
    """Every part of a block, after whole blocks and alone: a store that covers more than its channels would fault."""
    for blocks, max_tile_rows in ISAS[isa].max_tile_rows.items():
        for outputs in range(1, 16 * blocks + 17):
            case = Case(
                width=max_tile_rows,
                per_group=3,
                per_group_out=outputs,
                result=result,
                blocks=blocks,
                rows=max_tile_rows,
            )
            check(isa, replace(case, behind=0, seed=outputs))


@pytest.mark.parametrize("isa", TESTED_ISAS)
def test_the_oracle_detects_one_flipped_bit_of_a_weight(isa):
    case = Case(width=5, per_group=5, per_group_out=20, result="f32", blocks=min(2, ISAS[isa].blocks), rows=4)
    drawn = case_data(case)
    assert np.array_equal(run(isa, case, drawn).values, drawn.expected)
    flipped = drawn.weight.copy()
    flipped[17, 4] ^= 1
    wrong = run(isa, case, replace(drawn, weight=flipped)).values != drawn.expected
    assert wrong[:, 17].any()
    assert not np.delete(wrong, 17, axis=1).any()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_packed_columns_are_a_permutation_of_the_panel(blocks):
    assert sorted(permutation(True, blocks)) == permutation(False, blocks) == list(range(16 * blocks))


def test_kernel_names_are_unique():
    for isa in ISAS.values():
        names = [spec.name for spec in isa.specs()]
        assert len(names) == len(set(names))


AVX512 = "avx512f+avx512bw+avx512dq+avx512vl+avx512_vnni"
ASSEMBLER = {
    "avx2": "avx2+popcnt",
    "avxvnni": "avx2+popcnt+avx_vnni",
    "avx512vnni": AVX512,
    "amx_int8": f"{AVX512}+amx_int8+prfchw",  # every processor with AMX has PREFETCHW
}
"""Extensions that g++ enables in the assembler for each set. Every set has those of the sets before it, but not
AVX-VNNI, which some processors with AVX512-VNNI lack."""


PAIRS = [(kernels_of, allowed) for kernels_of in ASSEMBLER for allowed in ASSEMBLER]
QUICK = [(isa, allowed) for isa, allowed in PAIRS if isa in ("avx2", "avxvnni", allowed)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="the assembler's option is that of g++")
@pytest.mark.parametrize(
    ("kernels_of", "allowed"),
    [
        *QUICK,
        *slow_params(
            *(pair for pair in PAIRS if pair not in QUICK),
            reason="much text, or errors; every kernel is assembled for its own set, and short texts for other sets",
        ),
    ],
)
def test_kernels_use_no_instruction_of_a_later_set(kernels_of, allowed):
    """The compiler does not look into assembly, and a better machine would run it."""
    isa = ISAS[kernels_of]
    specs = [*isa.specs(), *int4_specs(kernels_of)]
    families = {spec.family: isa.tiles(spec) for spec in specs if not spec.looks_up}
    text = "\n".join(re.sub(r"\bintaglio_", f"{name}_intaglio_", isa.family_text(f)) for name, f in families.items())
    command = ["g++", "-x", "assembler", "-c", "-", "-o", os.devnull, f"-Wa,-march=generic64+{ASSEMBLER[allowed]}"]
    status = subprocess.run(command, input=text, text=True, capture_output=True).returncode
    order = list(ASSEMBLER)
    includes = kernels_of != "avxvnni" and order.index(kernels_of) < order.index(allowed)
    assert (status == 0) == (kernels_of == allowed or includes)


# ---- the planner


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 1 << 33)), max_size=30))
def test_no_two_buffers_alive_together_overlap(isa, drawn):
    lives, sizes = [(min(a, b), max(a, b)) for a, b, _ in drawn], [size for _, _, size in drawn]
    offsets, total = kernels(isa).place(lives, sizes)
    assert (offsets, total) == first_fit([BufferLifetime("", *life, 0) for life in lives], sizes)
    ends = [offset + size + 64 for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % 64 == 0 for offset in offsets)
    assert max(ends, default=0) <= total
    for i, (first, last) in enumerate(lives):
        for j in range(i):
            alive = first <= lives[j][1] and lives[j][0] <= last
            assert not alive or ends[i] <= offsets[j] or ends[j] <= offsets[i]


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_buffers_that_never_meet_share_their_bytes(isa):
    assert kernels(isa).place([(0, 1), (2, 3), (1, 2)], [1000, 1000, 500]) == ([0, 0, 1088], 1088 + 576)


def test_every_tile_height_up_to_the_tallest_has_a_kernel():
    for isa in ISAS.values():
        for blocks, max_tile_rows in isa.max_tile_rows.items():
            assert {spec.rows for spec in isa.specs() if spec.blocks == blocks} == set(range(1, max_tile_rows + 1))
            assert TileSpec(max_tile_rows, blocks) in set(isa.specs())


def test_sizes_of_winograds_method_are_those_of_the_library():
    files = [HEADER_FOLDER / "layers" / f"winograd.{kind}" for kind in ("h", "cpp")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    numbers = {
        name: int(one) << int(bits or 0) for name, one, bits in re.findall(r"(\w+) = (\d+)(?: << (\d+))?,? ", text)
    }
    for name in ("MOST_INPUTS", "POSITIONS"):
        assert numbers[name] == getattr(winograd_sizes, name)


def test_sums_of_winograds_method_fit_in_their_integers():
    """Every input at the end of its range that makes a sum largest, and every weight."""
    sums = np.abs(np.kron(TRANSFORM, TRANSFORM)).sum(1) * 128
    assert sums.max() == 9 * 128 < 2**15
    of_inputs = 2 * 2 * 255  # two of two inputs, in both directions
    assert winograd_sizes.MOST_INPUTS * of_inputs * sums.max() < 2**31
    assert winograd_sizes.MOST_INPUTS * 4 * 9 * 255 * 128 < 2**31
