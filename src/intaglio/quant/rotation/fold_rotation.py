"""Fold a rotation into the constants of a graph: weights, biases, tables, and the factors of norms."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant, in_file
from intaglio.fxgraph.graph_passes import drop_unused_constants
from intaglio.fxgraph.node_info import constant_path
from intaglio.fxgraph.nodes import arguments, constant_node, layer_operands, replace_node
from intaglio.quant.rotation.orthogonal import Rotation, multiplied_rows
from intaglio.quant.rotation.rotated_values import RotatedValues
from intaglio.quant.rotation.rotating_operators import is_norm


def fold_rotation(module: fx.GraphModule, found: RotatedValues) -> None:
    """Multiply connected values by a rotation, without a change to what the graph computes from them.

    Layers and tables that compute the values are multiplied by the rotation, in each head if the values are those of
    heads, and layers that read them by its inverse. Before that, the layers absorb the factors of norms in front.
    """
    folder = _Folder(module, Rotation(found.size, found.keeps_mean))
    for layer, scale in found.readers.items():
        folder.rotate_columns(layer, scale)
    for scale in found.scales:
        _drop_factors(scale)
    for layer in found.writers:
        folder.rotate_rows(layer)
    for node, constant in found.constants:
        if constant in node.all_input_nodes:
            folder.rotate_constant(node, constant)
    module.graph.eliminate_dead_code()
    drop_unused_constants(module)
    module.recompile()


class _Folder:
    """Replaces constants by rotated ones. Nodes that change a constant in the same way share the new one.

    Attributes:
        module: the graph.
        rotation: the rotation.
        made: name of a constant and what changed it -> the node of the new constant.
    """

    def __init__(self, module: fx.GraphModule, rotation: Rotation) -> None:
        self.module, self.rotation = module, rotation
        self.made: dict[tuple[str, str], fx.Node] = {}

    def rotate_columns(self, layer: fx.Node, scale: fx.Node | None) -> None:
        """Let a layer read rotated values, and absorb the factors and offsets of an operator in front of it."""
        x, old, bias = layer_operands(layer)
        weight, label, factors = self._tensor(old), "columns", None
        if scale is not None:
            label = f"columns {scale.name}"
            factors, offsets = (one.repeat(weight.shape[1] // self.rotation.size) for one in self._factors(scale))
            if offsets.any():
                moved = weight.double() @ offsets + (0.0 if bias is None else self._tensor(bias).double())
                path = constant_path(old, str(old.target)).removesuffix("weight") + "bias"
                bias = self._constant(old if bias is None else bias, f"{old.target} {label}", moved, path)
        layer.args = (x, self._constant(old, label, self._rotated(weight, factors)), bias)
        layer.kwargs = {}

    def rotate_rows(self, layer: fx.Node) -> None:
        """Let a layer compute rotated values."""
        x, weight, bias = layer_operands(layer)
        rotated = self._rotated(self._tensor(weight).t()).t()
        if bias is not None:
            bias = self._constant(bias, "rows", self._rotated(self._tensor(bias)))
        layer.args = (x, self._constant(weight, "rows", rotated), bias)
        layer.kwargs = {}

    def rotate_constant(self, node: fx.Node, constant: fx.Node) -> None:
        """Let a node read a constant with rotated rows."""
        node.replace_input_with(constant, self._constant(constant, "", self._rotated(self._tensor(constant))))

    def _rotated(self, rows: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows [..., heads * size] times factors and the rotation, in each head."""

        def multiplied(block: torch.Tensor) -> torch.Tensor:
            block = block if factors is None else block * factors
            return self.rotation(block.unflatten(-1, (-1, self.rotation.size))).flatten(-2)

        return multiplied_rows(rows, multiplied)

    def _factors(self, scale: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors and offsets of channels of a norm or of an addcmul, float64 [size]."""
        if is_norm(scale):
            given = [arguments(scale).get(name) for name in ("weight", "bias")]
        else:
            given = [scale.args[2], scale.args[0]]
        found = [start(self.rotation.size, dtype=torch.float64) for start in (torch.ones, torch.zeros)]
        for place, constant in enumerate(given):
            if constant is not None:
                found[place] = self._tensor(constant).double().flatten().expand(self.rotation.size)
        return found[0], found[1]

    def _tensor(self, constant: fx.Node) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.module, str(constant.target))
        return tensor

    def _constant(self, old: fx.Node, label: str, values: torch.Tensor, path: str | None = None) -> fx.Node:
        """Return the node of a constant that replaces an old one, with its path unless another is given."""
        key = str(old.target), label
        if key not in self.made:
            name = add_constant(self.module, f"{old.target}_rotated", in_file(values.float()))
            self.made[key] = constant_node(self.module, name, constant_path(old, name) if path is None else path)
        return self.made[key]


def _drop_factors(scale: fx.Node) -> None:
    """Remove the factors and offsets of a norm, or an addcmul."""
    if not is_norm(scale):
        replace_node(scale, scale.args[1])
        return
    epsilon = arguments(scale)["eps"]
    without = [None] * sum(name in arguments(scale) for name in ("weight", "bias"))
    scale.args = (*scale.args[:2], *without, epsilon)
    scale.kwargs = {}
