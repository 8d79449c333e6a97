"""Checkpoints of GPTQ and AWQ: weights to the bit, logits, `generate`, files, and what is refused."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, UnsupportedError
from support.checkpoint_checks import assert_generates, assert_weights, batches, decibels, logits
from support.checkpoint_files import (
    awq_gemm,
    awq_gemv,
    awq_settings,
    gptq_settings,
    gptq_words,
    small_llama,
    write_folder,
)
from support.slow_params import slow_params

pytestmark = pytest.mark.usefixtures("without_avx512")

GPTQ = {
    "4 bits": (4, 32, {}, {}),
    "4 bits, inputs in another order": (4, 32, {"in_order": False}, {"desc_act": True}),
    "4 bits, zero points": (4, 16, {"symmetric": False}, {"sym": False}),
    "2 bits, zero points": (2, 32, {"symmetric": False}, {"sym": False}),
    "8 bits, one group": (8, 0, {}, {}),
    "8 bits, zero points, inputs in another order": (8, 32, {"symmetric": False, "in_order": False}, {}),
    "without the groups of inputs": (4, 32, {"with_places": False}, {}),
    "whole zero points": (4, 32, {"symmetric": False, "missing": 0}, {"checkpoint_format": "gptq_v2"}),
    "bfloat16 scales": (4, 32, {"scale_type": torch.bfloat16}, {}),
}
AWQ = {"gemm": awq_gemm, "gemv": awq_gemv}


@pytest.mark.parametrize("form", GPTQ)
def test_gptq_weights_have_the_values_of_their_definition(form, tmp_path):
    bits, group, layout, settings = GPTQ[form]
    writer = gptq_words(bits, group, **layout)
    exact = write_folder(tmp_path, small_llama(), writer, gptq_settings(bits, group, **settings))
    checkpoint = stages.read_checkpoint(tmp_path)
    assert checkpoint.format == "gptq"
    assert_weights(checkpoint, exact)


@pytest.mark.parametrize("group", [16, 32, 0])
@pytest.mark.parametrize("version", AWQ)
def test_awq_weights_have_the_values_of_their_definition(version, group, tmp_path):
    exact = write_folder(tmp_path, small_llama(), AWQ[version](group), awq_settings(group, version))
    checkpoint = stages.read_checkpoint(tmp_path)
    assert checkpoint.format == "awq"
    assert_weights(checkpoint, exact)


@functools.cache
def gptq_model(in_order):
    """Return the float model and the model of a checkpoint whose groups hold neighbours or inputs in another order."""
    writer = gptq_words(4, 32, in_order=in_order)
    with tempfile.TemporaryDirectory() as folder:
        exact = write_folder(Path(folder), small_llama(), writer, gptq_settings(4, 32, desc_act=not in_order))
        return exact, intaglio.from_checkpoint(folder)


@pytest.mark.slow(reason="compiles a model; its weights are compared with their definition above")
@pytest.mark.parametrize(
    "in_order", [False, *slow_params(True, reason="compressed-tensors has the same test with groups of neighbours")]
)
def test_a_gptq_model_generates(in_order, tmp_path):
    exact, model = gptq_model(in_order)
    graph = model.programs["decoder"].graph
    assert {op.kind for op in graph.ops} >= {"linear_groups_f32"}
    assert decibels(logits(model), logits(exact)) > 100
    assert_generates(model, exact, tmp_path / "saved")


@pytest.mark.slow(reason="compiles a model; a model of compressed-tensors generates with the same kind of weights")
def test_layers_that_share_the_order_of_their_inputs_share_a_gather():
    """The order of the test depends on the number of inputs, as query, key and value have the same."""
    graph = gptq_model(False)[1].programs["decoder"].graph
    layers = [op for op in graph.ops if op.kind == "linear_groups_f32"]
    gathered = {op.inputs[0] for op in layers}
    assert len(layers) == 7
    assert len(gathered) == 4, "query, key and value; output; gate and up; down"


@pytest.mark.slow(reason="compiles a model; a model of compressed-tensors generates with the same kind of weights")
def test_an_awq_model_generates(tmp_path):
    exact = write_folder(tmp_path / "awq", small_llama(), awq_gemm(32), awq_settings(32, "gemm"))
    model = intaglio.from_checkpoint(tmp_path / "awq")
    assert decibels(logits(model), logits(exact)) > 100
    assert_generates(model, exact, tmp_path / "saved")


@pytest.mark.slow(reason="compressed-tensors has the same test, and both make the same weights")
def test_a_recipe_rounds_inputs_in_another_order_again(tmp_path):
    writer = gptq_words(4, 32, in_order=False)
    exact = write_folder(tmp_path, small_llama(), writer, gptq_settings(4, 32, desc_act=True))
    model = intaglio.from_checkpoint(tmp_path, batches(), recipe={"type:Linear": {"activations": "static"}})
    assert any("rounded again" in note for note in model.programs["decoder"].coverage.notes)
    assert decibels(logits(model), logits(exact)) > 15


REFUSED = {
    "the format 'marlin' is not read": (gptq_settings(4, 32, checkpoint_format="marlin"), UnsupportedError),
    "the format 'marlin'.* is not read": (gptq_settings(4, 32, is_marlin_format=True), UnsupportedError),
    "integers have 3 bits": (gptq_settings(3, 32), UnsupportedError),
    "its bits are '4'": (gptq_settings("4", 32), ArtifactError),
    "the format 'exllama' is not read": (awq_settings(32, "exllama"), UnsupportedError),
    "its integers have 8 bits": (awq_settings(32, "gemm", bits=8), UnsupportedError),
    "its group_size is '32'": (awq_settings(32, "gemm", group_size="32"), ArtifactError),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_other_formats_are_refused_by_name(problem, tmp_path):
    settings, error = REFUSED[problem]
    with_places = settings["quant_method"] != "gptq" or settings["bits"] != 3
    write_folder(tmp_path, small_llama(), gptq_words(4, 32, with_places=with_places), settings)
    with pytest.raises(error, match=problem):
        stages.read_checkpoint(tmp_path)
    write_folder(tmp_path, small_llama(), gptq_words(4, 32), gptq_settings(4, 32))
    assert len(stages.read_checkpoint(tmp_path).weights) == 7


def test_groups_of_unequal_sizes_are_refused_by_name(tmp_path):
    def writer(weight):
        stored = gptq_words(4, 32)(weight)
        places = stored.tensors["g_idx"].clone()
        places[0] = places[-1]
        return type(stored)({**stored.tensors, "g_idx": places}, stored.weight)

    write_folder(tmp_path, small_llama(), writer, gptq_settings(4, 32, desc_act=True))
    checkpoint = stages.read_checkpoint(tmp_path)
    with pytest.raises(UnsupportedError, match=r"up_proj\.g_idx: its inputs do not belong to"):
        checkpoint.weights["model.layers.0.mlp.up_proj"]
