"""`QuantizedWeight`: a weight that another tool quantized."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from intaglio.argument_checks import check_arguments, check_fields
from intaglio.errors import InputError
from intaglio.fxgraph.node_info import info
from intaglio.numerics import MIN_SCALE
from intaglio.quant.imported_weights.group_operator import dequantize_groups
from intaglio.quant.recipes.choices import ActivationMode
from intaglio.signature.tensor_checks import TO_DENSE_ON_CPU, unsupported_reason


@check_fields
@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight: ``float32(q) * scale + offset``, computed in float32 in this order.

    Attributes:
        quantized: int8[N, ...], one row for each output channel.
        steps: float32[1, N, G], the scales of the groups, or float32[2, N, G], scales and offsets.
        group: number of neighbouring weights of an output channel that share a scale. The last group of a channel may
            be smaller.
        activations: how the activations of the layer were meant to be computed: "float" (weight-only), "token"
            (quantized at run time) or "static" (calibrated).
        order: int64[K], the input that each column of ``quantized`` multiplies, for groups of inputs that are not
            neighbours (default: the inputs in order).
    """

    quantized: torch.Tensor
    steps: torch.Tensor
    group: int
    activations: str = ActivationMode.FLOAT
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_dense(quantized=self.quantized, steps=self.steps, order=self.order)
        quantized, steps, group = self.quantized, self.steps, self.group
        problem = None
        if quantized.dtype is not torch.int8 or quantized.dim() < 2:
            problem = f"quantized is {_type(quantized)}; it must be int8 with at least two axes"
        elif type(group) is not int or group < 1:
            problem = f"group is {group!r}; it must be a positive number of weights"
        elif self.activations not in ("float", "token", "static"):
            problem = f"activations = {self.activations!r}; allowed are 'float', 'token' and 'static'"
        else:
            outputs, inputs = len(quantized), quantized[0].numel() if len(quantized) else 0
            wanted = (outputs, -(-inputs // group))
            if steps.dtype is not torch.float32 or steps.dim() != 3 or steps.shape[1:] != wanted:
                problem = f"steps is {_type(steps)}; it must be float32 of shape [1 or 2, {wanted[0]}, {wanted[1]}]"
            elif len(steps) not in (1, 2) or not bool(steps.isfinite().all()):
                problem = "steps must be finite scales, and perhaps offsets"
            elif self.order is not None and not _is_permutation(self.order, inputs, quantized.dim()):
                problem = f"order is {_type(self.order)}; it must be a permutation of {inputs} inputs of a linear layer"
        if problem is not None:
            raise InputError("QuantizedWeight", None, problem)

    @staticmethod
    @check_arguments
    def of(
        quantized: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None = None,
        activations: str = ActivationMode.FLOAT,
        group: int | None = None,
        order: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """Return a weight with scales of any floating-point type, and one group per channel if all groups are equal.

        Args:
            quantized: int8[N, ...].
            scales: [N, G], or one scale, or one for each channel.
            offsets: like ``scales`` (default: none).
            activations: see the attribute.
            group: number of weights in a group (default: all of a channel divided by G).
            order: see the attribute.
        """
        _check_dense(quantized=quantized, scales=scales, offsets=offsets, order=order)
        if quantized.dim() < 2 or not quantized.numel():
            raise InputError("QuantizedWeight", None, f"quantized is {_type(quantized)}, which is no weight of a layer")
        outputs, inputs = len(quantized), quantized[0].numel()
        given = {"scales": scales} if offsets is None else {"scales": scales, "offsets": offsets}
        for name, part in given.items():
            if not part.numel() or part.numel() // _groups(part) not in (1, outputs):
                problem = f"{name} is {_type(part)}; it must have one value or row, or {outputs}, as many as channels"
                raise InputError("QuantizedWeight", None, problem)
        parts = [part.to(torch.float32).reshape(-1, _groups(part)) for part in given.values()]
        if offsets is not None and _groups(offsets) != _groups(scales):
            problem = f"offsets is {_type(offsets)}, but scales is {_type(scales)}; both must have the same groups"
            raise InputError("QuantizedWeight", None, problem)
        steps = torch.stack([part.expand(outputs, -1) for part in parts])
        if bool((steps == steps[:, :, :1]).all()):
            steps, group = steps[:, :, :1], inputs
            quantized, order = (quantized, None) if order is None else (quantized[:, torch.argsort(order)], None)
        return QuantizedWeight(quantized, steps.contiguous(), group or inputs // steps.shape[2], activations, order)

    def dequantized(self) -> torch.Tensor:
        """Return the float32 weight, with its inputs in order."""
        found = dequantize_groups(self.quantized, self.steps, self.group)
        return found if self.order is None else found[:, torch.argsort(self.order)]

    @property
    def int8_refusal(self) -> str | None:
        """Return why int8 products cannot take the integers as they are, or ``None`` if they can."""
        return int8_refusal(self.steps)

    def __repr__(self) -> str:
        kind = f"s8{list(self.quantized.shape)}, groups of {self.group}"
        return f"QuantizedWeight({kind}{', with offsets' if len(self.steps) > 1 else ''})"


def int8_refusal(steps: torch.Tensor) -> str | None:
    """Return why int8 products cannot take integers with these steps, or ``None`` if they can."""
    if steps.shape[2] > 1:
        return "its scales belong to groups of inputs"
    if len(steps) > 1 and bool(steps[1].any()):
        return "it has offsets"
    if not bool((steps[0] >= np.float32(MIN_SCALE)).all()):
        return "it has a scale that is not positive"
    return None


def has_imported_integers(constant: fx.Node) -> bool:
    """Return whether a float constant was dequantized from integers that int8 products take as they are."""
    imported: QuantizedWeight | None = info(constant).imported
    return imported is not None and imported.int8_refusal is None


def _check_dense(**tensors: torch.Tensor | None) -> None:
    """Raise `InputError` for a tensor that is not dense or not on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and (reason := unsupported_reason(tensor)) is not None:
            raise InputError("QuantizedWeight", None, f"{name}: {reason}", remedy=TO_DENSE_ON_CPU)


def _groups(scales: torch.Tensor) -> int:
    """Return the number of scales of a channel."""
    return scales.shape[-1] if scales.dim() > 1 else 1


def _is_permutation(order: torch.Tensor, count: int, axes: int) -> bool:
    if order.dtype is not torch.int64 or tuple(order.shape) != (count,) or axes != 2:
        return False
    return torch.equal(order.sort().values, torch.arange(count))


def _type(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
