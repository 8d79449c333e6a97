"""Checks that every format of checkpoints passes: weights to the bit, logits, tokens and saved files."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from intaglio import stages
from intaglio.integrations.transformers import from_pretrained
from support.checkpoint_files import VOCABULARY, linear_layers

PATHS_OF_NORMS = ("model.norm.weight", "model.embed_tokens.weight")


@contextlib.contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """Yield a list that has the warnings of intaglio after the block, for models that several tests share."""
    found: list[str] = []
    handler, logger = BufferingHandler(capacity=sys.maxsize), logging.getLogger("intaglio")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        found += map(logging.LogRecord.getMessage, handler.buffer)


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(2, VOCABULARY - 1, (4, 12), generator=draw)} for _ in range(count)]


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(20 * torch.log10(exact.norm() / (found - exact).norm().clamp_min(1e-30)).detach())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batches(1)[0]).logits
    return found


def assert_weights(checkpoint: stages.Checkpoint, exact: nn.Module) -> None:
    """Weights, and the other tensors, are those of the float model, to the bit."""
    layers = linear_layers(exact)
    assert set(checkpoint.weights) == set(layers)
    for path, module in layers.items():
        np.testing.assert_array_equal(checkpoint.weights[path].dequantized().numpy(), module.weight.detach().numpy())
    named = dict(exact.named_parameters())
    for name in PATHS_OF_NORMS:
        assert torch.equal(checkpoint.tensors[name], named[name])


def assert_generates(model: Any, exact: nn.Module, folder: Path, bits_of_float: bool = True) -> None:
    """`generate` gives the tokens of the float model, and a saved and loaded model the same logits, to the bit."""
    ids = batches(1)[0]["input_ids"][:2, :6]
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokens.shape[1] > ids.shape[1]
    if bits_of_float:
        assert torch.equal(tokens, exact.generate(ids, max_new_tokens=8, do_sample=False))
    assert isinstance(model, type(exact).__mro__[1])
    model.save_pretrained(folder)
    loaded = from_pretrained(folder)
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(loaded.generate(ids, max_new_tokens=8, do_sample=False), tokens)
