"""Copies of images with adjacent channels to planes of channels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.native.native_library import runtime
from intaglio.runtime.custom_op import MANY_ELEMENTS, in_memory_format


@given(st.integers(1, 3), st.integers(0, 70), st.integers(1, 50), st.integers(1, 3))
def test_planes_have_the_elements_of_the_pixels(images, count, channels, threads):
    pixels = np.arange(images * count * channels, dtype=np.float32).reshape(images, count, channels)
    planes = np.full((images * count * channels + 1,), -1, np.float32)
    runtime().intaglio_planes(pixels.ctypes.data, planes.ctypes.data, images, count, channels, threads)
    assert np.array_equal(planes[:-1].reshape(images, channels, count), pixels.transpose(0, 2, 1))
    assert planes[-1] == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 5, 3, 4), (2, 33, 30, 41)])
def test_images_are_contiguous_unless_an_input_is_channels_last(shape, dtype):
    assert MANY_ELEMENTS < 2 * 33 * 30 * 41
    contiguous = torch.arange(int(np.prod(shape))).remainder(251).to(dtype).reshape(shape)
    image = contiguous.to(memory_format=torch.channels_last)
    (copied,) = in_memory_format([image], [contiguous])
    assert copied.is_contiguous()
    assert copied.stride() == contiguous.stride()
    assert torch.equal(copied, contiguous)
    (kept,) = in_memory_format([image], [image])
    assert kept is image


def test_padded_images_become_contiguous():
    image = torch.rand(1, 33, 64, 80).to(memory_format=torch.channels_last)[..., :41]
    (copied,) = in_memory_format([image], [])
    assert copied.is_contiguous()
    assert torch.equal(copied, image)
