"""Padding masks among the inputs of a model, and the tokens of a value that they do not hide.

Calibration and corrections leave out padding, because its values change no result that anybody reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from intaglio.fxgraph.node_info import known_type
from intaglio.ir import Dim, DType, Shape, Signature

ATTENTION_MASK, KEY_PADDING_MASK = "attention_mask", "key_padding_mask"
"""Ends of the names of padding masks in transformers and PyTorch. The first is zero at padding. The second is true
there, or minus infinity."""
MASK_TYPES = (DType.I64, DType.I32, DType.BOOL)
"""Types of attention masks with two axes; floats may be masks that are added to scores."""

VisibleTokens = Mapping[str, torch.Tensor]
"""Name of a padding mask -> bool[n, l], true for tokens that it does not hide. Masks that hide nothing in a call are
left out."""


ROW_AXES = 3
"""Axes of rows: [samples, tokens, channels]."""


@dataclass(frozen=True)
class PaddedAxes:
    """Axes of a value along which a padding mask applies.

    Attributes:
        mask: name of the mask.
        samples: axis of the samples.
        tokens: axis of the tokens of a sample; ``None`` if the samples' axis has the tokens of all samples.
    """

    mask: str
    samples: int
    tokens: int | None

    def moved(self, axis: int) -> int:
        """Return where `visible_groups` has another axis of the value."""
        own = [one for one in (self.samples, self.tokens) if one is not None]
        return 2 + axis - sum(one < axis for one in own)


def padding_masks(signature: Signature) -> tuple[int, ...]:
    """Return the indices of the inputs that are padding masks [n, l], by name and type."""
    return tuple(
        index
        for index, entry in enumerate(signature.inputs)
        if len(entry.type.shape) == 2
        and (
            (entry.name.endswith(ATTENTION_MASK) and entry.type.dtype in MASK_TYPES)
            or (entry.name.endswith(KEY_PADDING_MASK) and entry.type.dtype in (DType.BOOL, DType.F32))
        )
    )


def padded_axes(shape: Shape, signature: Signature) -> PaddedAxes | None:
    """Return the axes along which the first padding mask that fits a value applies; ``None`` if no mask fits.

    A mask [n, l] fits a value [n, l, ...] with three axes, a value in which exactly one axis has size n and another one
    has size l, and a value whose first axis has size n * l. If l is a fixed number, a last axis of that size in a value
    with two or three axes counts as channels: there are models with as many channels as tokens.
    """
    for mask in padding_masks(signature):
        name, (samples, tokens) = signature.inputs[mask].name, signature.inputs[mask].type.shape
        if shape and shape[0] == _product(samples, tokens):
            return PaddedAxes(name, 0, None)
        if len(shape) == 3 and shape[:2] == (samples, tokens):
            return PaddedAxes(name, 0, 1)
        axes = [[axis for axis, size in enumerate(shape) if size == wanted] for wanted in (samples, tokens)]
        are_channels = len(shape) <= ROW_AXES and isinstance(tokens, int) and axes[1] == [len(shape) - 1]
        if len(axes[0]) == len(axes[1]) == 1 and axes[0] != axes[1] and not are_channels:
            return PaddedAxes(name, axes[0][0], axes[1][0])
    return None


def padded_axes_of(
    module: fx.GraphModule, names: Collection[str], signature: Signature
) -> dict[str, PaddedAxes | None]:
    """Return the axes along which a padding mask applies for each of some values of a graph, by node name."""
    return {
        node.name: padded_axes(known_type(node).shape, signature) for node in module.graph.nodes if node.name in names
    }


def _product(a: Dim, b: Dim) -> Dim:
    return a * b


def visible_tokens(signature: Signature, leaves: Sequence[torch.Tensor]) -> VisibleTokens:
    """Return the tokens of a call that its padding masks do not hide.

    Args:
        signature: signature of the model.
        leaves: tensors of the call, in the order of the signature's inputs.
    """
    found = {}
    for index in padding_masks(signature):
        entry, mask = signature.inputs[index], leaves[index]
        if entry.name.endswith(KEY_PADDING_MASK):
            visible = ~mask if mask.dtype is torch.bool else mask > -torch.inf
        else:
            visible = mask != 0
        if visible.any() and not visible.all():  # A mask that hides everything would leave nothing to calibrate on.
            found[entry.name] = visible
    return found


def visible_groups(value: torch.Tensor, axes: PaddedAxes | None, visible: VisibleTokens) -> list[torch.Tensor]:
    """Return the tokens of a value that no padding mask hides, in groups of samples with equally many of them.

    Args:
        value: the value.
        axes: its axes along which a mask applies.
        visible: the visible tokens of the call.

    Returns:
        The value itself if nothing in it is hidden. Otherwise tensors [samples, tokens, ...], where the other axes of
        the value follow in their order.
    """
    kept = None if axes is None else visible.get(axes.mask)
    ordered = None if axes is None or kept is None else _samples_and_tokens_first(value, axes, kept.shape)
    if kept is None or ordered is None:
        return [value]
    counts, groups = kept.sum(1), []
    for count in counts[counts > 0].unique().tolist():
        chosen = counts == count
        tokens = ordered[chosen][kept[chosen]]
        groups.append(tokens.reshape(-1, count, *tokens.shape[1:]))
    return groups


def _samples_and_tokens_first(value: torch.Tensor, axes: PaddedAxes, sizes: torch.Size) -> torch.Tensor | None:
    """Return a value as [samples, tokens, ...], or ``None`` if it has other ``sizes``.

    Operands of a concatenation may have other sizes than the value whose observer they share.
    """
    if axes.tokens is None:
        return value.unflatten(0, sizes) if value.shape[0] == sizes.numel() else None
    if value.dim() <= max(axes.samples, axes.tokens):
        return None
    ordered = value.movedim((axes.samples, axes.tokens), (0, 1))
    return ordered if ordered.shape[:2] == sizes else None


def visible_channels(
    value: torch.Tensor, channels: int, axes: PaddedAxes | None, visible: VisibleTokens
) -> torch.Tensor:
    """Return the visible values of each channel, of shape [channels, values].

    Args:
        value: the value.
        channels: its axis of channels.
        axes: its axes along which a mask applies.
        visible: the visible tokens of the call.
    """
    groups, channels = visible_groups(value, axes, visible), channels % value.dim()
    if axes is not None and groups[0] is not value:
        channels = axes.moved(channels)
    return torch.cat([group.movedim(channels, 0).unsqueeze(1).flatten(1) for group in groups], 1)
