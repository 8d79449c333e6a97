"""Custom operator that makes a quantized model one node for `torch.compile`, and memory formats of results.

Operators cannot take modules, so a graph names the model by a number. The compiler's guards refer to the module itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch

from intaglio.errors import InputError
from intaglio.ir import evaluate
from intaglio.native.native_library import runtime
from intaglio.runtime.model_protocol import CompiledModel
from intaglio.signature import TORCH_DTYPES, dims_of
from intaglio.torch_private import called_while_traced

_MODELS: WeakValueDictionary[int, CompiledModel] = WeakValueDictionary()
_NUMBERS = count()
MANY_ELEMENTS = 32768
"""Elements from which PyTorch copies with several threads, which then wait for more work on the cores that the next
call needs (results of 256 channels of 14 by 14 pixels, Zen 5: 0.76 ms a call; with the threads of the program 0.30)."""


def register(model: CompiledModel) -> int:
    """Return a new number that identifies the model in graphs."""
    number = next(_NUMBERS)
    _MODELS[number] = model
    return number


@called_while_traced
def refuse_call(problem: str, remedy: str) -> None:
    """Raise `InputError` for torch.export, in strict mode too."""
    raise InputError("call", None, problem, remedy=remedy)


@torch.library.custom_op("intaglio::call", mutates_args=(), device_types="cpu")
def call(inputs: list[torch.Tensor], model: int) -> list[torch.Tensor]:
    """Run a model and return its output tensors, none of which shares memory with an input or another output."""
    found = _MODELS[model]
    held = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    results = []
    for tensor, strides in zip(found.results(inputs), _strides(found, inputs, _symbols(found, inputs)), strict=True):
        if tensor.untyped_storage().data_ptr() in held or not _has_strides(tensor, strides):
            tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
        held.add(tensor.untyped_storage().data_ptr())
        results.append(tensor)
    return results


@call.register_fake
def _(inputs: list[torch.Tensor], model: int) -> list[torch.Tensor]:
    """Return fake results with sizes, strides and element types. The checks on sizes become guards of the compiler."""
    found = _MODELS[model]
    symbols = _symbols(found, inputs)
    types = [found.graph.types[name] for name in found.graph.outputs]
    return [
        torch.empty_strided(
            [evaluate(dim, symbols) for dim in kind.shape], strides, dtype=TORCH_DTYPES[kind.dtype], device="cpu"
        )
        for kind, strides in zip(types, _strides(found, inputs, symbols), strict=True)
    ]


def _symbols(model: CompiledModel, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    return dims_of(model.signature, inputs, model.graph.byte_inputs(), in_memory=False)


def _strides(model: CompiledModel, inputs: Sequence[torch.Tensor], symbols: dict[str, int]) -> list[tuple[int, ...]]:
    """Return the strides of every result, as a call of the model returns it. Results of the program have their own
    layout, but images are contiguous unless an input is channels-last. All other results are dense."""
    made = {external.value: external for external in model.artifact.program.externals if external.is_output}
    last = any(is_channels_last(tensor) for tensor in inputs)
    found = []
    for name in model.graph.outputs:
        sizes = [evaluate(dim, symbols) for dim in model.graph.types[name].shape]
        if name in made and (len(sizes) != 4 or last):
            found.append(made[name].strides(sizes))
        else:
            found.append(_dense(sizes))
    return found


def _dense(sizes: Sequence[int]) -> tuple[int, ...]:
    steps = [1]
    for size in reversed(sizes[1:]):
        steps.append(steps[-1] * torch.sym_max(size, 1))
    return tuple(reversed(steps[: len(sizes)]))


def _has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether the tensor has these strides, ignoring axes of size 1."""
    return all(a == b or size == 1 for a, b, size in zip(tensor.stride(), strides, tensor.shape, strict=True))


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a 4-d tensor is in channels-last format and not contiguous."""
    last = torch.channels_last
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def in_memory_format(values: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results with images contiguous, unless an input of the call is channels-last.

    Args:
        values: The results. Those with four axes may be channels-last.
        leaves: The inputs of the call.
    """
    if all(value.dim() != 4 or value.is_contiguous() for value in values) or any(map(is_channels_last, leaves)):
        return values
    return [_contiguous(value) if value.dim() == 4 else value for value in values]


def _contiguous(image: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the values of an image, copied by the threads of the program if it is large."""
    if image.numel() < MANY_ELEMENTS or image.dtype is not torch.float32 or not is_channels_last(image):
        return image.contiguous()
    planes = torch.empty(image.shape, dtype=torch.float32, device="cpu")
    images, channels, height, width = image.shape
    threads = torch.get_num_threads()
    runtime().intaglio_planes(image.data_ptr(), planes.data_ptr(), images, height * width, channels, threads)
    return planes
