"""Files and caches that are damaged, hostile, full or shared: an error that says so, or the same bits. Nothing runs."""

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import intaglio
from intaglio.errors import ArtifactError, BuildError
from intaglio.native.compile import build
from intaglio.runtime import QuantizedModel
from support import nets
from support.file_limits import files_no_larger_than
from support.int8_models import assert_same, compiled
from support.slow_params import slow_params

NET = nets.ConvThenUnsupported


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A file with a float part, an example and a library."""
    path = tmp_path_factory.mktemp("files") / "good.intaglio"
    compiled(NET)[0].save(path, example=nets.example(NET()))
    return path


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sealed(members: dict[str, bytes]) -> bytes:
    """A file of these members whose digests fit, as somebody who means harm would write it."""
    manifest = json.loads(members["manifest.json"])
    rest = {name: content for name, content in members.items() if name != "manifest.json"}
    manifest["digests"] = {name: hashlib.sha256(content).hexdigest() for name, content in rest.items()}
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in {"manifest.json": json.dumps(manifest).encode(), **rest}.items():
            archive.writestr(name, content)
    return memory.getvalue()


def loaded(content: bytes, **options) -> QuantizedModel | None:
    """The model in these bytes; ``None`` where `ArtifactError` refuses them, with a remedy."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.intaglio")
        path.write_bytes(content)
        try:
            return intaglio.load(path, **options)
        except ArtifactError as error:
            refusal = error
    assert refusal.where.startswith(str(path))
    assert refusal.problem
    assert refusal.remedy
    return None


# ---- damage

CHANGES = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("remove"), st.floats(0, 1), st.integers(1, 64)),
    st.tuples(st.just("zero"), st.floats(0, 1), st.integers(1, 4096)),
)


def damaged(content: bytes, kind: str, place: float, amount: int) -> bytes:
    at, data = int(place * max(len(content) - 1, 0)), bytearray(content)
    match kind:
        case "flip":
            data[at : at + 1] = bytes(byte ^ amount for byte in data[at : at + 1])
        case "cut":
            del data[at:]
        case "insert":
            data.insert(at, amount)
        case "remove":
            del data[at : at + amount]
        case "zero":
            data[at : at + amount] = bytes(len(data[at : at + amount]))
    return bytes(data)


@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
def test_a_damaged_file_is_refused_or_harmless(good, changes):
    content = good.read_bytes()
    for change in changes:
        content = damaged(content, *change)
    if (model := loaded(content)) is not None:
        model.verify()
        x = nets.example(NET(), 3)
        assert_same(model(x), compiled(NET)[0](x))


def places_in(value, path=()) -> Iterator[tuple]:
    """Every number, text, list and dictionary inside a JSON value."""
    if path:
        yield path
    if isinstance(value, (list, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[key], (*path, key))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 300),
    st.floats(-1e300, 1e300),
    st.sampled_from(["", "x", "n", "/etc/passwd", "\n#error", "aten.erf.default", "u8", "island0"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-1, 5), max_size=4),
)
TEXTS = ("graph.json", "islands.json", "manifest.json", "texts.json")


class SoundError(Exception):
    """Stands for a build: the graph was found to be sound."""


