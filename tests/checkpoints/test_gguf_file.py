"""Headers of GGUF files: metadata, places of tensors, and damaged files, which are errors."""

import contextlib
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio import stages
from intaglio.checkpoints.gguf_file import GgufFile
from intaglio.errors import ArtifactError, IntaglioError, UnsupportedError
from support.gguf_files import WRITERS, Tensor, gguf_bytes, text

WEIGHT = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
Q8_0, F32 = WRITERS["Q8_0"](WEIGHT), WRITERS["F32"](WEIGHT[0])
TENSORS = {"a.weight": Q8_0, "a.bias": F32}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def read(path, data):
    path.write_bytes(data)
    checkpoint = stages.read_checkpoint(path)
    for part in (checkpoint.weights, checkpoint.tensors):
        for name in part:
            part[name]
    return checkpoint


def array(kind, count, data):
    return struct.pack("<IIQ", 9, kind, count) + data


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (struct.pack("<IB", 0, 200), 200),
        (struct.pack("<Ib", 1, -100), -100),
        (struct.pack("<IH", 2, 60000), 60000),
        (struct.pack("<Ih", 3, -30000), -30000),
        (struct.pack("<II", 4, 4_000_000_000), 4_000_000_000),
        (struct.pack("<Ii", 5, -2_000_000_000), -2_000_000_000),
        (struct.pack("<If", 6, 0.1), float(np.float32(0.1))),
        (struct.pack("<IB", 7, 1), True),
        (struct.pack("<I", 8) + text("größer"), "größer"),
        (struct.pack("<I", 8) + text(b"a\xff"), "a\ufffd"),
        (struct.pack("<IQ", 10, 2**64 - 1), 2**64 - 1),
        (struct.pack("<Iq", 11, -(2**63)), -(2**63)),
        (struct.pack("<Id", 12, 0.1), 0.1),
        (array(1, 2, b"\xff\x01"), [-1, 1]),
        (array(7, 2, b"\1\0"), [True, False]),
        (array(8, 2, text("a") + text("")), ["a", ""]),
        (array(9, 2, struct.pack("<IQH", 2, 1, 7) + struct.pack("<IQ", 8, 0)), [[7], []]),
        (array(4, 0, b""), []),
    ],
)
def test_metadata_has_values_of_all_types(stored, value, path):
    found = read(path, gguf_bytes({"some.key": stored, "other": 5}, TENSORS)).metadata
    assert found == {"some.key": value, "other": 5}
    assert type(found["some.key"]) is type(value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 1, 8, 256])
def test_tensors_have_their_values(version, alignment, path):
    metadata = {} if alignment is None else {"general.alignment": alignment}
    found = read(path, gguf_bytes(metadata, TENSORS, version=version))
    np.testing.assert_array_equal(found.weights["a"].dequantized().numpy(), Q8_0.values)
    np.testing.assert_array_equal(found.tensors["a.bias"].numpy(), F32.values)
    assert found.format == "gguf Q8_0"


def test_tensors_may_have_one_to_four_axes_and_any_order(path):
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 32)).astype(np.float32)
    tensors = {name: WRITERS["Q8_0"](values[index]) for name, index in {"a.weight": ..., "b.weight": 0}.items()}
    tensors |= {"c.weight": WRITERS["Q8_0"](values[0, 0, 0]), "cls": WRITERS["Q8_0"](values[1, 1])}
    places = {"a.weight": 1024, "b.weight": 2048, "c.weight": 0, "cls": 64}
    found = read(path, gguf_bytes({}, tensors, places=places))
    assert set(found.weights) == {"a", "b"}
    for name in "ab":
        tensor = tensors[f"{name}.weight"]
        assert found.weights[name].quantized.shape == tensor.shape
        np.testing.assert_array_equal(found.weights[name].dequantized().numpy(), tensor.values)
    for name in ("c.weight", "cls"):
        np.testing.assert_array_equal(found.tensors[name].numpy(), tensors[name].values)


def patched(data, place, change):
    return data[:place] + change + data[place + len(change) :]


