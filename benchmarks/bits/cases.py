"""The table of cases: a network, its data, how it is quantized, and the doors it goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from bits import api, images, sequences

Tensors = tuple[Tensor, ...]
Options = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One network. ``inputs``: number of a call -> its arguments; for most networks the number is the batch."""

    net: Callable[[], nn.Module]
    inputs: Callable[[int], Tensors]
    flow: str = "calibrated"
    options: Options = dict
    doors: tuple[str, ...] = ()
    calls: tuple[int, ...] = (1, 5)
    calibration: tuple[int, ...] = (4, 4)
    capture: dict[str, Any] = field(default_factory=dict)


def pictures(channels: int, size: int) -> Callable[[int], Tensors]:
    return lambda batch: (torch.randn(batch, channels, size, size),)


def rows(*shape: int) -> Callable[[int], Tensors]:
    return lambda batch: (torch.randn(batch, *shape),)


def pairs(*shapes: tuple[int, ...]) -> Callable[[int], Tensors]:
    return lambda batch: tuple(torch.randn(batch, *shape) for shape in shapes)


def ids(most: int, length: int) -> Callable[[int], Tensors]:
    """Token ids; calls of other batches have other lengths."""
    return lambda batch: (torch.randint(0, most, (batch, length + batch - 4)),)


def pixels(batch: int) -> Tensors:
    """Normalised images to calibrate on, batches of 4; bytes for every other call."""
    if batch == 4:
        return (torch.randn(4, 3, 32, 32),)
    return (torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8),)


def text(batch: int) -> Tensors:
    """Ids, and a mask that hides the end of every text but the first."""
    length = 12 + batch
    mask = torch.ones(batch, length, dtype=torch.int64)
    for index in range(1, batch):
        mask[index, length - index :] = 0
    return torch.randint(0, 200, (batch, length)), mask


def padded(batch: int) -> Tensors:
    padding = torch.zeros(batch, 10, dtype=torch.bool)
    padding[:, 8:] = True
    return torch.randn(batch, 10, 32), padding


def recurrent(batch: int) -> Tensors:
    return torch.randn(batch, 7, 16), torch.randn(2, batch, 24) / 2


def clicks(batch: int) -> Tensors:
    return torch.rand(batch, 13), torch.randint(0, 60, (batch, 3, 4)), torch.randint(0, 40, (batch,))


def positions(call: int) -> Tensors:
    return torch.randn(1, 2, 16), torch.tensor([2 * call, 2 * call + 1])


def turns(batch: int) -> Tensors:
    return torch.randn(batch, 12), torch.tensor(batch)


def levels_of(**setting: Any) -> Options:
    """A recipe of one setting for everything."""
    return lambda: {"recipe": {"*": setting}}


def four_bits() -> dict[str, Any]:
    head = {"weights_dtype": "s8", "weights": "channel"}
    return {"recipe": {"*": {"weights_dtype": "s4", "weights": "group:8"}, "head": head}}


def seven_bits() -> dict[str, Any]:
    everything = {"bits": 7, "weights": "tensor", "method": "minmax"}
    return {"recipe": {"*": everything, "body": {"method": "percentile:99.9"}}}


def tables() -> dict[str, Any]:
    return {"recipe": {"type:Embedding*": {"embeddings": "int8"}}}


def buffers() -> dict[str, Any]:
    return {"int8_buffers": True}


def declared_images() -> dict[str, Any]:
    return {"input": api.public("Image")(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])}


def x86_preset() -> dict[str, Any]:
    config = api.public("get_symmetric_quantization_config")(is_per_channel=True)
    return {"annotator": lambda: api.public("X86Quantizer")().set_global(config)}


def patterns() -> dict[str, Any]:
    average = api.public("AverageMaxCalibrationCallback")()
    return {"patterns": api.public("builtin")("conv2d", "dense", calibration=average)}


FREE = {"dynamic_shapes": {"x": {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}}}
PRECISE = levels_of(functions="precise")
RECURRENT = {"calls": (1, 3), "calibration": (2, 2)}
MANY = ("quantize", "inductor", "onnx")

