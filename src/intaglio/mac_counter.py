"""Count the multiply-accumulates of operators while PyTorch runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from intaglio.ir import evaluate
from intaglio.ops import BY_TARGET
from intaglio.torch_private import OpOverload, TorchDispatchMode, schema_of

Arguments = Mapping[str, Any]


class MacCounter(TorchDispatchMode):
    """Counts the multiply-accumulates of all operators that run inside of the ``with``.

    Operators have the counts of their records. Fused operators that PyTorch calls by itself, such as those of attention
    and of recurrent layers, have the counts of `FUSED_COUNTS`.

    Attributes:
        total: the multiply-accumulates so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += _macs_of_call(func, args, kwargs or {}, result)
        return result


def _macs_of_call(func: OpOverload, args: tuple[Any, ...], kwargs: Arguments, result: Any) -> int:
    """Return the multiply-accumulates of one call; 0 for operators that multiply nothing."""
    given = {a.name: value for a, value in zip(schema_of(func).arguments, args, strict=False)} | dict(kwargs)
    if (count := FUSED_COUNTS.get(str(func))) is not None:
        return count(given)
    record = BY_TARGET.get(str(func))
    if record is None or record.macs is None:
        return 0
    read = given[record.operands[0]] if record.variadic else [given.get(name) for name in record.operands]
    attrs = {name: value for name, value in given.items() if name not in record.operands}
    with contextlib.suppress(RuntimeError):  # a nested tensor has no shape
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in read]
        return evaluate(record.macs(attrs, shapes, tuple(result.shape)), {})
    return 0


def _linear(given: Arguments) -> int:
    return int(given["input"].numel() * given["weight"].shape[0])


def _attention(given: Arguments) -> int:
    query, key, value = given["query"], given["key"], given["value"]
    return int(query.numel() * key.shape[-2] + query.shape[:-1].numel() * key.shape[-2] * value.shape[-1])


def _self_attention(tokens: torch.Tensor, width: int) -> int:
    """Return the multiply-accumulates of attention among the rows of each sample, without projections.

    Args:
        tokens: [samples, rows, width], or a nested tensor with samples of different lengths.
        width: the width of queries, keys and values.
    """
    lengths = [len(sample) for sample in tokens.unbind()]
    return sum(2 * length * length * width for length in lengths)


def _multihead_attention(given: Arguments) -> int:
    query, width = given["query"], given["embed_dim"]
    read = sum(given[name].numel() // given[name].size(-1) for name in ("query", "key", "value"))
    projections = read * width * width + query.numel() // query.size(-1) * width * width
    if given["key"].is_nested or query.is_nested:
        return int(projections) + _self_attention(query, width)
    return int(projections) + int(2 * query.size(0) * query.size(1) * given["key"].size(1) * width)


def _encoder_layer(given: Arguments) -> int:
    src, width = given["src"], given["embed_dim"]
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    rows = src.numel() // src.size(-1)
    return int(rows * sum(given[name].numel() for name in names)) + _self_attention(src, width)


def _recurrent_layer(given: Arguments) -> int:
    steps = given["input"].numel() // given["input"].shape[-1]
    return int(steps * (given["weight0"].numel() + given["weight1"].numel()))


def _trilinear(given: Arguments) -> int:
    """Count ``x1 @ weight[o] @ x2`` for every output, the form that `aten.bilinear` has."""
    rows = given["i1"].numel() // given["i1"].shape[-1]
    return int(rows * given["i2"].numel())


FUSED_COUNTS: dict[str, Callable[[Arguments], int]] = {
    "aten.linear.default": _linear,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_attention_math.default": _attention,
    "aten._native_multi_head_attention.default": _multihead_attention,
    "aten._transformer_encoder_layer_fwd.default": _encoder_layer,
    "aten.mkldnn_rnn_layer.default": _recurrent_layer,
    "aten._trilinear.default": _trilinear,
    "aten._sparse_addmm.default": lambda given: int(given["mat1"]._nnz() * given["mat2"].shape[-1]),
}
"""Multiply-accumulates of operators that no graph has, from the arguments of a call by name."""