GOOD = gguf_bytes({"some.key": "text", "numbers": [1, 2, 3]}, TENSORS)
COUNTS, FIRST_KEY = 8, 24
INFO = GOOD.index(b"a.weight") + len("a.weight")
NUMBERS = GOOD.index(b"numbers") + len("numbers")
ALIGNMENT_VALUE = FIRST_KEY + len(text("general.alignment")) + 4
DAMAGED_FILES = {
    "header says that 9223372036854775808 tensors follow": patched(GOOD, COUNTS, struct.pack("<Q", 2**63)),
    "header says that 4294967295 entries of metadata follow": patched(GOOD, COUNTS + 8, struct.pack("<Q", 2**32 - 1)),
    "header says that 1099511627776 bytes follow": patched(GOOD, FIRST_KEY, struct.pack("<Q", 2**40)),
    "header says that 18446744073709551615 values": patched(
        patched(GOOD, NUMBERS + 4, struct.pack("<I", 8)), NUMBERS + 8, struct.pack("<Q", 2**64 - 1)
    ),
    "header says that 4611686018427387904 bytes": patched(GOOD, NUMBERS + 8, struct.pack("<Q", 2**60)),
    "value of type 13 inside of 0 arrays": patched(GOOD, NUMBERS, struct.pack("<I", 13)),
    "value of type 99 inside of 1 arrays": patched(GOOD, NUMBERS + 4, struct.pack("<I", 99)),
    "value of type 9 inside of 4 arrays": gguf_bytes(
        {"deep": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000}, TENSORS
    ),
    "boolean that is neither 0 nor 1": gguf_bytes({"flag": struct.pack("<IB", 7, 2)}, TENSORS),
    "has the key 'twice' twice": patched(
        gguf_bytes({"twice": 1, "tw-ce": 2}, TENSORS), gguf_bytes({"twice": 1, "tw-ce": 2}, TENSORS).index(b"-"), b"i"
    ),
    "the key b'.*' is not UTF-8": patched(GOOD, FIRST_KEY + 8, b"\xff"),
    "the tensor name b'.*' is not UTF-8": patched(GOOD, INFO - 1, b"\xff"),
    "has the tensor 'a.weight' twice": GOOD.replace(text("a.bias"), text("a.weight")),
    "has 0 axes": patched(GOOD, INFO, struct.pack("<I", 0)),
    "has 4294967295 axes": patched(GOOD, INFO, struct.pack("<I", 2**32 - 1)),
    r"of shape \[4, 65\] does not have rows of Q8_0 blocks of 32": patched(GOOD, INFO + 4, struct.pack("<Q", 65)),
    r"of shape \[0, 64\] does not have rows": patched(GOOD, INFO + 12, struct.pack("<Q", 0)),
    "'a.weight' ends at byte": patched(GOOD, INFO + 12, struct.pack("<Q", 2**62)),
    "'a.weight' begins at byte 16, which is no multiple of 32": patched(GOOD, INFO + 24, struct.pack("<Q", 16)),
    "'a.weight' and 'a.bias' overlap": gguf_bytes({}, TENSORS, places={"a.bias": 32}),
    "'a.weight' and 'b.weight' overlap": gguf_bytes({}, {"a.weight": Q8_0, "b.weight": Q8_0}, places={"b.weight": 0}),
    "its alignment is 0,": gguf_bytes({"general.alignment": 0}, TENSORS),
    "its alignment is 48,": gguf_bytes({"general.alignment": 48}, TENSORS),
    "its alignment is 'many',": gguf_bytes({"general.alignment": "many"}, TENSORS),
    "'a.weight' ends at byte 214748": patched(
        gguf_bytes({"general.alignment": 32}, {"a.weight": Q8_0}), ALIGNMENT_VALUE, struct.pack("<I", 2**31)
    ),
    "scales that are not finite": gguf_bytes(
        {}, {"a.weight": Tensor("Q8_0", Q8_0.shape, b"\x00\x7c" + Q8_0.data[2:], Q8_0.values)}
    ),
}


@pytest.mark.parametrize("problem", DAMAGED_FILES)
def test_damaged_files_are_errors(problem, path):
    with pytest.raises(ArtifactError, match=problem) as error:
        read(path, DAMAGED_FILES[problem])
    assert error.value.remedy == "get the file again: it is damaged, or not completely downloaded"
    read(path, GOOD)


def test_files_that_end_anywhere_are_errors(path):
    for length in range(4, len(GOOD)):
        with pytest.raises(ArtifactError):
            read(path, GOOD[:length])


@given(st.data())
def test_changed_bytes_give_an_error_or_a_checkpoint(data):
    changed = bytearray(GOOD)
    for place in data.draw(st.lists(st.integers(4, len(GOOD) - 1), min_size=1, max_size=4)):
        changed[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(IntaglioError):
        read(Path(folder) / "model.gguf", changed)


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (1, "it is of version 1 of GGUF; versions 2 and 3, little-endian, are read"),
        (4, "it is of version 4 of GGUF"),
        (3 << 24, "it is of the big-endian version 3 of GGUF"),
    ],
)
def test_other_versions_are_refused_by_name(version, problem, path):
    with pytest.raises(UnsupportedError, match=problem):
        read(path, gguf_bytes({}, TENSORS, version=version))


def test_a_file_that_is_changed_after_it_was_opened_is_an_error(path):
    path.write_bytes(GOOD)
    checkpoint = stages.read_checkpoint(path)
    path.write_bytes(GOOD[: -len(F32.data) - 100])
    with pytest.raises(ArtifactError, match=r"it ends inside of the tensor 'a.weight'"):
        checkpoint.weights["a"]
    os.remove(path)
    with pytest.raises(ArtifactError, match="it cannot be read"):
        checkpoint.weights["a"]


def test_named_pipes_and_folders_are_not_opened(path):
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match="it is not a regular file"):
        stages.read_checkpoint(path)
    with pytest.raises(ArtifactError, match="it cannot be read"):
        GgufFile(path.parent)
