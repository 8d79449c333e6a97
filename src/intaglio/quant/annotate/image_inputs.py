"""Inputs declared as images, whose bytes convolutions read directly."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import fx

from intaglio.errors import SelectorError, UnsupportedError
from intaglio.fxgraph.node_info import info, origin, update_info
from intaglio.fxgraph.nodes import operator, record_of
from intaglio.fxgraph.passes.batch_norm_folding import insert_affine
from intaglio.ir import DType, Signature
from intaglio.quant.annotate.refusals import refusal
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.quantizer import Quantizer


def declare_images(
    module: fx.GraphModule, signature: Signature, quantizer: Quantizer, classes: Mapping[str, str]
) -> tuple[str, ...]:
    """Let convolutions read the bytes of each input that is declared an `Image`.

    The scale of each channel is folded into the weights, and the fraction of its zero point into the biases.

    Returns:
        A note for each declared input for which this is not possible.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = {entry.name: (entry, node) for entry, node in zip(signature.inputs, placeholders, strict=False)}
    notes = []
    for name, image in _by_name(quantizer.input or {}, list(inputs)).items():
        entry, node = inputs[name]
        kind = entry.type
        if kind.dtype is not DType.F32 or len(kind.shape) != 4 or not isinstance(kind.shape[1], int):
            problem = f"it is {kind}; an Image must be f32[batch, channels, height, width]"
            raise UnsupportedError(f"input '{name}'", None, problem, remedy="do not declare this input as an Image")
        pixels = image.pixels(kind.shape[1])
        reason = image_refusal(node, quantizer, classes)
        if entry.leaf in signature.updated_inputs:
            reason = "the model writes into it"
        if reason is None:
            value = insert_affine(module, node, pixels.gain, pixels.shift)
            update_info(value, zero_points=pixels.zero_points, takes_bytes=True)
        else:
            notes.append(f"input '{name}' is an Image, but takes no bytes, and its range is calibrated: {reason}")
    return tuple(notes)


def _by_name(given: Image | Mapping[str, Image], names: list[str]) -> Mapping[str, Image]:
    """Return the declared images by input name.

    Raises:
        SelectorError: for an unknown name, or for a single image when the model does not have exactly one input.
    """
    if isinstance(given, Image):
        if len(names) != 1:
            remedy = f"name the input: input={{{names[0]!r}: image}}" if names else "leave out input="
            raise SelectorError(
                "input", None, f"one Image is given, but the model has {len(names)} tensor inputs", remedy=remedy
            )
        return dict.fromkeys(names, given)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
            remedy = "nearest: " + ", ".join(close)
            raise SelectorError(f"input {name!r}", None, "the model has no input of this name", remedy=remedy)
    return given


def image_refusal(node: fx.Node, quantizer: Quantizer, classes: Mapping[str, str]) -> str | None:
    """Return why the readers of an image cannot take its bytes; ``None`` if they can."""
    users = [user for user in node.users if info(user).dim is None]
    for user in users:
        record, where = record_of(user), f"{origin(user).path or 'the model'} ({operator(user) or user.op})"
        if record is None or record.name != "conv2d":
            return f"{where} reads it, but only convolutions can read values with a scale per channel"
        setting = quantizer.recipe.setting(origin(user), classes)
        reason = refusal(user, setting)
        if reason is None and not setting.weight.native:
            reason = f"no kernel computes with {setting.weight.name} weights"
        if reason is not None:
            return f"{where} reads it and stays in float: {reason}"
    return None if users else "no operator reads it"
