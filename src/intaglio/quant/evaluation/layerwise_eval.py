"""Evaluate a graph layer by layer over cached batches, both in float and quantized so far.

Each operator runs once for each batch and track, and a value is freed after its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.nodes import layer_operands
from intaglio.ir import QParams
from intaglio.quant.annotate.find_regions import find_shortcuts, reads_shortcut
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.calibrate.float_run import channels_last, run_operator
from intaglio.quant.evaluation.byte_products import MOST_PRODUCTS
from intaglio.quant.evaluation.stored_values import StoredValue, Track, ValueStore
from intaglio.quant.evaluation.token_layers import TokenWeight, token_layer
from intaglio.quant.qdq.qdq_rewriter import quantizing
from intaglio.quant.qdq.weight_grid import WeightGrid
from intaglio.quant.recipes.choices import ActivationMode, Role
from intaglio.signature import TORCH_DTYPES
from intaglio.torch_private import schema_of

CACHE = 1 << 30
"""Bytes of live values that are kept in memory; further ones are stored in a temporary file."""

Parameters = Mapping[str, QParams]
Reader = Callable[[fx.Node, fx.Node], Any]
"""Returns the value of a node for another node that reads it."""


class LayerwiseEvaluation:
    """Iterates over regions in execution order on two tracks: the float model, and the model quantized so far.

    A value with a site is quantized on the second track as soon as ``qparams`` has the site, which may happen just
    before the region that reads it (`set_qparams`).

    Attributes:
        annotations: the annotated graph.
        calls: the tensors that the graph takes, for each batch.
        qparams: site -> its parameters.
        weights: weight node -> values that replace the model's on the second track.
        integer_weights: weight node -> its quantized values, where the second track has other weights.
        biases: anchor node -> values that replace the model's on the second track.
        token_weights: weight node -> its quantized values, with which layers with scales per token are computed as
            their kernels do on the second track.
    """

    def __init__(
        self,
        annotations: Annotations,
        calls: Sequence[Sequence[Any]],
        qparams: Parameters | None = None,
        *,
        float_track: bool = True,
        cache: int = CACHE,
        stops: Callable[[Region], bool] = lambda region: True,
    ) -> None:
        """Start an evaluation.

        Args:
            annotations: the annotated graph.
            calls: the tensors of each call.
            qparams: parameters that are known.
            float_track: whether to evaluate the float model, too.
            cache: bytes of values that are kept in memory.
            stops: whether the iteration yields a region. What does not depend on a yielded region waits until a later
                one reads it. It then runs for one batch after the other, so that most values are stored for one batch
                only.
        """
        self.annotations, self.calls, self.module = annotations, calls, annotations.module
        self.qparams: dict[str, QParams] = dict(qparams or {})
        self.weights: dict[str, torch.Tensor] = {}
        self.integer_weights: dict[str, torch.Tensor] = {}
        self.biases: dict[str, torch.Tensor] = {}
        self.token_weights: dict[str, TokenWeight] = {}
        self._stops, self._waiting = stops, dict[fx.Node, Region | None]()
        self.sites = {site.value: site for site in annotations.sites if site.role == Role.ACTIVATION}
        self._shortcut_sites = {site.value: site for site in annotations.sites if site.role == Role.SHORTCUT}
        self._shortcuts = find_shortcuts(annotations.regions)
        self._regions = {region.root.name: region for region in annotations.regions}
        self._rounded = {region.root.name for region in annotations.regions if not region.unrounded}
        self._inside = {n.name for region in annotations.regions for n in region.nodes}
        self._member = {n: region for region in annotations.regions for n in region.nodes}
        self._places = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        self._last = _last_readers(self.module.graph, annotations.regions)
        store = ValueStore(cache)
        self._float = Track(store) if float_track else None
        self._quantized, self._derived = Track(store), Track(store)
        self.results: list[tuple[Any, ...]] = []

    def __iter__(self) -> Generator[Region]:
        """Yield each region before it runs; ``results`` then has the outputs of the second track for each batch."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.module.graph.nodes:
                region = self._regions.get(node.name)
                if region is not None and self._stops(region):
                    if any(not self._waiting.keys().isdisjoint(inner.all_input_nodes) for inner in region.nodes):
                        self._run_waiting()
                    self._waiting[node] = region
                    yield region
                elif node.op != "get_attr" and (region is not None or node.name not in self._inside):
                    self._waiting[node] = region
            self._run_waiting()

    def is_done(self, region: Region) -> bool:
        """Return whether a region that was yielded has run."""
        return region.root not in self._waiting

    def unquantized_inputs(self, region: Region, batch: int) -> list[torch.Tensor]:
        """Return the inputs of the region in the float model, in the order of its activations."""
        return [self._require_float_track().get(value.name, batch) for value in region.activations()]

    def unquantized_outputs(self, region: Region, batch: int) -> list[torch.Tensor]:
        """Return the outputs of the region in the float model; those of recurrent layers are several."""
        return _tensors(self._run(region, self._read_float(batch), float_track=True))

    def quantized_inputs(self, region: Region, batch: int) -> list[torch.Tensor]:
        """Return the inputs of the region in the model quantized so far; those without parameters are float."""
        return [self._read(value, batch, None, inside=True) for value in region.activations()]

    def quantized_outputs(self, region: Region, batch: int) -> list[torch.Tensor]:
        """Return the outputs of the region in the model quantized so far.

        They are quantized if the site of the result has parameters.
        """
        value = self._run(region, self._reader(batch, inside=True), float_track=False)
        site = self.sites.get(region.root.name)
        q = None if site is None else self.qparams.get(site.name)
        if site is None or q is None:
            return _tensors(value)
        return [_dequantized(_quantize(value, q, site), q, site)]

    def anchor_outputs(self, region: Region, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of the anchor alone in the float model, and in the model quantized so far."""
        anchor = replace(region, nodes=region.nodes[:1])
        return self._run(anchor, self._read_float(batch), True), self._run(anchor, self._reader(batch, True), False)

    def quantized_values(self, node: fx.Node, batch: int) -> torch.Tensor:
        """Return the quantized values of a node that regions read; its site must have parameters."""
        kept = self._quantized.get(node.name, batch)
        return self._quantized_8bit(node, kept, self.qparams[self.sites[node.name].name])

    def float_values(self, node: fx.Node, batch: int) -> torch.Tensor:
        """Return the floats of a node in the model quantized so far; its site, if it has one, has no parameters."""
        found: torch.Tensor = self._quantized.get(node.name, batch).real
        return found

    def derived_value(self, node: fx.Node, batch: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``compute`` makes of the value of a node, and store it until that value is freed."""
        if batch not in self._derived.values.get(node.name, {}):
            self._derived.put(node.name, batch, compute())
        return cast("torch.Tensor", self._derived.get(node.name, batch))

    def set_qparams(self, site: str, q: QParams) -> None:
        """Set the parameters of a site, which values on the second track use from now on."""
        self.qparams[site] = q

    def set_weight(self, region: Region, node: fx.Node, grid: WeightGrid, quantized: np.ndarray, q: QParams) -> None:
        """Let regions use a quantized weight on the second track from now on.

        Args:
            region: a region that reads it.
            node: the node of the weight.
            grid: the values that its elements can take.
            quantized: its quantized values, on this grid.
            q: its scales.
        """
        per_token = region.setting.activations == ActivationMode.TOKEN
        if per_token and region.anchor.target is torch.ops.aten.linear.default and quantized.shape[1] <= MOST_PRODUCTS:
            kept = torch.from_numpy(grid.as_s8(quantized)), torch.tensor(q.scales, dtype=torch.float32)
            self.token_weights[node.name] = TokenWeight(*kept)
            return
        self.weights[node.name] = torch.from_numpy(grid.values(quantized))

    def drop_weight(self, node: fx.Node) -> None:
        """Let regions use the float weight again."""
        self.weights.pop(node.name, None)
        self.token_weights.pop(node.name, None)

    # -- running -------------------------------------------------------------------------------------------------

    def _tracks(self) -> list[Track]:
        return [track for track in (self._float, self._quantized, self._derived) if track is not None]

    def _drop(self, name: str, batch: int) -> None:
        for track in self._tracks():
            track.drop(name, batch)

    def _require_float_track(self) -> Track:
        if self._float is None:
            raise ValueError("this evaluation omits the float model")
        return self._float

    def _run_waiting(self) -> None:
        """Run the waiting operators and regions for one batch after the other."""
        for batch in range(len(self.calls)):
            for node, region in self._waiting.items():
                self._step(node, region, batch)
        self._waiting.clear()

    def _step(self, node: fx.Node, region: Region | None, batch: int) -> None:
        """Run a region or an operator outside of regions on all tracks, and store its results if they are read."""
        leaves, read_last = self.calls[batch], self._last.get(node.name, ())
        exact = value = None
        if node.op == "output":
            self.results.append(tuple(self._values(node.args[0], self._reader(batch, inside=False), node)))
        else:
            exact = self._value(node, region, leaves, self._read_float(batch), True) if self._float else None
            value = self._value(node, region, leaves, self._reader(batch, region is not None), False)
        for name in read_last:
            self._drop(name, batch)  # before the result is stored, which then needs less space
        if node.op == "output" or node.name in read_last:
            return
        if self._float is not None:
            self._float.put(node.name, batch, exact)
        self._quantized.put(node.name, batch, self._to_store(node, value, node.name in self._rounded))

    def _value(
        self, node: fx.Node, region: Region | None, leaves: Sequence[Any], read: Reader, float_track: bool
    ) -> Any:
        """Return the value of a node or region for one batch."""
        if node.op == "placeholder":
            return channels_last(leaves[self._places.index(node.name)])
        if region is not None:
            return self._run(region, read, float_track)
        args, kwargs = self._values((node.args, node.kwargs), read, node)
        return run_operator(node.target, args, kwargs)

    def _run(self, region: Region, read: Reader, float_track: bool) -> torch.Tensor:
        """Run the region's operators, with ``read`` for the values from outside."""
        found: dict[str, Any] = {}

        def value(node: fx.Node, user: fx.Node) -> Any:
            if node.name in found:
                return found[node.name]
            if node.op == "get_attr":
                return self._constant(node, float_track)
            return read(node, user)

        for node in region.nodes:
            args, kwargs = _mapped((node.args, node.kwargs), value, node)
            if not float_track and node is region.anchor and node.name in self.biases:
                args, kwargs = _with_bias(node, args, kwargs, self.biases[node.name])
            weight = None if float_track or node is not region.anchor else self._token_weight(region)
            if weight is not None:
                found[node.name] = token_layer(args[0], weight, *args[2:], **kwargs)
            else:
                found[node.name] = run_operator(node.target, args, kwargs)
        return found[region.root.name]

    def _token_weight(self, region: Region) -> TokenWeight | None:
        """Return the quantized weight of a region that is computed as its kernels do."""
        if not self.token_weights or region.record.roles.weight is None:
            return None
        return self.token_weights.get(layer_operands(region.anchor).weight.name)

    def _constant(self, node: fx.Node, float_track: bool) -> torch.Tensor:
        own = getattr(self.module, node.target)
        return own if float_track else self.weights.get(node.name, own)

    def _values(self, tree: Any, read: Reader, user: fx.Node) -> Any:
        return _mapped(tree, lambda n, user: self._constant(n, True) if n.op == "get_attr" else read(n, user), user)

    def _read_float(self, batch: int) -> Reader:
        track = self._require_float_track() if self._float is not None else self._quantized
        return lambda node, user: track.get(node.name, batch)

    def _reader(self, batch: int, inside: bool) -> Reader:
        return lambda node, user: self._read(node, batch, user, inside)

    def _read(self, node: fx.Node, batch: int, user: fx.Node | None, inside: bool) -> Any:
        """Return a value of the second track: dequantized for regions, otherwise as in the reference model."""
        kept = self._quantized.get(node.name, batch)
        site = self.sites.get(node.name)
        q = None if site is None else self.qparams.get(site.name)
        if site is None or q is None or (not inside and node.name not in self._rounded):
            return kept.real
        region = self._member.get(user) if user is not None else None
        if kept.is_16bit and region is not None and reads_shortcut(region, user, node, self._shortcuts):
            return self._dequantized_16bit(node, kept)
        return _dequantized(self._quantized_8bit(node, kept, q), q, site)

    def _quantized_8bit(self, node: fx.Node, kept: StoredValue, q: QParams) -> torch.Tensor:
        """Return the 8-bit quantized values; 16-bit values are rounded once more."""
        site = self.sites[node.name]
        if kept.quantized is None:
            return _quantize(kept.real, q, site)
        return _quantize(self._dequantized_16bit(node, kept), q, site) if kept.is_16bit else kept.quantized

    def _dequantized_16bit(self, node: fx.Node, kept: StoredValue) -> torch.Tensor:
        """Return a value dequantized from 16 bits."""
        site = self._shortcut_sites[node.name]
        return _dequantized(kept.quantized, self.qparams[site.name], site)

    def _to_store(self, node: fx.Node, value: Any, produced: bool) -> StoredValue:
        """Return what to store of a value: quantized values only, unless a reader outside of regions needs floats."""
        site = self.sites.get(node.name)
        if site is None or site.name not in self.qparams:
            return StoredValue(real=value)
        wide = self._shortcut_sites.get(node.name)
        wide = wide if wide is not None and wide.name in self.qparams else None
        kind = site if wide is None else wide
        quantized = _quantize(value, self.qparams[kind.name], kind)
        floating = not produced and any(user.name not in self._inside for user in node.users)
        return StoredValue(value if floating else None, quantized, wide is not None)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the results of an operator, which has one or a tuple of them."""
    return list(value) if isinstance(value, tuple) else [value]


def _mapped(tree: Any, read: Reader, user: fx.Node) -> Any:
    return fx.map_arg(tree, lambda node: read(node, user))


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio in decibels of two sums of squares."""
    return float(10 * np.log10(signal / noise)) if noise and signal else float("inf")


def _quantize(value: torch.Tensor, q: QParams, site: Site) -> torch.Tensor:
    return quantizing(q, site.dtype)[0](value, *_arguments(q, site))


def _dequantized(quantized: torch.Tensor, q: QParams, site: Site) -> torch.Tensor:
    return quantizing(q, site.dtype)[1](quantized, *_arguments(q, site))


def _arguments(q: QParams, site: Site) -> tuple[Any, ...]:
    """Return the arguments of quantize and dequantize after the value."""
    kind = TORCH_DTYPES[site.dtype]
    if q.axis is None:
        return q.step, q.zero, q.qmin, q.qmax, kind
    scales, zeros = torch.tensor(q.scales, dtype=torch.float32), torch.tensor(q.zeros, dtype=torch.int64)
    return scales, zeros, q.axis, q.qmin, q.qmax, kind


def _with_bias(node: fx.Node, args: Any, kwargs: Any, bias: torch.Tensor) -> tuple[Any, Any]:
    """Return the anchor's arguments with another bias, which may be the first it has."""
    place = [argument.name for argument in schema_of(node.target).arguments].index("bias")
    if place < len(args):
        return (*args[:place], bias, *args[place + 1 :]), kwargs
    return args, {**kwargs, "bias": bias}


def _last_readers(graph: fx.Graph, regions: Sequence[Region]) -> dict[str, list[str]]:
    """Return node -> the values that are not read after it ran; operands of a region are read at its root."""
    runs_at = {node.name: region.root.name for region in regions for node in region.nodes}
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    gone: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        readers = [runs_at.get(user.name, user.name) for user in node.users]
        gone.setdefault(max([node.name, *readers], key=order.__getitem__), []).append(node.name)
    return gone
