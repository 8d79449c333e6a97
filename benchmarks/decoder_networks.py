"""Decoders of the race: the sizes of published networks with random weights, and their computation in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torchvision_operators import declare_operators

declare_operators()  # transformers imports torchvision if it is installed

PAST, NEW = 512, 64
"""Tokens of the text, and the most tokens that follow it."""
SIZES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "qwen25_05b": (
        transformers.Qwen2Config,
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 24,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3_06b": (
        transformers.Qwen3Config,
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 28,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "llama32_1b": (
        transformers.LlamaConfig,
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 8,
            "vocab_size": 128256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
}
TITLES = {"qwen25_05b": "Qwen2.5-0.5B", "qwen3_06b": "Qwen3-0.6B", "llama32_1b": "Llama-3.2-1B, 8 of 16 layers"}


def decoder(network: str) -> transformers.PreTrainedModel:
    """Return a decoder of `SIZES` with random weights, whose output layer has the weights of the embedding."""
    kind, sizes = SIZES[network]
    shared = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **shared)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model


def tokens(network: str, count: int, seed: int) -> Tensor:
    """Return random token ids, [1, count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES[network][1]["vocab_size"], (1, count), generator=generator)


def weights_of_a_step(model: transformers.PreTrainedModel) -> dict[str, int]:
    """Return how many weights a step reads, in the layers and in the output layer."""
    linear = {name: module.weight.numel() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    output = linear.pop("lm_head")
    return {"layers": sum(linear.values()), "output": output}


# -- the same computation without transformers, for engines that trace it ---------------------------------------------


class PlainDecoder(nn.Module):
    """The computation of a decoder with its cache as arguments and results.

    Its modules are those of the ``transformers`` model, so that it adds no weights. Logits are those of the last token.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.embedding, self.norm, self.output = model.model.embed_tokens, model.model.norm, model.lm_head
        self.layers = nn.ModuleList(PlainLayer(layer, model.config) for layer in model.model.layers)
        size = self.layers[0].size
        theta = model.config.rope_parameters["rope_theta"]
        self.register_buffer("frequencies", theta ** (-torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Compute the logits of the last token, and keys and values of all tokens.

        Args:
            ids: token ids, [batch, new].
            mask: added to the scores of attention, [1, 1, new, all].
            positions: positions of the new tokens, [1, new].
            past: keys and values of every layer, [batch, heads, before, size].
        """
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        rotation = angles.cos(), angles.sin()
        x, present = self.embedding(ids), []
        for layer, keys, values in zip(self.layers, past[::2], past[1::2], strict=True):
            x, *new = layer(x, mask, rotation, keys, values)
            present += new
        return self.output(self.norm(x[:, -1:])), *present


class PlainLayer(nn.Module):
    def __init__(self, layer: nn.Module, config: transformers.PreTrainedConfig) -> None:
        super().__init__()
        self.layer, self.size = layer, layer.self_attn.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.normalizes_heads = hasattr(layer.self_attn, "q_norm")

    def forward(
        self, x: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor], past_keys: Tensor, past_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention, given = self.layer.self_attn, self.layer.input_layernorm(x)
        queries, keys, values = (
            projection(given).unflatten(-1, (-1, self.size))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.normalizes_heads:
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys = (rotated(tensor.transpose(1, 2), *rotation) for tensor in (queries, keys))
        keys, values = torch.cat((past_keys, keys), 2), torch.cat((past_values, values.transpose(1, 2)), 2)
        shared = (repeated(tensor, self.groups) for tensor in (keys, values))
        found = functional.scaled_dot_product_attention(queries, *shared, attn_mask=mask)
        x = x + attention.o_proj(found.transpose(1, 2).flatten(2))
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x)), keys, values


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, tokens, size]."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat every head of keys or values for the queries that share it."""
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, size).reshape(batch, heads * groups, length, size)


def causal_mask(new: int, before: int) -> Tensor:
    """Return what is added to scores of attention, [1, 1, new, before + new]."""
    return torch.full((1, 1, new, before + new), -1e9).triu(before + 1)
