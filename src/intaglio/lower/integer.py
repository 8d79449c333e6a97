"""Reference (torch.fx, Q/DQ) -> `Lowered` (integer graph). The one place where the two kinds of graph meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.nodes import (
    arguments,
    call_of,
    is_constant,
    operands,
    operator,
    origin,
    record_of,
    tensor_nodes,
    tensor_type,
)
from intaglio.ir import DType, Graph, Op, Origin, QParams, TensorType, fresh, verify
from intaglio.ir.rewrite import run_passes
from intaglio.lower.islands import Unit, island_of
from intaglio.lower.lowered import Island, Lowered
from intaglio.lower.real import loop_of, move_of, real_call
from intaglio.lower.recurrent import part_of_recurrent, recurrent
from intaglio.lower.regions import IntegerRegion, constant_of, find_regions, levels_of, pixels_of, quantized_to
from intaglio.lower.rows import part_of_rows, product_of_rows, quantize_rows
from intaglio.lower.tables import arange, embedding_bag, part_of_bag, range_of
from intaglio.lower.weights_only import linear_f32, stored_weight, widens_stored
from intaglio.ops import ACCUMULATING, ANCHORS, SUMS, OpDef
from intaglio.ops.fused_activations import bind_precise
from intaglio.ops.loop_ops.loop_builder import RealCall
from intaglio.ops.opdef import Attrs
from intaglio.ops.pool import counts
from intaglio.ops.products.conv import output_axis
from intaglio.ops.resize import is_free, tables
from intaglio.plan.graph_passes.integer_passes import INTEGER_PASSES
from intaglio.quant.annotate.embedding_tables import table_behind
from intaglio.quant.annotate.per_token import rows_behind
from intaglio.quant.annotate.recurrent_sites import RECURRENT_CALL
from intaglio.quant.annotate.refusals import macs
from intaglio.quant.annotate.regions import Annotations, Chain
from intaglio.quant.annotate.sites import Skip
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.qparams import each_output, per_output
from intaglio.quant.recipes.user_patterns import is_host
from intaglio.tracing.captured import expect
from intaglio.tracing.while_loops import loops_of, with_bodies


def requantize(reference: Reference) -> Lowered:
    """The integer graph of a Q/DQ model: every region between dequantize and quantize on int32 accumulators, one
    requantize at its end; everything else in as few float islands as the order allows."""
    expect(reference, Reference, "requantize")
    builder = _Builder(reference.module)
    builder.run()
    graph, _ = run_passes(verify(builder.graph(), "requantize"), INTEGER_PASSES)
    stacks = [node for node in builder.items if operator(node) == RECURRENT_CALL]
    integer = sum(macs(node) for region in builder.regions for node in region.nodes) + sum(map(macs, stacks))
    total = sum(macs(node) for node in reference.module.graph.nodes)
    inside = {node.name for region in builder.regions for node in region.nodes}.union(node.name for node in stacks)
    own = [*builder.real, *(node for node in builder.values if part_of_bag(node) or stored_weight(node))]
    inside |= {node.name for node in own if any(map(table_behind, node.args))}
    floats = tuple(skip for skip in reference.annotations.skipped if skip.node not in inside)
    floats += _simulated(reference.annotations, inside)
    floats += _without_reason(builder.cut, {skip.node for skip in floats})
    bodies = {name: requantize(body) for name, body in reference.bodies.items()}
    for island in builder.islands.values():
        with_bodies(island.module, bodies)
    native = frozenset(node.name for node in own)
    lowered = Lowered(
        graph,
        builder.islands,
        reference.signature,
        floats,
        (integer, total),
        len(inside),
        reference.about,
        builder.hosts,
        native,
        bodies,
    )
    notes = tuple(f"{name} runs in Python, its body in a program of its own, which counts once" for name in bodies)
    return replace(lowered, about=reference.about.after(notes, integer=lowered.text()))


def _without_reason(cut: Iterable[list[fx.Node]], named: set[str]) -> tuple[Skip, ...]:
    """Islands that no float operator explains: the program stops for them all the same."""
    computing = [[node for node in nodes if operator(node)] for nodes in cut]
    silent = [nodes[0] for nodes in computing if nodes and not named.intersection(node.name for node in nodes)]
    reason = "it makes integers or booleans, which stay in PyTorch"
    return tuple(Skip(node.name, reason, origin(node)) for node in silent)


def _simulated(annotations: Annotations, inside: set[str]) -> tuple[Skip, ...]:
    """Quantized operators that stay in float, as no kernel computes with their levels."""
    found = []
    for region in annotations.regions:
        values = {value.name for node in region.nodes for value in (node, *operands(node)) if value is not None}
        names = sorted({site.datatype for site in annotations.sites if site.value in values and not site.native})
        if names:
            reason = f"{' and '.join(names)}: no kernel computes with them, so float32 on rounded values"
            found += [Skip(n.name, reason, origin(n), macs(n)) for n in region.nodes if n.name not in inside]
    return tuple(found)


class _Builder:
    """Grows an `ir.Graph` node by node of a reference graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.regions = find_regions(module.graph)
        self.types: dict[str, TensorType] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.reused: dict[str, str] = {}
        self.ops: list[Op] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.islands: dict[str, Island] = {}
        self.hosts: dict[str, OpDef] = {}  # records of a user's own, by name
        self.cut: list[list[fx.Node]] = []  # nodes of each island
        self.values: dict[fx.Node, str] = {}  # node -> value that holds it: levels behind Q and DQ, else float
        self.rests: dict[str, str] = {}  # value of levels -> what it has besides in 16 bits
        self.items: dict[fx.Node, tuple[str, ...]] = {}  # node of several results -> their values
        self.real: dict[fx.Node, RealCall | tuple[OpDef, Attrs]] = {}  # float operators that the program runs
        self.floats: dict[str, str] = {}  # value of levels -> its dequantized value
        self.outside: dict[str, str] = {}  # value of levels that kernels have -> as callers and islands have it
        self.inside: dict[str, str] = {}  # the other way round

    # -- order ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All integer work that is ready, then one island of all float work that is ready, and again."""
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.inputs.append(self._given(node))
        pending = list(self._units())
        while pending:
            ready = next((unit for unit in pending if unit.native and self._ready(unit)), None)
            if ready is not None:
                pending.remove(ready)
                self._emit(ready)
                continue
            batch: list[fx.Node] = []
            for unit in pending:
                if not unit.native and all(n in self.values or n in batch for n in unit.needs):
                    batch.append(unit.nodes[0])
            pending = [unit for unit in pending if unit.nodes[0] not in batch]
            self._island(batch)
        results = next(node for node in self.module.graph.nodes if node.op == "output").args[0]
        self.outputs = [self._returned(node) for node in results]

    def _units(self) -> Iterable[Unit]:
        inner = {node for region in self.regions for node in region.nodes}
        regions = {region.root: region for region in self.regions}
        returned = {leaf for node in self.module.graph.nodes if node.op == "output" for leaf in tensor_nodes(node.args)}
        for node in self.module.graph.nodes:
            if node in regions:
                region = regions[node]
                needs = [v for n in region.nodes for v in operands(n) if v is not None and v not in region.nodes]
                needs = [n for n in needs if levels_of(n) or levels_of(n, DType.U16) or rows_behind(n)]
                if region.record.name == "attention":
                    needs = [value for value in region.operands() if value is not None and not is_constant(value)]
                yield Unit(region.nodes, tuple(needs), True, region)
            elif node in inner or "dim" in node.meta or node.op in ("placeholder", "output"):
                continue
            elif node.op == "get_attr":
                if node in returned:
                    yield Unit((node,), (), False)
            elif any(pixels_of(user) for user in node.users):
                continue
            elif image := pixels_of(node):
                yield Unit((node,), image[:1], True)
            elif any(quantized_to(node, dtype) or levels_of(node, dtype) for dtype in (DType.U8, DType.U16)):
                yield Unit((node,), () if is_constant(node.args[0]) else (node.args[0],), True)
            elif range_of(node) is not None:
                yield Unit((node,), (), True)
            elif part_of_rows(node) or part_of_recurrent(node) or part_of_bag(node):
                needs = [leaf for leaf in tensor_nodes(node.args) if leaf.op != "get_attr"]
                yield Unit((node,), tuple(needs), True)
            elif stored_weight(node):
                yield Unit((node,), tuple(x for x in operands(node)[:1] if not is_constant(x)), True)
            elif table_behind(node):
                yield Unit((node,), (), True)
            elif widens_stored(node) or (
                (constant_of(node, DType.S8) or constant_of(node, DType.I32)) and inner.issuperset(node.users)
            ):
                continue
            else:
                read = tensor_nodes((node.args, node.kwargs))
                needs = [n for n in read if n.op != "get_attr" and "dim" not in n.meta]
                levels = tensor_type(node) is not None and tensor_type(node).q is not None  # of a buffer
                found = (None if levels else real_call(node, self.module)) or move_of(node)
                if found is not None:
                    self.real[node] = found
                yield Unit((node,), tuple(dict.fromkeys(needs)), found is not None)

    def _ready(self, unit: Unit) -> bool:
        return all(node in self.values for node in unit.needs)

    def _emit(self, unit: Unit) -> None:
        node = unit.nodes[0]
        if unit.region is not None and rows_behind(operands(node)[0]):
            product_of_rows(self, unit.region)
        elif unit.region is not None:
            self._region(unit.region)
        elif part_of_rows(node):
            quantize_rows(self, node)
        elif part_of_recurrent(node):
            recurrent(self, node)
        elif part_of_bag(node):
            embedding_bag(self, node)
        elif stored_weight(node):
            linear_f32(self, node)
        elif attrs := range_of(node):
            arange(self, node, attrs)
        elif table := table_behind(node):
            self.values[node] = self._real_constant(table[0])
        elif levels_of(node) or levels_of(node, DType.U16) or quantized_to(node, DType.U16):
            self.values[node] = self._levels(node.args[0])
        elif node in self.real:
            found = self.real[node]
            if isinstance(found, RealCall):
                self._loop(node, found)
            else:
                self._move(node, *found)
        else:
            self._quantize(node, quantized_to(node))

    # -- values --------------------------------------------------------------------------------------------------

    def _value(self, stem: str, kind: TensorType, node: fx.Node | None = None) -> str:
        name = fresh({**self.types, **self.constants}, plain_name(stem))
        self.types[name] = kind
        if node is not None:
            self.values[node] = name
        return name

    def _constant(self, stem: str, array: np.ndarray, dtype: DType) -> str:
        name = self._value(stem, TensorType(array.shape, dtype))
        self.constants[name] = np.asarray(array, order="C")  # ascontiguousarray would give a number an axis
        return name

    def _weight(self, node: fx.Node, array: np.ndarray, q: QParams) -> str:
        """A weight's constant, one for all calls; packed in files as the reference's is."""
        stem = str(node.target)
        if stem not in self.reused:
            self.reused[stem] = self._value(stem, TensorType(array.shape, DType.S8, q, tensor_type(node).packing))
            self.constants[self.reused[stem]] = np.ascontiguousarray(array)
        return self.reused[stem]

    def _op(
        self,
        kind: str,
        inputs: Iterable[str],
        stem: str,
        result: TensorType,
        where: Origin,
        rest: QParams | None = None,
        **attrs: Any,
    ) -> str:
        """The first result of an operator; with ``rest`` it has another one of these parameters."""
        output = self._value(stem, result)
        outputs = [output]
        if rest is not None:
            self.rests[output] = self._value(f"{stem}_rest", TensorType(result.shape, DType.U8, rest))
            outputs.append(self.rests[output])
        self.ops.append(Op(kind, tuple(inputs), tuple(outputs), attrs, origin=where))
        return output

    def _float(self, node: fx.Node) -> str:
        """The float value of a node, dequantized once for all who need it."""
        name = self.values[node]
        kind = self.types[name]
        if kind.dtype is not DType.U8 or kind.q is None:
            return name
        if name not in self.floats:
            where = origin(node)
            self.floats[name] = self._op("dequantize", [name], f"{name}_f32", TensorType(kind.shape, DType.F32), where)
        return self.floats[name]

    def _given(self, node: fx.Node) -> str:
        """A value that comes from outside; levels of a buffer lie there as PyTorch has them."""
        name, kind = self._value(node.name, tensor_type(node), node), tensor_type(node)
        if kind is not None and kind.q is not None:
            self.inside[name] = ""
        return name

    def _levels(self, node: fx.Node) -> str:
        """Levels as kernels have them, of a node that is levels."""
        name = self.values[node]
        if self.inside.get(name) == "":
            self.inside[name] = self._laid_anew(name, "levels", node)
        return self.inside.get(name, name)

    def _returned(self, node: fx.Node) -> str:
        """A value for callers and islands: levels of a buffer as they are, else float."""
        name, kind = self.values[node], tensor_type(node)
        if kind is None or kind.dtype is not DType.U8 or kind.q is None:
            return self._float(node)
        if name not in self.inside and name not in self.outside:
            self.outside[name] = self._laid_anew(name, "bytes", node)
        return self.outside.get(name, name)

    def _laid_anew(self, name: str, stem: str, node: fx.Node) -> str:
        kind = self.types[name]
        return self._op("reshape", [name], f"{name}_{stem}", kind, origin(node), shape=kind.shape, relayout=True)

    # -- operators -----------------------------------------------------------------------------------------------

    def _quantize(self, node: fx.Node, q: QParams) -> None:
        """Float -> levels; levels of other parameters -> a table; equal parameters -> nothing; constants at once."""
        if image := pixels_of(node):
            self._pixels(node, image, q)
            return
        if is_constant(node.args[0]):
            stem = str(node.args[0].target)
            levels = numerics.quantize(getattr(self.module, stem).detach(), q.step, q.zero, q.qmin, q.qmax)
            name = self.values[node] = self._value(f"{stem}_u8", TensorType(levels.shape, DType.U8, q))
            self.constants[name] = levels.astype(np.uint8)
            return
        source = self.values[node.args[0]]
        kind = self.types[source]
        result = TensorType(kind.shape, DType.U8, q)
        if kind.q is None:
            self.values[node] = self._op("quantize", [source], f"{source}_u8", result, origin(node))
        elif kind.q == q:
            self.values[node] = source
        else:
            self.values[node] = self._again(source, q, origin(node))

    def _pixels(self, node: fx.Node, image: tuple[fx.Node, fx.Node, fx.Node], q: QParams) -> None:
        source, names = self.values[image[0]], []
        for constant, label in zip(image[1:], ("gain", "shift"), strict=True):
            values = getattr(self.module, constant.target).numpy().reshape(-1)
            names.append(self._constant(f"{source}_{label}", values, DType.F32))
        result = TensorType(self.types[source].shape, DType.U8, q)
        attrs: dict[str, Any] = {"bytes": True} if "bytes" in node.args[0].meta else {}
        self.values[node] = self._op("pixels", [source, *names], f"{source}_u8", result, origin(node), **attrs)

    def _region(self, region: IntegerRegion) -> None:
        where, kind = _origin(region), tensor_type(region.root)
        stem = where.path.replace("@", "_call") or region.record.name
        if is_host(region.record):
            self.values[region.root] = self._host(region, stem, TensorType(kind.shape, DType.U8, region.result))
            return
        if region.record.name == "attention":
            self.values[region.root] = self._attention(region, stem, TensorType(kind.shape, DType.U8, region.result))
            return
        if region.record.name in ANCHORS:
            current = self._anchor(region, stem)
        elif region.record.name == "bmm":
            current = self._product(region, stem)
        else:
            current = self.values[operands(region.anchor)[0]]
        if region.result is None:
            self.values[region.root] = self._op(
                "dequantize", [current], f"{stem}_f32", TensorType(kind.shape, DType.F32), where
            )
            return
        result, finest = TensorType(kind.shape, DType.U8, region.result), region.wide or region.result
        tail = {record_of(node).name: node for node in region.nodes}
        low, high = self._bounds(tail.get("clamp"), finest)
        if (total := next((tail[name] for name in SUMS if name in tail), None)) is not None:
            name = self._add(total, region, current, stem, result, low, high)
        elif region.record.name in ANCHORS and (function := _function_of(region)) is not None:
            name = self._activate(function, tail.get("affine"), current, stem, result, where)
        elif region.record.name in ACCUMULATING:
            acc = self.types[current].q
            factors = _each(numerics.multiplier(acc.scales, finest.step))
            factor = self._constant(f"{stem}_multiplier", factors, DType.F32)
            inputs, rest = [current, factor], _rest(region)
            name = self._op("requantize", inputs, stem, result, where, rest, low=low, high=high)
        elif region.record.name == "mul":
            name = self._mul(region, stem, result, low, high)
        elif region.record.name == "affine":
            name = self._affine(region, stem, result, low, high)
        elif region.record.variadic:
            name = self._cat(region, stem, result)
        elif region.record.name == "clamp":
            name = self._op("clamp", [current], f"{stem}_clamp", result, where, low=low, high=high)
        else:
            name = self._single(region, current, stem, result)
            if region.wide is not None:
                moved = TensorType(kind.shape, DType.U8, _rest(region))
                self.rests[name] = self._single(region, self.rests[current], f"{stem}_rest", moved)
        self.values[region.root] = name

    def _bounds(self, node: fx.Node | None, q: QParams) -> tuple[int, int]:
        if node is None:
            return q.qmin, q.qmax
        attrs = record_of(node).bind(call_of(node, record_of(node)))
        return numerics.clamp_levels(attrs["low"], attrs["high"], q.step, q.zero, q.qmin, q.qmax)

    def _anchor(self, region: IntegerRegion, stem: str) -> str:
        """A convolution or linear layer into an int32 accumulator; its weight with all outputs first."""
        node, record = region.anchor, region.record
        values = operands(node)
        x, (weight, scales) = self.values[values[0]], self.weight_of(region)
        unit = tuple(map(float, numerics.accumulator_scale(self.types[x].levels.step, scales)))
        axis = None if len(unit) == 1 else output_axis(record.name, len(tensor_type(node).shape))
        acc_q = QParams(unit, (0,) * len(unit), -(2**31), 2**31 - 1, axis)
        bias = constant_of(values[record.roles.bias], DType.I32)
        outputs = self.constants[weight].shape[0]
        steps = np.zeros(outputs, np.int32) if bias is None else getattr(self.module, bias.target).numpy()
        operand_names = [x, weight, self._constant(f"{stem}_bias", steps, DType.I32)]
        attrs = record.bind(call_of(node, record))
        result = TensorType(tensor_type(node).shape, DType.I32, acc_q)
        return self._op(record.name, operand_names, f"{stem}_acc", result, origin(node), **attrs)

    def weight_of(self, region: Chain) -> tuple[str, tuple[float, ...]]:
        """The constant weight of an anchor, with all outputs first, and its scales: one, or one per output."""
        node = operands(region.anchor)[region.record.roles.weight]
        weight = constant_of(node, DType.S8)
        levels, scales = per_output(region, getattr(self.module, weight.target).numpy()), self._scales(node)
        scales = scales if len(scales) == 1 else tuple(map(float, each_output(scales, len(levels))))
        q = QParams(scales, (0,) * len(scales), -128, 127, 0 if len(scales) > 1 else None)
        return self._weight(weight, levels, q), scales

    def _product(self, region: IntegerRegion, stem: str) -> str:
        """Two activations into an int32 accumulator, whose unit is multiplied by the number behind it."""
        names = [self.values[value] for value in region.operands()]
        unit = float(numerics.accumulator_scale(*[self.types[name].levels.step for name in names]))
        for node in region.nodes[1:]:
            number = float(arguments(node)["other"])
            unit = unit * number if record_of(node).name == "mul_number" else unit / number
        kind = TensorType(tensor_type(region.anchor).shape, DType.I32, QParams((unit,), (0,), -(2**31), 2**31 - 1))
        return self._op("bmm", names, f"{stem}_acc", kind, origin(region.anchor))

    def _scales(self, dequantize: fx.Node) -> tuple[float, ...]:
        scale = dequantize.args[1]
        return tuple(getattr(self.module, scale.target).tolist()) if isinstance(scale, fx.Node) else (float(scale),)

    def _add(
        self, node: fx.Node, region: IntegerRegion, current: str, stem: str, result: TensorType, low: int, high: int
    ) -> str:
        """The accumulator (or the first operand) first; alpha, or the factor of each channel, goes with the second
        operand as written."""
        record = record_of(node)
        attrs = {"low": low, "high": high}
        left, right, *factor = operands(node)
        other = right if left in region.nodes or region.record.name in SUMS else left
        rest = [self.rests[self.values[other]]] if levels_of(other, DType.U16) else []
        if factor:
            alpha = getattr(self.module, factor[0].target).numpy().astype(np.float64).ravel()
            attrs |= record.bind(call_of(node, record))
        else:
            alpha = record.bind(call_of(node, record))["alpha"]
        if other is right:
            a, b = (current if left in region.nodes else self.values[left]), self.values[right]
            alphas = 1.0, alpha
        else:
            a, b, alphas = current, self.values[left], (alpha, 1.0)
        scale_y, names = (region.wide or result.levels).step, []
        for value, weight, label in zip((a, *(rest or [b])), alphas, "ab", strict=True):
            unit = np.array(self.types[value].levels.scales, np.float64) * weight
            names.append(self._constant(f"{stem}_factor_{label}", _each(numerics.multiplier(unit, scale_y)), DType.F32))
        return self._op("add", [a, b, *names, *rest], f"{stem}_add", result, origin(node), _rest(region), **attrs)

    def _activate(
        self, node: fx.Node, scaled: fx.Node | None, acc: str, stem: str, result: TensorType, where: Origin
    ) -> str:
        """A function of the accumulator in its own unit, perhaps times a factor per channel."""
        record = record_of(node)
        names = [acc, self._constant(f"{stem}_unit", _each(np.array(self.types[acc].levels.scales)), DType.F32)]
        if scaled is not None:
            gain = getattr(self.module, operands(scaled)[1].target).numpy()
            names.append(self._constant(f"{stem}_gain", _each(gain), DType.F32))
        attrs = bind_precise(record.name, record.bind(call_of(node, record)))
        return self._op("activate", names, stem, result, where, **attrs)

    def _mul(self, region: IntegerRegion, stem: str, result: TensorType, low: int, high: int) -> str:
        names = [self.values[value] for value in operands(region.anchor)]
        unit = numerics.accumulator_scale(*[self.types[name].levels.step for name in names])
        factor = self._constant(f"{stem}_factor", _each(numerics.multiplier(unit, result.levels.step)), DType.F32)
        return self._op("mul", [*names, factor], f"{stem}_mul", result, origin(region.anchor), low=low, high=high)

    def _affine(self, region: IntegerRegion, stem: str, result: TensorType, low: int, high: int) -> str:
        """Scale and shift per channel, in steps of the result."""
        x, scale, shift = operands(region.anchor)
        values = [getattr(self.module, node.target).numpy().astype(np.float64).ravel() for node in (scale, shift)]
        step_x, step_y = self.types[self.values[x]].levels.step, result.levels.step
        factors = ((values[0] * step_x / step_y).astype(np.float32), (values[1] / step_y).astype(np.float32))
        names = [
            self._constant(f"{stem}_{label}", factor, DType.F32)
            for label, factor in zip(("factor", "offset"), factors, strict=True)
        ]
        inputs, attrs = [self.values[x], *names], region.record.bind(call_of(region.anchor, region.record))
        return self._op("affine", inputs, f"{stem}_affine", result, origin(region.anchor), **attrs, low=low, high=high)

    def _cat(self, region: IntegerRegion, stem: str, result: TensorType) -> str:
        """Operands of other parameters go through a table first; annotation lets them share, so ours never do."""
        node, names = region.anchor, []
        for value in operands(node):
            kind = self.types[self.values[value]]
            names.append(self.values[value])
            if kind.levels != result.levels:
                names[-1] = self._again(names[-1], result.levels, origin(node))
        attrs = region.record.bind(call_of(node, region.record))
        return self._op("cat", names, f"{stem}_cat", result, origin(node), **attrs)

    def _again(self, source: str, q: QParams, where: Origin) -> str:
        """Levels under other parameters."""
        old, shape = self.types[source].levels, self.types[source].shape
        table = numerics.requantize_table(old.step, old.zero, q.step, q.zero, q.qmin, q.qmax)
        levels = self._constant(f"{source}_table", table, DType.U8)
        return self._op("table", [source, levels], f"{source}_again", TensorType(shape, DType.U8, q), where)

    def _host(self, region: IntegerRegion, stem: str, result: TensorType) -> str:
        """A user's operator: levels of its activations, its constants as they are."""
        record, names = region.record, []
        for index, node in enumerate(region.operands()):
            if index in record.roles.x:
                names.append(self.values[node])
            elif node is not None:
                array = getattr(self.module, node.target).detach().numpy()
                names.append(self._constant(f"{stem}_{record.operands[index]}", array, DType.F32))
        self.hosts[record.name] = record
        attrs: dict[str, Any] = {"key": f"host{sum(op.kind == 'host' for op in self.ops)}", "operator": record.name}
        return self._op("host", names, f"{stem}_{record.name}", result, _origin(region), **region.attrs(), **attrs)

    def _attention(self, region: IntegerRegion, stem: str, result: TensorType) -> str:
        """Queries, keys and values as levels, and the mask, if there is one, as it is."""
        *levels, mask = (*region.operands(), None)[:4]
        names = [self.values[value] for value in levels]
        if mask is not None and is_constant(mask):
            array = getattr(self.module, mask.target).detach().numpy()
            names.append(self._constant(f"{stem}_mask", array, tensor_type(mask).dtype))
        elif mask is not None:
            names.append(self._float(mask))
        return self._op("attention", names, f"{stem}_attention", result, origin(region.root), **region.attrs())

    def _single(self, region: IntegerRegion, x: str, stem: str, result: TensorType) -> str:
        """Functions, pools and moves: one operator, attributes as its record binds them."""
        node, record = region.anchor, region.record
        attrs, inputs = record.bind(call_of(node, record)), [x]
        if record.function is not None:
            ends = self.types[x].levels, result.levels
            table = numerics.function_table(lambda real: record.function(real, attrs), *ends)
            levels = self._constant(f"{stem}_{record.name}_levels", table, DType.U8)
            return self._op("table", [x, levels], f"{stem}_{record.name}", result, origin(node))
        q, step_y = self.types[x].levels, result.levels.step
        ratio = _each(numerics.multiplier(q.step, step_y))
        if record.kernel == "resize":
            found = tables(record.name, attrs)
            arrays = {f"table{index}": table for index, table in enumerate(found)}
            arrays |= {} if record.shares else {"factor": ratio}
            attrs = attrs if is_free(attrs) else {}
        elif record.name == "prelu":
            slopes = getattr(self.module, operands(node)[1].target).numpy().astype(np.float64).ravel()
            arrays = {"rise": ratio, "fall": numerics.multiplier(slopes * q.step, step_y)}
        elif record.name == "layer_norm":
            arrays, attrs = self._layer_norm(node, attrs["eps"], q.step, step_y), {}
        elif not record.shares:
            divisors = counts(record.name, attrs, self.types[x].shape)
            arrays = {"factors": numerics.pool_multipliers(q.step, step_y, divisors)}
        else:
            arrays = {}
        for label, array in arrays.items():
            kind = DType.F32 if array.dtype == np.float32 else DType.I32
            inputs.append(self._constant(f"{stem}_{label}", array, kind))
        return self._op(record.name, inputs, f"{stem}_{record.name}", result, origin(node), **attrs)

    def _layer_norm(self, node: fx.Node, eps: float, step_x: float, step_y: float) -> dict[str, np.ndarray]:
        """Weight and bias in steps of the result, epsilon in squared steps of what is normalised."""
        channels, (_, *constants) = arguments(node)["normalized_shape"][0], operands(node)
        values = [
            np.full(channels, default) if node is None else getattr(self.module, node.target).numpy().astype(np.float64)
            for node, default in zip(constants, (1.0, 0.0), strict=True)
        ]
        factor, offset = (numerics.multiplier(value, step_y) for value in values)
        with np.errstate(over="ignore"):
            return {"factor": factor, "offset": offset, "eps": np.array([eps / step_x / step_x]).astype(np.float32)}

    def _loop(self, node: fx.Node, call: RealCall) -> None:
        """A float operator as a loop of its own; `merge_loops` joins it with its neighbours."""
        names: dict[fx.Node, str] = {}
        for leaf in dict.fromkeys(tensor_nodes((node.args, node.kwargs))):
            names[leaf] = self._real_constant(leaf) if leaf.op == "get_attr" else self._float(leaf)
            names |= {part: self._real_constant(part) for part in table_behind(leaf) or ()}
        result = self._value(node.name, tensor_type(node), node)
        op, arrays = loop_of(node, call, names, self.types, result)
        for name, array in arrays.items():
            self.types[name], self.constants[name] = op.body.types[name], array
        self.ops.append(op)

    def _move(self, node: fx.Node, record: OpDef, attrs: Attrs) -> None:
        """A move of floats, integers or booleans, or of the levels of a buffer."""
        of_levels = tensor_type(node).q is not None
        names = [
            self._real_constant(value)
            if is_constant(value)
            else self._levels(value)
            if of_levels
            else self._float(value)
            for value in operands(node)
            if value is not None
        ]
        self.values[node] = self._op(record.name, names, node.name, tensor_type(node), origin(node), **attrs)

    def _real_constant(self, node: fx.Node) -> str:
        """A float parameter of the model, one for all that read it."""
        stem = str(node.target)
        if stem not in self.reused:
            kind = tensor_type(node)
            self.reused[stem] = self._constant(stem, getattr(self.module, stem).detach().numpy(), kind.dtype)
        return self.reused[stem]

    # -- islands -------------------------------------------------------------------------------------------------

    def _island(self, nodes: list[fx.Node]) -> None:
        key = f"island{len(self.islands)}"
        part = island_of(self.module, nodes)
        inputs = [self._returned(node) for node in part.inputs]
        outputs = [self._given(node) for node in part.outputs]
        found = [node.target for node in loops_of(part.module)]
        loops = {loop.name: (loop.carried, loop.condition.module) for loop in found}
        self.islands[key] = Island(part.module, part.dims, tuple(operator(node) for node in nodes), loops)
        self.ops.append(Op("island", tuple(inputs), tuple(outputs), {"key": key}, origin=origin(nodes[0])))
        self.cut.append(nodes)
        for node in nodes:
            self.values.setdefault(node, "")

    def graph(self) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.outputs), self.types, tuple(self.ops), self.constants)


def plain_name(stem: str) -> str:
    """Of a value in the integer graph, from that of a node or constant of the reference."""
    return "".join(c if c.isalnum() else "_" for c in stem).strip("_") or "v"


def _function_of(region: IntegerRegion) -> fx.Node | None:
    """The function of one value behind an anchor."""
    return next((node for node in region.nodes if record_of(node).function is not None), None)


def _each(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).reshape(-1)


def _rest(region: IntegerRegion) -> QParams | None:
    """Parameters of what a region gives besides levels: what lies between them, in the steps of 16 bits."""
    if region.wide is None:
        return None
    return QParams(region.wide.scale, (numerics.STEPS // 2,), 0, numerics.STEPS - 1)


def _origin(region: IntegerRegion) -> Origin:
    """Where the kernel's work is written: the anchor's module, the whole chain of operators."""
    anchor = origin(region.anchor)
    return Origin(anchor.path, " + ".join(operator(node).split(".")[1] for node in region.nodes), anchor.source)
