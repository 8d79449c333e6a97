"""Large weights of a loaded model stay in its file, and its program is printed once: later loads read the cache."""

import contextlib
import gc
import hashlib
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio.build import stored_programs
from intaglio.codegen import PrintedProgram
from intaglio.codegen.emitters import emit_linear_f32, emit_matmul
from intaglio.errors import ArtifactError
from intaglio.ir import Constants, StoredArray
from intaglio.native import program_cache
from intaglio.plan import Plan
from intaglio.runtime import QuantizedModel
from intaglio.runtime.saved.members import Member, OpenFile
from intaglio.runtime.saved.stored_arrays import stored_arrays
from support import nets
from support.slow_params import slow_params_except

FEATURES = 512
RECIPES = {
    "int8": {},
    "int4": {"weights_dtype": "s4", "weights": "group:32"},
    "half": {"activations": "float", "weights_dtype": "f16"},
}


@pytest.fixture(
    scope="module",
    params=slow_params_except("int4", of=RECIPES, reason="weights of 8 and of 16 bits are stored in the same way"),
)
def saved(request, tmp_path_factory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """The file of a model with a large weight, an input and its result."""
    torch.manual_seed(0)
    model = nets.randomize(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()))
    x, path = torch.randn(4, FEATURES), tmp_path_factory.mktemp("stored") / "model.intaglio"
    setting = {"rounding": "nearest", "equalize": 0.0, **RECIPES[request.param]}
    int8 = intaglio.quantize(model, [x], recipe={"*": setting}, progress=False)
    int8.save(path)
    return path, x, int8(x)


@pytest.fixture
def packed(monkeypatch) -> list[str]:
    """The names of weights that are packed during the test."""
    found: list[str] = []
    for module, name in ((emit_matmul, "pack_int4"), (emit_matmul, "pack_weights"), (emit_linear_f32, "pack_panels")):
        pack = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, p=pack, n=name: (found.append(n), p(*args))[1])
    return found


def large(model: QuantizedModel) -> Iterator[str]:
    constants = model.graph.constants
    return (name for name in constants if constants.is_stored(name))


def test_large_weights_stay_in_the_file(saved, fresh_programs):
    path, x, expected = saved
    model = intaglio.load(path, trust=True)
    assert list(large(model))
    assert torch.equal(model(x), expected)


@pytest.mark.slow(reason="loads and saves again what is in the file")
def test_what_reads_weights_again_finds_them(saved, fresh_programs, tmp_path):
    path, x, expected = saved
    model, whole = intaglio.load(path, trust=True), path.read_bytes()
    moved = tmp_path / "moved.intaglio"
    model.save(moved)
    assert moved.read_bytes() == whole
    copy = pickle.loads(pickle.dumps(model))
    assert not list(large(copy))
    assert torch.equal(copy(x), expected)
    assert torch.equal(intaglio.load(path, trust=True, isa="portable")(x), expected)


def test_a_file_may_be_deleted_and_replaced_while_it_is_used(saved, fresh_programs, tmp_path):
    path, x, expected = saved
    copy, again = tmp_path / "copy.intaglio", tmp_path / "again.intaglio"
    copy.write_bytes(path.read_bytes())
    model = intaglio.load(copy, trust=True)
    model.save(copy)
    copy.unlink()
    model.save(again)
    assert again.read_bytes() == path.read_bytes()
    assert torch.equal(model(x), expected)


