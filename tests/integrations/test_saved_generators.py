"""Models that generate in one file: what comes back, and what is refused."""

import copy
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

import intaglio
from intaglio.build import load_program
from intaglio.cli import targets
from intaglio.errors import ArtifactError
from intaglio.integrations.transformers import from_pretrained
from intaglio.runtime.saved.archive import read, read_member, write
from intaglio.runtime.saved.members import Member
from support.generators import batch, generated, quantized
from support.slow_params import slow_params


@pytest.mark.parametrize(
    ("name", "kept"),
    [("llama", "float"), ("llama", "int8"), *slow_params(("t5", "float"), ("whisper", "int8"), reason="each compiles")],
)
def test_a_file_keeps_programs_class_and_configurations(name, kept, tmp_path):
    _, int8_model, _ = quantized(name, kept)
    int8_model.save(tmp_path / "model.intaglio")
    inputs = batch(name, 2, 7)
    for found in (intaglio.load(tmp_path / "model.intaglio"), from_pretrained(tmp_path / "model.intaglio", trust=True)):
        assert type(found) is type(int8_model)
        assert found.generation_config.to_dict() == int8_model.generation_config.to_dict()
        assert found.listed == int8_model.listed
        assert found.fingerprint() == int8_model.fingerprint()
        assert torch.equal(generated(found, inputs, num_beams=2), generated(int8_model, inputs, num_beams=2))
        if name == "llama":  # `generate` makes the masks of static caches, also of padding
            padded = batch(name, 3, 9, padding=4)
            static = generated(found, padded, cache_implementation="static")
            assert torch.equal(static, generated(int8_model, padded))


def test_fingerprints_tell_models_that_generate_apart():
    plain, other = quantized("llama", "float")[1], quantized("llama", "int8")[1]
    assert plain.fingerprint() != other.fingerprint()
    counting = copy.copy(plain)
    counting.listed = replace(plain.listed, numbering="mask")
    assert counting.fingerprint() != plain.fingerprint()
    assert intaglio.report(None, plain, calls=0).data.run.fingerprint == plain.fingerprint()


@pytest.mark.slow(reason="compiles the program of a file again")
def test_files_without_libraries_are_smaller_and_take_an_instruction_set(tmp_path):
    _, int8_model, _ = quantized("llama")
    int8_model.save(tmp_path / "both")
    int8_model.save(tmp_path / "graph", library=False)
    assert (tmp_path / "graph").stat().st_size < (tmp_path / "both").stat().st_size
    found = intaglio.load(tmp_path / "graph", isa="portable")
    inputs = batch("llama", 2, 7)
    assert torch.equal(found(**inputs).logits, int8_model(**inputs).logits)


def changed(path, manifest=None, **members):
    """Write a file with other entries of the manifest, and members without those that are None."""
    entries, stored = read(path)
    before = {name: member.read() for name, member in stored.items()}
    entries = {key: value for key, value in entries.items() if key not in ("format", "version", "digests")}
    contents = {name: value for name, value in {**before, **members}.items() if value is not None}
    write(path, {**entries, **(manifest or {})}, contents)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder.intaglio": None}, "'decoder.intaglio' is missing"),
        ({"decoder.intaglio": b"PK\x03\x04"}, "damaged"),
        ({"config.json": None}, "'config.json' is missing"),
        ({"config.json": b"[]"}, "not a JSON object"),
        ({"config.json": b'{"architectures": ["os"]}'}, "pass model_class="),
        ({"manifest": {"generator": 3}}, "does not list the programs"),
        ({"manifest": {"generator": {"programs": ["other"], "numbering": "mask"}}}, "does not list the programs"),
        ({"manifest": {"generator": {"programs": ["decoder"], "numbering": "other"}}}, "does not list the programs"),
        ({"manifest": {"generator": {"programs": ["decoder"], "numbering": True}}}, "does not list the programs"),
        ({"manifest": {"generator": {"programs": ["decoder"], "numbering": []}}}, "does not list the programs"),
        ({"manifest": {"generator": {"programs": ["decoder"], "counts_padding": []}}}, "does not list the programs"),
        (
            {"manifest": {"generator": {"programs": ["decoder"], "numbering": "mask", "takes_padding": 1}}},
            "does not list the programs",
        ),
        ({"manifest": {"generator": {"programs": ["decoder"]}}}, "does not list the programs"),
    ],
    ids=str,
)
def test_damaged_and_forged_files_are_errors(change, said, tmp_path):
    quantized("llama")[1].save(tmp_path / "model.intaglio")
    changed(tmp_path / "model.intaglio", **change)
    with pytest.raises(ArtifactError, match=said):
        intaglio.load(tmp_path / "model.intaglio")


