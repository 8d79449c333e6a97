"""`equalize`: scales per channel that cost nothing, put into the weights around a value before it is observed.

A value quantized as a whole gives its quiet channels few levels. Divide each channel by a factor where it is made
(rows of a weight, its bias), multiply where it is read (columns of a weight, the factor of a sum), and the float model
is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intaglio import numerics
from intaglio.capture.captured import expect
from intaglio.capture.nodes import arguments, call_of, is_constant, operands, operator, origin, record_of, tensor_type
from intaglio.ir import evaluate, symbols_of
from intaglio.ops import BY_TARGET
from intaglio.quant.annotate import Region
from intaglio.quant.correct.inputs import channels_of_inputs
from intaglio.quant.correct.steps import SAMPLES, kept_calls
from intaglio.quant.corrections import Step
from intaglio.quant.passes import constant_node
from intaglio.quant.prepare import Prepared, again, copy_graph
from intaglio.quant.walk import decibels

FLOOR = 0.1
"""No channel is blown up more than tenfold: what calibration saw of a quiet channel may not be all."""


def equalize(prepared: Prepared, data: Any, *, samples: int = SAMPLES) -> Prepared:
    """A prepared model of the same function whose values lose less when they are quantized; nothing is observed yet.

    Inputs that only convolutions read get a scale and an offset per channel, which their weights and biases absorb.
    Other values between weights get a factor ``(largest of the channel / largest of all) ** alpha`` per channel, with
    alpha the ``equalize`` of their setting (Nagel et al. 2019, extended to sums). ``data`` as for `calibrate`.
    """
    expect(prepared, Prepared, "equalize")
    calls = kept_calls(prepared.signature, data, samples)
    module = copy_graph(prepared.annotations.module)
    inputs = channels_of_inputs(module, prepared, calls)
    current = again(prepared, module) if inputs else prepared
    values = _candidates(current)
    largest = _largest(current.annotations.module, [value.region.root.name for value in values], calls)
    values = [value for value in values if largest[value.region.root.name].isfinite().all()]
    factors = {value.name: _factors(largest[value.name], value.alpha) for value in values}
    module = copy_graph(current.annotations.module)
    changed = _rewrite(module, current.annotations.regions, values, factors)
    if not changed and not inputs:
        return prepared
    gained = _gain(current.annotations.module, {name: factors[name] for name in changed}, calls[0]) if changed else ()
    return again(prepared, module, (*inputs, *map(str, gained)))


@dataclass(frozen=True)
class Use:
    """One reader of a value: the node, and what the value's factors are when they arrive there."""

    node: fx.Node
    trail: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Value:
    """The result of a region that can be divided by factors per channel."""

    region: Region
    uses: tuple[Use, ...]

    @property
    def name(self) -> str:
        return self.region.root.name

    @property
    def alpha(self) -> float:
        return float(self.region.setting.equalize)


def _candidates(prepared: Prepared) -> list[Value]:
    regions = prepared.annotations.regions
    member = {node: region for region in regions for node in region.nodes}
    found = []
    for region in regions:
        if region.setting.equalize and _divisible(region):
            uses = _uses(region.root, member, ())
            if uses:
                found.append(Value(region, tuple(uses)))
    return found


def _divisible(region: Region) -> bool:
    """A convolution or linear layer of its own constants, then sums and rectifiers only."""
    if region.record.roles.weight is None or not _owns(region.anchor):
        return False
    if len(tensor_type(region.root).shape) not in (2, 4):
        return False
    return all(_rectifies(node) or _adds(node, region) for node in region.nodes[1:])


def _owns(anchor: fx.Node) -> bool:
    record = record_of(anchor)
    values = operands(anchor)
    constants = [values[i] for i in (record.roles.weight, record.roles.bias) if values[i] is not None]
    return record.name in ("conv2d", "linear") and all(is_constant(c) and len(c.users) == 1 for c in constants)


def _rectifies(node: fx.Node) -> bool:
    """max(x, 0): the one bound that factors above zero do not move."""
    if record_of(node).name != "clamp":
        return False
    bounds = record_of(node).bind(call_of(node, record_of(node)))
    return bounds["low"] == 0 and bounds["high"] is None


def _adds(node: fx.Node, region: Region) -> bool:
    return record_of(node).name == "add" and _other(node, region) is not None


