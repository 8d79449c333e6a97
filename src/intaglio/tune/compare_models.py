"""Comparison of a quantized model with its float model, operator by operator, to find where accuracy is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from intaglio import eager
from intaglio.argument_checks import check_arguments, value_text
from intaglio.eager.recording.plain_objects import named_tensors
from intaglio.eager.run_trace import binder_of, captured_by_number, float_copy, float_counterpart, run_traced
from intaglio.errors import InputError, IntaglioError
from intaglio.fxgraph.graph_passes import copy_graph, run
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import is_constant
from intaglio.ir import Signature
from intaglio.lower import Lowered, requantize
from intaglio.lower.graph_builder import plain_name
from intaglio.progress import report_progress, shows_progress
from intaglio.quant.calibrate.batches import Binder, Call, log_once, peek
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared, annotate, prepare
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime import QuantizedModel
from intaglio.signature import Integers, bind, clone_tensors, dims_of
from intaglio.torch_private import buffers_of, pytree
from intaglio.tracing import Captured
from intaglio.tracing.captured import GraphStage
from intaglio.tune.capture_again import capture_again
from intaglio.tune.comparison import Comparison, number_repeated_calls
from intaglio.tune.op_error import ErrorSums, GraphComparison
from intaglio.tune.verdict import ResultTotals, classifies


@check_arguments
@log_once()
@shows_progress("compare", only_if=lambda: not Group.current().rank)
def compare(
    exact: nn.Module | Captured | Prepared,
    quantized: Any,
    data: Any,
    *,
    samples: int | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Compare a quantized model with its float model on the same batches.

    An int8 model, saved or not, does not contain its reference. The reference is made again from the float model and
    the parameters that the int8 model stores. If this gives another integer graph, for example after corrections of
    weights, or for other stages, the comparison has results only and no rows per operator. For a model of eager mode
    every recording that ran is compared over all its calls and loop iterations.

    Args:
        exact: the float model, or its captured or prepared stage.
        quantized: a `Reference`, an int8 model, another stage, or a converted model of eager mode.
        data: an iterable of batches as for `calibrate`, which is read once.
        samples: number of samples after which to stop (default: all).
        progress: whether to show progress (default: on a terminal and in a notebook).

    Returns:
        The error of every operator alone and accumulated, the error of the results, and a verdict about them.

    Raises:
        InputError: the two models do not belong together.

    Examples:
        >>> report = intaglio.compare(model, int8, batches, samples=64)
        >>> print(report)
    """
    if not isinstance(quantized, GraphStage) and callable(getattr(quantized, "compare", None)):
        problem = "the model consists of several int8 parts, and each has a comparison of its own"
        raise InputError("compare", None, problem, remedy="call int8.compare(model, data)")
    return run_comparison(exact, quantized, data, samples).comparison


@dataclass(frozen=True)
class ComparisonRun:
    """One pass of two models over the data.

    Attributes:
        comparison: errors of the operators and of the results.
        graphs: the compared graphs, with the statistics of their values; none if the operators were not compared.
        stage: the graph of the float model; ``None`` for a model of eager mode.
        calls: arguments of all calls.
        digest: digest of the inputs of all calls.
    """

    comparison: Comparison
    graphs: tuple[GraphComparison, ...]
    stage: GraphStage | None
    calls: tuple[Call, ...]
    digest: str


