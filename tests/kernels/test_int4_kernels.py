"""Microkernels for 4-bit weights, through the loops that call them, against the reference of the operators."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.kernels import ISAS, TileSpec
from intaglio.kernels.tile_spec import PACKED_RESULTS
from support.matmul_cases import Case, case_data, run
from support.matmul_library import RUNNABLE_ISAS, SOFTWARE_ISAS, int4_specs

INT4_ISAS = [isa for isa in [*RUNNABLE_ISAS, *SOFTWARE_ISAS] if ISAS[isa].int4_tile_rows]


def check(isa: str, case: Case) -> None:
    drawn = case_data(case)
    result = run(isa, case, drawn)
    assert np.array_equal(result.values, drawn.expected, equal_nan=True)
    assert not result.stray, "bytes outside the result changed"


@st.composite
def int4_cases(draw, isa: str) -> Case:
    """A linear layer of any number of rows, as whole tiles and not, of lines and panels, with any result."""
    spec = draw(st.sampled_from(int4_specs(isa)))
    zero_points = draw(st.tuples(*[st.integers(0, 255)] * 3))
    return Case(
        width=draw(st.integers(1, 3 * spec.rows)),
        per_group=64 * draw(st.integers(1, 5)),
        per_group_out=draw(st.integers(1, 40 * spec.blocks)),
        zero_points=zero_points,
        extreme=draw(st.booleans()) and spec.result not in PACKED_RESULTS,
        int4=True,
        result=spec.result,
        blocks=spec.blocks,
        rows=spec.rows,
        saturates=False,
        levels=draw(st.integers(0, 2)),
        threads=draw(st.integers(1, 3)),
        split_channels_below=draw(st.sampled_from([0, 1 << 40])),
        behind=draw(st.sampled_from([0, 256])),
        seed=draw(st.integers(0, 1 << 30)),
    )


@pytest.mark.parametrize("isa", INT4_ISAS)
@given(st.data())
def test_random_linear_layers_match_the_reference(isa, data):
    check(isa, data.draw(int4_cases(isa)))


@pytest.mark.parametrize("isa", INT4_ISAS)
def test_every_kernel_matches_its_reference(isa, subtests):
    for spec in int4_specs(isa):
        with subtests.test(kernel=spec.name):
            case = Case(width=spec.rows, per_group=128, int4=True, saturates=False, zero_points=(7, 9, 250))
            case = replace(case, result=spec.result, blocks=spec.blocks, rows=spec.rows)
            for levels, outputs in enumerate((16 * spec.blocks, 32 * spec.blocks - 5), start=1):
                check(isa, replace(case, per_group_out=outputs, levels=levels, seed=outputs))


@pytest.mark.parametrize("isa", INT4_ISAS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_of_a_group_at_their_extremes_do_not_saturate(isa, sign):
    """255 times -8 or 7 in every product: 32640 in each of two 16-bit sums of a group of 32 inputs."""
    for blocks, rows in ISAS[isa].int4_tile_rows.items():
        case = Case(width=rows, per_group=192, per_group_out=40, int4=True, result="f32", blocks=blocks, rows=rows)
        drawn = case_data(case)
        ends = replace(
            drawn, x=np.full_like(drawn.x, 255), weight=np.full_like(drawn.weight, -120 if sign < 0 else 105)
        )
        sums = 192 * 255 * int(ends.weight[0, 0, 0, 0]) + drawn.bias
        expected = sums.astype(np.float32) * drawn.factor
        found = run(isa, case, ends).values
        assert np.array_equal(found, np.broadcast_to(expected[None, :, None, None], found.shape))


@pytest.mark.parametrize("int4", [False, True])
def test_weights_are_prefetched_into_one_or_two_levels_of_the_cache(int4):
    """Processors with AMX are those of Intel."""
    spec = TileSpec(1, 2, "rows", int4=int4)
    texts = {isa: ISAS[isa].kernel_text(spec) for isa in ("amx_int8", "avx512vnni")}
    assert "prefetcht1" in texts["amx_int8"]
    assert "prefetchnta" not in texts["amx_int8"]
    _, two_levels, one_level = re.split(r"\bjne 14f|\b14:", texts["avx512vnni"])
    assert "prefetcht1" in two_levels
    assert "prefetchnta" in one_level


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_every_block_of_8_bit_weights_is_prefetched(blocks):
    text = ISAS["avx512vnni"].kernel_text(TileSpec(1, blocks, "rows"))
    assert len(set(re.findall(r"prefetcht1 (\S+)", text))) == blocks
