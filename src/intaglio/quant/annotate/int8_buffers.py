"""Quantized buffers, such as a key-value cache in a quarter of the memory: state that stays uint8 between calls. Inputs
that hold results of earlier calls are read and returned like them.

Operators that only move data in such a buffer move quantized values, so a stored value is never rounded again. Where a
value must go through float32, `quantize` after `dequantize` restores each of the 256 quantized values exactly.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import (
    constant_path,
    copy_info,
    info,
    known_type,
    origin,
    set_info,
    tensor_type,
    update_info,
)
from intaglio.fxgraph.nodes import arguments, is_constant, operator, tensor_nodes
from intaglio.ir import DType, QParams, Signature, State, TensorType
from intaglio.quant.annotate.sites import Site
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_TENSOR, QUANTIZE_TENSOR
from intaglio.quant.recipes.choices import Role

BUFFER_UPDATES: Mapping[str, tuple[str, ...]] = {
    "aten.index_put.default": ("self", "values"),
    "aten.slice_scatter.default": ("self", "src"),
    "aten.select_scatter.default": ("self", "src"),
    "aten.index_copy.default": ("self", "source"),
    "aten.scatter.src": ("self", "src"),
    "aten.where.self": ("self", "other"),
    "aten.cat.default": ("tensors",),
    **dict.fromkeys(
        (
            "aten.slice.Tensor",
            "aten.select.int",
            "aten.reshape.default",
            "aten.permute.default",
            "aten.transpose.int",
            "aten.unsqueeze.default",
            "aten.squeeze.dim",
            "aten.expand.default",
            "aten.flip.default",
            "aten.roll.default",
            "aten.index_select.default",
        ),
        ("self",),
    ),
}
"""Data movement operators -> their arguments that hold the moved values."""
PARTIAL_WRITE_TARGETS = (
    "aten.index_put.default",
    "aten.slice_scatter.default",
    "aten.select_scatter.default",
    "aten.index_copy.default",
    "aten.scatter.src",
    "aten.copy.default",
)
"""Operators that return their first argument with a part of it overwritten."""


# -- selection of buffers, and their sites ----------------------------------------------------------------------------


def selected_buffers(graph: fx.Graph, selectors: Sequence[str]) -> dict[fx.Node, fx.Node]:
    """Return the mutable buffers that are to be quantized -> their values after a call.

    Args:
        graph: a captured graph. No two of its buffers share memory, because capture rejects that.
        selectors: paths of buffers, or wildcards, which skip buffers of other types than float32.

    Raises:
        UnsupportedError: for the exact path of a buffer that is not float32.
        SelectorError: for a selector that matches no buffer that the model changes.
    """
    state = [node for node in graph.nodes if info(node).buffer is not None]
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    after = dict(zip(state, results[len(results) - len(state) :], strict=True))
    paths = {str(info(node).buffer): node for node in state}
    found: dict[fx.Node, fx.Node] = {}
    for selector in selectors:
        hits = fnmatch.filter(paths, selector)
        if not hits and selector != "*":
            raise SelectorError(
                "int8_buffers",
                None,
                f"{selector!r} matches no buffer that the model changes",
                remedy=f"choose from {', '.join(paths)}" if paths else "leave out int8_buffers",
            )
        for path in hits:
            kind = tensor_type(paths[path])
            if kind is None or kind.dtype is not DType.F32:
                if path == selector:
                    problem = f"the buffer is {kind and kind.dtype}; only float32 buffers can be quantized"
                    raise UnsupportedError(path, None, problem, remedy="remove it from int8_buffers")
                continue
            found[paths[path]] = after[paths[path]]
    return found


def buffer_names(buffers: Mapping[fx.Node, fx.Node]) -> dict[str, str]:
    """Return the buffers by node names, which copies of the graph share."""
    return {before.name: after.name for before, after in buffers.items()}


def check_buffer_sites(buffers: Mapping[fx.Node, fx.Node], sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return the sites unchanged; raise `UnsupportedError` if one of a buffer or cached input is not uint8 with a
    single scale."""
    kept = {node.name: before for before, after in buffers.items() for node in (before, after)}
    for site in sites:
        is_buffer = site.value in kept and site.role == Role.ACTIVATION
        if is_buffer and (site.dtype is not DType.U8 or site.axis is not None):
            is_cached = info(kept[site.value]).buffer is None
            name, remedy = "buffer", "remove the buffer from int8_buffers"
            if is_cached:
                name, remedy = "cache", "leave out cache = 'int8' where the recipe sets activations_dtype"
            problem = f"the {name} would be stored as {site.datatype}; a {name} must be u8 with a single scale"
            raise UnsupportedError(site.name, None, problem, remedy=remedy)
    return sites