@pytest.mark.parametrize(("counts", "numbering"), [(True, "tokens"), (False, "mask")])
def test_files_of_earlier_versions_say_whether_padding_counts(counts, numbering, tmp_path):
    quantized("llama")[1].save(tmp_path / "model.intaglio")
    changed(tmp_path / "model.intaglio", {"generator": {"programs": ["decoder"], "counts_padding": counts}})
    assert intaglio.load(tmp_path / "model.intaglio").listed.numbering == numbering


def test_files_of_other_kinds_name_the_function_to_call(tmp_path):
    _, int8_model, _ = quantized("llama")
    int8_model.save(tmp_path / "generator")
    with pytest.raises(ArtifactError, match=r"(?s)holds a model that generates.*call intaglio.load\(path\)"):
        load_program(tmp_path / "generator")
    with pytest.raises(ArtifactError, match=r"save a program of it: model.programs\['decoder'\].save\(path\)"):
        targets.load_saved(str(tmp_path / "generator"))
    int8_model.programs["decoder"].save(tmp_path / "program")
    assert isinstance(targets.load_saved(str(tmp_path / "program")), intaglio.QuantizedModel)
    with pytest.raises(ArtifactError, match=r"(?s)does not hold a model that generates.*call intaglio.load\(path\)"):
        from_pretrained(tmp_path / "program")
    assert isinstance(intaglio.load(tmp_path / "program"), intaglio.QuantizedModel)


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path):
    _, int8_model, _ = quantized("llama")
    int8_model.save(tmp_path / "model.intaglio")
    before = (tmp_path / "model.intaglio").read_bytes()
    with pytest.raises(ArtifactError):
        int8_model.save(tmp_path)
    assert (tmp_path / "model.intaglio").read_bytes() == before
    with zipfile.ZipFile(tmp_path / "model.intaglio") as archive:
        assert {"config.json", "generation_config.json", "decoder.intaglio"} <= set(archive.namelist())


@pytest.mark.slow(reason="a process imports PyTorch")
def test_programs_are_loaded_without_transformers_and_what_quantizes(tmp_path):
    quantized("llama")[1].programs["decoder"].save(tmp_path / "program")
    names = ("transformers", "intaglio.lower", "intaglio.eager", "intaglio.quant.qdq", "intaglio.tune")
    code = (
        f"import sys, intaglio; intaglio.load({str(tmp_path / 'program')!r})\n"
        f"assert not set({names!r}) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bytes_of_programs_are_hashed_once(tmp_path, monkeypatch):
    hashed, compute = list[int](), Member._computed_digest
    monkeypatch.setattr(Member, "_computed_digest", lambda self: (hashed.append(self.size), compute(self))[1])
    quantized("llama")[1].save(tmp_path / "model.intaglio")
    intaglio.load(tmp_path / "model.intaglio", trust=True)
    size = (tmp_path / "model.intaglio").stat().st_size
    assert 0.9 * size < sum(hashed) < size


def test_a_damaged_weight_of_a_program_is_found(tmp_path):
    path = tmp_path / "model.intaglio"
    quantized("llama")[1].save(path)
    _, members = read_member(path, read(path)[1], "decoder.intaglio")
    place = members["weights.safetensors"].start + members["weights.safetensors"].size - 1
    content = path.read_bytes()
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(ArtifactError, match=r"decoder.intaglio: 'weights.safetensors' is damaged"):
        intaglio.load(path, trust=True)
