"""Recurrent layers: tensors of a call, sites of its weights, and the operator that replaces it in the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.node_info import copy_info, inherit_info, known_type, origin, tensor_type
from intaglio.fxgraph.nodes import arguments, call_of, is_constant, known_record, operator, record_of
from intaglio.ir import Dim, DType, Op, QParams, TensorType
from intaglio.ops.dynamic_quant import per_token_qparams
from intaglio.ops.products.recurrent import bind_recurrent, macs_of_weights, recurrent_reference, result_shapes
from intaglio.quant.annotate.per_token import dynamic_operands
from intaglio.quant.annotate.sites import Observed, Site
from intaglio.quant.qdq.weight_grid import channel_scales, weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.settings import Setting
from intaglio.torch_private import OpOverload

RECURRENT_CALL = "intaglio.recurrent.default"
ZERO_STATE_TARGETS = ("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default")
BIASES_PER_DIRECTION = 2
"""Biases of one layer and direction: one added to the product of x, one to the product of the hidden state."""


@dataclass(frozen=True)
class RecurrentTensors:
    """The tensors of a call, as nodes.

    Attributes:
        weights: (input weight, hidden weight) of every layer and direction.
        biases: the two biases of every layer and direction, or empty tuples.
        states: initial states; empty if they are zeros.
    """

    weights: tuple[tuple[fx.Node, fx.Node], ...]
    biases: tuple[tuple[fx.Node, ...], ...]
    states: tuple[fx.Node, ...]


def is_recurrent(node: fx.Node) -> bool:
    """Return whether a node is a call of a recurrent layer, or of one cell."""
    record = record_of(node)
    return record is not None and record.recurrent


def has_recurrent_weights(node: fx.Node) -> bool:
    """Return whether a node is a call of any recurrent layer of PyTorch or of a cell, also of one without a record."""
    given = arguments(node) if isinstance(node.target, OpOverload) else {}
    return "w_ih" in given or {"params", "num_layers"} <= given.keys()


def recurrent_tensors(node: fx.Node) -> RecurrentTensors:
    """Return the weights, biases and states of a call of a stack or of one cell."""
    given = arguments(node)
    if "w_ih" in given:
        biases = tuple(given[name] for name in ("b_ih", "b_hh") if given[name] is not None)
        weights: tuple[tuple[fx.Node, fx.Node], ...] = ((given["w_ih"], given["w_hh"]),)
        return RecurrentTensors(weights, (biases,), _states(given["hx"]))
    each = len(given["params"]) // (given["num_layers"] * (1 + given["bidirectional"]))
    found = [tuple(given["params"][i : i + each]) for i in range(0, len(given["params"]), each)]
    behind = 2 + BIASES_PER_DIRECTION * bool(given["has_biases"])
    return RecurrentTensors(tuple((p[0], p[1]) for p in found), tuple(p[2:behind] for p in found), _states(given["hx"]))


def _states(given: Any) -> tuple[fx.Node, ...]:
    """Return the nodes of initial states; none if all are zeros."""
    nodes = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    return () if all(node is None or operator(node) in ZERO_STATE_TARGETS for node in nodes) else nodes


def recurrent_refusal(node: fx.Node, setting: Setting) -> str | None:
    """Return why a recurrent layer stays in float; ``None`` if it can be quantized."""
    given, record = arguments(node), known_record(node)
    attrs = bind_recurrent(call_of(node, record))
    if "params" in given:
        each = 2 + BIASES_PER_DIRECTION * bool(given["has_biases"])
        if len(given["params"]) != each * attrs["layers"] * attrs["directions"]:
            return "it projects its hidden states (proj_size), which the kernel does not support"
    parts = recurrent_tensors(node)
    constants = [one for group in (*parts.weights, *parts.biases) for one in group]
    if not all(is_constant(one) for one in constants):
        return "a weight is computed while the model runs; the kernel takes constant weights"
    kinds = {known_type(one).dtype for one in (*constants, *parts.states)}
    if kinds != {DType.F32} or {len(group) for group in parts.biases} - {0, BIASES_PER_DIRECTION}:
        return "its weights, biases and states must be float32, and it must have both biases or none"
    if setting.activation.name != "u8" or setting.weight.name != "s8":
        kind = f"{setting.activation.name} activations and {setting.weight.name} weights"
        return f"the recipe has {kind}; the kernel takes u8 activations and s8 weights"
    return record.check(call_of(node, record))


def recurrent_macs(node: fx.Node) -> Dim:
    """Return the multiply-accumulates of a call of a recurrent layer or cell."""
    if operator(node) == RECURRENT_CALL:
        weights, shape = node.args[5], known_type(node.args[1]).shape
    else:
        weights = [weight for pair in recurrent_tensors(node).weights for weight in pair]
        shape = known_type(node.args[0]).shape
    return macs_of_weights(shape, [known_type(weight).shape for weight in weights])


def recurrent_weight_sites(node: fx.Node, name_of: Callable[[fx.Node], str]) -> Iterator[Site]:
    """Yield one s8 site for every weight, with one scale for each output row of each gate."""
    for weight in (one for pair in recurrent_tensors(node).weights for one in pair):
        spec, kind = Observed("absmax", True), Setting().weight
        yield Site(
            name_of(weight), weight.name, Role.WEIGHT, spec, kind.storage, *kind.stored(0), 0, origin(node), kind.name
        )


def recurrent_qparams(
    module: fx.GraphModule, sites: Mapping[tuple[str, Role], Site], nodes: list[fx.Node], given: Mapping[str, QParams]
) -> dict[str, QParams]:
    """Return the parameters of all weights: the given ones, or else those computed from the weight."""
    found = {}
    for weight in (one for node in nodes for pair in recurrent_tensors(node).weights for one in pair):
        site = sites[weight.name, Role.WEIGHT]
        values = getattr(module, str(weight.target)).detach().numpy()
        scales = channel_scales(values, site.record, 0) if site.name not in given else given[site.name].scales
        found[site.name] = QParams(tuple(map(float, scales)), (0,) * len(values), site.qmin, site.qmax, 0)
    return found


# ---- operator of the reference model --------------------------------------------------------------------------------

StoreConstant = Callable[[str, np.ndarray, TensorType], fx.Node]
"""Stores a constant under a key and returns its node."""


def quantize_recurrent(
    node: fx.Node, sites: Mapping[tuple[str, Role], Site], qparams: Mapping[str, QParams], store: StoreConstant
) -> None:
    """Replace a call whose input is a dequantize by the operator on quantized values, whose items are the results."""
    record = known_record(node)
    graph, parts, attrs = node.graph, recurrent_tensors(node), bind_recurrent(call_of(node, record))
    constants: list[fx.Node] = []
    for pair, biases in zip(parts.weights, parts.biases, strict=True):
        quantized, scales, shifts = [], [], []
        for place, weight in enumerate(pair):
            site, values = sites[weight.name, Role.WEIGHT], _values(weight)
            q, gates = qparams[site.name], len(values)
            steps = np.array(q.scales, np.float32)
            grid = weight_grid(values, steps, site.record).nearest(values).astype(np.int8)
            quantized.append(store(site.name, grid, TensorType(grid.shape, DType.S8, q)))
            scales.append(store(f"{site.name}:scale", steps, TensorType(steps.shape, DType.F32)))
            bias = _values(biases[place]) if biases else np.zeros(gates, np.float32)
            shifts.append(store(f"{site.name}:bias", bias, TensorType(bias.shape, DType.F32)))
        constants += [*quantized, *scales, *shifts]
    rows = dynamic_operands(node.args[0])
    if rows is not None:
        (x, scale_node), step, zero = rows, 1.0, per_token_qparams("").zero
    else:
        (x, step, zero), scale_node = node.args[0].args[:3], None
    geometry = (attrs["layers"], attrs["directions"], attrs["batch_first"], attrs["cell"])
    with graph.inserting_before(node):
        call = graph.call_function(
            recurrent_operator(),
            (record.name, x, scale_node, float(step), int(zero), constants, list(parts.states), *geometry),
        )
        inherit_info(call, node)
        if tensor_type(node) is not None:
            result = graph.call_function(getitem, (call, 0))
            copy_info(result, node, replaces=node.name)
            call = result
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _values(node: fx.Node) -> np.ndarray:
    found: np.ndarray = getattr(node.graph.owning_module, str(node.target)).detach().numpy().astype(np.float32)
    return found


SCHEMA = (
    "recurrent(str kind, Tensor quantized, Tensor? scales, float scale, int zero_point, Tensor[] constants, "
    "Tensor[] states, int layers, int directions, bool batch_first, bool cell) -> Tensor[]"
)


@functools.cache
def recurrent_operator() -> Any:
    """Return the PyTorch operator, registered on first use; it calls the reference implementation."""
    library = torch.library.Library("intaglio", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("recurrent", _recurrent, "CPU")
    torch.library.register_fake("intaglio::recurrent", _fake, lib=library)
    RECURRENT_OPERATOR_LIBRARIES.append(library)
    return torch.ops.intaglio.recurrent.default


RECURRENT_OPERATOR_LIBRARIES: list[torch.library.Library] = []
"""Keeps the library alive, because an operator is removed together with its library."""


def _recurrent(
    kind: str,
    quantized: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    zero_point: int,
    constants: list[torch.Tensor],
    states: list[torch.Tensor],
    layers: int,
    directions: int,
    batch_first: bool,
    cell: bool,
) -> list[torch.Tensor]:
    """Run `ops.products.recurrent.recurrent_reference` on tensors."""
    rows = scales is not None
    attrs = {"layers": layers, "directions": directions, "batch_first": batch_first, "cell": cell, "rows": rows}
    q = per_token_qparams("") if rows else QParams((scale,), (zero_point,), 0, 255)
    kind_of_x = TensorType(tuple(quantized.shape), DType.U8, q)
    operands = [quantized, *([scales] if scales is not None else []), *constants, *states]
    arrays = [tensor.detach().numpy() for tensor in operands]
    found = recurrent_reference(Op(kind, (), ("y",), attrs), arrays, [kind_of_x], kind_of_x)
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in found]


def _fake(
    kind: str,
    quantized: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    zero_point: int,
    constants: list[torch.Tensor],
    states: list[torch.Tensor],
    layers: int,
    directions: int,
    batch_first: bool,
    cell: bool,
) -> list[torch.Tensor]:
    attrs = {"layers": layers, "directions": directions, "batch_first": batch_first, "cell": cell}
    shapes = result_shapes(kind, attrs, tuple(quantized.shape), constants[1].shape[1])
    return [quantized.new_empty(list(shape), dtype=torch.float32) for shape in shapes]  # type: ignore[arg-type]  # sizes of a fake tensor