def test_a_file_that_is_written_while_it_is_used_is_an_error(saved, fresh_programs, tmp_path):
    path, x, expected = saved
    copy, content = tmp_path / "copy.intaglio", bytearray(path.read_bytes())
    copy.write_bytes(content)
    model = intaglio.load(copy, trust=True)
    os.utime(copy, ns=(0, 0))
    model.save(tmp_path / "same.intaglio")  # the time changed, the bytes did not
    with zipfile.ZipFile(copy) as archive:
        start = archive.getinfo("weights.safetensors").header_offset + 10_000
    content[start : start + 8] = bytes(255 - byte for byte in content[start : start + 8])
    with copy.open("r+b") as file:
        file.write(content)
    with pytest.raises(ArtifactError, match="was changed after the file was loaded"):
        model.save(tmp_path / "other.intaglio")
    with copy.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ArtifactError, match="shorter than it says"):
        model.save(tmp_path / "other.intaglio")
    assert torch.equal(model(x), expected)


@pytest.mark.slow(reason="collects garbage until the file is closed")
def test_the_file_is_closed_when_nothing_reads_it(saved, fresh_programs):
    path, *_ = saved

    def open_files() -> list[str]:
        return [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]

    model = intaglio.load(path, trust=True)
    assert os.path.realpath(path) in open_files()
    del model
    gc.collect()
    assert os.path.realpath(path) not in open_files()


def test_a_program_is_printed_once(saved, fresh_programs, packed, monkeypatch):
    path, x, expected = saved
    first = intaglio.load(path)
    count = len(packed)
    entries = list((fresh_programs / program_cache.FOLDER).iterdir())
    assert len(entries) == 1
    assert os.stat(entries[0]).st_mode & 0o022 == 0
    with monkeypatch.context() as patch:
        patch.setattr(stored_programs, "plan_graph", None)
        patch.setattr(stored_programs, "emit", None)
        second = intaglio.load(path)
    assert len(packed) == count
    a, b = first.artifact.program, second.artifact.program
    assert np.array_equal(a.constants, b.constants)
    assert replace(a, constants=b.constants).__dict__ == b.__dict__
    assert second.text("plan") == first.text("plan")
    assert torch.equal(second(x), expected)


def test_weights_are_packed_once_if_this_version_prints_another_text(saved, fresh_programs, packed, monkeypatch):
    path, x, expected = saved
    emit, printed = stored_programs.emit, []

    def another(plan: Plan, name: str) -> PrintedProgram:
        found = emit(plan, name)
        printed.append(name)
        return replace(found, text=replace(found.text, source=f"{found.text.source}\nextern int another_text;\n"))

    monkeypatch.setattr(stored_programs, "emit", another)
    for _ in range(3):
        model = intaglio.load(path, trust=True)
        assert torch.equal(model(x), expected)
        assert len(printed) == 2  # for the settings of the library, and for those of this machine
        assert len(packed) == 1


def test_a_damaged_digest_of_a_text_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path))
    assert program_cache.known_text("key") == ""
    program_cache.write_text("key", "0123abcd")
    assert program_cache.known_text("key") == "0123abcd"
    assert program_cache.known_text("other") == ""
    (entry,) = (tmp_path / program_cache.FOLDER).iterdir()
    content = entry.read_bytes()
    for damaged in (b"", content[:-1], content[1:], b"\xff" + content[1:], b"0123abce" + content[8:]):
        entry.write_bytes(damaged)
        assert program_cache.known_text("key") == ""


@pytest.mark.slow(reason="compiles programs of other names; entries of other weights are compared below")
def test_programs_for_other_names_and_instruction_sets_have_other_entries(saved, fresh_programs, tmp_path):
    path, x, expected = saved
    renamed = tmp_path / "renamed.intaglio"
    model = intaglio.load(path)
    model.model_info = replace(model.model_info, name="renamed")
    model.save(renamed)
    assert intaglio.load(renamed).artifact.program.name == "renamed"
    assert torch.equal(intaglio.load(path, isa="portable")(x), expected)
    assert len(list((fresh_programs / program_cache.FOLDER).iterdir())) == 3


