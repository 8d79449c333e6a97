"""Products of signed bytes are exact."""

import pytest
import torch

from intaglio.quant.evaluation.byte_products import EXACT_PRODUCTS, byte_products, float_products, integer_products


@pytest.mark.parametrize("count", [1, 7, EXACT_PRODUCTS, 3 * EXACT_PRODUCTS + 5])
def test_both_ways_to_multiply_are_exact(count):
    """Bytes of one sign and of the largest magnitude make the largest sums; random ones cancel."""
    extreme = torch.tensor([-128, 127, -127], dtype=torch.int8)[:, None].repeat(1, count)
    mixed = torch.randint(-128, 128, (5, count), dtype=torch.int8)
    for x in (extreme, torch.cat([extreme, mixed])):
        wide = x.long()
        assert torch.equal(float_products(x, x), wide @ wide.t())
        assert torch.equal(integer_products(x, x).long(), wide @ wide.t())
        assert torch.equal(byte_products(x, x).long(), wide @ wide.t())
