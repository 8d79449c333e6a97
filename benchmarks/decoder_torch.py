"""Decoders of ``transformers`` whose linear layers have kernels of PyTorch, zentorch or AutoRound.

What is around the layers is compiled: by TorchInductor, and for zentorch by its own backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from decoder_networks import NEW, PAST, decoder
from torch import Tensor, nn

GROUP = 32


def rounded(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return weights in int32, [out, in], and the scales of their groups, [out, groups].

    With 4 bits, the value of the largest magnitude of a group becomes -8. With 8 bits it becomes 127 or -127.
    """
    groups = weight.detach().float().unflatten(1, (-1, group))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = extreme / -8 if bits == 4 else extreme.abs() / 127
    scales = scales.where(extreme != 0, torch.ones(()))
    values = (groups / scales).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1)
    return values.int().flatten(1), scales[..., 0]


class Int4Linear(nn.Module):
    """Kernel of PyTorch: bfloat16 activations, weights in groups of 32 with bfloat16 scales."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        values, scales = rounded(layer.weight, GROUP, 4)
        self.weight = nn.Buffer(torch.ops.aten._convert_weight_to_int4pack_for_cpu(values + 8, 1))
        pairs = torch.stack([scales, torch.zeros_like(scales)], -1).bfloat16()
        self.scales = nn.Buffer(pairs.transpose(0, 1).contiguous())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales)
        found = found if self.bias is None else found + self.bias
        return found.unflatten(0, x.shape[:-1])


class ZentorchInt4(nn.Module):
    """Kernel of zentorch: bfloat16 activations, weights in groups of 32 with bfloat16 scales."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        values, scales = rounded(layer.weight, GROUP, 4)
        packed = torch.ops.zentorch.zentorch_woq_repack_weight(values.to(torch.int8))
        self.weight = nn.Buffer(self.of_kernel(packed))
        self.scales = nn.Buffer(scales.t().contiguous().bfloat16())
        self.bias = layer.bias

    def of_kernel(self, packed: Tensor) -> Tensor:
        return packed.t()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.zentorch.zentorch_woq_linear(x, self.weight, self.scales, None, self.bias)


class ZentorchDynamicInt4(ZentorchInt4):
    """The same with activations that are quantized to int8 per token."""

    def of_kernel(self, packed: Tensor) -> Tensor:
        return packed.view(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.zentorch.zentorch_dynamic_qlinear(x, self.weight, self.scales, self.bias)


class ZentorchDynamicInt8(nn.Module):
    """Kernel of zentorch: weights with a scale per channel, activations that are quantized to int8 per token."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        values, scales = rounded(layer.weight, layer.in_features, 8)
        self.weight, self.scales = nn.Buffer(values.to(torch.int8)), nn.Buffer(scales[:, 0].bfloat16())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.zentorch.zentorch_dynamic_qlinear(x, self.weight, self.scales, self.bias)


class AutoRoundLinear(nn.Module):
    """Kernel of AutoRound: float32 activations, weights in groups of 32 with float32 scales."""

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        super().__init__()
        kernels = importlib.import_module("auto_round_kernel")
        values, scales = rounded(layer.weight, GROUP, bits)
        self.types = ("auto", f"int{bits}", "fp32", False)
        columns, zero_points = values.t().to(torch.int8).contiguous(), torch.empty(0, dtype=torch.int8)
        packed = kernels.repack_quantized_weight(columns, scales.t().contiguous(), zero_points, GROUP, *self.types)
        self.weight, self.bits, self.sizes = nn.Buffer(packed), bits, (layer.out_features, layer.in_features)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        bias = x.new_empty(0) if self.bias is None else self.bias
        return auto_round(x.flatten(0, -2), self.weight, bias, *self.sizes, self.bits).unflatten(0, x.shape[:-1])


@torch.library.custom_op("benchmarks::auto_round", mutates_args=())
def auto_round(x: Tensor, weight: Tensor, bias: Tensor, outputs: int, inputs: int, bits: int) -> Tensor:
    """Call the kernel of AutoRound as an operator, so that TorchInductor does not divide the graph at each layer."""
    kernels = importlib.import_module("auto_round_kernel")
    return kernels.woqgemm(x, weight, bias, outputs, inputs, GROUP, "auto", f"int{bits}", "fp32", False)


@auto_round.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, outputs: int, inputs: int, bits: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


# -- whole models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """The linear layers of an engine, and how the model around them is compiled.

    Attributes:
        layers: number of bits -> what makes a layer of a float one; without a number, torchao quantizes the model.
        dtype: of activations and of all weights that stay in float.
        backend: of `torch.compile`.
    """

    layers: dict[int, Callable[[nn.Linear], nn.Module]]
    dtype: torch.dtype = torch.bfloat16
    backend: str = "inductor"


KERNELS = {
    "torch": Kernels({4: Int4Linear}),
    "zentorch": Kernels({4: ZentorchInt4}, backend="zentorch"),
    "zentorch_dynamic": Kernels({4: ZentorchDynamicInt4, 8: ZentorchDynamicInt8}, backend="zentorch"),
    "autoround": Kernels(
        {bits: lambda layer, bits=bits: AutoRoundLinear(layer, bits) for bits in (4, 8)}, torch.float32
    ),
}


def quantized(network: str, bits: int, kernels: Kernels) -> transformers.PreTrainedModel:
    """Return a decoder whose linear layers, the output layer included, have integer weights."""
    model = decoder(network)
    if bits not in kernels.layers:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.to(kernels.dtype), Int8WeightOnlyConfig())
        return model
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, kernels.layers[bits](layer))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kernels.dtype)
    return model


class Compiled:
    """Calls a compiled forward with a static cache, as `generate` does with ``cache_implementation="static"``."""

    def __init__(self, network: str, bits: int, name: str) -> None:
        kernels = KERNELS[name]
        if kernels.backend != "inductor":
            importlib.import_module(kernels.backend)  # which registers operators and the backend
        self.model = quantized(network, bits, kernels)
        self.forward: Any = torch.compile(self.model.forward, dynamic=False, backend=kernels.backend)
        config = self.model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = transformers.StaticCache(config=config, max_cache_len=PAST + NEW)
        self.cache.early_initialization(1, config.num_key_value_heads, head, kernels.dtype, torch.device("cpu"))
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
