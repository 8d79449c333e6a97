"""Errors of rows by products of bytes: the kernels give the bits of NumPy, and the errors of the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.native import native_library
from intaglio.native.row_errors import MOST, row_errors, row_errors_numpy, split_rows, split_rows_numpy


@given(
    rows=st.integers(0, 40),
    k=st.integers(1, 900),
    positions=st.integers(0, 90),
    threads=st.integers(1, 3),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**31),
)
def test_the_kernels_give_the_bits_of_numpy_and_the_errors_of_the_definition(
    runtime_library, rows, k, positions, threads, exponent, seed
):
    make = np.random.default_rng(seed)
    values = make.standard_normal((rows, k)) * 10.0**exponent
    values[make.random(rows) < 0.2] = 0.0
    values[:, make.random(k) < 0.2] *= 1e-3
    offset = make.integers(-255, 256, k).astype(np.int32)
    operands = make.integers(-128, 128, (k, positions))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "runtime_if_built", lambda: runtime_library)
        split = split_rows(values, offset, threads)
        products = (split.digits.astype(np.int64) @ operands).astype(np.int32)
        errors = row_errors(products, split, threads)
    for found, expected in zip(split, split_rows_numpy(values, offset), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(errors, row_errors_numpy(products, split))

    upper, lower = split.digits.astype(np.int64)
    assert (abs(256 * upper + lower) <= MOST).all()
    rounded = (256 * upper + lower) * split.units[:, None]
    assert (abs(rounded - values) <= 0.5000001 * split.units[:, None]).all()
    exact = np.square(rounded @ (operands + offset[:, None])).sum(1)
    np.testing.assert_allclose(errors, exact, rtol=1e-9, atol=1e-9 * max(exact, default=0.0))
