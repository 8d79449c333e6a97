"""Where files cannot be written, every writer says so in the same words, before it has worked for minutes."""

import sys

import pytest

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.convert import Reference
from support import nets
from support.lowering import quantized
from support.slow_params import slow_params_except

WRITERS = ("save", "to_onnx", "save_package", "ranges", "parameters", "recipe")


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = nets.randomize(nets.ConvBnRelu())
    return quantized(model, nets.example(model))[0]


def writer(name: str, reference: Reference, monkeypatch: pytest.MonkeyPatch):
    """What writes to a path, its work made impossible."""

    def reached(*args, **kwargs):
        raise AssertionError("the work has begun")

    if name == "to_onnx":
        monkeypatch.setattr(sys.modules["intaglio.backends.onnx.onnx_export"], "_exported", reached)
        return lambda path: stages.compile(reference, backend="onnx", path=path)
    if name == "save_package":
        monkeypatch.setattr("torch.export.export", reached)
        return stages.compile(reference, backend="inductor").save_package
    if name == "save":
        model = stages.compile(reference)
        monkeypatch.setattr(type(model), "_exact_digest", reached)
        return lambda path: model.save(path, example=nets.example(nets.ConvBnRelu()))
    return {"ranges": Ranges({}, 0, 0, ""), "parameters": reference.parameters, "recipe": intaglio.Recipe()}[name].save


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        *(name for name in WRITERS if name != "save_package"), of=WRITERS, reason="a model compiled by Inductor"
    ),
)
def test_a_file_needs_a_folder_that_exists_and_no_folder_of_its_name(name, reference, tmp_path, monkeypatch):
    write = writer(name, reference, monkeypatch)
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "file").touch()
    said = r"cannot be written: .*\n  remedy: choose a file in an existing folder"
    for path in ("folder.pt2", "nowhere/m.pt2", "file/m.pt2"):
        with pytest.raises(ArtifactError, match=said) as raised:
            write(tmp_path / path)
        assert raised.value.where == str(tmp_path / path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.pt2"]


def test_the_folder_of_an_export_is_made_and_checked_before_the_work(reference, tmp_path, monkeypatch):
    model = stages.compile(reference)
    model.export_c(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "weights.bin").exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr(type(model), "program_for", lambda self, isa: pytest.fail("the work has begun"))
    for path in ("file", "file/folder"):
        with pytest.raises(ArtifactError, match=r"cannot be written: .*\n  remedy: choose a folder"):
            model.export_c(tmp_path / path)