def is_destination(reader: fx.Node, value: fx.Node) -> bool:
    """Return whether a node overwrites a part of a mutable buffer `value`.

    Such a value is not an arithmetic operand and gets no observer.
    """
    while operator(value) in BUFFER_UPDATES and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    return operator(reader) in PARTIAL_WRITE_TARGETS and reader.args[0] is value and info(value).buffer is not None


# -- conversion -------------------------------------------------------------------------------------------------------


def quantize_buffers(
    module: fx.GraphModule,
    signature: Signature,
    buffers: Mapping[str, str],
    cached: Mapping[int, int | None],
    qparams: Mapping[str, QParams],
) -> tuple[Signature, list[str]]:
    """Rewrite a Q/DQ graph so that the given buffers and cached inputs are uint8 inputs and outputs.

    Args:
        module: the graph, which is changed in place.
        signature: its signature.
        buffers: name of the graph's input -> site, for buffers and cached inputs.
        cached: positions of cached inputs -> positions of the results that later calls receive in their place.
        qparams: site -> its parameters.

    Returns:
        The new signature, and a note for each buffer whose new values are computed from its old ones and rounded.
    """
    graph, notes, state = module.graph, [], []
    nodes = {node.name: node for node in graph.nodes}
    end = next(node for node in graph.nodes if node.op == "output")
    results = list(end.args[0])
    for entry, position in zip(signature.state, range(len(results) - len(signature.state), len(results)), strict=True):
        if entry.name in buffers:
            entry = _quantized_state(entry, qparams[buffers[entry.name]])
            _read_quantized(nodes[entry.name], entry.type)
            dataflow = _QuantizedDataflow(module, nodes[entry.name], entry.type)
            results[position] = dataflow.quantized(results[position])
            if dataflow.rounded:
                notes.append(
                    f"buffer {entry.path}: computed from its own quantized values, and rounded again, in every call"
                )
        state.append(entry)
    inputs = list(signature.inputs)
    for position, result in cached.items():
        given = inputs[position]
        if given.name in buffers:
            kind = TensorType(given.type.shape, DType.U8, qparams[buffers[given.name]])
            inputs[position] = replace(given, type=kind)
            _read_quantized(nodes[given.name], kind)
            if result is not None:
                results[result] = _QuantizedDataflow(module, nodes[given.name], kind).quantized(results[result])
    end.args = (tuple(results),)
    graph.eliminate_dead_code()
    return replace(signature, inputs=tuple(inputs), state=tuple(state)), notes


def _quantized_state(entry: State, q: QParams) -> State:
    """Return a buffer's entry in the signature with its type and initial contents quantized."""
    quantized = numerics.quantize(entry.initial, q.step, q.zero, q.qmin, q.qmax).astype(np.uint8)
    return replace(entry, type=TensorType(entry.type.shape, DType.U8, q), initial=quantized)


def _read_quantized(before: fx.Node, kind: TensorType) -> None:
    """Change the type of a buffer's input to quantized, and remove the quantize nodes that read it."""
    update_info(before, type=kind)
    for user in [user for user in before.users if operator(user) == QUANTIZE_TENSOR]:
        user.replace_all_uses_with(before)
        before.graph.erase_node(user)


