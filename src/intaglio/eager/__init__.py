"""Define-by-run: quantize models that stay plain Python."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio.eager.session import Session, unchanged
from intaglio.eager.state import AutoQuantizationState, attach
from intaglio.errors import CalibrationError, InputError
from intaglio.quant import Quantizer, Recipe, Reference

__all__ = ["AutoQuantizationState", "convert", "prepare", "rewrite"]


def prepare(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_classes: tuple[type, ...] = (),
) -> nn.Module:
    """A copy of the model that observes as it runs."""
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    prepared = _copy(model)
    quantizer = Quantizer(Recipe.given(recipe))
    session = Session(prepared, _plain_copy(prepared), quantizer, leaf_classes=leaf_classes)
    attach(session)
    with unchanged(prepared):
        prepared(*args, **(example_kwargs or {}))
    for chain in session.chains:
        chain.clear()
    session.runs = 0
    return prepared


def convert(prepared: nn.Module, *, strict: bool = False) -> nn.Module:
    """A model that runs int8, still plain Python."""
    before = session_of(prepared)
    if before.runs == 0:
        raise CalibrationError("model", None, "it was never run", remedy="call the prepared model with a few batches")
    converted = _copy(prepared)
    session = Session(converted, before.origin, before.quantizer, strict, before.leaf_classes)
    session.records, session.edges = False, {}
    session.floats, session.turns = set(before.floats), set(before.turns)
    session.outside = set(before.outside)
    pairs = {chain: chain.converted() for chain in before.chains}
    for chain in pairs.values():
        session.chains.append(chain)
        if chain.refused is None:
            session.enter(chain)
    for place, ends in before.edges.items():
        key = None if place is None else (pairs[place[0]], place[1])
        session.edges[key] = [(pairs[chain], index) for chain, index in ends]
    attach(session)
    return converted


def rewrite(converted: nn.Module) -> Reference:
    """The explicit graph."""
    chains = session_of(converted).chains
    if len(chains) != 1 or chains[0].reference is None:
        raise InputError("rewrite", None, f"the model has {len(chains)} recordings; a graph is one straight line")
    reference: Reference = chains[0].reference
    return reference


def session_of(model: nn.Module) -> Session:
    state = getattr(model, "_auto_quant_state", None)
    if state is None:
        found = f"a {type(model).__name__} that is not prepared"
        raise InputError("model", None, found, remedy="eager.prepare(model, example_inputs) makes one")
    session: Session = state.session
    return session


def _copy(model: nn.Module) -> nn.Module:
    """Modules of its own, tensors too, in evaluation mode, without what a preparation attached."""
    attached = {id(v): None for m in model.modules() for n, v in vars(m).items() if n in ATTACHED}
    copied: nn.Module = copy.deepcopy(model, dict(attached)).eval()
    for module in copied.modules():
        for name in ATTACHED:
            if name in vars(module) and vars(module)[name] is None:
                delattr(module, name)
    return copied


ATTACHED = ("forward", "_auto_quant_state")


def _plain_copy(model: nn.Module) -> nn.Module:
    """Modules of its own around the same tensors; operators of its modules do not work in place."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    copied: nn.Module = copy.deepcopy(model, dict(tensors))
    for module in list(copied.modules()):
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
        for name, child in module.named_children():
            if isinstance(child, torch.jit.ScriptModule):  # torch.export takes no model that has one
                del module._modules[name]
    return copied


