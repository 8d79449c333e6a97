"""The samples that corrections look at, several times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intaglio.calls import bind, dims_of
from intaglio.ir import Signature
from intaglio.quant.calibrate import batch_size
from intaglio.quant.data import Binder, peek

SAMPLES = 256
"""Corrections look at so many samples; more gain little (0.5 dB from 256 to 1024 on ResNet-20)."""


def kept_calls(signature: Signature, data: Any, samples: int = SAMPLES) -> list[list[torch.Tensor]]:
    """The tensors of the first batches, whole ones, until there are so many samples."""
    binder, found, seen = Binder.of(signature), [], 0
    for item in peek(data)[1]:
        args, kwargs = binder(item)
        leaves = bind(signature, args, kwargs)
        dims_of(signature, leaves)
        found.append([leaf.detach() for leaf in leaves])
        seen += next((leaf.shape[0] for leaf in leaves if leaf.dim()), 1)
        if seen >= samples:
            break
    return found


def keep(data: Any, signature: Signature, samples: int) -> tuple[list[Any], Any]:
    """The first batches, whole ones, until there are so many samples, and data that still starts with them.

    A function that runs the model gives none. What an iterator gives is copied: it may fill one buffer again and again.
    """
    if callable(data) and not isinstance(data, torch.Tensor) and not hasattr(data, "__iter__"):
        return [], data
    found, seen, binder = [], 0, Binder.of(signature)
    _, items = peek(data)
    for item in items:
        item = pytree.tree_map_only(torch.Tensor, torch.clone, item) if isinstance(data, Iterator) else item
        found.append(item)
        seen += batch_size(*binder(item))
        if seen >= samples:
            break
    return found, itertools.chain(found, items)