def test_a_damaged_entry_is_printed_again(saved, fresh_programs, caplog):
    path, x, expected = saved
    intaglio.load(path, trust=True)
    (entry,) = (fresh_programs / program_cache.FOLDER).iterdir()
    content = entry.read_bytes()
    for damaged in (content[:-1], content[:-40] + bytes(40), bytes([content[0] ^ 1]) + content[1:], b""):
        entry.write_bytes(damaged)
        assert torch.equal(intaglio.load(path, trust=True)(x), expected)
        assert entry.read_bytes() == content
    entry.chmod(0o666)
    assert torch.equal(intaglio.load(path, trust=True)(x), expected)
    assert "lets others write" in caplog.text


@pytest.mark.parametrize("bytes_at_once", [1000, 1 << 17])
def test_an_entry_is_checked_in_every_piece(tmp_path, monkeypatch, bytes_at_once):
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(program_cache, "PIECE_BYTES", bytes_at_once)
    draw = np.random.default_rng(0)
    constants, record = draw.bytes(123_456), draw.bytes(70_001)
    program_cache.write("key", memoryview(constants), record)
    (entry,) = (tmp_path / program_cache.FOLDER).iterdir()
    content = entry.read_bytes()

    def read() -> tuple[memoryview, bytes] | None:
        return program_cache.read("key", lambda size: memoryview(bytearray(size)))

    assert read() == (constants, record)
    for place in (0, 123_455, 123_456, 150_000, *range(len(content) - 41, len(content))):
        entry.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert read() is None
    for damaged in (b"", content[1:], content[:-1], content[-40:]):
        entry.write_bytes(damaged)
        assert read() is None


def test_other_weights_and_other_code_have_other_entries(saved, fresh_programs, tmp_path, monkeypatch):
    path, x, expected = saved
    model, other = intaglio.load(path, trust=True), tmp_path / "other.intaglio"
    state = model.state_dict()
    name = next(key for key in state if key.endswith("bias") and state[key].numel() == FEATURES)
    state[name] = state[name] + 1
    model.load_state_dict(state)
    model.save(other)
    changed = model(x)
    assert not torch.equal(changed, expected)
    assert torch.equal(intaglio.load(other, trust=True)(x), changed)
    assert torch.equal(intaglio.load(path, trust=True)(x), expected)
    monkeypatch.setattr(program_cache, "_code", lambda: "another version")
    intaglio.load(path, trust=True)
    assert len(list((fresh_programs / program_cache.FOLDER).iterdir())) == 3


@pytest.mark.parametrize("damage", [lambda text: text.replace(b"numpy", b"nympu"), lambda text: pickle.dumps(None)])
def test_a_program_that_other_packages_have_stored_is_printed_again(damage, saved, fresh_programs, packed, monkeypatch):
    path, x, expected = saved
    write = program_cache.write
    with monkeypatch.context() as patch:
        patch.setattr(program_cache, "write", lambda key, constants, record: write(key, constants, damage(record)))
        intaglio.load(path, trust=True)
    packed.clear()
    assert torch.equal(intaglio.load(path, trust=True)(x), expected)
    assert packed
    packed.clear()
    assert torch.equal(intaglio.load(path, trust=True)(x), expected)  # the entry was written again
    assert not packed


def test_other_versions_of_python_and_numpy_have_other_entries(saved, fresh_programs, monkeypatch):
    intaglio.load(saved[0], trust=True)
    monkeypatch.setattr(np, "__version__", "1.0")
    intaglio.load(saved[0], trust=True)
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    intaglio.load(saved[0], trust=True)
    assert len(list((fresh_programs / program_cache.FOLDER).iterdir())) == 3


def test_constants_of_version_0_2_are_evicted(saved, fresh_programs, monkeypatch):
    folder = fresh_programs / program_cache.FOLDER
    folder.mkdir(mode=0o700)
    old = folder / "0123.constants"
    old.write_bytes(bytes(5 << 20))
    os.utime(old, (0, 0))
    monkeypatch.setenv("INTAGLIO_CACHE_MB", "1")
    intaglio.load(saved[0])
    assert [entry.suffix for entry in folder.iterdir()] == [program_cache.SUFFIX]


