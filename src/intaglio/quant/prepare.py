"""`Prepared`: the captured graph with an observer on every site that owns its parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from intaglio.capture.canonical import run
from intaglio.capture.captured import Captured, GraphStage, expect
from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.ir import About, Signature
from intaglio.quant.annotate import Annotations, annotate_graph, notes_of
from intaglio.quant.declare import declare_images
from intaglio.quant.passes import PTQ_PASSES
from intaglio.quant.recipe import Quantizer
from intaglio.quant.sites import Observed, Shared, Site
from intaglio.quant.statistics import Statistics


class Observer(nn.Module):
    """Passes its input through and counts it into ``statistics``."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.statistics = Statistics()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = Statistics()
        batch.update(_in_memory_order(x.detach()).numpy(), threads=torch.get_num_threads())
        if batch.nans or batch.infinities:
            raise CalibrationError(
                self.site.name, self.site.origin.operator or None,
                f"{batch.nans} NaN and {batch.infinities} infinite values among {x.numel()}",
                source=self.site.origin.source or None,
                remedy="remove them from the data, or skip the part of the model that makes them",
            )  # fmt: skip
        self.statistics = self.statistics.merge(batch)
        return x

    def extra_repr(self) -> str:
        return f"{self.site.name}, count={self.statistics.count}"


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """The values without a copy where channels lie last; statistics do not care for order."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)
    return x.contiguous()


@dataclass(frozen=True)
class Prepared(GraphStage):
    """Runs like the float model and counts what it sees. ``observers``: site name -> observer.

    ``quantizer`` and ``classes`` (module path -> class name) are what it was annotated by.
    """

    module: fx.GraphModule
    signature: Signature
    annotations: Annotations
    observers: Mapping[str, Observer]
    about: About = field(default_factory=About)
    rewrites: Mapping[str, int] = field(default_factory=dict)
    quantizer: Quantizer = field(default_factory=Quantizer)
    classes: Mapping[str, str] = field(default_factory=dict)


def annotate(captured: Captured, quantizer: Quantizer | None = None) -> Annotations:
    """Sites, and why the rest is skipped, for a captured model after the passes of post-training quantization."""
    expect(captured, Captured, "annotate")
    quantizer = quantizer or Quantizer()
    module = copy_graph(captured.module)
    run(module, PTQ_PASSES)
    declare_images(module, captured.signature, quantizer, captured.classes)
    return annotate_graph(module, quantizer, captured.classes)


def prepare(captured: Captured, quantizer: Quantizer | None = None) -> Prepared:
    """Fold what can be folded, find the sites, put an observer on each. `UnsupportedError` when there is none."""
    expect(captured, Captured, "prepare")
    quantizer = quantizer or Quantizer()
    module = copy_graph(captured.module)
    rewrites = run(module, PTQ_PASSES)
    notes = declare_images(module, captured.signature, quantizer, captured.classes)
    annotations = annotate_graph(module, quantizer, captured.classes)
    if not annotations.regions:
        worst = sorted(annotations.skipped, key=lambda skip: -skip.macs)[:3]
        reasons = "; ".join(dict.fromkeys(map(str, worst)))
        raise UnsupportedError(
            "model", None, "nothing in it can be quantized" + (f": {reasons}" if reasons else ""),
            remedy="check the recipe, and that the model has convolutions or linear layers with float32 constants",
        )  # fmt: skip
    notes += notes_of(annotations.regions)
    texts = {"captured": captured.text(), "quantizer": quantizer.to_toml(), "sites": annotations.text()}
    about = captured.about.after(notes, **texts)
    observed, observers = _observed(annotations)
    return Prepared(observed, captured.signature, annotations, observers, about, rewrites, quantizer, captured.classes)


def again(prepared: Prepared, module: fx.GraphModule, notes: tuple[str, ...] = ()) -> Prepared:
    """Of a module that computes what ``prepared.annotations.module`` does: annotated alike, nothing observed yet."""
    annotations = annotate_graph(module, prepared.quantizer, prepared.classes)
    observed, observers = _observed(annotations)
    about = prepared.about.after(notes, sites=annotations.text())
    return replace(prepared, module=observed, annotations=annotations, observers=observers, about=about)


def _observed(annotations: Annotations) -> tuple[fx.GraphModule, dict[str, Observer]]:
    """A copy of the graph that counts, and what it counts into."""
    observed = copy_graph(annotations.module)
    observers = {
        site.name: Observer(site)
        for site in annotations.sites
        if site.role == "activation" and isinstance(site.spec, Observed)
    }
    nodes = {node.name: node for node in observed.graph.nodes}
    places = {name: f"observer_{index}" for index, name in enumerate(observers)}
    for site in annotations.sites:
        leader = annotations.leaders[site.name]
        if site.name in observers or (isinstance(site.spec, Shared) and site.spec.observed):
            _insert(observed, nodes[site.value], places[leader], observers[leader])
    observed.recompile()
    return observed, observers


def _insert(module: fx.GraphModule, node: fx.Node, name: str, observer: Observer) -> None:
    module.add_submodule(name, observer)
    users = list(node.users)
    with module.graph.inserting_after(node):
        call = module.graph.call_module(name, (node,))
    call.meta = {"type": node.meta["type"], "origin": observer.site.origin}
    for user in users:
        user.replace_input_with(node, call)


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that can be rewritten freely; tensors are shared with the original, never written."""
    root = nn.Module()
    for name, tensor in module._buffers.items():
        root.register_buffer(name, tensor)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping)
    if output is not None:
        graph.output(output)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    copied = fx.GraphModule(root, graph)
    copied.meta = copy.deepcopy(module.meta)
    return copied