CASES: dict[str, Case] = {
    # Images.
    "first_steps": Case(images.FirstSteps, pictures(3, 32), doors=MANY),
    "resnet20": Case(images.ResNet20, pictures(3, 32), flow="corrected", doors=("onnx",)),
    "bottleneck": Case(images.Bottleneck, pictures(3, 64), calls=(1, 16), doors=("inductor",)),
    "mobilenet": Case(images.MobileNet, pictures(3, 48), flow="corrected", doors=("quantize",)),
    "squeeze_excite": Case(partial(images.MobileNet, nn.Hardswish, True), pictures(3, 48), doors=("onnx",)),
    "efficient": Case(partial(images.MobileNet, nn.SiLU, True), pictures(3, 32), options=PRECISE),
    "convolutions": Case(images.Convolutions, pictures(5, 21)),
    "shuffle": Case(images.Shuffle, pictures(3, 20), doors=("onnx",)),
    "segmenter": Case(images.Segmenter, pictures(3, 24)),
    "functions": Case(images.Functions, pictures(3, 14)),
    "functions_precise": Case(images.Functions, pictures(3, 14), options=PRECISE),
    "convnext": Case(images.ConvNext, pictures(3, 32)),
    "islands": Case(images.Islands, pictures(3, 12), doors=("quantize",)),
    "signals": Case(images.Signals, rows(4, 32)),
    "image_input": Case(images.FirstSteps, pixels, options=declared_images, flow="corrected"),
    "free_sizes": Case(images.Convolutions, lambda n: (torch.randn(n, 5, 20 + n, 25 - n),), capture=FREE),
    "accurate": Case(images.Bottleneck, pictures(3, 32), options=lambda: {"recipe": "accurate"}),
    "int8_outputs": Case(images.FirstSteps, pictures(3, 16), options=lambda: {"outputs": "int8"}),
    "x86_preset": Case(images.FirstSteps, pictures(3, 16), options=x86_preset),
    "patterns": Case(images.FirstSteps, pictures(3, 16), options=patterns, flow="callbacks"),
    "four_bits": Case(images.FirstSteps, pictures(3, 16), options=four_bits, flow="corrected", doors=("onnx",)),
    "seven_bits": Case(images.FirstSteps, pictures(3, 16), options=seven_bits),
    "sixteen_bits": Case(images.FirstSteps, pictures(3, 16), options=levels_of(activations_dtype="s16")),
    "float8": Case(images.Perceptron, rows(48), options=levels_of(activations_dtype="f8e4m3", weights_dtype="f8e5m2")),
    # Training, other tools, plain Python, a search.
    "training": Case(images.Trainable, pictures(3, 12), flow="trained"),
    "training_four_bits": Case(images.Trainable, pictures(3, 12), flow="trained_four_bits"),
    "quantized_elsewhere": Case(images.QuantizedElsewhere, pictures(3, 12), flow="from_qdq", doors=("inductor",)),
    "eager": Case(images.FirstSteps, pictures(3, 16), flow="eager"),
    "eager_branches": Case(images.EarlyExit, lambda n: (torch.randn(n, 3, 16, 16) * 4 * (n % 3),), flow="eager",
                           calibration=(4, 5)),
    "eager_loop": Case(sequences.Tagger, ids(100, 5), flow="eager", calls=(3, 4), calibration=(4, 3)),
    "search": Case(images.Perceptron, rows(48), flow="search"),
    # Vectors and sequences.
    "chains": Case(images.Chains, pairs((9, 20), (9, 40)), doors=("inductor",)),
    "dynamic": Case(images.Perceptron, rows(48), flow="dynamic", doors=("quantize", "onnx")),
    "weights_only_f16": Case(images.Perceptron, rows(48), flow="dynamic",
                             options=levels_of(activations="float", weights_dtype="f16")),
    "weights_only_s4": Case(images.Perceptron, rows(48), flow="dynamic",
                            options=levels_of(activations="float", weights_dtype="s4", weights="group:16")),
    "bert": Case(sequences.Bert, text, flow="corrected", doors=("quantize",)),
    "vit": Case(sequences.Vit, pictures(3, 32), doors=("onnx",)),
    "decoder": Case(sequences.Decoder, ids(100, 12)),
    "decoder_dynamic": Case(sequences.Decoder, ids(100, 12), flow="dynamic"),
    "attention_int8": Case(sequences.WrittenOut, rows(9, 32), options=levels_of(residual="int8", method="mse")),
    "encoder_layer": Case(sequences.EncoderLayer, padded),
    "products": Case(sequences.Products, pairs((6, 24), (11, 24))),
    "lstm": Case(sequences.Lstm, ids(50, 7), **RECURRENT),
    "lstm_dynamic": Case(sequences.Lstm, ids(50, 7), flow="dynamic", **RECURRENT),
    "gru": Case(sequences.Gru, recurrent, **RECURRENT),
    "recommender": Case(sequences.Recommender, clicks, options=tables),
    "cache": Case(sequences.Cache, positions, calls=(0, 1, 2), calibration=(0, 1), options=buffers),
    "loop": Case(sequences.Loop, turns, calls=(1, 5), calibration=(4, 3)),
}  # fmt: skip