def _other(node: fx.Node, region: Region) -> fx.Node | None:
    """The operand of a sum that comes from outside the region, where the other is the region's own, taken once."""
    left, right = operands(node)
    alpha = record_of(node).bind(call_of(node, record_of(node)))["alpha"]
    if left in region.nodes and right not in region.nodes:
        return right
    return left if right in region.nodes and left not in region.nodes and alpha == 1 else None


PASSIVE = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "reshape", "slice", "pad", "clamp")


def _uses(value: fx.Node, member: Mapping[fx.Node, Region], trail: tuple[fx.Node, ...]) -> list[Use] | None:
    """Readers behind what only selects or averages within a channel; ``None`` when one cannot undo a factor."""
    found = []
    for user in value.users:
        if "dim" in user.meta:
            continue
        region, record = member.get(user), record_of(user)
        if region is None or record is None:
            return None
        alone = len(region.nodes) == 1 and record.name in PASSIVE
        if alone and (record.name != "clamp" or _rectifies(user)):
            inner = _uses(user, member, (*trail, user))
            if inner is None:
                return None
            found += inner
        elif _absorbs(user, value, region):
            found.append(Use(user, trail))
        else:
            return None
    return found


def _absorbs(user: fx.Node, value: fx.Node, region: Region) -> bool:
    """Whether a factor on ``value`` can be undone in this reader: by columns of a weight, or the factor of a sum."""
    record = record_of(user)
    if user is region.anchor:
        return _owns(user) and operands(user)[record.roles.x[0]] is value
    return record.name == "add" and _divisible(region) and _other(user, region) is value


