"""Configurations from the metadata of GGUF files: settings that are read, missing, malformed or not known."""

import pytest
import torch

import intaglio
from intaglio import stages
from intaglio.checkpoints.gguf_config import config_entries
from intaglio.errors import ArtifactError, IntaglioError, UnsupportedError
from support.checkpoint_files import SIZES, library, small_llama
from support.gguf_files import write_model

pytestmark = pytest.mark.usefixtures("without_avx512")


def float_model(path, kind=None):
    library()
    from intaglio.integrations.transformers.checkpoint_models import model_from_checkpoint

    return model_from_checkpoint(path, kind)


def entries(path, **metadata):
    write_model(path, small_llama(), {"": "Q8_0"}, **metadata)
    return config_entries(stages.read_checkpoint(path))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_settings_become_the_configuration_of_the_class(path):
    found = entries(path, llama__rope__freq_base=500000.0, llama__rope__dimension_count=16, llama__vocab_size=96)
    assert {key: found[key] for key in SIZES} == SIZES
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert found["rms_norm_eps"] == pytest.approx(1e-6)
    assert (found["head_dim"], found["rope_theta"], found["rope_scaling"]) == (16, 500000.0, None)
    assert not found["tie_word_embeddings"]
    config = float_model(path).config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}


def test_the_number_of_tokens_and_of_heads_of_keys_have_defaults(path):
    write_model(path, small_llama(num_key_value_heads=4), {"": "Q8_0"}, llama__attention__head_count_kv=None)
    found = config_entries(stages.read_checkpoint(path))
    assert (found["num_key_value_heads"], found["vocab_size"], found["rope_theta"]) == (4, 96, 10000.0)


@pytest.mark.parametrize(
    "metadata",
    [{"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, {"llama__rope__scale_linear": 4.0}],
)
def test_positions_are_scaled_linearly(metadata, path):
    write_model(path, small_llama(), {"": "Q8_0"}, **metadata)
    frequencies = float_model(path).model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, small_llama().model.rotary_emb.inv_freq / 4)


def test_models_of_mistral_have_their_own_class(path):
    """Files name the architecture "llama" for them."""
    exact = write_model(path, small_llama("MistralForCausalLM", sliding_window=None), {"": "Q8_0"})
    model = float_model(path, library().MistralForCausalLM)
    assert isinstance(model, library().MistralForCausalLM)
    assert model.config.sliding_window is None
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, exact.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("embedding_length", None, "llama.embedding_length: the metadata lacks it; it must be a positive integer"),
        ("embedding_length", -64.0, "llama.embedding_length: it is -64.0, not a positive integer"),
        ("feed_forward_length", [128, 64], "llama.feed_forward_length: it has a value for each layer"),
        ("attention.head_count", 0, "llama.attention.head_count: it is 0, not a positive integer"),
        ("attention.head_count", True, "llama.attention.head_count: it is True, not a positive integer"),
        ("attention.head_count", 5, "its configuration is not one of LlamaForCausalLM"),
        ("attention.head_count", 4_000_000_000, "attention.key_length: it is 0, not a positive integer"),
        ("attention.head_count_kv", 3, "blk.0.attn_k.weight: its 32 rows are not those of 3 heads"),
        ("attention.layer_norm_rms_epsilon", None, "rms_epsilon: the metadata lacks it; it must be a positive number"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "rms_epsilon: it is nan, not a positive number"),
        ("block_count", 4_000_000_000, "llama.block_count: it is 4000000000, but the file has 12 tensors"),
        ("block_count", 2, "it lacks 9 tensors of LlamaForCausalLM: model.layers.1"),
        ("embedding_length", 128, r"model.embed_tokens: its weight has shape \[96, 128\], but the quantized one"),
        ("vocab_size", 90, "it does not fit LlamaForCausalLM: model.embed_tokens: its weight has shape"),
        ("vocab_size", 4_000_000_000, "it does not fit LlamaForCausalLM|no LlamaForCausalLM can be made"),
        ("feed_forward_length", 4_000_000_000, "it does not fit LlamaForCausalLM|no LlamaForCausalLM can be made"),
        ("context_length", "long", "llama.context_length: it is 'long', not a positive integer"),
        ("rope.freq_base", -1.0, "llama.rope.freq_base: it is -1.0, not a positive number"),
    ],
)
def test_settings_that_are_missing_or_malformed_are_errors(key, value, problem, path):
    write_model(path, small_llama(), {"": "Q8_0"}, **{f"llama.{key}": value})
    with pytest.raises(IntaglioError, match=problem):
        intaglio.from_checkpoint(path)


@pytest.mark.parametrize("token", [-1.0, "two"])
def test_token_ids_are_numbers(token, path):
    with pytest.raises(ArtifactError, match=r"tokenizer.ggml.eos_token_id: it is .*, not a token id"):
        entries(path, tokenizer__ggml__eos_token_id=token)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("expert_count", 8, "llama.expert_count: it is 8; models without it are read"),
        ("attention.sliding_window", 4096, "llama.attention.sliding_window: it is 4096"),
        ("attention.scale", 0.5, "llama.attention.scale: it is 0.5"),
        ("attention.causal", False, "llama.attention.causal: attention is not causal"),
        ("rope.dimension_count", 8, "llama.rope.dimension_count: 8 of 16 channels of a head are rotated"),
        ("attention.value_length", 32, "heads of keys and values have different sizes"),
        ("rope.scaling.type", "yarn", "llama.rope.scaling.type: positions are scaled by 'yarn'; 'linear' is read"),
    ],
)
def test_other_settings_are_refused_by_name_and_a_model_of_ones_own_is_filled(key, value, problem, path):
    exact = write_model(path, small_llama(), {"": "Q8_0"}, **{f"llama.{key}": value})
    with pytest.raises(UnsupportedError, match=problem) as error:
        intaglio.from_checkpoint(path)
    assert error.value.remedy.startswith("fill a float model of your own: stages.with_weights(model, stages.read_check")
    filled = stages.with_weights(small_llama(), stages.read_checkpoint(path).weights)
    assert torch.equal(filled.lm_head.weight, exact.lm_head.weight)
