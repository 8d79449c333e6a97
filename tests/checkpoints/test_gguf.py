"""Models in GGUF files: weights to the bit, names, logits, `generate`, and what is refused."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, UnsupportedError
from support.checkpoint_checks import assert_generates, batches, decibels, logged_warnings, logits
from support.checkpoint_files import library, small_llama
from support.gguf_files import TYPES, WRITERS, Tensor, gguf_bytes, write_model
from support.slow_params import slow_params

pytestmark = pytest.mark.usefixtures("without_avx512")

LARGE = {"hidden_size": 256, "intermediate_size": 256}
MODELS = {
    "llama, Q4_0": ("llama", "LlamaForCausalLM", {"": "Q4_0", "lm_head": "Q8_0"}, {}),
    "llama, Q4_K": ("llama", "LlamaForCausalLM", {"": "Q4_K", "v_proj": "Q6_K", "lm_head": "Q6_K"}, LARGE),
    "llama, Q5_K": ("llama", "LlamaForCausalLM", {"": "Q5_K", "v_proj": "Q5_1", "lm_head": "Q5_0"}, LARGE),
    "llama, Q4_1": ("llama", "LlamaForCausalLM", {"": "Q4_1", "lm_head": "Q5_1"}, {}),
    "llama, one table": ("llama", "LlamaForCausalLM", {"": "Q4_0"}, {"tie_word_embeddings": True}),
    "llama, biases": ("llama", "LlamaForCausalLM", {"": "Q8_0"}, {"attention_bias": True}),
    "llama, two layers": ("llama", "LlamaForCausalLM", {"": "Q4_0", "o_proj": "BF16"}, {"num_hidden_layers": 2}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {"": "Q8_0", "lm_head": "F16"}, {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"": "Q4_0", "embed_tokens": "F32"}, {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def file_with_more_tensors(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf") / "model.gguf"


def written(path, form, **metadata):
    architecture, kind, types, settings = MODELS[form]
    model = small_llama(kind, **settings)
    if "head_dim" in settings:
        metadata[f"{architecture}__attention__key_length"] = settings["head_dim"]
        metadata[f"{architecture}__attention__value_length"] = settings["head_dim"]
    return write_model(path, model, types, architecture, **metadata)


@pytest.mark.parametrize("form", MODELS)
def test_weights_have_the_names_and_values_of_the_model(form, tmp_path):
    exact = written(tmp_path / "model.gguf", form)
    checkpoint = stages.read_checkpoint(tmp_path / "model.gguf")
    named = dict(exact.named_parameters())
    assert {*(f"{path}.weight" for path in checkpoint.weights), *checkpoint.tensors} == set(named)
    for path, weight in checkpoint.weights.items():
        assert torch.equal(weight.dequantized(), named[f"{path}.weight"]), path
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, named[name]), name


@pytest.mark.slow(reason="compiles a second model; the weights of all forms are compared above")
@pytest.mark.parametrize(
    "form",
    [
        "qwen3",
        *slow_params(
            *("llama, Q4_0", "llama, Q5_K", "llama, one table", "qwen2"),
            reason="each compiles a model; the weights and names of all forms are compared above",
        ),
    ],
)
def test_a_model_has_the_logits_of_the_float_model(form, tmp_path):
    exact = written(tmp_path / "model.gguf", form)
    model = intaglio.from_checkpoint(tmp_path / "model.gguf")
    layers = [op for op in model.programs["decoder"].graph.ops if op.kind == "linear_groups_f32"]
    assert len(layers) == (7 if form == "qwen2" else 8)
    assert decibels(logits(model), logits(exact)) > 100


@pytest.mark.slow(
    reason="compiles a model; its weights are compared above, and a model of compressed-tensors generates"
)
def test_a_model_generates(tmp_path):
    exact = written(tmp_path / "model.gguf", "llama, Q4_K")
    model = intaglio.from_checkpoint(tmp_path / "model.gguf")
    assert decibels(logits(model), logits(exact)) > 100
    assert_generates(model, exact, tmp_path / "saved")
    assert model.generation_config.eos_token_id == 95


@pytest.mark.slow(reason="compressed-tensors has the same test, and both make the same kind of weights")
def test_a_recipe_rounds_groups_again(tmp_path):
    exact = written(tmp_path / "model.gguf", "llama, Q4_0")
    model = intaglio.from_checkpoint(
        tmp_path / "model.gguf", batches(), recipe={"type:Linear": {"activations": "static"}}
    )
    assert any("rounded again" in note for note in model.programs["decoder"].coverage.notes)
    assert decibels(logits(model), logits(exact)) > 15


@functools.cache
def with_more_tensors(path):
    """Write a file with factors of rotary frequencies and a tensor that is not known.

    Return the model that it is made of, the float model and the int8 model of what it holds, and what was logged.
    """
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    model = small_llama(rope_scaling=scaling | {"rope_theta": 10000.0})
    own, plain = model.model.rotary_emb.inv_freq, small_llama().model.rotary_emb.inv_freq
    factors = WRITERS["F32"]((plain / own).numpy())
    assert factors.values.max() > 2
    extra = {"rope_freqs.weight": factors, "blk.0.attn_rot_embd": WRITERS["F32"](np.zeros(8, np.float32))}
    exact = write_model(path, model, {"": "Q8_0"}, extra=extra)
    with logged_warnings() as found:
        int8 = intaglio.from_checkpoint(path)
    return model, exact, int8, found


@pytest.mark.slow(reason="compiles a third model")
def test_factors_of_rotary_frequencies_are_kept(file_with_more_tensors, tmp_path):
    """Files of Llama 3.1 and later have what the configuration of `transformers` computes."""
    model, exact, int8, _ = with_more_tensors(file_with_more_tensors)
    found = stages.read_checkpoint(file_with_more_tensors).tensors["model.rotary_emb.inv_freq"]
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq, rtol=3e-7, atol=0)
    assert decibels(logits(int8), logits(exact)) > 100
    assert_generates(int8, exact, tmp_path / "saved")
    for values, problem in ((np.zeros(8), "positive factors"), (np.ones(7), r"8 positive factors, but is \[7\]")):
        wrong = {"rope_freqs.weight": WRITERS["F32"](values.astype(np.float32))}
        write_model(tmp_path / "model.gguf", model, {"": "Q8_0"}, extra=wrong)
        with pytest.raises(ArtifactError, match=problem):
            intaglio.from_checkpoint(tmp_path / "model.gguf")


REFUSED = sorted(set(TYPES) - set(WRITERS))


@pytest.mark.parametrize("kind", REFUSED)
def test_other_types_are_refused_by_name_and_the_float_model_is_quantized(kind, tmp_path):
    values = np.zeros((2, 256), np.float32)
    tensors = {"blk.0.ffn_down.weight": Tensor(kind, (2, 256), bytes(2048), values)}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes({}, tensors))
    with pytest.raises(UnsupportedError, match=rf"blk.0.ffn_down.weight: its type {kind} is not read; F32, ") as error:
        stages.read_checkpoint(tmp_path / "model.gguf")
    assert error.value.remedy == "quantize the float model: intaglio.quantize(model, data)"
    intaglio.quantize(nn.Linear(8, 8), [torch.randn(4, 8)])


def test_numbers_that_are_no_known_type_are_refused(tmp_path):
    data = gguf_bytes({}, {"a.weight": WRITERS["Q8_0"](np.ones((1, 32), np.float32))})
    place = data.index(b"a.weight") + 8 + 4 + 16
    (tmp_path / "model.gguf").write_bytes(data[:place] + b"\xe7\x03\0\0" + data[place + 4 :])
    with pytest.raises(UnsupportedError, match=r"a.weight: its type of number 999 is not read"):
        stages.read_checkpoint(tmp_path / "model.gguf")


def test_files_without_quantized_weights_and_parts_of_files_are_refused(tmp_path):
    write_model(tmp_path / "model.gguf", small_llama(), {"": "F16"})
    with pytest.raises(UnsupportedError, match="its weights are not quantized"):
        stages.read_checkpoint(tmp_path / "model.gguf")
    write_model(tmp_path / "model.gguf", small_llama(), {"": "Q8_0"}, split__count=3)
    with pytest.raises(UnsupportedError, match="it is one of 3 parts") as error:
        stages.read_checkpoint(tmp_path / "model.gguf")
    assert error.value.remedy == "join its parts: llama-gguf-split --merge"


def test_tensors_of_other_architectures_keep_their_names(tmp_path):
    layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    stored = {f"{name}.weight": WRITERS["Q8_0"](layers[int(name)].weight.detach().numpy()) for name in "02"}
    library()
    tensors = stored | {"0.bias": WRITERS["F32"](np.zeros(32, np.float32))}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes({"general.architecture": "mlp"}, tensors))
    with pytest.raises(UnsupportedError, match=r"no model can be built for the architecture 'mlp'; llama, ") as error:
        intaglio.from_checkpoint(tmp_path / "model.gguf")
    assert error.value.remedy.startswith("fill a float model of your own: stages.with_weights(model, stages.read_check")
    filled = stages.with_weights(layers, stages.read_checkpoint(tmp_path / "model.gguf").weights)
    np.testing.assert_array_equal(filled[0].weight.numpy(), stored["0.weight"].values)
    np.testing.assert_array_equal(filled[2].weight.numpy(), stored["2.weight"].values)


def test_two_tensors_of_a_name_are_an_error(tmp_path):
    extra = {"model.norm.weight": WRITERS["F32"](np.zeros(64, np.float32))}
    write_model(tmp_path / "model.gguf", small_llama(), {"": "Q8_0"}, extra=extra)
    with pytest.raises(ArtifactError, match=r"it has two tensors 'model.norm.weight'"):
        stages.read_checkpoint(tmp_path / "model.gguf")


@pytest.mark.slow(reason="compiles a third model; folders have the same test")
def test_tensors_that_are_not_known_are_warned_about(file_with_more_tensors):
    logged = with_more_tensors(file_with_more_tensors)[3]
    assert any("LlamaForCausalLM does not use the tensors blk.0.attn_rot_embd" in text for text in logged)
