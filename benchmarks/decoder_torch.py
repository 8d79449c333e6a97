"""A decoder of ``transformers`` with PyTorch's own kernels for 4-bit and 8-bit weights, compiled by TorchInductor."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from decoder_networks import NEW, PAST, decoder
from torch import Tensor, nn

GROUP = 32


class Int4Linear(nn.Module):
    """Linear layer with bfloat16 activations and weights in groups of 32 with bfloat16 scales."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        groups = layer.weight.detach().float().unflatten(1, (-1, GROUP))
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scales = (extreme / -8).where(extreme != 0, torch.ones(())).bfloat16()
        values = (groups / scales.float()).round().clamp(-8, 7).int().flatten(1) + 8
        self.weight = nn.Buffer(torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1))
        pairs = torch.cat([scales, torch.zeros_like(scales)], -1)
        self.scales = nn.Buffer(pairs.transpose(0, 1).contiguous())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales)
        found = found if self.bias is None else found + self.bias
        return found.unflatten(0, x.shape[:-1])


def quantized(network: str, bits: int) -> transformers.PreTrainedModel:
    """Return a decoder in bfloat16 whose linear layers, the output layer included, have integer weights."""
    model = decoder(network)
    if bits == 8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.bfloat16(), Int8WeightOnlyConfig())
        return model
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, Int4Linear(layer))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


class Compiled:
    """Calls a compiled forward with a static cache, as `generate` does with ``cache_implementation="static"``."""

    def __init__(self, network: str, bits: int) -> None:
        self.model = quantized(network, bits)
        self.forward: Any = torch.compile(self.model.forward, dynamic=False)
        config = self.model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = transformers.StaticCache(config=config, max_cache_len=PAST + NEW)
        self.cache.early_initialization(1, config.num_key_value_heads, head, torch.bfloat16, torch.device("cpu"))
        self.length = 0

    def text(self, ids: Tensor) -> Tensor:
        self.cache.reset()
        self.length = 0
        return self.step(ids)

    def step(self, ids: Tensor) -> Tensor:
        positions = torch.arange(self.length, self.length + ids.shape[1])[None]
        self.length += ids.shape[1]
        found = self.forward(ids, past_key_values=self.cache, position_ids=positions, logits_to_keep=1)
        return found.logits[:, -1].float()