def run_comparison(
    exact: nn.Module | Captured | Prepared, quantized: Any, data: Any, samples: int | None, statistics: bool = False
) -> ComparisonRun:
    """Compare a quantized model with its float model, as `compare` does, and keep what is known about the graphs.

    Args:
        exact: the float model, or its captured or prepared stage.
        quantized: the quantized model or stage.
        data: an iterable of batches, which is read once.
        samples: number of samples after which to stop (default: all).
        statistics: whether to count the float model's values at every operator, and to keep the calls.

    Raises:
        InputError: the two models do not belong together.
    """
    if isinstance(exact, QuantizedModel):
        problem = "the first argument is an int8 model, and the second one is compared with it"
        raise InputError("compare", None, problem, remedy="call compare(model, int8, data), with the float model first")
    if not callable(quantized) or isinstance(quantized, type):
        problem = f"quantized takes a stage or a model, got {value_text(quantized)}"
        raise InputError("compare", None, problem, remedy="pass what quantize, convert or eager.convert returns")
    first, items = peek(data)
    compared: StageComparison | SegmentComparison
    if eager.is_session(quantized) and isinstance(exact, nn.Module):
        compared = SegmentComparison(exact, quantized, statistics)
    else:
        stage = exact if isinstance(exact, GraphStage) else capture_again(exact, first, quantized)
        compared = StageComparison(stage, quantized, _reference(stage, quantized), statistics)
    return _compared(compared, items, samples, statistics)


@log_once()
def compare_results(
    exact: nn.Module | GraphStage, quantized: QuantizedModel | Reference, data: Any, *, samples: int | None
) -> Comparison:
    """Compare only the results of a quantized model with those of its float model. This takes less time than `compare`.

    Args:
        exact: the float model, or its captured stage.
        quantized: the int8 model, or its reference.
        data: an iterable of batches.
        samples: number of samples after which to stop (default: all).

    Returns:
        A comparison without rows.
    """
    first, items = peek(data)
    stage = exact if isinstance(exact, GraphStage) else capture_again(exact, first, quantized)
    return _compared(StageComparison(stage, quantized, None), items, samples).comparison


def _compared(
    compared: StageComparison | SegmentComparison, items: Iterable[Any], samples: int | None, keep: bool = False
) -> ComparisonRun:
    """Run both models on all batches and return their comparison, with all calls if they are to be kept."""
    total, outcome, seen = ErrorSums(), ResultTotals(), 0
    calls, digest = list[Call](), hashlib.sha256()
    for item in items:
        report_progress("compare", seen, samples)
        args, kwargs = compared.binder(item)
        if keep:
            calls.append(clone_tensors((args, kwargs)))
            _update_digest(digest, args, kwargs)
        for index, (name, expected, found) in enumerate(compared(args, kwargs)):
            total.add(name, expected, found)
            if index == 0:
                outcome.add(expected, found, logits=expected.dim() == 2 and compared.classifies)
        sizes = [leaf.shape[0] for leaf in pytree.tree_leaves((args, kwargs)) if is_batch(leaf)]
        seen += sizes[0] if sizes else 1
        if samples is not None and seen >= samples:
            break
    rows = number_repeated_calls([row for comparison in compared.comparisons for row in comparison.rows()])
    rows.sort(key=lambda row: (row.alone, row.so_far))
    results = tuple(total.decibels(key) for key in total.signal)
    comparison = Comparison(
        tuple(rows), results, seen, compared.parted, outcome.agreement, outcome.cosine, tuple(total.signal)
    )
    stage = compared.stage if isinstance(compared, StageComparison) else None
    return ComparisonRun(comparison, tuple(compared.comparisons), stage, tuple(calls), digest.hexdigest())


