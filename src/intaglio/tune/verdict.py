"""Judgement of the results of a quantized model: top-1 agreement of classes, or cosine similarity."""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.nn import functional as F

from intaglio.fxgraph.node_info import tensor_type
from intaglio.fxgraph.nodes import operator

LAYERS = frozenset({"aten.linear.default", "aten.addmm.default", "aten.conv2d.default"})
KEEP_CLASSES = frozenset(
    {
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.dropout.default",
        "aten.flatten.using_ints",
        "aten.log_softmax.int",
        "aten.reshape.default",
        "aten.softmax.int",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.view.default",
    }
)
"""Operators behind the last layer of a classifier that keep the order of its classes."""
RARE, COMMON = 0.99, 0.95
"""Top-1 agreement from which a loss of accuracy is rarely visible, and below which it commonly is."""
CLOSE, SIMILAR = 0.999, 0.99
"""Cosine similarity from which results hardly differ, and from which they differ a little."""


class ResultTotals:
    """Running sums over the samples of one result tensor. Memory does not depend on the number of samples."""

    def __init__(self) -> None:
        self.samples = self.agreeing = self.classified = 0
        self.cosines = 0.0

    def add(self, exact: torch.Tensor, found: torch.Tensor, logits: bool) -> None:
        """Add a batch. The first axis of a tensor with at least two axes counts samples."""
        exact, found = (tensor.detach().double() for tensor in (exact, found))
        exact, found = (t.flatten(1) if t.dim() > 1 else t.reshape(1, -1) for t in (exact, found))
        if not exact.numel():
            return
        self.samples += exact.shape[0]
        similar = F.cosine_similarity(exact, found, dim=1)
        both_zero = (exact == 0).all(1) & (found == 0).all(1)
        self.cosines += similar.masked_fill(both_zero, 1.0).sum().item()
        if logits:
            self.classified += exact.shape[0]
            self.agreeing += int((exact.argmax(1) == found.argmax(1)).sum())

    @property
    def cosine(self) -> float:
        """Return the mean cosine similarity of the samples, 1 without samples."""
        return self.cosines / self.samples if self.samples else 1.0

    @property
    def agreement(self) -> float | None:
        """Return the share of samples with the same top-1 class, or ``None`` if not all batches are logits."""
        return self.agreeing / self.samples if self.samples and self.classified == self.samples else None


def classifies(module: fx.GraphModule | None) -> bool:
    """Return whether a graph looks like a classifier: its first result with two axes is f[n, classes], has at least
    two classes, and comes from a linear layer or a convolution, directly or through a softmax or a reshape."""
    if module is None:
        return False
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = [node for node in output.all_input_nodes if tensor_type(node) is not None]
    for node in results:
        kind = tensor_type(node)
        if kind is not None and len(kind.shape) == 2:
            return kind.shape[1] != 1 and operator(_last_layer(node)) in LAYERS
    return False


def _last_layer(node: fx.Node) -> fx.Node:
    while operator(node) in KEEP_CLASSES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def verdict(agreement: float | None, cosine: float, decibels: float, samples: int) -> str:
    """Return two sentences about a result: how close it is to float, and what that usually means.

    Args:
        agreement: share of samples with the same top-1 class, or ``None`` for results that are not classes.
        cosine: mean cosine similarity of the samples.
        decibels: signal-to-quantization-noise ratio of the result.
        samples: number of samples.
    """
    ratio = "exact" if decibels == math.inf else f"{decibels:.1f} dB"
    if agreement is None:
        found = f"the cosine similarity of int8 and float results is {cosine:.5f} (mean of {samples} samples)"
        return f"{found}, SQNR {ratio}. {_meaning_of_cosine(cosine)}"
    found = f"{100 * agreement:.1f} % of {samples} samples have the same top-1 class in int8 as in float"
    return f"{found}, SQNR {ratio}. {_meaning_of_agreement(agreement)}"


def _meaning_of_agreement(agreement: float) -> str:
    if agreement == 1:
        return "The accuracy on these samples is that of the float model."
    limit = f"The accuracy on these samples differs from float by at most {100 * (1 - agreement):.1f} percentage points"
    if agreement >= RARE:
        return f"{limit}, usually by much less: most samples that change class are ambiguous in float too."
    if agreement >= COMMON:
        return f"{limit}, usually by less: measure it on labelled data."
    return f"{limit}; such a difference is usually visible, so look at the operators with the largest error first."


def _meaning_of_cosine(cosine: float) -> str:
    if cosine >= CLOSE:
        return "This usually means that rankings by similarity, and other uses of the result, hardly change."
    if cosine >= SIMILAR:
        return "This usually means small changes, such as swapped neighbours in a ranking: check with your own metric."
    return "This usually means a visible loss of accuracy: look at the operators with the largest error first."