def test_a_cache_without_space_stores_nothing(saved, fresh_programs, monkeypatch):
    path, x, expected = saved
    monkeypatch.setenv("INTAGLIO_CACHE_MB", "0")
    assert torch.equal(intaglio.load(path, trust=True)(x), expected)
    assert not (fresh_programs / program_cache.FOLDER).exists()


def test_arrays_that_are_added_change_the_digest():
    stored = Constants({"a": np.zeros(3)}, "digest")
    found = [(stored | {"b": array}).source for array in (np.zeros(2), np.ones(2), np.zeros(2, np.float32))]
    assert len({*found, stored.source}) == 4
    assert (Constants({"a": np.zeros(3)}) | {"b": np.zeros(2)}).source == ""
    assert stored.only({"a"}).source == "digest"


def test_a_stored_array_is_read_each_time():
    calls: list[int] = []
    stored = StoredArray((2,), np.dtype(np.int8), lambda: (calls.append(1), np.array([1, 2], np.int8))[1])
    constants = Constants({"a": stored}) | {"b": np.zeros(4, np.int8)}
    assert (constants.layout("a"), constants.nbytes("a"), constants.nbytes("b")) == (((2,), np.dtype(np.int8)), 2, 4)
    assert not calls
    assert [constants["a"].tolist(), constants["a"].tolist()] == [[1, 2], [1, 2]]
    assert len(calls) == 2


def member(folder: Path, content: bytes) -> Member:
    path = folder / "arrays"
    path.write_bytes(content)
    return Member(OpenFile(os.open(path, os.O_RDONLY), path), "arrays", 0, len(content))


def test_a_file_is_hashed_again_once_for_each_change(tmp_path, monkeypatch):
    calls, compute = list[int](), Member._computed_digest
    monkeypatch.setattr(Member, "_computed_digest", lambda self: (calls.append(1), compute(self))[1])
    checked = member(tmp_path, b"content").checked(hashlib.sha256(b"content").hexdigest())
    assert checked is not None
    for count in (2, 3):
        os.utime(tmp_path / "arrays", ns=(count, count))
        assert [checked.read(1, 3), checked.read()] == [b"ont", b"content"]
        assert len(calls) == count


def test_arrays_are_those_of_the_safetensors_library(tmp_path):
    kinds = (np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64)
    arrays = {np.dtype(kind).name: np.arange(6).astype(kind).reshape(2, 3) for kind in kinds}
    arrays |= {"scalar": np.array(3.0), "none": np.zeros((0, 4), np.float32)}
    stored = stored_arrays(member(tmp_path, safetensors.numpy.save(arrays, {"written": "by a test"})))
    assert set(stored) == set(arrays)
    for name, array in arrays.items():
        assert stored.layout(name) == (array.shape, array.dtype)
        assert stored[name].dtype == array.dtype
        assert np.array_equal(stored[name], array)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_header_is_read_or_refused(tmp_path_factory, text, length):
    folder = tmp_path_factory.mktemp("headers")
    for content in (struct.pack("<Q", length) + text, struct.pack("<Q", len(text)) + text, text):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # those of `errors.MALFORMED` that may occur
            stored_arrays(member(folder, content))


@pytest.mark.parametrize(
    "entry",
    [
        b'{"dtype":"F32","shape":[2],"data_offsets":[0,4]}',
        b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',
        b'{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}',
        b'{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}',
        b'{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}',
        b'{"dtype":"U8","shape":[1],"data_offsets":[0]}',
        b"[]",
    ],
)
def test_an_array_outside_of_the_member_is_refused(tmp_path, entry):
    header = b'{"a":' + entry + b"}"
    with pytest.raises((ValueError, TypeError)):
        stored_arrays(member(tmp_path, struct.pack("<Q", len(header)) + header + bytes(4)))
