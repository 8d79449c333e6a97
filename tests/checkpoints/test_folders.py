"""Folders of checkpoints that are incomplete, damaged, of other formats or of other models, and what helps."""

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, InputError, IntaglioError, UnsupportedError
from support.checkpoint_checks import batches, logged_warnings
from support.checkpoint_files import (
    compressed_int8,
    compressed_packed,
    compressed_settings,
    library,
    small_llama,
    write_config,
    write_folder,
)

pytestmark = pytest.mark.usefixtures("without_avx512")


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "folder", small_llama(), compressed_packed(4, 32), compressed_settings(4, 32))
    return tmp_path / "folder"


def tensors_of(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def rewrite(folder, **changes):
    """Write the tensors again, with some of them changed, or left out if they are None."""
    held = tensors_of(folder) | {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value.contiguous() for name, value in held.items() if value is not None}
    safetensors.torch.save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_and_safetensors_help(name, folder):
    pickle = folder / name
    torch.save(tensors_of(folder), pickle)
    os.remove(folder / "model.safetensors")
    for path in (folder, pickle):
        with pytest.raises(UnsupportedError, match="this file holds a Python pickle, which may run any code") as error:
            stages.read_checkpoint(path)
    assert "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')" in error.value.remedy
    safetensors.torch.save_file(torch.load(pickle, weights_only=True), folder / "model.safetensors")
    assert len(stages.read_checkpoint(folder).weights) == 7


@pytest.mark.parametrize("keep", [0, 4, 9, 100, 0.5, 0.99])
def test_a_damaged_file_is_an_error_until_it_is_whole_again(keep, folder, tmp_path):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(ArtifactError, match="cannot be read") as error:
        read_everything(stages.read_checkpoint(folder))
    assert error.value.remedy == "get the file again: it is damaged, or not completely downloaded"
    file.write_bytes(whole)
    read_everything(stages.read_checkpoint(folder))


def read_everything(checkpoint: stages.Checkpoint) -> None:
    for part in (checkpoint.weights, checkpoint.tensors):
        for name in part:
            part[name]


GATE = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("weight_scale", None, "the tensor 'model.layers.0.mlp.gate_proj.weight_scale' is missing"),
        ("weight_shape", None, "the tensor 'model.layers.0.mlp.gate_proj.weight_shape' is missing"),
        ("weight_shape", torch.tensor([128, 96]), "weight_packed: it is int32.128, 8., not int32.128, 12."),
        ("weight_shape", torch.tensor([128.0, 64]), "the shape of its weight is"),
        ("weight_shape", torch.tensor([2, 128, 64]), "the shape of its weight is"),
        ("weight_shape", torch.tensor([-128, 64]), "the shape of its weight is"),
        ("weight_shape", torch.tensor([2**40, 2**40]), "the shape of its weight is"),
        ("weight_packed", torch.zeros(128, 8), "it is float32.128, 8., not int32"),
        ("weight_scale", torch.zeros(128, 3), "it is float32.128, 3., not float32 or float16 or bfloat16.128, 2."),
        ("weight_scale", torch.zeros(128, 2, dtype=torch.int8), "it is int8"),
        ("weight_scale", torch.full((128, 2), torch.nan), "steps must be finite"),
    ],
)
def test_tensors_that_do_not_fit_are_errors_that_name_them(part, change, problem, folder):
    rewrite(folder, **{f"{GATE}.{part}".replace(".", "__"): change})
    with pytest.raises(IntaglioError, match=problem):
        read_everything(stages.read_checkpoint(folder))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ("{}", "has no quantization_config, so its weights are not quantized"),
        ('{"quantization_config": 5}', "its quantization_config is not an object"),
        ('{"quantization_config": {"quant_method": "bitsandbytes"}}', "its quantization method is 'bitsandbytes'"),
        ('{"quantization_config": {"quant_method": "fp8"}}', "its quantization method is 'fp8'"),
        ('{"quantization_config": {"quant_method": ["awq"]}}', "its quantization method is"),
        (
            '{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}',
            "its groups of quantized layers are malformed: KeyError: 'config_groups'",
        ),
        (
            '{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", '
            '"config_groups": {"a": ["Linear"]}}}',
            "its groups of quantized layers are malformed: TypeError",
        ),
    ],
)
def test_malformed_and_other_configurations_are_refused(text, problem, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(IntaglioError, match=problem):
        stages.read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "model.bin", "a\0.safetensors", 5])
def test_an_index_names_files_of_its_folder_only(name, folder):
    shutil.copy(folder / "model.safetensors", folder.parent)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ArtifactError, match="which is not a safetensors file in this folder"):
        stages.read_checkpoint(folder)


