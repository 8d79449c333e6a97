"""Quantizers written as annotators of nodes and edges."""

import torch
from torch import nn

from intaglio import stages
from intaglio.fxgraph.nodes import operator
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from support import nets

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def prepared(model, annotator, *example):
    return prepare(stages.capture(nets.randomize(model), example or (X,)), annotator)


def reference(model, annotator, *example):
    stage = prepared(model, annotator, *example)
    stage(*(example or (X,)))
    return convert(stage)


def counts(reference) -> str:
    """quantize : dequantize : dequantize of weights."""
    names = [operator(node).removeprefix("quantized_decomposed.") for node in reference.module.graph.nodes]
    integers = [node.args[-1] for node in reference.module.graph.nodes if "dequantize_per_channel" in operator(node)]
    per_tensor = [name.partition("_per_")[0] for name in names if name.endswith("_per_tensor.default")]
    return f"{per_tensor.count('quantize')}:{per_tensor.count('dequantize')}:{integers.count(torch.int8)}"


class Extremum(nn.Module):
    """Sees values and keeps the largest magnitude."""

    def __init__(self):
        super().__init__()
        self.most = 0.0

    def forward(self, x):
        self.most = max(self.most, x.abs().max().item())
        return x


class Shifted(Extremum):
    """Signed bytes around -3, for an activation."""

    def convert(self, module, node):
        ops, given = torch.ops.quantized_decomposed, (self.most / 100, -3, -128, 127, torch.int8)
        with module.graph.inserting_before(node):
            quantized = module.graph.call_function(ops.quantize_per_tensor.default, (node.args[0], *given))
            back = module.graph.call_function(ops.dequantize_per_tensor.default, (quantized, *given))
        node.replace_all_uses_with(back)
        module.graph.erase_node(node)
