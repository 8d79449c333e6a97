"""`Observer`: the module that `prepare` inserts to collect the statistics of a value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx, nn

from intaglio.errors import CalibrationError, NotFiniteError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import info, known_type, set_info
from intaglio.fxgraph.padding_masks import PaddedAxes, VisibleTokens, padded_axes, visible_groups
from intaglio.ir import QParams, Shape, Signature, symbols_of
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.annotate.sites import Observed, Shared, Site
from intaglio.quant.calibrate.custom_observer import Edge
from intaglio.quant.calibrate.float_run import REPLACED
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.recipes.choices import Role


@dataclass
class ObserverState:
    """State that all observers of a model share.

    Attributes:
        batch: index of the next batch.
        stride: increment of the index from one batch to the next.
        ignore: whether NaN and infinities are left out instead of an error, unless all values of a batch are such.
        observed_edges: edges whose values went through an observer that writes its own quantize nodes.
        visible: the tokens of the present call that padding masks do not hide.
    """

    batch: int = 0
    stride: int = 1
    ignore: bool = False
    observed_edges: set[Edge] = field(default_factory=set)
    visible: VisibleTokens = field(default_factory=dict)


FINITE_DATA = (
    "remove samples with such values from the data; if the model computes them from finite data, leave the operators "
    "that compute and read them in float (skip=..., or None in a recipe), or ignore them: "
    "stages.calibrate(..., nonfinite='ignore')"
)


class Observer(nn.Module):
    """Returns its input and adds it to ``statistics``, without the tokens that a padding mask hides.

    Attributes:
        samples: the sample axis of the input, or ``None``.
        padded: the axes along which a padding mask applies, or ``None``.
        channels: the axis with separate extrema for each channel; the site's, unless it is changed before calibration.
    """

    def __init__(
        self,
        site: Site,
        samples: int | None = 0,
        observer_state: ObserverState | None = None,
        padded: PaddedAxes | None = None,
    ) -> None:
        super().__init__()
        self.padded = padded
        self.site, self.samples, self.observer_state = site, samples, observer_state or ObserverState()
        self.channels = site.axis if isinstance(site.axis, int) else None
        self.statistics = Statistics()
        make = site.spec.observer if isinstance(site.spec, Observed) else None
        self.custom_observer = None if make is None else make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add a tensor to the statistics and return it.

        Raises:
            NotFiniteError: the tensor contains NaN or infinities that may not be ignored.
        """
        found = self._statistics_of(x.detach().resolve_neg())
        nonfinite = found.nans + found.infinities
        if nonfinite and (nonfinite == found.count or not self.observer_state.ignore):
            raise NotFiniteError(
                self.site.name,
                self.site.origin.operator or None,
                f"{found.nans} NaN and {found.infinities} infinite values among {x.numel()}",
                source=self.site.origin.source or None,
                remedy=FINITE_DATA,
            )
        self.statistics = self.statistics.merge(found)
        if self.custom_observer is not None:
            self.custom_observer(x.detach())
        return x

    def _statistics_of(self, x: torch.Tensor) -> Statistics:
        """Return the statistics of the visible tokens of a tensor."""
        samples, channels = self.samples, self.channels
        groups = visible_groups(x, self.padded, self.observer_state.visible)
        if self.padded is not None and groups[0] is not x:
            samples, channels = 0, None if channels is None else self.padded.moved(channels)
        found = Statistics()
        for group in groups:
            values = group.contiguous() if samples or channels is not None else _in_memory_order(group)
            own = Statistics.of(
                values.numpy(),
                torch.get_num_threads(),
                samples=samples,
                channels=channels,
                batch=self.observer_state.batch,
            )
            if own.channels is not None and self.channels is not None:
                own.channels = replace(own.channels, axis=self.channels)
            found = own if group is groups[0] else found.merge(own)
        return found

    def custom_qparams(self) -> QParams | None:
        """Return the parameters from the user's own observer; ``None`` without such an observer or without values."""
        if self.custom_observer is None or not self.statistics.count:
            return None
        scale, zero_point = (np.asarray(value).reshape(-1) for value in self.custom_observer.calculate_qparams())
        shift = 128 if getattr(self.custom_observer, "dtype", None) is torch.int8 else 0
        if len(scale) != 1:
            problem = f"its observer returned {len(scale)} scales, but an activation has one"
            where, remedy = self.site.origin.operator or None, "use an observer with a single scale"
            raise CalibrationError(self.site.name, where, problem, remedy=remedy)
        return QParams((float(np.float32(scale[0])),), (int(zero_point[0]) + shift,), self.site.qmin, self.site.qmax)

    def extra_repr(self) -> str:
        """Return the site and the number of observed values."""
        return f"{self.site.name}, count={self.statistics.count}"


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return the values without a copy if they are channels-last; statistics do not depend on the order."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)
    return x.contiguous()


def insert_observers(
    annotations: Annotations, signature: Signature, observer_state: ObserverState
) -> tuple[fx.GraphModule, dict[str, Observer]]:
    """Return a copy of an annotated graph with observers, and the observers by site name.

    Args:
        annotations: the annotated graph.
        signature: signature of the model.
        observer_state: the state that the observers share.
    """
    observed = copy_graph(annotations.module)
    nodes = {node.name: node for node in observed.graph.nodes}
    observers = {
        site.name: _observer_of(site, nodes[site.value], signature, observer_state)
        for site in annotations.sites
        if site.role == Role.ACTIVATION and isinstance(site.spec, Observed)
    }
    places = {name: f"observer_{index}" for index, name in enumerate(observers)}
    for site in annotations.sites:
        leader = annotations.leaders[site.name]
        if site.name in observers or (isinstance(site.spec, Shared) and site.spec.observed):
            _insert(observed, nodes[site.value], places[leader], observers[leader])
    return observed, observers


def _observer_of(site: Site, node: fx.Node, signature: Signature, observer_state: ObserverState) -> Observer:
    """Return the observer of a site for the value of a node."""
    shape = known_type(node).shape
    return Observer(site, _sample_axis(shape, signature), observer_state, padded_axes(shape, signature))


def _sample_axis(shape: Shape, signature: Signature) -> int | None:
    """Return the axis of a value whose size depends on the batch size; ``None`` without one."""
    free = [entry.type.shape[0] for entry in signature.inputs if entry.type.shape]
    batch = {symbol for size in free[:1] for symbol in symbols_of(size)}
    axes = [axis for axis, size in enumerate(shape) if batch.intersection(symbols_of(size))]
    return axes[0] if axes else None


def _insert(module: fx.GraphModule, node: fx.Node, name: str, observer: Observer) -> None:
    module.add_submodule(name, observer)
    users = list(node.users)
    with module.graph.inserting_after(node):
        call = module.graph.call_module(name, (node,))
    set_info(call, type=info(node).type, origin=observer.site.origin)
    for user in users:
        user.replace_input_with(node, call)


def observed_part(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return a graph with observers without its results and without operators that no observer reads.

    Such operators are the last layer of most models, which takes a large part of the time if it computes the logits of
    a large vocabulary. The part has the operators of `REPLACED` and shares tensors and observers with the graph. It is
    ``None`` if it is the whole graph.
    """
    kept, graph = ("placeholder", "call_module", "output"), fx.Graph()  # all modules of a graph are observers
    graph.graph_copy(module.graph, {})
    graph.output(())
    if not graph.eliminate_dead_code(lambda node: node.op in kept or node.is_impure()):
        return None
    for node in graph.nodes:
        node.target = REPLACED.get(node.target, node.target)
    return fx.GraphModule(module, graph)
