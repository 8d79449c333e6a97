"""Blocks and files of the package gguf, which belongs to llama.cpp, mean the same here to the bit."""

import gguf
import numpy as np
import pytest
import torch

import intaglio
from intaglio import stages
from intaglio.checkpoints.gguf_blocks import BLOCK_TYPES
from support.checkpoint_checks import decibels, logits
from support.checkpoint_files import small_llama
from support.slow_params import slow_params

KINDS = [name for name in BLOCK_TYPES if name.startswith("Q")]
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_random_blocks_have_the_values_of_the_package(kind):
    record = BLOCK_TYPES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (500, record.octets), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    finite = np.isfinite(expected).all(1)  # random scales of 16 bits may be infinite
    found = record.groups(blocks).values().reshape(expected.shape)
    assert finite.sum() > 300
    np.testing.assert_array_equal(found[finite], expected[finite])


def rotated_pairs_together(weight, heads):
    """The rows of queries or keys in the order of the files: the two halves of each head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, kind):
    """Write a Llama with the package's writer, and put the rounded weights into the model."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    rounded, number = {}, gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".", 3)
        module = MODULES.get(".".join(parts)) or f"blk.{parts[2]}.{MODULES[parts[3]]}"
        weight = tensor.numpy()
        if weight.ndim == 1:
            writer.add_tensor(f"{module}.weight", weight)
            continue
        blocks = gguf.quants.quantize(weight, number)
        rounded[name] = torch.from_numpy(gguf.quants.dequantize(blocks, number))
        if (count := heads.get(module.rsplit(".", 1)[-1])) is not None:
            blocks = rotated_pairs_together(blocks, count)
        writer.add_tensor(f"{module}.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(rounded, strict=False)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_file_of_the_package_has_the_weights_of_the_model(kind, tmp_path):
    model = small_llama("LlamaForCausalLM", num_hidden_layers=2)
    write(tmp_path / "model.gguf", model, kind)
    named = dict(model.named_parameters())
    checkpoint = stages.read_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.weights
    for path, weight in checkpoint.weights.items():
        assert torch.equal(weight.dequantized(), named[f"{path}.weight"]), path


@pytest.mark.slow(reason="compiles a model; its weights are compared above")
@pytest.mark.parametrize(
    "kind", ["Q4_0", *slow_params("Q8_0", reason="compiles a second model; its weights are above")]
)
def test_a_file_of_the_package_has_the_logits_of_the_model(kind, tmp_path):
    model = small_llama("LlamaForCausalLM", num_hidden_layers=1 if kind == "Q4_0" else 2)
    write(tmp_path / "model.gguf", model, kind)
    assert decibels(logits(intaglio.from_checkpoint(tmp_path / "model.gguf")), logits(model)) > 100
