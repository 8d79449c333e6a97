"""`Prepared`: the captured graph with an observer for every site that has its own parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from intaglio.argument_checks import check_arguments, check_arguments_except
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.fxgraph.graph_checker import finish_pass
from intaglio.fxgraph.graph_passes import Pass, copy_graph, run
from intaglio.fxgraph.node_info import info, origin
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.padding_masks import padding_masks, visible_tokens
from intaglio.ir import ModelInfo, Origin, Signature
from intaglio.quant.annotate.annotate_graph import annotate_graph, match_notes, notes_of, reannotate_graph
from intaglio.quant.annotate.embedding_tables import table_notes
from intaglio.quant.annotate.image_inputs import declare_images
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.annotate.refusals import remedy_of_reasons
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.annotate.sites import Observed
from intaglio.quant.calibrate.custom_observer import insert_custom_observers
from intaglio.quant.calibrate.observer import Observer, ObserverState, insert_observers
from intaglio.quant.calibrate.range_methods import method_of
from intaglio.quant.correct.corrections import Equalization
from intaglio.quant.imported_weights.choose_weights import choose_imported_weights, with_imported_activations
from intaglio.quant.imported_weights.group_operator import grouped_weight
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES, PassLists
from intaglio.quant.qdq.qdq_normalize import quantizes
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.decide_recipe import decide_recipe
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.pattern_rewrites import rewrite_matches
from intaglio.quant.recipes.quantizer import Quantizer, flat_patterns
from intaglio.quant.recipes.user_patterns import patterns_of
from intaglio.signature import bind, dims_of
from intaglio.torch_private import without_global_hooks
from intaglio.tracing.captured import Captured, GraphStage, expect
from intaglio.tracing.loops.while_loops import loops_of, nodes_with_loop_bodies, replace_loop_bodies


@dataclass(frozen=True, repr=False)
class Prepared(GraphStage):
    """A model that computes the float results and observes its values.

    Attributes:
        module: the graph with observers.
        signature: inputs and outputs of the captured model.
        annotations: all decisions about quantization, and the graph without observers.
        observers: site name -> observer, those of loop bodies included.
        model_info: notes and texts for reports.
        passes: the passes that rewrote the captured graph.
        quantizer: the options by which it was annotated.
        classes: module path -> class name.
        equalization: the equalization that was applied to the float model.
        observer_state: state that all observers share.
        bodies: name -> prepared loop body.
    """

    module: fx.GraphModule
    signature: Signature
    annotations: Annotations
    observers: Mapping[str, Observer]
    model_info: ModelInfo = field(default_factory=ModelInfo)
    passes: tuple[Pass, ...] = ()
    quantizer: Quantizer = field(default_factory=Quantizer)
    classes: Mapping[str, str] = field(default_factory=dict)
    equalization: Equalization = field(default_factory=Equalization)
    observer_state: ObserverState = field(default_factory=ObserverState)
    bodies: Mapping[str, Prepared] = field(default_factory=dict)

    @property
    def images(self) -> Mapping[str, Image]:
        """Return the images that were declared for inputs, by input name."""
        declared = self.quantizer.input or {}
        return {self.signature.inputs[0].name: declared} if isinstance(declared, Image) else declared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the float model's results, and let the observers count one more batch without its padding."""
        with self._counted_batch(args, kwargs):
            return super().__call__(*args, **kwargs)

    @check_arguments
    def observe(self, part: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        """Run a part of the graph, which returns nothing, as ``__call__`` runs the whole."""
        with self._counted_batch(args, kwargs) as leaves, torch.no_grad(), without_global_hooks():
            torch.autocast("cpu", enabled=False)(part)(*leaves)

    @contextmanager
    def _counted_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[list[torch.Tensor]]:
        """Let the observers count the tensors of a call, without its padding, as one more batch; yield the tensors."""
        leaves = bind(self.signature, args, kwargs)
        dims_of(self.signature, leaves)
        if padding_masks(self.signature):
            self.observer_state.visible = visible_tokens(self.signature, leaves)
        try:
            yield leaves
        finally:
            self.observer_state.visible = {}
        self.observer_state.batch += self.observer_state.stride

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        replace_loop_bodies(copied.module, {name: body.module for name, body in copied.bodies.items()})
        return copied

    def _contents(self) -> str:
        annotations, batches = self.annotations, self.observer_state.batch
        count = len(annotations.skipped)
        left = f", {count} operator{'s stay' if count > 1 else ' stays'} in float" if count else ""
        return f"{len(self.observers)} sites with observers, {batches} batches seen{left}"

    def _other_texts(self) -> Mapping[str, str]:
        skipped = "\n".join(map(str, self.annotations.skipped))
        return {"Sites": self.annotations.sites_text()} | ({"Operators in float": skipped} if skipped else {})

    @property
    def fingerprint(self) -> str:
        """Return a digest of the operators, their operands and the sites.

        Sizes are not part of it, because a model may be used with several.
        """
        nodes = self.annotations.module.graph.nodes
        lines = [f"{node.name} {node.op} {operator(node)} {[v.name for v in node.all_input_nodes]}" for node in nodes]
        return hashlib.sha256("\n".join([*lines, *sorted(self.observers)]).encode()).hexdigest()[:16]

    @check_arguments
    def with_method(self, method: str) -> Prepared:
        """Return the model with another range method for all activations; ranges of either model fit both."""
        try:
            method_of(method)
        except ValueError as error:
            raise SelectorError("method", None, str(error)) from error
        sites = tuple(
            replace(site, spec=replace(site.spec, method=method))
            if site.role == Role.ACTIVATION and isinstance(site.spec, Observed)
            else site
            for site in self.annotations.sites
        )
        bodies = {name: body.with_method(method) for name, body in self.bodies.items()}
        return replace(self, annotations=replace(self.annotations, sites=sites), bodies=bodies)


@check_arguments_except("captured", "quantizer")
def annotate(captured: Captured, quantizer: Quantizer | Annotator | None = None) -> Annotations:
    """Return what `prepare` would quantize, without inserting observers.

    Args:
        captured: the captured model.
        quantizer: a `Quantizer` or an annotator, as for `prepare`.

    Returns:
        The sites, and the skipped operators with their reasons.
    """
    expect(captured, Captured, "annotate")
    quantizer = Quantizer.of(quantizer)
    module = copy_graph(captured.module)
    choose_imported_weights(module, quantizer, captured.classes)
    run_passes(module, quantizer, PTQ_PASSES)
    quantizer = _resolve_options(quantizer, module)
    declare_images(module, captured.signature, quantizer, captured.classes)
    return annotate_graph(module, quantizer, captured.classes)


def prepare(captured: Captured, quantizer: Quantizer | Annotator | None = None) -> Prepared:
    """Run the passes of post-training quantization, annotate the model, and insert observers.

    Args:
        captured: the captured model.
        quantizer: a `Quantizer`, or an annotator (`intaglio.annotation`) such as one of torchao's quantizers.

    Raises:
        UnsupportedError: if nothing can be quantized.
    """
    expect(captured, Captured, "prepare")
    return prepare_with_passes(copy_graph(captured.module), captured, Quantizer.of(quantizer), PTQ_PASSES)


def prepare_part(captured: Captured, quantizer: Quantizer) -> Prepared:
    """Prepare one of several modules that a model is made of.

    A recipe may leave the whole module in float, such as the encoder of a model with a decoder.
    """
    return _prepared(copy_graph(captured.module), captured, quantizer, PTQ_PASSES)


def prepare_with_passes(
    module: fx.GraphModule, captured: Captured, quantizer: Quantizer, passes: PassLists
) -> Prepared:
    """Prepare a module with the given passes; the module is rewritten in place."""
    prepared = _prepared(module, captured, quantizer, passes)
    if not quantizes_something(prepared):
        annotations = prepared.annotations
        worst = sorted(annotations.skipped, key=lambda skip: -skip.macs)[:3]
        reasons = "; ".join(dict.fromkeys(map(str, worst)))
        quantizing = [node for node in module.graph.nodes if quantizes(node)]
        if any(info(node).rewritten_by is not None for node in quantizing):
            return prepared
        if quantizing:
            raise UnsupportedError(
                "model",
                None,
                "it is quantized already, and nothing else in it can be quantized",
                remedy="import it with its quantization: intaglio.stages.from_qdq(model, example_inputs)",
            )
        raise nothing_quantized(reasons)
    return prepared


def nothing_quantized(reasons: str) -> UnsupportedError:
    """Return the error for a model in which nothing is quantized."""
    problem = "nothing in it can be quantized" + (f": {reasons}" if reasons else "")
    return UnsupportedError("model", None, problem, remedy=remedy_of_reasons(reasons))


def quantizes_something(prepared: Prepared) -> bool:
    """Return whether anything in a prepared model or in the bodies of its loops is quantized."""
    return any(_is_wanted(one.annotations) for one in (prepared, *prepared.bodies.values()))


def _is_wanted(annotations: Annotations) -> bool:
    """Return whether anything in the annotated graph is quantized."""
    own = annotations
    wanted = own.regions or own.weight_only or own.edges or own.outputs or own.custom_observers
    imported = any(map(grouped_weight, own.module.graph.nodes))
    return bool(wanted) or imported or any(table.is_quantized for table in own.tables)


def _prepared(
    module: fx.GraphModule,
    captured: Captured,
    quantizer: Quantizer,
    passes: PassLists,
    observer_state: ObserverState | None = None,
) -> Prepared:
    """Prepare a module and its loop bodies; ``observer_state`` is the enclosing model's when this is a loop body."""
    observer_state = observer_state or ObserverState()
    bodies = {
        loop.name: _prepared(
            copy_graph(loop.body.module), loop.body, quantizer_for_part(quantizer, loop.body), passes, observer_state
        )
        for loop in (node.target for node in loops_of(module))
    }
    choose_imported_weights(module, quantizer, captured.classes)
    steps = run_passes(module, quantizer, passes)
    quantizer = _resolve_options(quantizer, module)
    notes = declare_images(module, captured.signature, quantizer, captured.classes)
    annotations = annotate_graph(module, quantizer, captured.classes)
    notes += notes_of(annotations.regions) + table_notes(annotations.tables) + match_notes(annotations)
    sites = "".join([annotations.text(), *[body.annotations.text() for body in bodies.values()]])
    texts = {"captured": captured.text(), "quantizer": quantizer.to_toml(), "sites": sites}
    if not quantizer.has_text:
        del texts["quantizer"]
    model_info = captured.model_info.with_stage(notes, **texts)
    observed, observers = _with_observers(annotations, captured.signature, observer_state, bodies)
    return Prepared(
        observed,
        captured.signature,
        annotations,
        observers,
        model_info,
        steps,
        quantizer,
        captured.classes,
        observer_state=observer_state,
        bodies=bodies,
    )


def origins_of(captured: Captured) -> list[Origin]:
    """Return where each operator of a captured model and of its loop bodies comes from."""
    return [origin(node) for node in nodes_with_loop_bodies(captured.module) if node.op == "call_function"]


def quantizer_for_part(quantizer: Quantizer, part: Captured) -> Quantizer:
    """Return the quantizer for a loop body or a submodule, to which the model's input and output options do not
    apply."""
    return replace(
        with_selectors_of(quantizer, part),
        input=None,
        skip_first=False,
        skip_last=False,
        outputs="float",
        int8_buffers=(),
        cached_inputs={},
    )


def with_selectors_of(quantizer: Quantizer, part: Captured) -> Quantizer:
    """Return the quantizer without the selectors that match no operator of a part of a model."""
    return replace(quantizer, recipe=quantizer.recipe.for_part(origins_of(part), part.classes))


def run_passes(module: fx.GraphModule, quantizer: Quantizer, lists: PassLists) -> tuple[Pass, ...]:
    """Run the passes of a mode, replace the matches of patterns that rewrite, and return the passes.

    Raises:
        UnsupportedError: a pattern rewrites in quantization-aware training, or its callback fails.
    """
    steps = passes_for(quantizer, lists)
    run(module, steps)
    patterns = patterns_of(flat_patterns(quantizer.patterns))
    if lists is not PTQ_PASSES and (names := [pattern.name for pattern in patterns if pattern.rewrite is not None]):
        problem = "quantization-aware training cannot train what a callback builds"
        raise UnsupportedError(f"pattern {names[0]!r}", None, problem)
    if rewrite_matches(module, patterns, quantizer.operators):
        finish_pass(module, "rewrite_matches")
        run(module, steps)  # a callback may build operators that these passes bring into their final form
    return steps


def passes_for(quantizer: Quantizer, lists: PassLists) -> tuple[Pass, ...]:
    """Return the passes of a mode that leave operators as a user's patterns and annotators expect them."""
    if quantizer.annotator is not None:
        return lists.annotator
    return lists.patterns if quantizer.patterns else lists.recipe


def _resolve_options(quantizer: Quantizer, module: fx.GraphModule) -> Quantizer:
    """Return the quantizer with all open options of its recipe decided for this graph."""
    imported = any(map(grouped_weight, module.graph.nodes))
    decided = decide_recipe(quantizer.recipe, module, decoder=quantizer.is_decoder and not imported)
    return replace(quantizer, recipe=with_imported_activations(decided, quantizer.recipe, module), decoder=False)


def reannotate(prepared: Prepared, module: fx.GraphModule) -> Annotations:
    """Return the annotations of a rewritten module by the same recipe, with the specs that sites have now."""
    return with_specs(prepared, reannotate_graph(prepared.annotations, module, prepared.quantizer, prepared.classes))


def with_specs(prepared: Prepared, found: Annotations) -> Annotations:
    """Return annotations with the specs that sites have in a prepared model."""
    known = {site.name: site for site in prepared.annotations.sites}
    sites = tuple(
        replace(site, spec=known[site.name].spec)
        if site.name in known and isinstance(site.spec, Observed) and isinstance(known[site.name].spec, Observed)
        else site
        for site in found.sites
    )
    return replace(found, sites=sites)


def annotate_everything(prepared: Prepared) -> Annotations:
    """Return the annotations that the model would have if its recipe left nothing in float.

    They are the same for all recipes that differ only in what they leave in float. With patterns or an annotator, which
    decide together with the recipe, they are the present annotations.
    """
    quantizer = prepared.quantizer
    ends = quantizer.skip_first or quantizer.skip_last
    if quantizer.patterns or quantizer.annotator or not (ends or quantizer.recipe.leaves_float):
        return prepared.annotations
    everything = replace(quantizer, recipe=quantizer.recipe.without_skips(), skip_first=False, skip_last=False)
    own = prepared.annotations
    return annotate_graph(copy_graph(own.module), everything, prepared.classes, own.data_floats)


def reprepare(prepared: Prepared, module: fx.GraphModule) -> Prepared:
    """Return a rewritten module annotated by the same options, with new observers.

    ``module`` must compute the same function as ``prepared.annotations.module``.
    """
    annotations = reannotate(prepared, module)
    observer_state = ObserverState()
    bodies = {name: _reprepare_body(body, observer_state) for name, body in prepared.bodies.items()}
    observed, observers = _with_observers(annotations, prepared.signature, observer_state, bodies)
    model_info = prepared.model_info.with_stage(sites=annotations.text())
    return replace(
        prepared,
        module=observed,
        annotations=annotations,
        observers=observers,
        model_info=model_info,
        observer_state=observer_state,
        bodies=bodies,
    )


def _reprepare_body(body: Prepared, observer_state: ObserverState) -> Prepared:
    """Return a loop body with new observers."""
    observed, observers = _with_observers(body.annotations, body.signature, observer_state, {})
    return replace(body, module=observed, observers=observers, observer_state=observer_state)


def _with_observers(
    annotations: Annotations, signature: Signature, observer_state: ObserverState, bodies: Mapping[str, Prepared]
) -> tuple[fx.GraphModule, dict[str, Observer]]:
    """Return a copy of the graph with observers, and all observers by site name, those of loop bodies included."""
    observed, observers = insert_observers(annotations, signature, observer_state)
    insert_custom_observers(observed, annotations.custom_observers, observer_state.observed_edges)
    replace_loop_bodies(observed, {name: body.module for name, body in bodies.items()})
    observed.recompile()
    return observed, observers | {name: one for body in bodies.values() for name, one in body.observers.items()}
