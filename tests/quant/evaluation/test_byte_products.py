"""Products of signed bytes are exact."""

import pytest
import torch

from intaglio.quant.evaluation.byte_products import EXACT_PRODUCTS, byte_products, float_products, integer_products


@pytest.mark.parametrize("count", [1, 7, EXACT_PRODUCTS, 3 * EXACT_PRODUCTS + 5])
def test_all_ways_to_multiply_are_exact(count):
    """Bytes of one sign and of the largest magnitude make the largest sums; random ones cancel."""
    extreme = torch.tensor([-128, 127, -127], dtype=torch.int8)[:, None].repeat(1, count)
    mixed = torch.randint(-128, 128, (5, count), dtype=torch.int8)
    for x in (extreme, torch.cat([extreme, mixed])):
        wide = x.long()
        for multiply in (float_products, integer_products, byte_products):
            found = multiply(x, x)
            assert found.dtype is torch.int32
            assert torch.equal(found.long(), wide @ wide.t())