def _update_digest(digest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Add the tensors of a call, with their shapes and types, to a digest."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not leaf.is_nested:
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            digest.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def is_batch(leaf: Any) -> bool:
    """Return whether a leaf is a tensor with a batch axis."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


Results = list[tuple[str, torch.Tensor, torch.Tensor]]
"""Tensors of a call's result: name, tensor of the float model, and tensor of the quantized model."""


class StageComparison:
    """Compares a stage or an int8 model that consists of one graph."""

    parted = 0

    def __init__(
        self, stage: GraphStage, quantized: Any, reference: Reference | None, statistics: bool = False
    ) -> None:
        self.stage, self.quantized, self.binder = stage, quantized, Binder.of(stage.signature)
        self.classifies = classifies(stage.annotations.module if isinstance(stage, Prepared) else stage.module)
        self.comparisons = []
        if reference is not None:
            graph = _float_graph(stage, reference)
            self.comparisons = [GraphComparison(graph, reference, statistics=statistics)]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Results:
        """Run one call of both models and return the tensors of their results."""
        stage = self.stage
        leaves = bind(stage.signature, args, kwargs)
        dims_of(stage.signature, leaves)
        own_args, own_kwargs = with_int8_caches(self.quantized, (args, dict(kwargs)))
        own_leaves = bind(stage.signature, own_args, own_kwargs)
        values, own_values = (clone_tensors([*given, *stage.state]) for given in (leaves, own_leaves))
        expected, found = (
            stage(*clone_tensors(args), **clone_tensors(kwargs)),
            self.quantized(*clone_tensors(own_args), **clone_tensors(own_kwargs)),
        )
        for comparison in self.comparisons:
            names = [node.name for node in comparison.module.graph.nodes if node.op == "placeholder"]
            comparison.add(dict(zip(names, values, strict=True)), dict(zip(names, own_values, strict=True)))
        return _pairs(expected, found)


class SegmentComparison:
    """Compares a converted model of eager mode, recording by recording."""

    def __init__(self, exact: nn.Module, quantized: nn.Module, statistics: bool = False) -> None:
        self.exact, self.quantized = float_copy(exact), quantized
        self.counterpart, self.binder, self.parted = float_counterpart(quantized), binder_of(quantized), 0
        self.by_number: dict[int, GraphComparison] = {}
        self.classifies = False
        for number, (stage, reference) in captured_by_number(quantized, self.exact).items():
            graph = _float_graph(stage, reference)
            self.by_number[number] = GraphComparison(graph, reference, number, statistics)

    @property
    def comparisons(self) -> list[GraphComparison]:
        """Return the comparisons in order of their parts of the model."""
        return list(self.by_number.values())

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Results:
        """Run one call of both models and return the tensors of their results. If data-dependent control flow took
        another path in int8, the calls are counted in ``parted``, and the list is empty if shapes differ."""
        with torch.no_grad():
            expected = self.exact(*clone_tensors(args), **clone_tensors(kwargs))
        _, exact_spans = run_traced(self.counterpart, clone_tensors(args), clone_tensors(kwargs))
        found, quantized_spans = run_traced(self.quantized, clone_tensors(args), clone_tensors(kwargs))
        for mine, its in zip(exact_spans, quantized_spans, strict=False):
            if (mine.number, mine.first) != (its.number, its.first):
                break
            if mine.number in self.by_number:
                self.by_number[mine.number].add(mine.given, its.given, range(mine.first, min(mine.end, its.end)))
            if mine.end != its.end:
                break
        last = self.by_number.get(exact_spans[-1].number) if exact_spans else None
        self.classifies = last is not None and classifies(last.module)
        parted = [s.bounds for s in exact_spans] != [s.bounds for s in quantized_spans]
        self.parted += parted
        results = _pairs(expected, found, strict=not parted)
        return results if all(a.shape == b.shape for _, a, b in results) else []


def _reference(stage: GraphStage, quantized: Any) -> Reference | None:
    """Return the reference of a quantized model, or ``None`` if it cannot be made."""
    if isinstance(quantized, Reference):
        return quantized
    return eager.rewrite(quantized) if eager.is_session(quantized) else _reference_from_texts(stage, quantized)


def _reference_from_texts(stage: GraphStage, quantized: Any) -> Reference | None:
    """Return the reference made from the float model and the texts stored in the int8 model, or ``None`` if it
    differs."""
    texts = quantized.model_info.texts if isinstance(quantized, (Lowered, QuantizedModel)) else {}
    if not isinstance(stage, (Captured, Prepared)) or not {"quantizer", "parameters", "integer"} <= texts.keys():
        return None
    try:
        prepared = stage if isinstance(stage, Prepared) else prepare(stage, Quantizer.from_toml(texts["quantizer"]))
        reference = convert(prepared, Parameters.from_json(texts["parameters"]))
    except IntaglioError:
        return None
    if requantize(reference).text() != texts["integer"]:
        return None
    return _with_integers(reference, quantized.graph.constants)


def _with_integers(reference: Reference, constants: Mapping[str, np.ndarray]) -> Reference:
    """Return the reference with the int8 model's weights, which corrections may not have rounded to nearest."""
    module, weights = copy_graph(reference.module), dict[str, np.ndarray]()
    sites = {site.name for site in reference.annotations.sites if site.role == Role.WEIGHT}
    of_constant = {node.all_input_nodes[0]: info(node).site for node in module.graph.nodes if info(node).site in sites}
    site_of = {str(node.target): site for node, site in of_constant.items() if is_constant(node)}
    for name, tensor in buffers_of(module).items():
        found = constants.get(plain_name(name))
        if tensor is None or tensor.dtype is not torch.int8 or found is None:
            continue
        if found.dtype == np.int8 and found.shape == tensor.shape:  # the float table of tied weights has this name too
            buffers_of(module)[name] = torch.from_numpy(np.array(found))
            if (site := site_of.get(name)) is not None:
                weights[site] = np.array(found)
    corrected = replace(reference.parameters.corrected, quantized_weights=weights)
    return replace(reference, module=module, parameters=replace(reference.parameters, corrected=corrected))


def _float_graph(stage: GraphStage, reference: Reference) -> fx.GraphModule:
    """Return the float graph as `prepare` leaves it, whose nodes have the same names as those of the reference."""
    if isinstance(stage, Prepared):
        return stage.annotations.module
    text = reference.model_info.texts.get("quantizer")
    if isinstance(stage, Captured) and text is not None:
        return annotate(stage, Quantizer.from_toml(text)).module
    module = copy_graph(stage.module)
    run(module, reference.passes)
    return module


def with_int8_caches(quantized: Any, call: Call) -> Call:
    """Return the arguments of the float model with those of int8 caches, which must be empty, as uint8.

    Raises:
        InputError: a cache has elements, which only the quantized model can compute.
    """
    signature = getattr(quantized, "signature", None)
    inputs = signature.inputs if isinstance(signature, Signature) else ()
    leaves, spec = pytree.tree_flatten(call)
    for entry in (one for one in inputs if one.type.q is not None):
        if leaves[entry.leaf].numel():
            problem = f"{entry.name} holds float values, but the quantized model takes a cache in int8"
            raise InputError("compare", None, problem, remedy="compare calls whose cache is empty")
        leaves[entry.leaf] = leaves[entry.leaf].to(torch.uint8)
    found: Call = pytree.tree_unflatten(leaves, spec)
    return found


def _pairs(expected: Any, found: Any, strict: bool = True) -> Results:
    """Return the tensors of two results side by side, with their names in the first. Raise `InputError` if ``strict``
    and their numbers differ. Results of the quantized model that are int8 caches are left out."""
    caches = {name for name, tensor in named_tensors(found) if tensor.dtype is torch.uint8}
    first, second = [(name, one) for name, one in _tensors(expected) if name not in caches], _tensors(found)
    if strict and len(first) != len(second):
        problem = f"the float model returns {len(first)} float tensors, the quantized one {len(second)}"
        raise InputError("compare", None, problem, remedy="compare a quantized model with its own float model")
    return [(name, exact, quantized) for (name, exact), (_, quantized) in zip(first, second, strict=False)]


def _tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the floating-point tensors of a result and their names, with quantized tensors dequantized."""
    value = pytree.tree_map(
        lambda part: part.dequantize() if isinstance(part, Integers) else part,
        value,
        is_leaf=lambda part: isinstance(part, Integers),
    )
    return [(name, tensor) for name, tensor in named_tensors(value) if tensor.is_floating_point()]
