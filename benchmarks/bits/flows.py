"""The ways a float model becomes a reference model, by name. Each returns the reference and what else it gave."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bits import api
from bits.cases import Case

Result = tuple[Any, dict[str, Any]]
"""A reference (or `None`), and values or texts to record."""
Batches = list[tuple[Tensor, ...]]


def _prepared(case: Case, model: nn.Module, batches: Batches) -> Any:
    captured = api.capture(model, batches[0], **case.capture)
    return api.public("prepare")(captured, api.quantizer(case.options()))


def calibrated(case: Case, model: nn.Module, batches: Batches) -> Result:
    prepared = _prepared(case, model, batches)
    return api.public("convert")(prepared, api.public("calibrate")(prepared, batches)), {}


def corrected(case: Case, model: nn.Module, batches: Batches) -> Result:
    """Equalized or smoothed before, GPTQ and bias corrections after calibration."""
    prepared = api.public("equalize")(_prepared(case, model, batches), batches)
    ranges = api.public("calibrate")(prepared, batches)
    corrections = api.public("correct")(prepared, ranges, batches)
    return api.public("convert")(prepared, ranges, corrections), {}


def callbacks(case: Case, model: nn.Module, batches: Batches) -> Result:
    prepared = _prepared(case, model, batches)
    ranges = api.public("Calibrator")(prepared, batches).calibrate()
    return api.public("convert")(prepared, ranges), {}


def dynamic(case: Case, model: nn.Module, batches: Batches) -> Result:
    """Nothing is calibrated: scales are made while the model runs, or there are none."""
    captured = api.capture(model, batches[0], **case.capture)
    options = case.options() or {"recipe": "int8_dynamic"}
    return api.public("convert")(api.public("prepare")(captured, api.quantizer(options))), {}


def _trained(case: Case, model: nn.Module, batches: Batches, four: bool) -> Result:
    recipe = {"*": {"weights_dtype": "s4", "activations_dtype": "u4"}} if four else None
    captured = api.capture(model, batches[0], train=True)
    prepared = api.public("prepare")(captured, api.quantizer({"recipe": recipe}), qat=True)
    api.public("calibrate")(prepared, batches)
    if four:
        prepared.learn_scales()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(4):
        x = case.inputs(8)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(prepared(*x), torch.randint(0, 4, (8,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    reference = api.public("convert")(prepared)
    return reference, {"losses": losses, "prepared": prepared.eval()(*batches[1]).detach()}


def trained(case: Case, model: nn.Module, batches: Batches) -> Result:
    return _trained(case, model, batches, four=False)


def trained_four_bits(case: Case, model: nn.Module, batches: Batches) -> Result:
    return _trained(case, model, batches, four=True)


def from_qdq(case: Case, model: nn.Module, batches: Batches) -> Result:
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the operators

    return api.public("from_qdq")(model, batches[0]), {"given": model(*batches[1])}


def eager(case: Case, model: nn.Module, batches: Batches) -> Result:
    """Define-by-run; the reference is that of a model with one recording."""
    from intaglio import eager as door
    from intaglio.errors import InputError

    prepared = door.prepare(model, batches[0])
    for batch in batches:
        prepared(*batch)
    converted = door.convert(prepared)
    found = {f"eager {call}": converted(*case.inputs(call)) for call in case.calls}
    found["parameters"] = [own.to_json() for own in door.parameters(converted)]
    try:
        return door.rewrite(converted), found
    except InputError:  # several recordings: there is no one graph
        return None, found


def search(case: Case, model: nn.Module, batches: Batches) -> Result:
    """Search by the error on a batch. The size is minimized, because it is the same in every run."""
    wanted = model(*batches[1])

    def evaluate(candidate: Callable[..., Tensor]) -> float:
        return -(candidate(*batches[1]) - wanted).square().mean().item()

    options = {"max_drop": 1e-7, "relative": False, "evaluations": 6, "minimize": "size", "budget": 60.0}
    found = api.public("search")(model, batches, evaluate, candidates={"float": None}, **options)
    return found.reference, {"tuned": found.model(*batches[1]), "sites": found.model.text("sites")}


FLOWS: dict[str, Callable[[Case, nn.Module, Batches], Result]] = {
    flow.__name__: flow
    for flow in (
        calibrated, corrected, callbacks, dynamic, trained, trained_four_bits, from_qdq, eager, search,
    )
}  # fmt: skip
