"""Sizes and counts in reports: the unit fits the number, so that nothing small is printed as zero."""

import pytest

from intaglio.formatting.number_text import count_text, size_text
from intaglio.runtime.reports.coverage import Coverage, FloatPart


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (288, "288 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (46_720, "46.7 kB"),
        (999_949, "999.9 kB"),
        (999_960, "1.00 MB"),
        (25_950_000, "25.95 MB"),
        (186_800_000, "186.80 MB"),
        (999_994_000, "999.99 MB"),
        (999_996_000, "1.00 GB"),
        (1_024_000_000, "1.02 GB"),
        (8_796_093_022_208, "8.80 TB"),
        (2**60, "1.15 EB"),
        (2**80, "1208925.82 EB"),
    ],
)
def test_a_size_has_the_unit_that_fits_it(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (640, "640"),
        (1000, "1.0 k"),
        (12_345, "12.3 k"),
        (999_960, "1.0 M"),
        (43_700_000, "43.7 M"),
        (4_089_000_000, "4089.0 M"),
    ],
)
def test_a_count_has_the_unit_that_fits_it(count, text):
    assert count_text(count) == text


def coverage(macs: int, **changes) -> Coverage:
    values = {
        "macs_int8": macs,
        "macs_total": macs,
        "operators_int8": 2,
        "operators_total": 2,
        "islands": 0,
        "floats": (),
        "bytes_before": 288,
        "bytes_after": 320,
    }
    return Coverage(**{**values, **changes})


def test_the_coverage_of_a_small_model_has_numbers_larger_than_zero():
    text = str(coverage(640, loops=(FloatPart("0", "aten.linear.default", "the recipe leaves it in float", 32),)))
    assert text.splitlines()[:2] == [
        "100.0 % of 640 MACs and 2 of 2 operators in int8",
        "parameters take 320 bytes instead of 288 bytes",
    ]
    assert "[32 MACs]" in text


def test_the_coverage_of_a_model_without_multiply_accumulates_says_so():
    first, second = str(coverage(0)).splitlines()[:2]
    assert first == "2 of 2 operators in int8"
    assert second == "MACs are not counted: the model has no convolution, linear layer or matrix product"