class _QuantizedDataflow:
    """Computes the quantized value of a buffer after a call, moving quantized values instead of floats if possible."""

    def __init__(self, module: fx.GraphModule, before: fx.Node, kind: TensorType) -> None:
        self.quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
        self.module, self.graph, self.before, self.kind = module, module.graph, before, kind
        self.known: dict[fx.Node, fx.Node] = {}
        self.rounded = False  # Set if a new value is computed from stored values and then rounded.

    def quantized(self, value: fx.Node) -> fx.Node:
        """Return the node of the quantized value of a float node."""
        if value not in self.known:
            self.known[value] = self._find_quantized(value)
        return self.known[value]

    def _find_quantized(self, value: fx.Node) -> fx.Node:
        if operator(value) == DEQUANTIZE_TENSOR and self._has_buffer_qparams(value):
            source = value.args[0]
            if operator(source) == QUANTIZE_TENSOR and self._only_moves_stored(source.args[0]):
                moved = self.quantized(source.args[0])
                update_info(moved, site=info(source).site)
                source.replace_all_uses_with(moved)
                return moved
            self.rounded |= operator(source) == QUANTIZE_TENSOR and self._reads_stored(source)
            return source
        alone = operator(value) in BUFFER_UPDATES and len(value.users) == 1  # The operands are quantized instead.
        return self._move_quantized(value) if alone or self._only_moves_stored(value) else self._insert_quantize(value)

    def _move_quantized(self, value: fx.Node) -> fx.Node:
        """Return a copy of a data movement node that reads quantized values."""
        own = [arguments(value)[name] for name in BUFFER_UPDATES[operator(value)]]
        given = {leaf: self.quantized(leaf) for leaf in tensor_nodes(own)}
        with self.graph.inserting_after(value):
            moved = self.graph.node_copy(value, lambda leaf: given.get(leaf, leaf))
        copy_info(moved, value, type=replace(self.kind, shape=known_type(value).shape))
        return moved

    def _insert_quantize(self, value: fx.Node) -> fx.Node:
        """Return a node that quantizes a float value with the buffer's parameters."""
        self.rounded |= self._reads_stored(value)
        q, kind = self.kind.qparams, replace(self.kind, shape=known_type(value).shape)
        if is_constant(value):
            return self._quantized_constant(value, kind)
        parameters = (q.step, q.zero, q.qmin, q.qmax, torch.uint8)
        with self.graph.inserting_after(value):
            made = self.graph.call_function(self.quantize, (value, *parameters))
        set_info(made, type=kind, origin=origin(value))
        return made

    def _quantized_constant(self, value: fx.Node, kind: TensorType) -> fx.Node:
        """Return a quantized copy of a constant."""
        q, array = kind.qparams, getattr(self.module, str(value.target)).detach().numpy()
        quantized = numerics.quantize(array, q.step, q.zero, q.qmin, q.qmax).astype(np.uint8)
        name = add_constant(self.module, f"{value.target}_levels", torch.from_numpy(quantized))
        with self.graph.inserting_after(value):
            made = self.graph.get_attr(name)
        set_info(made, type=kind, path=constant_path(value))
        return made

    def _only_moves_stored(self, value: fx.Node) -> bool:
        """Return whether a value consists of stored values that were only moved.

        Data movement, and quantize and dequantize with the buffer's parameters, are allowed on the way.
        """
        if operator(value) == DEQUANTIZE_TENSOR and self._has_buffer_qparams(value):
            source = value.args[0]
            return source is self.before or (
                operator(source) == QUANTIZE_TENSOR and self._only_moves_stored(source.args[0])
            )
        if operator(value) not in BUFFER_UPDATES or arguments(value).get("accumulate"):
            return False
        own = [arguments(value)[name] for name in BUFFER_UPDATES[operator(value)]]
        return any(map(self._only_moves_stored, tensor_nodes(own)))

    def _reads_stored(self, value: fx.Node) -> bool:
        """Return whether a value depends on the stored values of the buffer."""
        seen, left = {value}, [value]
        while left:
            new = [leaf for leaf in left.pop().all_input_nodes if leaf not in seen]
            seen.update(new)
            left += new
        return self.before in seen

    def _has_buffer_qparams(self, dequantize: fx.Node) -> bool:
        """Return whether a dequantize has the buffer's parameters."""
        q = self.kind.qparams
        return dequantize.args[1:] == (q.step, q.zero, q.qmin, q.qmax, torch.uint8)
