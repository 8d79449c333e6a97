"""Evaluate a graph layer by layer over cached batches, both in float and quantized so far.

Each operator runs once for each batch and track, and a value is freed after its last reader.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedRandom
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from intaglio.ir import QParams
from intaglio.quant.annotate.find_regions import find_shortcuts, reads_shortcut
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.calibrate.channels_last_run import channels_last, run_operator
from intaglio.quant.qdq.qdq_rewriter import quantizing
from intaglio.quant.recipes.choices import Role
from intaglio.signature import TORCH_DTYPES
from intaglio.torch_private import pytree, schema_of

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
    """

    def __init__(
        self,
        annotations: Annotations,
        calls: Sequence[Sequence[Any]],
        qparams: Parameters | None = None,
        *,
        float_track: bool = True,
        cache: int = CACHE,
    ) -> None:
        """Start an evaluation with ``cache`` bytes of values in memory; ``float_track=False`` omits the float model."""
        self.annotations, self.calls, self.module = annotations, calls, annotations.module
        self.qparams: dict[str, QParams] = dict(qparams or {})
        self.weights: dict[str, torch.Tensor] = {}
        self.integer_weights: dict[str, torch.Tensor] = {}
        self.biases: dict[str, torch.Tensor] = {}
        self.sites = {site.value: site for site in annotations.sites if site.role == Role.ACTIVATION}
        self._shortcut_sites = {site.value: site for site in annotations.sites if site.role == Role.SHORTCUT}
        self._shortcuts = find_shortcuts(annotations.regions)
        self._regions = {region.root.name: region for region in annotations.regions}
        self._rounded = {region.root.name for region in annotations.regions if not region.unrounded}
        self._inside = {n.name for region in annotations.regions for n in region.nodes}
        self._member = {n: region for region in annotations.regions for n in region.nodes}
        self._places = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        self._last = _last_readers(self.module.graph, annotations.regions)
        store = _Store(cache)
        self._float = _Track(store) if float_track else None
        self._quantized, self._derived = _Track(store), _Track(store)
        self.results: list[tuple[Any, ...]] = []

    def __iter__(self) -> Generator[Region]:
        """Yield each region before it runs; ``results`` then has the outputs of the second track for each batch."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.module.graph.nodes:
                region = self._regions.get(node.name)
                if region is not None:
                    yield region
                if region is not None or node.name not in self._inside:
                    self._step(node, region)
                for gone in self._last.get(node.name, ()):
                    self._drop(gone, range(len(self.calls)))

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

    # -- running -------------------------------------------------------------------------------------------------

    def _tracks(self) -> list[_Track]:
        return [track for track in (self._float, self._quantized, self._derived) if track is not None]

    def _drop(self, name: str, batches: Iterable[int]) -> None:
        for track, batch in itertools.product(self._tracks(), batches):
            track.drop(name, batch)

    def _require_float_track(self) -> _Track:
        if self._float is None:
            raise ValueError("this evaluation omits the float model")
        return self._float

    def _step(self, node: fx.Node, region: Region | None) -> None:
        """Run a region or an operator outside of regions on all batches and tracks, and store its results."""
        if node.op == "output":
            for batch in range(len(self.calls)):
                self.results.append(tuple(self._values(node.args[0], self._reader(batch, inside=False), node)))
            return
        if node.op == "get_attr":
            return
        for batch, leaves in enumerate(self.calls):
            exact = self._value(node, region, leaves, self._read_float(batch), True) if self._float else None
            value = self._value(node, region, leaves, self._reader(batch, region is not None), False)
            for read_last in self._last.get(node.name, ()):
                self._drop(read_last, [batch])  # before its result is stored, which then needs less space
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
            found[node.name] = run_operator(node.target, args, kwargs)
        return found[region.root.name]

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

    def _quantized_8bit(self, node: fx.Node, kept: _StoredValue, q: QParams) -> torch.Tensor:
        """Return the 8-bit quantized values; 16-bit values are rounded once more."""
        site = self.sites[node.name]
        if kept.quantized is None:
            return _quantize(kept.real, q, site)
        return _quantize(self._dequantized_16bit(node, kept), q, site) if kept.is_16bit else kept.quantized

    def _dequantized_16bit(self, node: fx.Node, kept: _StoredValue) -> torch.Tensor:
        """Return a value dequantized from 16 bits."""
        site = self._shortcut_sites[node.name]
        return _dequantized(kept.quantized, self.qparams[site.name], site)

    def _to_store(self, node: fx.Node, value: Any, produced: bool) -> _StoredValue:
        """Return what to store of a value: quantized values only, unless a reader outside of regions needs floats."""
        site = self.sites.get(node.name)
        if site is None or site.name not in self.qparams:
            return _StoredValue(real=value)
        wide = self._shortcut_sites.get(node.name)
        wide = wide if wide is not None and wide.name in self.qparams else None
        kind = site if wide is None else wide
        quantized = _quantize(value, self.qparams[kind.name], kind)
        floating = not produced and any(user.name not in self._inside for user in node.users)
        return _StoredValue(value if floating else None, quantized, wide is not None)


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


@dataclass
class _StoredValue:
    """A stored value of the second track, in float, quantized, or both; ``is_16bit`` marks 16-bit quantized values."""

    real: Any = None
    quantized: Any = None
    is_16bit: bool = False


@dataclass(frozen=True)
class _Spilled:
    """A tensor in the temporary file, whose bytes start at ``offset`` in memory order."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Store:
    """Stores tensors with their strides, in memory up to a number of bytes and then in one temporary file."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.end = limit, 0, 0
        self.free: dict[int, list[int]] = {}
        self.file: BufferedRandom | None = None

    def put(self, tensor: torch.Tensor) -> torch.Tensor | _Spilled:
        """Store a tensor, and return it or its place in the file."""
        size = tensor.numel() * tensor.element_size()
        if self.used + size <= self.limit:
            self.used += size
            return tensor
        if self.file is None:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115  # The unnamed file lives as long as the evaluation.
        offset = places.pop() if (places := self.free.get(size)) else self.end
        self.end = max(self.end, offset + size)
        self.file.seek(offset)
        self.file.write(_dense(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)
        return _Spilled(offset, tensor.shape, _dense(tensor).stride(), tensor.dtype)

    def get(self, kept: torch.Tensor | _Spilled) -> torch.Tensor:
        """Return a stored tensor."""
        if isinstance(kept, torch.Tensor):
            return kept
        assert self.file is not None
        flat = torch.empty(kept.shape.numel(), dtype=kept.dtype)
        self.file.seek(kept.offset)
        self.file.readinto(flat.view(torch.uint8).numpy().data)
        return flat.as_strided(kept.shape, kept.stride)

    def drop(self, kept: torch.Tensor | _Spilled) -> None:
        """Release the memory or the part of the file that a stored tensor uses."""
        if isinstance(kept, torch.Tensor):
            self.used -= kept.numel() * kept.element_size()
        else:
            self.free.setdefault(int(np.prod(kept.shape)) * kept.dtype.itemsize, []).append(kept.offset)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gaps in memory, which a slice of a larger tensor may have."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


@dataclass
class _Track:
    """Stored values by node and batch."""

    store: _Store
    values: dict[str, dict[int, Any]] = field(default_factory=dict)

    def put(self, name: str, batch: int, value: Any) -> None:
        parts, tree = pytree.tree_flatten(_fields(value))
        kept = [self.store.put(_dense(part)) if isinstance(part, torch.Tensor) else part for part in parts]
        self.values.setdefault(name, {})[batch] = (type(value) is _StoredValue, kept, tree)

    def get(self, name: str, batch: int) -> Any:
        pair, kept, tree = self.values[name][batch]
        parts = [self.store.get(part) if isinstance(part, (torch.Tensor, _Spilled)) else part for part in kept]
        value = pytree.tree_unflatten(parts, tree)
        return _StoredValue(*value) if pair else value

    def drop(self, name: str, batch: int) -> None:
        own = self.values.get(name, {})
        _, kept, _ = own.pop(batch, (False, [], None))
        if not own:
            self.values.pop(name, None)
        for part in kept:
            if isinstance(part, (torch.Tensor, _Spilled)):
                self.store.drop(part)


def _fields(value: Any) -> Any:
    return (value.real, value.quantized, value.is_16bit) if type(value) is _StoredValue else value
