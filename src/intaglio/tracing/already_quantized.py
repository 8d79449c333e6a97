"""Detection of models that are already quantized or prepared, or no models, with errors that name the right call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from intaglio.errors import CaptureError

QUANTIZE_FLOAT_MODEL = "quantize the float model it was made from"
STAGES = {
    "Captured": "it is captured already: call prepare(captured)",
    "Prepared": "call calibrate(prepared, data), then convert(prepared, ranges)",
    "PreparedQat": "train it, then call convert(prepared)",
    "Reference": "it is quantized already: call compile(reference)",
    "Lowered": "it is quantized already: call compile(lowered)",
    "ExportedProgram": "pass program.module(), or call from_qdq(program) if it is quantized already",
}
"""Call that takes an object which is not a module, by class name."""
PREPARED = "this is an observer: another tool has prepared the model, but not converted it"
CONVERT = f"convert it with that tool and call from_qdq(model, example_inputs), or {QUANTIZE_FLOAT_MODEL}"
PACKED = "this module is quantized already: its weights are packed for PyTorch's own kernels"
PROGRAM = "this part is quantized already, and native code cannot be traced"
OUTSIDE = f"{QUANTIZE_FLOAT_MODEL}, or insert the int8 part afterwards"
QUANTIZED_MODULES = {
    "torch.ao.nn.quantized.modules.functional_modules.": None,  # float models contain these too
    "torch.ao.nn.quantized.reference.": None,  # these contain quantize and dequantize operators
    "torch.ao.nn.quantized.": (PACKED, QUANTIZE_FLOAT_MODEL),
    "torch.ao.nn.intrinsic.quantized.": (PACKED, QUANTIZE_FLOAT_MODEL),
    "torch.ao.quantization.observer.": (PREPARED, CONVERT),
    "torch.ao.quantization.fake_quantize.": (PREPARED, CONVERT),
    "torchao.quantization.pt2e.observer.": (PREPARED, CONVERT),
    "torchao.quantization.pt2e.fake_quantize.": (PREPARED, CONVERT),
    "intaglio.quant.qat.": (
        "this model is prepared for training",
        f"call stages.convert(model), or {QUANTIZE_FLOAT_MODEL}",
    ),
    "intaglio.runtime.": (PROGRAM, OUTSIDE),
    "intaglio.backends.": (PROGRAM, OUTSIDE),
    "intaglio.integrations.": (PROGRAM, OUTSIDE),
}
"""Problem and remedy by prefix of the qualified class name, first match; ``None``: the module can be traced."""


def refuse_other_train(model: nn.Module) -> None:
    """Raise a `CaptureError` if the method ``train`` of a model does something else than that of `nn.Module`.

    That of the class ``YOLO`` of Ultralytics trains the model, and `nn.Module.eval` calls it.
    """
    signature = inspect.signature(model.train)
    first = next(iter(signature.parameters.values()), None)
    if first is not None and (
        first.name == "mode" or first.kind is first.VAR_POSITIONAL or isinstance(first.default, bool)
    ):
        return
    inside = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    raise CaptureError(
        type(model).__name__,
        None,
        f"its method, train{signature}, does not set the mode of layers as that of nn.Module does",
        remedy=f"pass the network in it, such as model.{inside[0]}, and put the result in its place"
        if inside
        else "give the method another name",
    )


def refuse_quantized(model: Any) -> None:
    """Raise a `CaptureError` if a model is not a float nn.Module or contains a quantized part."""
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        remedy = STAGES.get(name, "pass the float model, which is an nn.Module")
        raise CaptureError(name, None, "the model is not an nn.Module written in Python", remedy=remedy)
    if isinstance(model, torch.jit.ScriptModule):
        problem = "the model is TorchScript, which torch.export cannot trace"
        raise CaptureError(type(model).__name__, None, problem, remedy="quantize the nn.Module that it was made from")
    refuse_other_train(model)
    for path, module in model.named_modules():
        where, kind = path or "model", type(module)
        if hasattr(module, "_auto_quant_state"):
            raise CaptureError(
                where,
                None,
                "this module is prepared or quantized by intaglio.eager",
                remedy=f"call compile(eager.rewrite(converted)), or {QUANTIZE_FLOAT_MODEL}",
            )
        if (found := _kind(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            raise CaptureError(where, kind.__qualname__, found[0], remedy=found[1])
        for parameter, tensor in module.named_parameters(recurse=False):
            if nn.parameter.is_lazy(tensor):
                problem = "this parameter gets its shape in the first call of the model"
                where = f"{path}.{parameter}".lstrip(".")
                raise CaptureError(where, kind.__qualname__, problem, remedy="call the float model once with a batch")
            if type(tensor).__module__.startswith("torchao."):
                where = f"{path}.{parameter}".lstrip(".")
                raise CaptureError(
                    where,
                    type(tensor).__name__,
                    "this parameter is quantized already by torchao",
                    remedy=QUANTIZE_FLOAT_MODEL,
                )


def _kind(name: str) -> tuple[str, str] | None:
    return next((found for start, found in QUANTIZED_MODULES.items() if name.startswith(start)), None)