def test_indices_without_files_and_tensors_in_two_files_are_errors(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-2.safetensors"}}))
    with pytest.raises(ArtifactError, match="there is no such file"):
        stages.read_checkpoint(folder)
    index.write_text("[]")
    with pytest.raises(ArtifactError, match="it is not an index of tensors"):
        stages.read_checkpoint(folder)
    os.remove(index)
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    with pytest.raises(ArtifactError, match=r"is in two files, model.safetensors and other.safetensors"):
        stages.read_checkpoint(folder)


def test_other_paths_are_refused_and_the_folder_helps(folder, tmp_path):
    for path, problem in (
        (tmp_path / "nothing", "there is no such file"),
        (folder / "config.json", "it is neither a folder with safetensors files"),
    ):
        with pytest.raises(ArtifactError, match=problem):
            stages.read_checkpoint(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps({"quantization_config": compressed_settings(4, 32)}))
    with pytest.raises(ArtifactError, match="it has no safetensors files") as error:
        stages.read_checkpoint(empty)
    assert error.value.remedy == "pass a folder with config.json and safetensors files, or a GGUF file"
    stages.read_checkpoint(folder)


def test_named_pipes_are_not_opened(folder):
    for name in ("config.json", "model.safetensors"):
        os.rename(folder / name, folder / "kept")
        os.mkfifo(folder / name)
        with pytest.raises(ArtifactError, match="it is not a regular file"):
            stages.read_checkpoint(folder)
        os.remove(folder / name)
        os.rename(folder / "kept", folder / name)


def test_float8_tensors_are_refused_by_name_and_the_float_model_is_quantized(folder):
    rewrite(folder, **{f"{GATE}__extra".replace(".", "__"): torch.zeros(4, dtype=torch.float8_e4m3fn)})
    checkpoint = stages.read_checkpoint(folder)
    with pytest.raises(UnsupportedError, match=r"gate_proj.extra: it is F8_E4M3, and belongs to no quantized") as error:
        read_everything(checkpoint)
    assert error.value.remedy == "quantize the float model: intaglio.quantize(model, data)"
    layer = nn.Linear(8, 8)
    intaglio.quantize(layer, [torch.randn(4, 8)])


# ---- models


def test_tensors_of_another_model_are_errors_that_name_them(folder):
    entries = json.loads((folder / "config.json").read_text())
    for changes, problem in (
        ({"num_hidden_layers": 2}, r"it lacks 9 tensors of LlamaForCausalLM: model.layers.1.self_attn.q_proj.weight"),
        ({"intermediate_size": 64}, "it does not fit LlamaForCausalLM: model.layers.0.mlp.down_proj: its weight has"),
        ({"vocab_size": 90}, r"it does not fit LlamaForCausalLM: lm_head.weight: it has shape \[96, 64\]"),
        ({"architectures": ["NoSuchModel"]}, "'NoSuchModel', which config.json names, is not a model"),
        ({"architectures": ["AutoConfig"]}, "'AutoConfig', which config.json names, is not a model"),
        ({"num_attention_heads": "four"}, "its configuration is not one of LlamaForCausalLM"),
    ):
        (folder / "config.json").write_text(json.dumps(entries | changes))
        with pytest.raises(ArtifactError, match=problem):
            intaglio.from_checkpoint(folder)


@functools.cache
def own_model():
    """Return a class, a model of it, and what was logged while it was read from a folder.

    The folder has a tensor that the model does not use, and settings for `generate`. Without the class it is refused.
    """

    class Own(library().LlamaForCausalLM):
        pass

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, small_llama(), compressed_packed(4, 32), compressed_settings(4, 32))
        rewrite(folder, model__extra=torch.zeros(3))
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3, "eos_token_id": 95}))
        write_config(folder, small_llama(), compressed_settings(4, 32))
        entries = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(entries | {"architectures": ["Own"]}))
        with pytest.raises(ArtifactError, match="pass model_class= if it is a class of yours"):
            intaglio.from_checkpoint(folder)
        with logged_warnings() as found:
            model = intaglio.from_checkpoint(folder, model_class=Own)
    return Own, model, found


def test_a_class_of_ones_own_is_passed():
    kind, model, _ = own_model()
    assert isinstance(model, kind)


@pytest.mark.slow(reason="builds and quantizes an encoder of a library")
def test_models_that_take_more_than_tokens_need_data(tmp_path):
    kind, settings = library().BertForSequenceClassification, compressed_settings(4, 32)
    config = library().BertConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    write_folder(tmp_path / "bert", kind(config).eval(), compressed_packed(4, 32), settings)
    assert intaglio.from_checkpoint(tmp_path / "bert").coverage.islands >= 0
    small = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    bart = library().BartForConditionalGeneration(
        library().BartConfig(vocab_size=96, decoder_attention_heads=4, **small)
    )
    write_folder(tmp_path / "bart", bart.eval(), compressed_packed(4, 32), settings)
    with pytest.raises(InputError, match=r"takes more than token ids[^\n]*\n *remedy: pass data: from_checkpoint"):
        intaglio.from_checkpoint(tmp_path / "bart")


def test_a_checkpoint_of_static_scales_asks_for_data(tmp_path):
    write_folder(tmp_path, small_llama(), compressed_int8(static=True), compressed_settings(8, activations="static"))
    with pytest.raises(InputError, match=r"needs data[^\n]*\n *remedy: pass data: from_checkpoint"):
        intaglio.from_checkpoint(tmp_path)


@pytest.mark.slow(reason="calibrates and compiles a model, whose results test_compressed_tensors.py compares")
def test_a_checkpoint_of_static_scales_takes_data(tmp_path):
    write_folder(tmp_path, small_llama(), compressed_int8(static=True), compressed_settings(8, activations="static"))
    intaglio.from_checkpoint(tmp_path, batches(1), progress=False)


def test_tensors_that_the_model_does_not_use_are_warned_about():
    assert any("Own does not use the tensors model.extra" in text for text in own_model()[2])


def test_generation_settings_of_the_folder_are_kept():
    model = own_model()[1]
    assert model.generation_config.max_new_tokens == 3
    assert not hasattr(model.config, "quantization_config")
