"""Cached samples of the calibration data, which corrections run several times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from intaglio.ir import Signature
from intaglio.quant.calibrate.batches import Binder, Call, CountedBatches, batches, is_function, length_of, peek
from intaglio.quant.calibrate.calibration_loop import batch_size, without_samples
from intaglio.quant.calibrate.distributed import Group
from intaglio.signature import bind, clone_tensors, dims_of, initial_state

Calls = list[list[torch.Tensor]]
"""Tensors of a call, for each batch."""

CACHED_SAMPLES = 256
"""Number of samples that corrections use; more gain little (0.5 dB from 256 to 1024 on ResNet-20)."""


def cached_calls(signature: Signature, data: Any, samples: int = CACHED_SAMPLES, group: Group | None = None) -> Calls:
    """Return the tensors of this rank's batches among the first whole batches with this many samples.

    Each call starts from the state that the model was captured with. Batches without samples are left out.

    Raises:
        CalibrationError: no batch has a sample.
    """
    found, group, read = [], group or Group.current(), 0
    for args, kwargs in (call for _, call in _first(data, signature, samples, group)):
        read += 1
        if not batch_size(args, kwargs):
            continue
        leaves = bind(signature, args, kwargs)
        dims_of(signature, leaves)
        found.append([leaf.detach().resolve_neg() for leaf in (*leaves, *initial_state(signature))])
    if not found and group.size == 1:
        raise without_samples(read)
    return found


def cache_batches(data: Any, signature: Signature, samples: int) -> tuple[list[Any], Any]:
    """Return this rank's batches among the first whole batches with this many samples, and all of the data.

    The data still starts with these batches. The list is empty for a function that runs the model. Batches of an
    iterator are copied, because it may reuse one buffer for all of them.
    """
    if is_function(data):
        return [], data
    items = batches(data)
    if isinstance(data, Iterator):
        items = map(clone_tensors, items)
    found = [item for item, _ in _first(items, signature, samples, Group.current())]
    return found, CountedBatches(itertools.chain(found, items), length_of(data))


def _first(data: Any, signature: Signature, samples: int, group: Group) -> Iterator[tuple[Any, Call]]:
    """Yield items and calls of this rank, which has every ``size``-th batch.

    All batches are assumed to have as many samples as the first.
    """
    binder, size = Binder.of(signature), 0
    for place, item in enumerate(batches(data) if group.size > 1 else peek(data)[1]):
        args, kwargs = binder(item)
        yield item, (args, kwargs)
        size = size or max(1, batch_size(args, kwargs))
        if ((place + 1) * group.size + group.rank) * size >= samples:
            return