@given(data=st.data())
def test_arbitrary_json_values_in_a_file_are_refused_or_harmless(good, data):
    """Forged files, with digests that fit: refused with a reason, or sound enough to be compiled; nothing else."""
    members = members_of(good)
    name = data.draw(st.sampled_from(TEXTS))
    held = json.loads(members[name])
    path = data.draw(st.sampled_from(list(places_in(held))))
    inner = held
    for key in path[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[path[-1]] = data.draw(JUNK)
    else:
        del inner[path[-1]]
    forged = sealed({**members, name: json.dumps(held).encode()})
    compiles = mock.patch("intaglio.build.build_artifact", side_effect=SoundError)
    with compiles, contextlib.suppress(SoundError):
        assert loaded(forged) is None


# ---- harm


class Bomb:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_malicious_pickle_runs_where_pickles_are_read(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_no_pickle_in_a_file_is_read(good, tmp_path):
    bomb, members = pickle.dumps(Bomb(tmp_path / "ran")), members_of(good)
    saved = io.BytesIO()
    torch.save(Bomb(tmp_path / "ran"), saved)
    for poison in (bomb, saved.getvalue()):
        loaded(poison, trust=False)
        for name in {*members, "data.pkl", "archive/data.pkl"} - {"manifest.json"}:
            loaded(sealed({**members, name: poison}))
        assert loaded(sealed({**members, "manifest.json": members["manifest.json"], "data.pkl": poison})) is None
    assert not (tmp_path / "ran").exists()


def poisoned_library(mark: Path) -> bytes:
    """A shared object that makes a file when it is mapped."""
    source = f"""
        #include <fcntl.h>
        __attribute__((constructor)) static void poison() {{ open("{mark}", O_CREAT | O_WRONLY, 0600); }}
    """
    return build(source, name="poison", isa="portable").read_bytes()


def test_a_malicious_library_runs_only_with_trust(good, fresh_programs, tmp_path):
    members = members_of(good)
    libraries = {name: poisoned_library(tmp_path / "ran") for name in members if name.endswith(".so")}
    path = tmp_path / "m"
    path.write_bytes(sealed({**members, **libraries}))
    model = intaglio.load(path)
    model.verify()
    model.save(tmp_path / "again")
    intaglio.load(tmp_path / "again", trust=True).verify()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BuildError, match="the library does not contain a program"):
        intaglio.load(path, trust=True)
    assert (tmp_path / "ran").exists()


# ---- caches


def entries(cache: Path) -> list[str]:
    """Libraries and scratch folders in a cache."""
    return sorted(path.name for path in cache.rglob("*") if path.suffix == ".so" or path.name.startswith(".build-"))


WAYS: dict[str, Callable[[Path], object]] = {
    "built": lambda path: intaglio.load(path),
    "trusted": lambda path: intaglio.load(path, trust=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("room", [0, *slow_params(4096, reason="a file that ends in the middle")])
def test_a_full_cache_folder_is_an_error_and_nothing_is_half_written(way, room, good, fresh_cache):
    with files_no_larger_than(room), pytest.raises(BuildError):
        way(good)
    assert entries(fresh_cache) == []
    way(good).verify()


def test_a_full_folder_keeps_the_file_there_was(good, tmp_path):
    model, path = compiled(nets.Linears)[0], tmp_path / "m"
    shutil.copy(good, path)
    with files_no_larger_than(4096), pytest.raises(ArtifactError, match=r"cannot be written: File too large\n  remedy"):
        model.save(path)
    assert os.listdir(tmp_path) == ["m"]
    assert path.read_bytes() == good.read_bytes()


@pytest.fixture
def read_only(monkeypatch) -> Callable[[], None]:
    """From when it is called, nothing can be made, replaced or touched: permissions do not hold root."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def begin() -> None:
        for name in ("mkdir", "replace", "utime", "unlink", "rename"):
            monkeypatch.setattr(os, name, refuse)

    return begin


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_read_only_cache_serves_its_entries(way, good, fresh_programs, read_only):
    first = way(good)
    read_only()
    second = way(good)
    assert second.artifact.path == first.artifact.path
    second.verify()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_empty_read_only_cache_is_named_with_its_variable(way, good, fresh_cache, read_only):
    read_only()
    with pytest.raises(BuildError, match=r"kernel cache .* cannot be used: .*Read-only file system") as raised:
        way(good)
    assert "INTAGLIO_CACHE_DIR" in raised.value.remedy


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_threads_that_load_at_once_all_get_the_model(way, good, fresh_programs):
    start = threading.Barrier(4)

    def one(index: int) -> torch.Tensor:
        start.wait()
        return way(good)(nets.example(NET(), 2, seed=index))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, range(4)))
    assert_same(results, [compiled(NET)[0](nets.example(NET(), 2, seed=index)) for index in range(4)])
    assert not [name for name in entries(fresh_programs) if name.startswith(".build-")]


@pytest.mark.slow(reason="stress of processes; threads that load at once are tested below")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_load_at_once_all_get_the_model(way, good, fresh_cache):
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                way(good).verify()
                code = 0
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, 0, 0]
    assert not [name for name in entries(fresh_cache) if name.startswith(".build-")]


@pytest.mark.slow(reason="saves again and again while it loads; threads that load at once are tested below")
def test_loading_during_saves_gives_one_complete_model(tmp_path):
    models, path = [compiled(net)[0] for net in (nets.Linears, NET)], tmp_path / "m"
    models[0].save(path)
    done = threading.Event()

    def save() -> None:
        while not done.is_set():
            for model in models:
                model.save(path)

    with ThreadPoolExecutor(2) as pool:
        savers = [pool.submit(save) for _ in range(2)]
        try:
            names = [intaglio.load(path).model_info.name for _ in range(20)]
        finally:
            done.set()
        for saver in savers:
            saver.result()
    assert set(names) <= {model.model_info.name for model in models}
    assert os.listdir(tmp_path) == ["m"]


def test_a_damaged_trusted_copy_in_the_cache_is_written_again(good, fresh_cache):
    path = intaglio.load(good, trust=True).artifact.path
    content = path.read_bytes()
    path.unlink()  # the mapped pages of the library stay as they are
    path.write_bytes(content[: len(content) // 2])
    intaglio.load(good, trust=True).verify()
    assert path.read_bytes() == content
