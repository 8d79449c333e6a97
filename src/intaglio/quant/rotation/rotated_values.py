"""Find the values that one orthogonal matrix can multiply: residual streams, and the values of attention.

Their rotation starts at the tables and at the weights of linear layers that compute them, and ends at the weights of
the linear layers that read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from intaglio.fxgraph.node_info import info, origin
from intaglio.fxgraph.nodes import is_constant, layer_operands, operator
from intaglio.fxgraph.overloads import EMBEDDING_TARGET, LINEAR_TARGET
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.rotation.rotating_operators import (
    is_attention,
    is_layer_norm,
    is_norm,
    is_sum,
    measures_rows,
    merges_heads,
    moves_rows,
    passing_operands,
    scales_channels,
    size_of_rows,
    splits_heads,
)


@dataclass
class RotatedValues:
    """Values that are connected by operators that a rotation passes through, so that all have the same rotation.

    Attributes:
        size: size of their last axis.
        values: the values, in the order in which they were found.
        writers: linear layers that compute some of them.
        readers: linear layers that read some of them -> the factors per channel in front of the layer, if any.
        constants: pairs of an operator and a table or another constant that it reads.
        cached: inputs and results that hold int8 caches, which may be rotated because only the model reads them.
        refusal: why they cannot be rotated.
    """

    size: int
    values: dict[fx.Node, None] = field(default_factory=dict)
    writers: dict[fx.Node, None] = field(default_factory=dict)
    readers: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    constants: dict[tuple[fx.Node, fx.Node], None] = field(default_factory=dict)
    cached: frozenset[fx.Node] = frozenset()
    refusal: str | None = None
    _measured: bool = False

    @property
    def first(self) -> fx.Node:
        """Return the first of the values in execution order."""
        graph = next(iter(self.values)).graph
        return next(node for node in graph.nodes if node in self.values)

    @property
    def layers(self) -> list[fx.Node]:
        """Return the linear layers that compute or read the values."""
        return list(dict.fromkeys((*self.writers, *self.readers)))

    @property
    def scales(self) -> list[fx.Node]:
        """Return the operators that multiply channels by constant factors."""
        return [node for node in self.values if scales_channels(node)]

    @property
    def is_stream(self) -> bool:
        """Return whether they are a residual stream: sums that norms read."""
        return any(map(is_sum, self.values)) and (self._measured or any(map(is_norm, self.values)))

    @property
    def is_attended(self) -> bool:
        """Return whether attention reads them as its values."""
        return any(map(is_attention, self.values))

    @property
    def keeps_mean(self) -> bool:
        """Return whether their rotation must keep the mean of each row, which a layer norm subtracts."""
        return any(map(is_layer_norm, self.values))

    def connect(self, seed: fx.Node) -> None:
        """Add a value, and all values that have its rotation."""
        pending = [seed]
        while pending:
            value = pending.pop()
            if value not in self.values:
                self.values[value] = None
                pending += [*self._operands(value), *self._users(value)]
        for scale in self.scales:
            self._find_scaled_readers(scale)

    def _operands(self, value: fx.Node) -> Iterator[fx.Node]:
        """Yield the rotated operands of a value, and store the layer or constant that it is computed from."""
        if (passing := passing_operands(value, self.size)) is not None:
            for operand in passing:
                if is_constant(operand):
                    self.constants[value, operand] = None
                else:
                    yield operand
        elif operator(value) == EMBEDDING_TARGET and is_constant(value.args[0]):
            self.constants[value, value.args[0]] = None
        elif is_plain_layer(value):
            self.writers[value] = None
        elif splits_heads(value, self.size) and is_plain_layer(value.args[0]) and len(_readers(value.args[0])) == 1:
            self.writers[value.args[0]] = None
        elif value.op != "placeholder" or value not in self.cached:
            self._refuse("the model takes them as input" if value.op == "placeholder" else _named(value, "computes"))

    def _users(self, value: fx.Node) -> Iterator[fx.Node]:
        """Yield the rotated results of operators that read a value, and store the layers that read it."""
        for user in _readers(value):
            layers = _readers(user) if merges_heads(user, self.size) else [user]
            if measures_rows(user, value):
                self._measured = True
            elif user.op == "output" and value in self.cached:
                continue
            elif value in (passing_operands(user, self.size) or ()):
                yield user
            elif all(is_plain_layer(layer) and value_of(layer) in (value, user) for layer in layers):
                self.readers.update(dict.fromkeys(layers))
            else:
                self._refuse("the model returns them" if user.op == "output" else _named(user, "reads"))

    def _find_scaled_readers(self, scale: fx.Node) -> None:
        """Store the layers that absorb the factors of an operator."""
        values = [scale]
        for value in values:
            for user in _readers(value):
                layers = _readers(user) if merges_heads(user, self.size) else [user]
                if user in self.values and moves_rows(user):
                    values.append(user)
                elif user in self.values or measures_rows(user, value):
                    self._refuse(f"{_named(user, 'reads')} with a factor for each channel")
                else:
                    self.readers.update((layer, scale) for layer in layers if layer in self.readers)

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


def find_rotated_values(annotations: Annotations) -> list[RotatedValues]:
    """Return the residual streams of a graph and the values of each attention, also those that cannot be rotated."""
    module, cached = annotations.module, int8_caches(annotations)
    found: list[RotatedValues] = []
    for node in module.graph.nodes:
        size = size_of_rows(node)
        if isinstance(size, int) and _is_seed(node) and not any(node in one.values for one in found):
            found.append(RotatedValues(size, cached=cached))
            found[-1].connect(node)
    return [one for one in found if one.is_stream or one.is_attended]


def int8_caches(annotations: Annotations) -> frozenset[fx.Node]:
    """Return the inputs that hold int8 caches which the model computes itself, and their values after a call."""
    nodes = {node.name: node for node in annotations.module.graph.nodes}
    pairs = [(nodes[before], nodes[after]) for before, after in annotations.buffers.items()]
    return frozenset(node for before, after in pairs if after is not before for node in (before, after))


def _is_seed(node: fx.Node) -> bool:
    """Return whether a node is a norm or attention, or is measured by one of the operators of a norm."""
    return is_norm(node) or is_attention(node) or any(measures_rows(user, node) for user in node.users)


def is_plain_layer(node: fx.Node) -> bool:
    """Return whether a node is a linear layer whose parameters are constants."""
    if operator(node) != LINEAR_TARGET or not is_constant(node.args[1]):
        return False
    _, weight, bias = layer_operands(node)
    return is_constant(weight) and (bias is None or is_constant(bias))


def value_of(layer: fx.Node) -> fx.Node:
    """Return the value that a linear layer reads."""
    return layer_operands(layer).x


def _readers(value: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a value, without those that ask for its size."""
    return [user for user in value.users if info(user).dim is None]


def _named(node: fx.Node, does: str) -> str:
    """Return that an operator computes or reads the values."""
    return f"{origin(node).path or 'the model'} ({origin(node).operator or operator(node)}) {does} them"
