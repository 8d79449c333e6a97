"""Operators that the float parts of a file may call, and checks of the types of their arguments.

A file can ask for any call, so operators that do not check their arguments are refused: with wrong ones they would read
or write memory that is not theirs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from intaglio.errors import ArtifactError
from intaglio.torch_private import OpOverloadPacket, quantized_decomposed, schema_of

PYTHON_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"operator.{f.__name__}": f
    for f in (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv)
}
"""Python functions that islands may call besides ATen operators: arithmetic on sizes, and ``getitem`` for tuple
results."""

REFUSED_OPERATORS = frozenset({"from_file", "set_data", "record_stream", "resize_as", "resize_as_sparse"})
"""ATen operators that access more than their arguments or bypass their checks."""

PRIVATE_OPERATORS = frozenset(
    [
        *("_addmm_activation", "_ctc_loss", "_int_mm", "_is_all_true", "_is_any_true", "_linalg_eigvals", "_stack"),
        *("_logcumsumexp", "_masked_scale", "_masked_softmax", "_pack_padded_sequence", "_reshape_copy", "_unique"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_cdist_forward", "_conj", "_convolution", "_embedding_bag"),
        *("_embedding_bag_forward_only", "_euclidean_dist", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_fused_rms_norm"),
        *("_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_local_scalar_dense"),
        *("_log_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_neg_view"),
        *("_pdist_forward", "_prelu_kernel", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_softmax", "_to_copy", "_trilinear", "_unique2", "_unsafe_index", "_unsafe_index_put", "_unsafe_view"),
        *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d"),
        *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_weight_norm_interface"),
    ]
)
"""Private ATen operators that captured models call. Others, such as ``_reshape_alias``, may not check their
arguments."""

REFUSED_PARTS = ("backward", "mkldnn", "cudnn", "miopen", "sparse", "nested")
"""Parts of the names of operators that captured models do not call, and some of which do not check their arguments."""

TORCH_ARGUMENTS: Mapping[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}
"""Types of arguments that PyTorch also takes as numbers, without a check of their range."""

_NAME = re.compile(r"(aten|quantized_decomposed)\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
HARMFUL = "the operator changes its arguments, has side effects, or does not check its arguments, which is not allowed"


def function_of(name: str) -> Callable[..., Any]:
    """Return the operator for a name such as ``aten.add.Tensor`` or
    ``quantized_decomposed.quantize_per_tensor.default``.

    Only operators are allowed that compute tensors, or numbers from tensors, modify nothing and check their arguments.
    Nothing is imported, except PyTorch's own module of quantize and dequantize operators.

    Raises:
        ArtifactError: the name is any other one.
    """
    if name in PYTHON_FUNCTIONS:
        return PYTHON_FUNCTIONS[name]
    parts = _NAME.fullmatch(name)
    if parts is None:
        problem = (
            "it is neither an ATen operator nor one of quantized values, which the float parts of a file consist of"
        )
        raise ArtifactError(name, None, problem)
    library, packet_name, overload = parts.groups()
    if library == "quantized_decomposed":
        quantized_decomposed()
    packet = getattr(getattr(torch.ops, library), packet_name, None)
    if not isinstance(packet, OpOverloadPacket) or overload not in packet.overloads():
        problem = f"PyTorch {torch.__version__} does not have this operator"
        raise ArtifactError(name, None, problem, remedy="install the version of PyTorch that saved the file")
    found = getattr(packet, overload)
    if _is_refused_name(packet_name) or _is_refused_schema(schema_of(found)):
        raise ArtifactError(name, None, f"{HARMFUL} in the float parts of a file")
    return found


def _is_refused_name(name: str) -> bool:
    if name.startswith("__"):  # __and__ is the operator &
        return False
    if name.endswith("_") or name in REFUSED_OPERATORS or any(part in name for part in REFUSED_PARTS):
        return True
    return name.startswith("_") and name not in PRIVATE_OPERATORS


def _is_refused_schema(schema: Any) -> bool:
    """Return whether an operator writes to an argument, returns nothing, or has nothing to do with tensors."""
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return True
    return not any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns)) or not schema.returns


def check_arguments_of(function: Callable[..., Any], arguments: Any, keywords: Mapping[str, Any]) -> None:
    """Check data types, layouts, memory formats and devices among the arguments of an ATen operator.

    Raises:
        ValueError: one of them is something else.
    """
    if not isinstance(arguments, (list, tuple)):
        raise ValueError(f"{arguments!r:.60} is not a list of arguments")
    if not hasattr(function, "_schema"):
        return
    declared = schema_of(function).arguments
    given = [(argument, value) for argument, value in zip(declared, arguments, strict=False)]
    given += [(argument, keywords[argument.name]) for argument in declared if argument.name in keywords]
    for argument, value in given:
        kind = TORCH_ARGUMENTS.get(re.sub(r"Optional\[(\w+)\]", r"\1", str(argument.real_type)))
        if kind is not None and value is not None and not isinstance(value, kind):
            raise ValueError(f"argument {argument.name} of {function} is {value!r:.60}, but must be a {kind.__name__}")
