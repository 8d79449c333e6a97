"""Quantized models of the library ``sentence-transformers``: the float model with an int8 transformer inside."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from intaglio.errors import CalibrationError, InputError
from intaglio.integrations import AdaptedPart, Quantize, is_of_library, transformers
from intaglio.quant.calibrate.batches import Call, Use

SENTENCES_PER_BATCH = 32
"""Sentences in a batch where the data is one list of sentences, as `encode` has them."""


def quantize_model(model: nn.Module, data: Any, quantize: Quantize) -> nn.Module:
    """Return a copy of a ``SentenceTransformer`` whose transformer is quantized; ``encode`` and all else are unchanged.

    Args:
        model: the float model. Its copy shares no tensors with it.
        data: sentences, batches of sentences, or batches of what its ``preprocess`` returns.
        quantize: quantizes the transformer.

    Raises:
        InputError: the model has no transformer of the library ``transformers``.
        CalibrationError: ``data`` is not one of these.
    """
    inner = next((part for part in model.modules() if is_of_library(part, "transformers.PreTrainedModel")), None)
    if inner is None:
        problem = "it has no transformer of the library transformers, which is the part that is quantized"
        remedy = "quantize its modules one by one, with batches of their inputs"
        raise InputError(type(model).__name__, None, problem, remedy=remedy)
    int8 = transformers.quantize_model(cast(Any, inner), inner_calls(model, inner, data), quantize)
    return copy.deepcopy(model, {id(inner): int8})


def reason_for_parts(model: nn.Module, data: Any) -> str | None:
    """Return ``None``: the transformer inside does not generate."""
    return None


def further_calls(model: nn.Module, call: Call) -> list[Use]:
    """Return no calls: the transformer inside does not generate."""
    return []


def adapted_parts(model: nn.Module) -> dict[str, AdaptedPart]:
    """Return none: the transformer inside does not generate, and takes no images of several sizes."""
    return {}


def install_hooks(model: nn.Module) -> None:
    """Do nothing: sentences have one result."""


def has_collected_layers(module: nn.Module) -> bool:
    """Return that no results of modules inside of others are read."""
    return False


def decoder_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the decoders inside."""
    inner = {path: one for path, one in model.named_modules() if is_of_library(one, "transformers.PreTrainedModel")}
    return tuple(
        f"{path}.{own}".strip(".") for path, one in inner.items() for own in transformers.decoder_paths(cast(Any, one))
    )


def inner_calls(model: nn.Module, inner: nn.Module, data: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments that the transformer gets for each batch of the data. It does not run.

    Args:
        model: the ``SentenceTransformer``.
        inner: its transformer.
        data: as in `quantize_model`.
    """
    for features in feature_batches(model, data):
        given: dict[str, Any] = {}

        def keep(given: dict[str, Any] = given, **kwargs: Any) -> None:
            given.update(kwargs)
            raise _CallSeenError

        inner.forward = keep  # the library calls forward itself, which passes hooks by
        try:
            with torch.no_grad(), contextlib.suppress(_CallSeenError):
                model(dict(features))
        finally:
            del inner.forward
        yield {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def feature_batches(model: nn.Module, data: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the features of each batch of sentences; batches that are features already are passed on."""
    preprocess = getattr(model, "preprocess", None) or cast(Any, model).tokenize
    for batch in _batches(data):
        if isinstance(batch, Mapping):
            yield batch
        elif isinstance(batch, (list, tuple)) and batch and all(isinstance(one, str) for one in batch):
            yield preprocess(list(batch))
        else:
            raise CalibrationError(
                "data",
                None,
                f"a batch is of type {type(batch).__name__}, which is neither sentences nor their features",
                remedy="pass a list of sentences, or batches that preprocess(sentences) of the model returns",
            )


def _batches(data: Any) -> Iterator[Any]:
    """Yield batches. Single sentences are joined to batches."""
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise CalibrationError(
            "data",
            None,
            f"expected sentences or batches, got {type(data).__name__}",
            remedy="pass a list of sentences, or batches that preprocess(sentences) of the model returns",
        )
    items = iter(data)
    for first in items:
        if not isinstance(first, str):
            yield first
            continue
        yield [first, *itertools.islice(items, SENTENCES_PER_BATCH - 1)]


class _CallSeenError(Exception):
    """Ends a call of the model once the arguments of its transformer are known."""