def _largest(module: fx.GraphModule, names: Sequence[str], calls: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Largest magnitude of every channel, by value."""
    found: dict[str, torch.Tensor] = {}

    def see(name: str, value: torch.Tensor) -> None:
        largest = value.abs().transpose(0, 1).flatten(1).amax(1)
        found[name] = torch.maximum(found[name], largest) if name in found else largest

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for leaves in calls:
            _Recorder(module, names, see).run(*leaves)
    return found


class _Recorder(fx.Interpreter):
    """Hands the values of some nodes to ``see``."""

    def __init__(self, module: fx.GraphModule, names: Iterable[str], see: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__(module)
        self.names, self.see = frozenset(names), see

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names:
            self.see(n.name, value)
        return value


def _gain(module: fx.GraphModule, factors: Mapping[str, torch.Tensor], leaves: Sequence[Any]) -> tuple[Step, ...]:
    """Signal to noise of the values themselves, whole and divided, each with 8 bits from its least to its largest."""
    signal, before, after = [], [], []

    def see(name: str, value: torch.Tensor) -> None:
        divisor = factors[name].float().reshape(1, -1, *[1] * (value.dim() - 2))
        signal.append(value.square().sum().item())
        before.append((_rounded(value) - value).square().sum().item())
        after.append((_rounded(value / divisor) * divisor - value).square().sum().item())

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        _Recorder(module, factors, see).run(*leaves)
    shares = [[n / s for n, s in zip(noise, signal, strict=True) if s > 0] for noise in (before, after)]
    means = [decibels(len(share), sum(share)) for share in shares]
    return (Step("equalize", f"{len(factors)} values, mean over them", *means),)


def _rounded(value: torch.Tensor) -> torch.Tensor:
    low, high = min(value.min().item(), 0.0), max(value.max().item(), 0.0)
    scale, zero = numerics.affine(low, high, 0, 255)
    return ((value / scale).round().clamp(-zero, 255 - zero)) * scale


def _factors(largest: torch.Tensor, alpha: float) -> torch.Tensor:
    """One for channels that are always zero, and where all are."""
    top = largest.max()
    relative = (largest.double() / top.double().clamp_min(1e-300)) ** alpha
    return torch.where(largest > 0, relative.clamp_min(FLOOR), torch.ones_like(relative))


def _rewrite(
    module: fx.GraphModule, regions: Sequence[Region], values: Sequence[Value], factors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Scale rows, columns and sums; the names of values that were divided.

    A value whose factors do not arrive whole at a reader (a reader sees them mixed) stays as it is.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    arriving: dict[str, dict[str, torch.Tensor]] = {}  # reader -> value -> factors there
    divided: dict[str, torch.Tensor] = {}
    for value in values:
        there = {use.node.name: _along(use, factors[value.name]) for use in value.uses}
        if all(found is not None for found in there.values()):
            divided[value.name] = factors[value.name]
            for reader, found in there.items():
                arriving.setdefault(reader, {})[value.name] = found
    for region in regions:
        anchor = nodes[region.anchor.name]
        rows = divided.get(region.root.name)
        columns = next(iter(arriving.get(anchor.name, {}).values()), None)
        if rows is not None or columns is not None:
            _scale(module, anchor, rows, columns)
        for node in region.nodes[1:]:
            here = next(iter(arriving.get(node.name, {}).values()), None)
            if record_of(node).name == "add" and (rows is not None or here is not None):
                _weigh(module, nodes[node.name], nodes[_other(node, region).name], rows, here)
    module.graph.eliminate_dead_code()
    module.recompile()
    return list(divided)


def _along(use: Use, factors: torch.Tensor) -> torch.Tensor | None:
    """Factors of the last value of a trail: the operators themselves carry them; what they pad with counts as one."""
    if not use.trail:
        return factors
    first = use.trail[0].args[0]
    shape = _sizes(first)
    spread = factors.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape).contiguous()
    for node in use.trail:
        args = [spread if value is node.args[0] else _number(value) for value in node.args]
        spread = node.target(*args, **node.kwargs)
    columns = spread.transpose(0, 1).flatten(1)
    top = columns.amax(1)
    if not ((columns == 0) | (columns - top[:, None]).abs().le(1e-12)).all():
        return None
    return torch.where(top == 0, torch.ones_like(top), top)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """A shape with one image, other free dimensions as in the example."""
    known = node.graph.owning_module.meta.get("sizes", {})
    shape = tensor_type(node).shape
    inner = (evaluate(d, {name: known.get(name, 1) for name in symbols_of(d)}) for d in shape[1:])
    return (1, *inner)


def _number(value: Any) -> Any:
    """Arguments with nodes of sizes replaced by the sizes in the example, of one image."""
    known: dict[str, int] = {}

    def size(node: fx.Node) -> int:
        dim = node.meta["dim"]
        sizes = node.graph.owning_module.meta.get("sizes", known)
        return evaluate(dim, {name: sizes.get(name, 1) for name in symbols_of(dim)})

    return fx.map_arg(value, size)


def _scale(
    module: fx.GraphModule, anchor: fx.Node, rows: torch.Tensor | None, columns: torch.Tensor | None
) -> None:
    """Weight rows divided by ``rows``, columns multiplied by ``columns``; the bias goes with the rows."""
    record = BY_TARGET[operator(anchor)]
    values = operands(anchor)
    weight = getattr(module, values[record.roles.weight].target).double()
    if columns is not None:
        groups = arguments(anchor).get("groups", 1)
        each = columns.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, weight.shape[1])
        weight = weight * each.reshape(weight.shape[:2] + (1,) * (weight.dim() - 2))
    bias = values[record.roles.bias]
    if rows is not None:
        weight = weight / rows.reshape(-1, *[1] * (weight.dim() - 1))
        if bias is not None:
            scaled = getattr(module, bias.target).double() / rows
            _swap(module, anchor, bias, scaled)
    _swap(module, anchor, values[record.roles.weight], weight)


def _swap(module: fx.GraphModule, user: fx.Node, old: fx.Node, values: torch.Tensor) -> None:
    name = f"{old.target}_equalized"
    module.register_buffer(name, values.float())
    user.replace_input_with(old, constant_node(module, name, old.meta.get("path", name)))


def _weigh(
    module: fx.GraphModule, add: fx.Node, other: fx.Node, rows: torch.Tensor | None, here: torch.Tensor | None
) -> None:
    """``acc + alpha * other`` -> ``acc + other * ratio``, ratio per channel; one of ``rows`` and ``here`` is given."""
    own = next(value for value in operands(add) if value is not other)
    alpha = record_of(add).bind(call_of(add, record_of(add)))["alpha"]
    ratio = (alpha * (1.0 if here is None else here) / (1.0 if rows is None else rows)).float()
    name = f"{add.name}_ratio"
    module.register_buffer(name, ratio.reshape(1, -1, *[1] * (len(tensor_type(add).shape) - 2)))
    constant = constant_node(module, name, f"{origin(add).path}.ratio")
    add.target = torch.ops.aten.addcmul.default
    add.args, add.kwargs = (own, other, constant), {}

