"""`model.save` and `intaglio.load`: what comes back, what is refused, what survives a failure."""

import copy
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict, namedtuple
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, BuildError, InputError
from intaglio.ir import DType, Groups, PerRow, QParams, Ref, TensorType, symbol
from intaglio.kernels import ISAS
from intaglio.native import compile as compile_module
from intaglio.native import cpu as machine
from intaglio.runtime.float_islands import FloatIsland
from intaglio.runtime.saved.island_operators import function_of
from intaglio.runtime.saved.json_codec import (
    NotStorableError,
    ParameterTable,
    decode,
    decode_dim,
    decode_type,
    encode,
    encode_dim,
    encode_type,
)
from intaglio.runtime.saved.signature_codec import decode_tree, encode_tree
from support import nets
from support.int8_models import assert_same, built, compiled, picture
from support.slow_params import slow_params_except

NETS = [net for net in nets.ALL if net is not nets.CrossNet]  # nothing of which can be quantized


def through(model, path, **options):
    model.save(path)
    return intaglio.load(path, **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A file with a float part, an example and a library."""
    path = tmp_path_factory.mktemp("files") / "good.intaglio"
    compiled(nets.ConvThenUnsupported)[0].save(path, example=nets.example(nets.ConvThenUnsupported()))
    return path


# ---- round trips


@pytest.mark.case("frontends A12")
@pytest.mark.parametrize(
    "net",
    slow_params_except(
        nets.InplaceMutations,
        nets.SharedConvBn,
        nets.Residual,
        nets.ConvThenUnsupported,
        of=NETS,
        reason="layers of the other networks",
    ),
)
def test_a_loaded_model_is_the_saved_one(net, tmp_path):
    model, _ = compiled(net)
    first, second = tmp_path / "first", tmp_path / "second"
    model.save(first, example=nets.example(net()))
    loaded = intaglio.load(first)
    for batch in (1, 3, 0, 5):
        x = nets.example(net(), batch, seed=batch)
        assert_same(loaded(x), model(x))
    assert repr(loaded) == repr(model)
    assert loaded.coverage == model.coverage
    assert loaded.model_info == model.model_info
    assert loaded.signature == model.signature
    loaded.verify()
    loaded.save(second)
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.slow(reason="compiles a model with nested results; saved results of networks are tested above")
def test_signatures_with_keywords_dictionaries_and_constants_are_saved(tmp_path):
    def body(m, d, scale=2, *, left=None):
        y = m.c(d["image"])
        return OrderedDict(y=[y, None, 3, "text"], nested=({"z": y * scale},))

    model, lowered = built(body, {"image": picture()}, scale=2)
    loaded = through(model, tmp_path / "m")
    found = loaded({"image": picture(seed=5)}, scale=2)
    assert isinstance(found, OrderedDict)
    assert found["y"][1:] == [None, 3, "text"]
    assert_same(found, lowered({"image": picture(seed=5)}, scale=2))
    with pytest.raises(InputError, match="the model was captured with 2"):
        loaded({"image": picture()}, scale=3)


def test_a_size_in_the_result_follows_the_batch(tmp_path):
    loaded = through(built(lambda m, x: {"y": m.c(x), "batch": x.shape[0]}, picture())[0], tmp_path / "m")
    assert loaded(picture(5))["batch"] == 5


def test_an_input_the_model_writes_is_written(tmp_path):
    def body(m, x):
        y = m.c(x)
        x.add_(1)
        return y

    loaded = through(built(body, picture())[0], tmp_path / "m")
    x = picture(2, 3)
    loaded(x)
    assert_same(x, picture(2, 3) + 1)


FLOAT_PARTS = {
    "sizes": lambda m, x: m.c(m.c(x).reshape(x.shape[0], 3, -1).cumprod(2).reshape(x.shape)),
    "several results": lambda m, x: m.c(torch.cat([a.cumprod(3) for a in m.c(x).chunk(2, 2)], 2)),
    "constants": lambda m, x: m.c(m.c(x).erf() * torch.tensor([[1.5]]) + torch.tensor([2.0])),
    "types and infinities": lambda m, x: m.c(m.c(x).to(torch.float64).clamp(max=float("inf")).float().erf()),
    "made tensors": lambda m, x: m.c(m.c(x).erf() + torch.ones(12, dtype=torch.float32)),
    "texts": lambda m, x: m.c(torch.div(m.c(x), 0.1, rounding_mode="floor")),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("constants", of=FLOAT_PARTS, reason="other operators of float parts"),
)
def test_float_islands_are_saved_and_loaded(name, tmp_path):
    model, lowered = built(FLOAT_PARTS[name], picture())
    loaded = through(model, tmp_path / "m")
    assert all(isinstance(part, FloatIsland) for part in loaded.islands.values())
    assert len(loaded.islands) >= 1
    for found in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert_same(found(picture(5)), lowered(picture(5)))


class Transposed(nn.Module):
    """A float operator that reads the transpose of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.register_buffer("matrix", torch.randn(8, 6))
        self.register_buffer("added", torch.randn(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), torch.addmm(self.added, x, self.matrix.T, beta=0.5, alpha=2)


def test_float_islands_with_transposed_constants_give_the_same_bits_when_loaded(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(7, 6)
    model = intaglio.quantize(Transposed().eval(), [torch.randn(32, 6) for _ in range(2)], progress=False)
    assert model.coverage.islands == 1
    model.save(tmp_path / "m.intaglio")
    loaded = intaglio.load(tmp_path / "m.intaglio")
    assert [t.stride() for t in model.buffers()] == [t.stride() for t in loaded.buffers()]
    assert all(map(torch.equal, model(x), loaded(x)))


def test_state_dicts_are_the_same(tmp_path):
    model, _ = compiled(nets.BnFirst)
    loaded = through(model, tmp_path / "m")
    assert list(loaded.state_dict()) == list(model.state_dict())
    loaded.load_state_dict(model.state_dict())


@pytest.mark.case("problem 14")
@pytest.mark.parametrize("isa", [isa for isa in machine.isas() if isa in ISAS])
def test_another_instruction_set_gives_the_same_bits(isa, good):
    loaded = intaglio.load(good, isa=isa)
    assert isa in repr(loaded)
    loaded.verify()
    x = nets.example(nets.ConvThenUnsupported(), 3)
    assert_same(loaded(x), compiled(nets.ConvThenUnsupported)[0](x))


@pytest.mark.slow(reason="a process imports PyTorch; the class is not in the file")
@pytest.mark.case("problem 30")
def test_a_fresh_process_loads_without_the_model_s_class(tmp_path):
    model, _ = compiled(nets.MultiOutput)
    x = nets.example(nets.MultiOutput(), 3)
    model.save(tmp_path / "m", example=x)
    safetensors.torch.save_file({"x": x, "logits": model(x)["logits"]}, tmp_path / "expected")
    script = """
        import pickle, sys
        pickle.Unpickler = pickle.load = pickle.loads = None
        import torch, intaglio, safetensors.torch
        torch.load = None
        model, expected = intaglio.load("m"), safetensors.torch.load_file("expected")
        model.verify()
        assert torch.equal(model(expected["x"])["logits"], expected["logits"])
        assert "nets" not in sys.modules
    """
    folders = os.pathsep.join([str(Path(intaglio.__file__).parents[1])])
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": folders},
    )


def test_texts_of_a_loaded_model_are_those_of_the_saved_one(tmp_path):
    """Those of graph and plan are made again, with the schedules of the library; others are read from the file."""
    model, _ = compiled(nets.ConvThenUnsupported)
    for trust in (True, False):
        loaded = through(model, tmp_path / "m", trust=trust)
        (tmp_path / "m").unlink()
        assert {stage: loaded.text(stage) for stage in model.model_info.texts} == dict(model.model_info.texts)


# ---- examples


def test_verify_needs_an_example(tmp_path):
    model, _ = compiled(nets.Linears)
    with pytest.raises(InputError, match=r"no stored example\n.*save\(path, example=x\)"):
        through(model, tmp_path / "m").verify()


def test_verify_finds_a_changed_bit(good):
    model = copy.deepcopy(intaglio.load(good))
    model.verify()
    model.artifact.constants[:] ^= 1
    with pytest.raises(ArtifactError, match="the results of the stored example differ"):
        model.verify()


def test_an_example_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    model, _ = compiled(nets.Linears)
    for wrong in (torch.randn(2, 3), (), np.zeros((2, 16), np.float32)):
        with pytest.raises(InputError):
            model.save(tmp_path / "m", example=wrong)
    assert not list(tmp_path.iterdir())


# ---- what cannot be saved


@pytest.mark.slow(reason="compiles a model whose result is of a class")
def test_structures_of_classes_are_refused_by_name(tmp_path):
    pair = namedtuple("pair", "a b")
    model, _ = built(lambda m, x: pair(m.c(x), m.c(x + 1)), picture())
    with pytest.raises(ArtifactError, match=r"the result contain a .*pair[\s\S]*remedy"):
        model.save(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_arguments_that_cannot_be_saved_are_refused_by_leaf():
    with pytest.raises(NotStorableError, match="Fraction"):
        encode([Fraction(1, 2)])


def test_complex_results_and_numbers_of_float_parts_are_saved(tmp_path):
    model, _ = built(lambda m, x: (torch.fft.rfft(m.c(x)) * (0.5 - 1j), torch.complex(m.c(x), x) * 2j), picture())
    loaded = through(model, tmp_path / "m")
    x = picture(seed=3)
    assert_same(loaded(x), model(x))
    assert [result.dtype for result in loaded(x)] == [torch.complex64] * 2


def test_unknown_custom_operators_are_refused(tmp_path):
    @torch.library.custom_op("intaglio_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    model, _ = built(lambda m, x: m.c(twice(m.c(x))), picture())
    with pytest.raises(
        ArtifactError, match=r"twice \(intaglio_tests\.twice\.default\): .*neither an ATen operator nor"
    ):
        model.save(tmp_path / "m")
    assert not list(tmp_path.iterdir())


# ---- failures while writing


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_keeps_the_file_there_was(failure, step, good, tmp_path, monkeypatch):
    path = tmp_path / "m"
    path.write_bytes(good.read_bytes())

    def fail(*arguments):
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else ArtifactError) as raised:
        compiled(nets.Linears)[0].save(path)
    monkeypatch.undo()
    assert "No space left" in str(raised.value) or not raised.value.args
    assert path.read_bytes() == good.read_bytes()
    assert os.listdir(tmp_path) == ["m"]


def test_unwritable_paths_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "nowhere" / "m", tmp_path / "file" / "m"):
        with pytest.raises(ArtifactError, match=r"cannot be written: .*\n  remedy: choose a file") as raised:
            compiled(nets.Linears)[0].save(path)
        assert str(raised.value).startswith(str(path))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_enough_to_load(good, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "m").write_bytes(good.read_bytes())
    folder.chmod(0o500)
    intaglio.load(folder / "m").verify()
    with pytest.raises(ArtifactError, match="cannot be written"):
        compiled(nets.Linears)[0].save(folder / "m")


def test_saving_to_a_symbolic_link_keeps_the_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "m")
    compiled(nets.Linears)[0].save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    intaglio.load(tmp_path / "m")


# ---- damaged and foreign files


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members: dict[str, bytes], sealed: bool = True, pack: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of these members; ``sealed``: with the digests that fit them, as somebody who means harm would."""
    if sealed:
        manifest = json.loads(members["manifest.json"])
        rest = {name: content for name, content in members.items() if name != "manifest.json"}
        manifest["digests"] = {name: hashlib.sha256(content).hexdigest() for name, content in rest.items()}
        members = {"manifest.json": json.dumps(manifest).encode(), **rest}
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", pack) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return memory.getvalue()


def refused(content: bytes, tmp_path: Path, trust: bool = False) -> str:
    path = tmp_path / "bad.intaglio"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as raised:
        intaglio.load(path, trust=trust)
    assert raised.value.where.startswith(str(path))
    assert raised.value.remedy
    return str(raised.value)


def test_a_flipped_byte_in_any_member_is_found(good, tmp_path):
    content = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        entries = archive.infolist()
    assert len(entries) == 9
    for entry in entries:
        start = entry.header_offset + 30 + len(entry.filename)
        for place in (start, start + entry.file_size // 2, start + entry.file_size - 1):
            content[place] ^= 4
            assert "damaged" in refused(bytes(content), tmp_path)
            content[place] ^= 4
    assert bytes(content) == good.read_bytes()


def test_a_changed_member_is_found_by_its_digest(good, tmp_path):
    members = members_of(good)
    for name in sorted(set(members) - {"manifest.json"}):
        text = refused(packed({**members, name: members[name] + b" "}, sealed=False), tmp_path)
        assert f"'{name}' is damaged" in text


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99, 0.9999])
def test_a_file_cut_off_is_refused(part, good, tmp_path):
    content = good.read_bytes()
    refused(content[: int(len(content) * part)], tmp_path)


def test_a_missing_member_is_named(good, tmp_path):
    members = members_of(good)
    for name in members:
        rest = {key: value for key, value in members.items() if key != name}
        text = refused(packed(rest, sealed=False), tmp_path)
        assert "not a model file of intaglio" in text if name == "manifest.json" else f"'{name}' is missing" in text
        if name != "manifest.json":
            assert f"'{name}' is missing" in refused(packed(rest), tmp_path)


@pytest.mark.parametrize("name", ["../escape.so", "/escape", "program-portable.so", "extra.pkl"])
def test_unknown_members_are_refused_and_never_written(name, good, tmp_path):
    members = {**members_of(good), name: b"x"}
    assert "which its manifest does not list" in refused(packed(members, sealed=False), tmp_path)
    assert f"the members {name} are not described" in refused(packed(members), tmp_path)
    assert os.listdir(tmp_path) == ["bad.intaglio"]


def test_foreign_files_are_refused(good, tmp_path):
    foreign = io.BytesIO()
    torch.save({"x": torch.ones(2)}, foreign)
    for content in (b"", b"hello", pickle.dumps(print), foreign.getvalue(), packed({"a": b"b"}, sealed=False)):
        assert "not a model file of intaglio" in refused(content, tmp_path)
    assert "compressed or encrypted" in refused(packed(members_of(good), pack=zipfile.ZIP_DEFLATED), tmp_path)
    with pytest.raises(ArtifactError, match=r"cannot be read: No such file"):
        intaglio.load(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"cannot be read: Is a directory"):
        intaglio.load(tmp_path)


def changed(good: Path, name: str, change) -> bytes:
    members = members_of(good)
    held = json.loads(members[name])
    change(held)
    return packed({**members, name: json.dumps(held).encode()})


def test_a_newer_format_is_refused(good, tmp_path):
    content = changed(good, "manifest.json", lambda m: m.update(version=2, intaglio="9.0"))
    text = refused(content, tmp_path)
    assert "its format is 2, but this version reads format 1" in text
    assert "install the one that saved it (intaglio 9.0)" in text


def test_a_coverage_entry_other_than_a_number_is_refused(good, tmp_path):
    refused(changed(good, "manifest.json", lambda m: m["coverage"].update(macs_int8="all")), tmp_path)
    refused(changed(good, "manifest.json", lambda m: m["coverage"]["floats"][0].update(reason=None)), tmp_path)


HARMFUL = (
    "aten.erf_.default",
    "aten.erf.out",
    "aten.from_file.default",
    "aten.save.default",
    "aten.set_data.default",
    "aten.__class__.default",
    "aten.erf.__call__",
    "prims.erf.default",
    "os.system",
    "operator.attrgetter",
    "eval",
    "aten.erf",
    "aten.nothing.default",
    "aten.record_stream.default",
    "aten._print.default",
    "aten._reshape_alias.default",
    "aten.remainder.int",
    "",
)


@pytest.mark.parametrize("name", HARMFUL)
def test_operators_that_are_not_allowed_are_refused(name, good, tmp_path):
    with pytest.raises(ArtifactError):
        function_of(name)

    def change(islands):
        islands["island0"]["calls"][0][1] = name

    refused(changed(good, "islands.json", change), tmp_path)


WRONG_GRAPHS = {
    "code in the name of a value": lambda g: g["inputs"].__setitem__(0, "x;\n#error"),
    "a line break in an origin": lambda g: g["ops"][0].update(origin=["a\nint evil;", "", ""]),
    "a comment that goes on": lambda g: g["ops"][0].update(origin=["a\\", "", ""]),
    "code in an attribute": lambda g: g["ops"][0].update(attrs={"low": "\nint evil;"}),
    "code in a kind": lambda g: g["ops"][1].update(kind="conv2d();"),
    "an unknown operator": lambda g: g["ops"][1].update(kind="conv9d"),
    "a smaller result": lambda g: g["types"][g["ops"][1]["outputs"][0]]["shape"].__setitem__(1, 4),
    "a negative size": lambda g: g["types"][g["inputs"][0]]["shape"].__setitem__(1, -3),
    "a value nobody makes": lambda g: g["outputs"].__setitem__(0, "nothing"),
    "steps backwards": lambda g: g["ops"][1]["attrs"].update(stride={"tuple": [-1, -1]}),
    "a float for a list": lambda g: g.update(ops=1.5),
    "no operators": lambda g: g.pop("ops"),
    "numbers that are not there": lambda g: g["types"][g["ops"][1]["inputs"][1]]["q"].update(
        scale={"at": 0, "count": 10**12}
    ),
    "a symbol with code": lambda g: g["types"][g["inputs"][0]]["shape"].__setitem__(0, [[["n);"], 1]]),
}


def test_a_float_part_that_gives_another_shape_is_refused_before_its_bytes_are_read(good, tmp_path):
    def change(islands):
        islands["island0"]["calls"][0] = ["erf", "aten.slice.Tensor", [{"name": "conv2d"}, 2, 0, 1], {}]

    path = tmp_path / "m"
    path.write_bytes(changed(good, "islands.json", change))
    with pytest.raises(InputError, match=r"\[2, 8, 1, 10\] on cpu, but the program reads \(2, 8, 10, 10\)"):
        intaglio.load(path)(nets.example(nets.ConvThenUnsupported()))


@pytest.mark.parametrize("change", WRONG_GRAPHS.values(), ids=WRONG_GRAPHS)
def test_an_invalid_graph_is_refused_before_compilation(change, good, tmp_path, monkeypatch):
    monkeypatch.setattr("intaglio.build.build_artifact", None)
    refused(changed(good, "graph.json", change), tmp_path)


def test_a_pickle_as_a_member_is_not_read(good, tmp_path):
    members = members_of(good)
    for name in members:
        if name != "manifest.json" and not name.endswith(".so"):
            refused(packed({**members, name: pickle.dumps(print)}), tmp_path)


# ---- trust


def library(path: Path) -> str:
    return next(name for name in members_of(path) if name.endswith(".so"))


@pytest.mark.case("problem 33")
def test_a_trusted_library_is_used_and_needs_no_compiler(good, fresh_cache, monkeypatch):
    built = []
    monkeypatch.setattr("intaglio.runtime.artifact.build", lambda *a, **k: built.append(a))
    model = intaglio.load(good, trust=True)
    assert not built
    assert model.artifact.path.name.startswith("trusted-")
    assert model.artifact.path.read_bytes() == members_of(good)[library(good)]
    model.verify()


def test_without_trust_no_code_of_the_library_runs(good, fresh_programs, tmp_path):
    path = tmp_path / "poisoned"
    path.write_bytes(packed({**members_of(good), library(good): b"\x7fELF poison"}))
    model = intaglio.load(path)
    model.verify()
    assert not list(fresh_programs.rglob("trusted-*"))
    with pytest.raises(intaglio.errors.BuildError, match="cannot be loaded"):
        intaglio.load(path, trust=True)


def test_a_library_of_another_text_is_not_used(good, fresh_programs, tmp_path):
    def change(manifest):
        for entry in manifest["libraries"].values():
            entry["key"] = "0" * 64

    path = tmp_path / "other"
    path.write_bytes(changed(good, "manifest.json", change))
    model = intaglio.load(path, trust=True)
    model.verify()
    assert not list(fresh_programs.rglob("trusted-*"))


def test_a_library_can_be_left_out(tmp_path):
    model, _ = compiled(nets.Linears)
    model.save(tmp_path / "m", library=False)
    assert not [name for name in members_of(tmp_path / "m") if name.endswith(".so")]
    x = torch.randn(3, 16)
    assert_same(intaglio.load(tmp_path / "m", trust=True)(x), model(x))


def test_saving_rebuilds_a_library_missing_from_the_cache(fresh_programs, tmp_path):
    model = stages.compile(compiled(nets.Linears)[1])
    model.artifact.path.unlink()
    model.save(tmp_path / "m")
    intaglio.load(tmp_path / "m", trust=True)


# ---- instruction sets

ALL = ("avx512vnni", "avx2", "portable")
RUNNABLE = [ALL[i:] for i in range(3) if ALL[i] in machine.isas()]
"""The sets from one on that this machine runs: what a lesser machine, and this one, can do."""


def only(monkeypatch, *able: str) -> None:
    """This machine runs these instruction sets from here on."""
    monkeypatch.setattr(machine, "isas", lambda: able)


@pytest.fixture(scope="module")
def fat(tmp_path_factory) -> Path:
    """A file with a library for every instruction set."""
    path = tmp_path_factory.mktemp("files") / "fat.intaglio"
    model = stages.compile(compiled(nets.ConvThenUnsupported)[1], isa=reversed(ALL))
    model.save(path, example=nets.example(nets.ConvThenUnsupported()))
    return path


@pytest.mark.slow(reason="compiles a network for every set of instructions")
@pytest.mark.parametrize("able", RUNNABLE, ids=lambda able: able[0])
def test_a_model_of_all_instruction_sets_runs_the_best_of_the_machine(able, monkeypatch):
    only(monkeypatch, *able)
    model = stages.compile(compiled(nets.Residual)[1], isa=ALL)
    assert model.artifact.program.isa == able[0]
    assert repr(model).endswith(f"{able[0]} (compiled for {', '.join(isa for isa in ALL if isa != able[0])} too))")
    assert_same(model(picture()), compiled(nets.Residual)[1](picture()))


@pytest.mark.parametrize("able", RUNNABLE, ids=lambda able: able[0])
def test_a_file_of_all_instruction_sets_needs_no_compiler_anywhere(able, fat, fresh_cache, monkeypatch):
    only(monkeypatch, *able)
    monkeypatch.setattr("intaglio.runtime.artifact.build", None)
    model = intaglio.load(fat, trust=True)
    assert model.artifact.program.isa == able[0]
    assert model.artifact.path.read_bytes() == members_of(fat)[f"program-{able[0]}.so"]
    model.verify()


@pytest.mark.slow(reason="compiles for sets of instructions that are not here")
def test_libraries_this_machine_does_not_run_are_never_mapped(fat, fresh_cache, tmp_path, monkeypatch):
    lowered = compiled(nets.Linears)[1]
    only(monkeypatch, "portable")
    mapped = []
    monkeypatch.setattr("intaglio.runtime.artifact.load", lambda path: mapped.append(path) or compile_module.load(path))
    stages.compile(lowered, isa=ALL).save(tmp_path / "m")
    intaglio.load(tmp_path / "m", trust=True)
    intaglio.load(fat, trust=True)
    intaglio.load(fat)
    names = {"program-portable.so", *(path.name for path in mapped)}
    assert len(mapped) == 4
    contents = {path.read_bytes() for path in mapped}
    for path in (fat, tmp_path / "m"):
        for name, content in members_of(path).items():
            assert (content in contents) == (name == "program-portable.so"), names


def test_a_trusted_file_without_the_best_instruction_set_uses_its_best(tmp_path, monkeypatch, caplog):
    only(monkeypatch, *ALL)
    model = stages.compile(compiled(nets.Linears)[1], isa=("portable", "avx2"))
    model.save(tmp_path / "m")
    caplog.set_level("INFO", "intaglio")
    assert intaglio.load(tmp_path / "m", trust=True).artifact.program.isa == "avx2"
    assert "has a library for avx2, none for avx512vnni, which this machine runs" in caplog.text
    assert intaglio.load(tmp_path / "m").artifact.program.isa == "avx512vnni"
    assert intaglio.load(tmp_path / "m", trust=True, isa="avx512vnni").artifact.program.isa == "avx512vnni"
    assert intaglio.load(tmp_path / "m", trust=True, isa="portable").artifact.program.isa == "portable"


def test_trusted_libraries_are_saved_again_and_others_are_not(fat, tmp_path):
    intaglio.load(fat, trust=True).save(tmp_path / "trusted")
    intaglio.load(fat).save(tmp_path / "stranger")
    assert (tmp_path / "trusted").read_bytes() == fat.read_bytes()
    libraries = [name for name in members_of(tmp_path / "stranger") if name.endswith(".so")]
    assert libraries == [f"program-{machine.isas()[0]}.so", "runtime.so"]


def test_instruction_sets_without_kernels_are_refused(monkeypatch):
    lowered = compiled(nets.Linears)[1]
    with pytest.raises(
        BuildError,
        match=r"isa=\('avx2', 'neon'\): there are no kernels for neon; allowed are amx_int8, avx512vnni, avxvnni, avx2",
    ):
        stages.compile(lowered, isa=["avx2", "neon"])
    with pytest.raises(BuildError, match=r"isa=\(\): this machine supports none of these"):
        stages.compile(lowered, isa=())
    only(monkeypatch, "portable")
    with pytest.raises(BuildError, match=r"runs portable\n  remedy: add one of those"):
        stages.compile(lowered, isa=("avx512vnni", "avx2"))


def test_a_pickle_of_another_machine_is_refused(monkeypatch):
    content = pickle.dumps(stages.compile(compiled(nets.Linears)[1], isa="avx2"))
    only(monkeypatch, "portable")
    with pytest.raises(
        BuildError,
        match=r"the program is for avx2, but this machine runs portable\n  remedy: save the model with model\.save",
    ):
        pickle.loads(content)


# ---- values

NAMES = st.sampled_from("nhw")
DIMS = st.recursive(
    st.integers(0, 50) | NAMES.map(symbol),
    lambda dims: st.one_of(
        st.tuples(dims, dims).map(lambda pair: pair[0] + pair[1]),
        st.tuples(dims, dims).map(lambda pair: pair[0] * pair[1]),
        st.tuples(dims, st.integers(1, 5)).map(lambda pair: pair[0] // pair[1]),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.complex_numbers(allow_nan=False),
        st.text(),
        DIMS,
        st.sampled_from([torch.float32, torch.int8, torch.channels_last, torch.strided, torch.device("cpu")]),
        st.floats(width=32, allow_nan=False).map(np.float32),
        st.integers(-(2**31), 2**31 - 1).map(np.int64),
    ),
    lambda values: st.lists(values, max_size=3) | st.lists(values, max_size=3).map(tuple),
    max_leaves=8,
)


def same(a, b) -> bool:
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def by_text(value):
    return json.loads(json.dumps(value, allow_nan=False))


@given(VALUES)
def test_json_values_are_decoded_unchanged(value):
    assert same(decode(by_text(encode(value))), value)


@given(DIMS)
def test_json_dimensions_are_decoded_unchanged(dim):
    assert decode_dim(by_text(encode_dim(dim))) == dim


SCALES = st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=9)


@given(SCALES, st.integers(0, 255), st.sampled_from([0, 1, PerRow(), Groups(4)]), st.lists(DIMS, max_size=4))
def test_json_types_are_decoded_unchanged(scales, zero, axis, shape):
    zeros = tuple(min(255, zero + i * (len(scales) % 2)) for i in range(len(scales)))
    kind = TensorType(tuple(shape), DType.U8, QParams(tuple(scales), zeros, 0, 255, axis))
    held = TensorType(tuple(shape), DType.S8, QParams(Ref("s"), Ref("z"), -128, 127, PerRow()))
    numbers = ParameterTable()
    entries = [by_text(encode_type(one, numbers)) for one in (kind, held, kind)]
    read = ParameterTable(numbers.array())
    assert [decode_type(entry, read) for entry in entries] == [kind, held, kind]


TREES = st.recursive(
    st.just(0),
    lambda trees: st.one_of(
        st.lists(trees, max_size=3),
        st.lists(trees, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(0, 9), trees, max_size=3),
        st.dictionaries(st.text(max_size=3), trees, max_size=3).map(OrderedDict),
    ),
    max_leaves=6,
)


@given(TREES)
def test_json_structures_are_decoded_unchanged(tree):
    spec = torch.utils._pytree.tree_structure(tree)
    assert decode_tree(by_text(encode_tree(spec, "the arguments"))) == spec


def test_a_module_replaced_by_hand_is_refused(tmp_path):
    model = copy.deepcopy(compiled(nets.ConvThenUnsupported)[0])
    model.islands["island0"] = nn.Identity()
    with pytest.raises(ArtifactError, match="replaced by another module"):
        model.save(tmp_path / "m")
