"""Checkpoints of compressed-tensors: weights to the bit, logits, `generate`, files, and what is refused."""

import numpy as np
import pytest
import torch

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, InputError, UnsupportedError
from support.checkpoint_checks import assert_generates, assert_weights, batches, decibels, logits
from support.checkpoint_files import (
    compressed_int8,
    compressed_packed,
    compressed_settings,
    linear_layers,
    small_llama,
    write_folder,
)

pytestmark = pytest.mark.usefixtures("without_avx512")

PACKED = [(4, 32, True), (4, 16, False), (8, 32, False), (2, 32, True), (4, 0, True), (8, 0, True)]


@pytest.mark.parametrize(("bits", "group", "symmetric"), PACKED)
@pytest.mark.parametrize("scale_type", [torch.bfloat16, torch.float16])
def test_packed_weights_have_the_values_of_their_definition(bits, group, symmetric, scale_type, tmp_path):
    writer = compressed_packed(bits, group, symmetric, scale_type)
    exact = write_folder(tmp_path, small_llama(), writer, compressed_settings(bits, group, symmetric))
    checkpoint = stages.read_checkpoint(tmp_path)
    assert checkpoint.format == "compressed-tensors pack-quantized"
    assert_weights(checkpoint, exact)


def test_integers_of_their_own_type_have_the_values_of_their_definition(tmp_path):
    settings = compressed_settings(8, activations="token")
    exact = write_folder(tmp_path, small_llama(), compressed_int8(torch.float32), settings)
    checkpoint = stages.read_checkpoint(tmp_path)
    assert_weights(checkpoint, exact)
    assert checkpoint.weights["model.layers.0.mlp.up_proj"].activations == "token"
    assert all(checkpoint.weights[path].int8_refusal is None for path in checkpoint.weights)


def test_a_model_of_four_bits_in_groups_generates(tmp_path):
    exact = write_folder(tmp_path / "w4", small_llama(), compressed_packed(4, 32), compressed_settings(4, 32), shards=2)
    model = intaglio.from_checkpoint(tmp_path / "w4")
    assert decibels(logits(model), logits(exact)) > 100
    assert {op.kind for op in model.programs["decoder"].graph.ops} >= {"linear_groups_f32"}
    assert_generates(model, exact, tmp_path / "saved")


@pytest.mark.slow(reason="compiles a model; a model of four bits generates above")
def test_dynamic_int8_layers_are_int8_products_of_the_same_integers(tmp_path):
    exact = write_folder(
        tmp_path / "w8a8", small_llama(), compressed_int8(), compressed_settings(8, activations="token")
    )
    checkpoint = stages.read_checkpoint(tmp_path / "w8a8")
    model = intaglio.from_checkpoint(tmp_path / "w8a8")
    graph = model.programs["decoder"].graph
    for path in linear_layers(exact):
        held = graph.constants[f"{path.replace('.', '_')}_weight"]
        np.testing.assert_array_equal(held, checkpoint.weights[path].quantized.numpy())
    assert decibels(logits(model), logits(exact)) > 25
    assert_generates(model, exact, tmp_path / "saved", bits_of_float=False)


@pytest.mark.slow(reason="compiles a model; imported weights have the same kinds in quant/imported_weights")
def test_static_int8_layers_are_calibrated(tmp_path):
    settings = compressed_settings(8, activations="static")
    exact = write_folder(tmp_path, small_llama(), compressed_int8(static=True), settings)
    with pytest.raises(InputError, match="the activations of its layers are calibrated, which needs data"):
        intaglio.from_checkpoint(tmp_path)
    model = intaglio.from_checkpoint(tmp_path, batches(1))
    checkpoint = stages.read_checkpoint(tmp_path)
    assert checkpoint.notes == ("the scales of static activations are calibrated again",)
    graph = model.programs["decoder"].graph
    held = graph.constants["model_layers_0_mlp_down_proj_weight"]
    np.testing.assert_array_equal(held, checkpoint.weights["model.layers.0.mlp.down_proj"].quantized.numpy())
    assert decibels(logits(model), logits(exact)) > 20


@pytest.mark.slow(reason="compiles another model; layers with scales per token are compared above")
def test_static_int8_layers_may_be_computed_with_scales_per_token(tmp_path):
    settings = compressed_settings(8, activations="static")
    exact = write_folder(tmp_path, small_llama(), compressed_int8(static=True), settings)
    dynamic = intaglio.from_checkpoint(tmp_path, recipe="int8_dynamic")
    assert decibels(logits(dynamic), logits(exact)) > 20


