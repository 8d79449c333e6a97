"""Constants of a program: one aligned block of memory, which the kernels read where it was written."""

import pickle

import numpy as np
import torch
from torch import nn

import intaglio
from intaglio.codegen.packed_constants import CONSTANT_ALIGNMENT, HUGE_PAGE, PackedConstants
from intaglio.runtime.artifact import aligned
from support import nets
from support.int8_models import assert_same, compiled, picture
from support.nets import Body


def test_constants_are_aligned_and_unchanged():
    blob, given = (
        PackedConstants(),
        [np.arange(n, dtype=kind) for kind in (np.uint8, np.int32, np.float32) for n in (1, 17, 64)],
    )
    starts = [blob.add(array) for array in given]
    whole = blob.array()
    assert all(start % CONSTANT_ALIGNMENT == 0 for start in starts)
    assert whole.ctypes.data % CONSTANT_ALIGNMENT == 0
    for start, array in zip(starts, given, strict=True):
        assert whole[start : start + array.nbytes].tobytes() == array.tobytes()


def test_equal_bytes_are_stored_once_whatever_their_type():
    blob = PackedConstants()
    assert blob.add(np.zeros(64, np.uint8)) == blob.add(np.zeros((4, 4), np.float32)) == 0
    assert blob.add(np.ones(64, np.uint8)) == blob.array().size - 64 == 64


def test_the_constant_buffer_grows():
    blob, piece = PackedConstants(), np.arange(HUGE_PAGE // 8 + 1)
    for i in range(8):
        blob.add(piece + i)
    whole = blob.array()
    found = [int(whole[at : at + 8].view(np.int64)[0]) for at in range(0, whole.size, whole.size // 8)]
    assert found == list(range(8))


def test_an_empty_constant_takes_no_bytes():
    assert PackedConstants().array().size == 0
    assert PackedConstants().add(np.zeros(0, np.int32)) == 0


def test_kernels_read_what_the_program_holds():
    artifact = compiled(nets.Residual)[0].artifact
    assert np.shares_memory(artifact.constants, artifact.program.constants)


def test_unaligned_constants_are_copied():
    array = np.arange(256, dtype=np.uint8)
    for start in range(2):
        found = aligned(array[start:])
        assert found.ctypes.data % 64 == 0
        assert np.array_equal(found, array[start:])


def test_a_pickled_program_includes_its_constants():
    model, lowered = compiled(nets.Residual)
    assert_same(pickle.loads(pickle.dumps(model))(picture()), lowered(picture()))


def test_a_value_may_have_the_name_of_a_constant():
    layers = Body(lambda m, x: m.weights(m.factor(x).relu()), weights=nn.Linear(8, 8), factor=nn.Linear(8, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model = intaglio.quantize(nets.randomize(layers), [x], progress=False)
    assert model(x).shape == (4, 8)
    source = model.text("program")
    assert "p02_weights(" in source
    assert "p02_weights_2 = " in source
