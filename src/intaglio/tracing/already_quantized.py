"""Detection of models that are already quantized or prepared, with errors that name the right call."""

from __future__ import annotations

from typing import Any

from torch import nn

from intaglio.errors import CaptureError

QUANTIZE_FLOAT_MODEL = "quantize the float model it was made from"
STAGES = {
    "Captured": "prepare(captured)",
    "Prepared": "calibrate(prepared, data), then convert(prepared, ranges)",
    "PreparedQat": "train it, then convert(prepared)",
    "Reference": "it is quantized already: compile(reference)",
    "Lowered": "it is quantized already: compile(lowered)",
    "ExportedProgram": "pass program.module(); from_qdq(program), where it is quantized already",
}
"""Call that takes an object which is not a module, by class name."""
PREPARED = "an observer: the model is prepared by another tool, and not converted"
CONVERT = f"convert it there, then from_qdq(model, example_inputs); or {QUANTIZE_FLOAT_MODEL}"
PACKED = "quantized already: its weights are packed for PyTorch's own kernels"
PROGRAM = "this part is quantized already, and native code cannot be traced"
OUTSIDE = f"{QUANTIZE_FLOAT_MODEL}, or put the int8 part in afterwards"
QUANTIZED_MODULES = {
    "torch.ao.nn.quantized.modules.functional_modules.": None,  # float models contain these too
    "torch.ao.nn.quantized.reference.": None,  # these contain quantize and dequantize operators
    "torch.ao.nn.quantized.": (PACKED, QUANTIZE_FLOAT_MODEL),
    "torch.ao.nn.intrinsic.quantized.": (PACKED, QUANTIZE_FLOAT_MODEL),
    "torch.ao.quantization.observer.": (PREPARED, CONVERT),
    "torch.ao.quantization.fake_quantize.": (PREPARED, CONVERT),
    "torchao.quantization.pt2e.observer.": (PREPARED, CONVERT),
    "torchao.quantization.pt2e.fake_quantize.": (PREPARED, CONVERT),
    "intaglio.runtime.": (PROGRAM, OUTSIDE),
    "intaglio.backends.": (PROGRAM, OUTSIDE),
}
"""Problem and remedy by prefix of the qualified class name, first match; ``None``: the module can be traced."""


def refuse_quantized(model: Any) -> None:
    """Raise a `CaptureError` if a model is not a float nn.Module or contains a quantized part."""
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        remedy = STAGES.get(name, "pass the float model, or the module it is made of")
        raise CaptureError(name, None, "not an nn.Module written in Python", remedy=remedy)
    for path, module in model.named_modules():
        where, kind = path or "model", type(module)
        if "_auto_quant_state" in vars(module):
            raise CaptureError(
                where,
                None,
                "quantized already, define-by-run, or prepared for it",
                remedy=f"eager.rewrite(converted) gives what compile takes; or {QUANTIZE_FLOAT_MODEL}",
            )
        if (found := _kind(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            raise CaptureError(where, kind.__qualname__, found[0], remedy=found[1])
        for parameter, tensor in module.named_parameters(recurse=False):
            if type(tensor).__module__.startswith("torchao."):
                where = f"{path}.{parameter}".lstrip(".")
                raise CaptureError(
                    where, type(tensor).__name__, "quantized already by torchao", remedy=QUANTIZE_FLOAT_MODEL
                )


def _kind(name: str) -> tuple[str, str] | None:
    return next((found for start, found in QUANTIZED_MODULES.items() if name.startswith(start)), None)