@pytest.mark.slow(reason="quant/imported_weights has the same notes on smaller models")
def test_a_recipe_rounds_groups_again(tmp_path):
    exact = write_folder(tmp_path, small_llama(), compressed_packed(4, 32), compressed_settings(4, 32))
    model = intaglio.from_checkpoint(tmp_path, batches(), recipe={"type:Linear": {"activations": "static"}})
    (note,) = [note for note in model.programs["decoder"].coverage.notes if "rounded again" in note]
    assert note.startswith("imported weights rounded again: 7 layers, signal to noise of weights ")
    assert "of results" in note
    assert decibels(logits(model), logits(exact)) > 15


@pytest.mark.slow(reason="compiles a model for one table")
def test_tied_embeddings_are_shared(tmp_path):
    model = small_llama(tie_word_embeddings=True)
    exact = write_folder(tmp_path, model, compressed_packed(4, 32), compressed_settings(4, 32))
    assert decibels(logits(intaglio.from_checkpoint(tmp_path)), logits(exact)) > 100


def test_weights_of_any_module_are_read_by_path(tmp_path):
    exact = write_folder(tmp_path, small_llama(), compressed_packed(4, 32), compressed_settings(4, 32))
    checkpoint = stages.read_checkpoint(tmp_path)
    path = "model.layers.0.mlp.gate_proj"
    own = stages.with_weights(small_llama(), {path: checkpoint.weights[path]})
    assert torch.equal(own.get_submodule(path).weight, exact.get_submodule(path).weight)


# ---- schemes of several groups


def two_groups(targets: list[str]) -> dict:
    settings = compressed_settings(8, activations="token")
    first = settings["config_groups"]["group_0"]
    second = {**first, "targets": targets, "input_activations": None}
    return {**settings, "config_groups": {"group_0": first, "group_1": second}}


@pytest.mark.parametrize("targets", [["re:.*down_proj$"], ["model.layers.0.mlp.down_proj", "re:.*1.mlp.up"]])
def test_a_module_belongs_to_the_group_that_names_it(targets, tmp_path):
    write_folder(tmp_path, small_llama(), compressed_int8(), two_groups(targets))
    weights = stages.read_checkpoint(tmp_path).weights
    modes = {path: weights[path].activations for path in weights}
    assert {path for path, mode in modes.items() if mode == "float"} == {p for p in modes if "down_proj" in p}


@pytest.mark.parametrize(
    ("targets", "error", "problem"),
    [
        (["re:^(?!.*lm_head).*"], UnsupportedError, "is not a regular expression of RE2, which has no lookaround"),
        (["Linear"], ArtifactError, "2 groups of the configuration describe this module"),
    ],
)
def test_ambiguous_groups_are_refused(targets, error, problem, tmp_path):
    write_folder(tmp_path, small_llama(), compressed_int8(), two_groups(targets))
    with pytest.raises(error, match=problem):
        stages.read_checkpoint(tmp_path)


# ---- refused


def with_weights(**changes) -> dict:
    settings = compressed_settings(4, 32)
    settings["config_groups"]["group_0"]["weights"] |= changes
    return settings


REFUSED = [
    (compressed_settings(8, format="float-quantized"), "'float-quantized' is not read"),
    (compressed_settings(4, 32, format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized' is not read"),
    (compressed_settings(4, 32, format="mxfp4-pack-quantized"), "'mxfp4-pack-quantized' is not read"),
    (compressed_settings(4, 32, format="marlin-24"), "'marlin-24' is not read"),
    (compressed_settings(4, 32, format="dense"), "'dense' is not read"),
    (compressed_settings(4, 32, sparsity_config={"format": "sparse-24-bitmask"}), "stored sparse, as 'sparse-24"),
    (compressed_settings(4, 32, transform_config={"config_groups": {"u": {}}}), "transform_config rotates"),
    (with_weights(type="float", num_bits=8), "its weights are 'float' numbers of 8 bits"),
    (with_weights(strategy="block"), "its scales belong to a 'block'"),
    (with_weights(num_bits=3), "model.layers.0.mlp.down_proj: its integers of 3 bits are packed"),
    (with_weights(num_bits=16), "its weights have 16 bits"),
]


@pytest.mark.parametrize(("settings", "problem"), REFUSED)
def test_other_formats_are_refused_by_name(settings, problem, tmp_path):
    write_folder(tmp_path, small_llama(), compressed_packed(4, 32), settings)
    with pytest.raises(UnsupportedError, match=problem) as refused:
        stages.read_checkpoint(tmp_path)
    assert "intaglio.quantize(model, data)" in str(refused.value.remedy)


def test_reordered_inputs_are_refused_by_name(tmp_path):
    def write(weight):
        stored = compressed_packed(4, 32)(weight)
        return type(stored)({**stored.tensors, "weight_g_idx": torch.arange(weight.shape[1]) // 32}, stored.weight)

    write_folder(tmp_path, small_llama(), write, compressed_settings(4, 32))
    with pytest.raises(UnsupportedError, match=r"gate_proj.weight_g_idx: its inputs are reordered"):
        stages.read_checkpoint(tmp_path).weights["model.layers.0.mlp.gate_proj"]
