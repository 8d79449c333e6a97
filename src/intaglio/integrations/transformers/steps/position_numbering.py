"""The way in which a float model computes the positions of tokens in calls that do not have them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from intaglio.integrations.transformers.folders import Numbering
from intaglio.integrations.transformers.steps.cached_steps import PER_LAYER, StepNames, output_of
from intaglio.integrations.transformers.steps.calibration_calls import decoder_tokens, example_tokens, own_positions
from intaglio.integrations.transformers.steps.float_programs import CLOSE


def numbering_of(model: PreTrainedModel, names: StepNames, call: Mapping[str, Any]) -> Numbering:
    """Return how the float model computes the positions of tokens in calls without them.

    It is the first way with which the float model has the same results with and without positions, for tokens of which
    some are masked and some are the padding token, unless these are embeddings.
    """
    if names.positions is None or names.mask is None or model.config.is_encoder_decoder:
        return "tokens"
    given = example_tokens(decoder_tokens(model, names, call))
    mask = given.mask.clone()
    mask[0, :2] = 0
    kept = mask.bool()
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    padding_ids: set[int | None] = {one.padding_idx for one in embeddings if one.padding_idx is not None}
    if given.tokens.is_floating_point():
        padding_ids.clear()
    for padding_id in padding_ids or {None}:
        tokens = given.tokens.clone()
        if padding_id is not None:
            tokens[:, 1] = padding_id
        shared = {names.tokens: tokens, names.mask: mask, "use_cache": False}
        shared |= {name: tensor for name, tensor in given.others.items() if name == PER_LAYER}
        with torch.no_grad(), contextlib.suppress(IndexError):  # a table of positions may end before the ids
            own = output_of(model(**shared))[kept]
            for numbering in ("tokens", "mask", padding_id):
                if numbering is not None:
                    positions = own_positions(numbering, tokens, 0, mask)
                    other = output_of(model(**shared, **{names.positions: positions}))[kept]
                    if (own - other).abs().max() <= CLOSE * own.abs().max():
                        return numbering
    return None
