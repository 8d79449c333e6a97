"""Preparation of a captured model for quantization-aware training."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from intaglio.argument_checks import check_arguments
from intaglio.errors import ArtifactError, CalibrationError, InputError, UnsupportedError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import origin
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.annotate.recurrent_sites import is_recurrent
from intaglio.quant.calibrate.prepare import Prepared, prepare_with_passes
from intaglio.quant.qat.constant_tape import Tape
from intaglio.quant.qat.eval_graph import BatchNormMark, keep_first_marks, marks_of, propagate_marks, to_evaluation
from intaglio.quant.qat.fake_quantize import FakeQuantize, FakeQuantizeMode, FakeQuantizeWeight
from intaglio.quant.qat.parameter_tree import ParameterTree
from intaglio.quant.qat.training_graph import TrainingGraph
from intaglio.quant.qdq.prepare_passes import QAT_PASSES
from intaglio.quant.recipes.datatypes import FLOAT8
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.signature import bind, dims_of, unflatten_result, update_inputs
from intaglio.tracing.captured import Captured, expect
from intaglio.tracing.loops.while_loops import refuse_loops


@dataclass(frozen=True)
class TrainingPlan:
    """The parts of a prepared model that training does not change.

    Attributes:
        prepared: the model as `convert` receives it, except for its constants.
        names: names of the constants in the prepared graph.
        compute: ``compute(root)`` returns the constants `names`, then the folding factors of batch norms.
        run: ``run(root, *inputs, *computed)`` returns the results.
    """

    prepared: Prepared
    names: tuple[str, ...]
    compute: Callable[..., Sequence[torch.Tensor]]
    run: Callable[..., Sequence[torch.Tensor]]

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingPlan:
        return self


class PreparedQat(nn.Module):
    """Trainable model with fake quantization.

    It has the parameters, buffers and batch norms of the float model under their own names, and fake-quantize modules
    under ``quantizers``. It loads its own state dicts, and with ``strict=False`` those of the float model.

    ``train()`` and ``eval()`` switch batch norms and dropout. Scales follow the values at first (`observe_ranges`:
    moving averages of activation ranges in training, current weights); they can also be trained (`learn_scales`) or
    stay constant.
    """

    _plan: TrainingPlan
    _mode: FakeQuantizeMode

    def __init__(self) -> None:
        super().__init__()
        # A hook, because a parent that loads its own state does not call `load_state_dict` of its children.
        self.register_load_state_dict_post_hook(_switch_as_loaded)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the float model computed with fake quantization."""
        signature = self._plan.prepared.signature
        leaves = bind(signature, args, kwargs)
        symbols = dims_of(signature, leaves)
        with torch.autocast("cpu", enabled=False):  # the graph contains explicit casts
            results = self._plan.run(self, *leaves, *self._plan.compute(self))
        with torch.no_grad():
            results = update_inputs(signature, leaves, results)
        return unflatten_result(signature, results, symbols)

    @check_arguments
    def observe_ranges(self, on: bool = True) -> PreparedQat:
        """Let scales follow the values if `on`, which ends their training; otherwise keep them constant."""
        return self._switch(observe=on, learn=self._mode.learn and not on)

    @check_arguments
    def learn_scales(self, on: bool = True) -> PreparedQat:
        """Train the scales if `on`, which ends observation; the optimizer must contain `scale_parameters`.

        Raises:
            CalibrationError: a site has no scale to start from.
        """
        if on and (unseen := self.unseen()):
            raise CalibrationError(
                ", ".join(unseen[:5]),
                None,
                f"{len(unseen)} sites have seen no data, so their scales have no initial values",
                remedy="call calibrate(prepared, data) first, or train some batches before",
            )
        if on and self._mode.observe:
            self.follow_weights()
        return self._switch(learn=on, observe=self._mode.observe and not on)

    @check_arguments
    def round_values(self, on: bool = True) -> PreparedQat:
        """Enable or disable fake quantization. Without it the model computes the float results."""
        return self._switch(quantize=on)

    @check_arguments
    def freeze_batch_norms(self, on: bool = True) -> PreparedQat:
        """Use running statistics of batch norms in training too, without updating them, if `on`.

        The statistics are then constants for the gradient, as for batch norms in evaluation mode. Training can diverge,
        in float as well, if they do not fit the data yet or the learning rate needs normalization. Use it with trained
        weights or in the last epochs.
        """
        return self._switch(frozen=on)

    def scale_parameters(self) -> list[nn.Parameter]:
        """Return learned scales and zero points, for an optimizer group without weight decay."""
        return [parameter for module in self.rounding() for parameter in module.learnable()]

    def rounding(self) -> Iterator[FakeQuantize | FakeQuantizeWeight]:
        """Iterate over the fake-quantize modules of activations and weights."""
        return (module for module in self.modules() if isinstance(module, (FakeQuantize, FakeQuantizeWeight)))

    def unseen(self) -> list[str]:
        """Return the names of activation sites that have seen no data."""
        return [m.site.name for m in self.rounding() if isinstance(m, FakeQuantize) and not m.seen]

    @torch.no_grad()
    def follow_weights(self) -> None:
        """Recompute the scales of weights from their current values."""
        for name, values in self.constants().items():
            for module in self.rounding():
                if isinstance(module, FakeQuantizeWeight) and module.constant == name:
                    module.update_qparams(values)

    @torch.no_grad()
    def constants(self) -> dict[str, torch.Tensor]:
        """Return the constants of the prepared graph by name, batch norms folded with their running statistics."""
        frozen = self._mode.frozen
        self._mode.frozen = True
        try:
            values = self._plan.compute(self)
        finally:
            self._mode.frozen = frozen
        return {name: value.detach().clone() for name, value in zip(self._plan.names, values, strict=False)}

    def _switch(self, **fields: bool) -> PreparedQat:
        for name, value in fields.items():
            setattr(self._mode, name, value)
        for module in self.rounding():
            for parameter in module.learnable():
                parameter.requires_grad_(self._mode.learn)
        return self

    def get_extra_state(self) -> torch.Tensor:
        """Return the mode switches, so that a state dict resumes in the same mode."""
        return torch.tensor([getattr(self._mode, name) for name in SWITCHES])

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Restore the mode switches that `get_extra_state` returned."""
        for name, value in zip(SWITCHES, state.tolist(), strict=True):
            setattr(self._mode, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArtifactError(
            type(self).__name__,
            None,
            "a prepared model cannot be pickled",
            remedy="save prepared.state_dict(), and load it into prepare(captured, quantizer, qat=True)",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedQat:
        copied = PreparedQat.__new__(PreparedQat)
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


SWITCHES = ("observe", "learn", "quantize", "frozen")


def _switch_as_loaded(prepared: PreparedQat, incompatible: Any) -> None:
    """Enable gradients of scales and zero points by the switches of a loaded state dict."""
    prepared._switch()


def prepare_qat(captured: Captured, quantizer: Quantizer | Annotator | None = None) -> PreparedQat:
    """Prepare a model that was captured in training for quantization-aware training.

    Args:
        captured: result of ``capture(..., train=True)``.
        quantizer: what to quantize.

    Raises:
        InputError: the model was captured in evaluation.
        UnsupportedError: the model contains parts that cannot be trained.
    """
    expect(captured, Captured, "prepare")
    if not captured.training:
        raise InputError(
            "prepare",
            None,
            "the model was captured in evaluation mode, without the batch norms and dropout of training",
            remedy="capture(model, example_inputs, train=True)",
        )
    refuse_loops(captured.module, "such a loop cannot be trained", "write a loop with a fixed number of iterations")
    evaluation, tape = to_evaluation(captured), Tape()
    module = copy_graph(evaluation.module)
    with tape, propagate_marks(module):
        prepared = prepare_with_passes(module, evaluation, Quantizer.of(quantizer), QAT_PASSES)
    keep_first_marks(prepared.annotations.module)
    _check(prepared, evaluation)
    root, mode = PreparedQat(), FakeQuantizeMode()
    tree = ParameterTree(root, captured, evaluation, mode)
    training = TrainingGraph(prepared.annotations, tree, mode)
    run = training.write()
    compute = tree.constants(prepared.annotations.module, training.names, tape)
    if lost := _unread(root, run, compute):
        notes = (f"not trained, because the graph contains their values as constants: {', '.join(lost)}",)
        prepared = replace(prepared, model_info=prepared.model_info.with_stage(notes))
    name = f"{prepared.model_info.name}, prepared for training"
    root._plan = TrainingPlan(
        prepared, tuple(training.names), _function(compute, f"constants of {name}"), _function(run, name)
    )
    root._mode = mode
    return root


def _check(prepared: Prepared, evaluation: Captured) -> None:
    """Check that everything quantized has a gradient, and that no batch norm or dropout was lost on the way.

    Raises:
        UnsupportedError: one of these is not the case.
    """
    annotations = prepared.annotations
    refused = [(region.anchor, "a recurrent layer") for region in annotations.regions if is_recurrent(region.anchor)]
    refused += [(table.node, "a quantized embedding table") for table in annotations.tables if table.is_quantized]
    nodes = {node.name: node for node in annotations.module.graph.nodes}
    refused += [(nodes[name], "a weight-only layer") for name in annotations.weight_only]
    refused += [
        (nodes[reader or value], "a value whose observer writes its own quantize nodes")
        for value, reader in annotations.custom_observers
    ]
    for site in annotations.sites:
        if site.dtype in FLOAT8:
            raise UnsupportedError(
                site.name,
                site.origin.operator,
                f"{site.datatype} values cannot be trained",
                remedy="choose an integer datatype in the recipe",
            )
    for node, problem in refused:
        where = origin(node)
        raise UnsupportedError(
            where.path or "model",
            where.operator,
            f"{problem} cannot be trained",
            remedy=f"leave it in float, in the recipe: {{{where.path!r}: None}}",
        )
    kept = {(type(mark), mark.number) for _, mark in marks_of(annotations.module)}
    for _, mark in marks_of(evaluation.module):
        if (type(mark), mark.number) not in kept:
            name = "norm" if isinstance(mark, BatchNormMark) else "dropout"
            problem = f"this {name} was replaced by other operators and cannot be trained"
            raise UnsupportedError(mark.path or "model", None, problem, remedy="train the model without it")


def _unread(root: nn.Module, *graphs: fx.Graph) -> list[str]:
    """Return the names of trainable parameters that no graph reads."""
    read = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "get_attr"}
    return [name for name, p in root.named_parameters() if p.requires_grad and name not in read]


def _function(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """Compile a graph to a function of the root module and its inputs, with source lines for debuggers."""
    code = graph.python_code("self")
    file = f"<{title}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(True), file)
    names = dict(code.globals)
    exec(compile(code.src, file, "exec"), names)
    return names["forward"]
