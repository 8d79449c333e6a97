"""Files of ncnn in int8, in the format of its tools ncnn2table and ncnn2int8, which its Python package does not have.

Weights have a scale per output channel, or per group of a grouped convolution. Those of 3x3 convolutions that ncnn
computes by Winograd's algorithm have 6 bits. Activations have one scale, of the largest absolute value; the default of
the tools is KL divergence. A layer writes its result in int8 if only quantized layers read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

INT8 = 0x000D4B38
"""Mark in front of weights in int8."""
OUTPUTS, HAS_BIAS, WEIGHTS, GROUPS, SCALES = "0", "5", "6", "7", "8"
"""Numbers of the settings of a convolution."""
OF_LINEAR = {HAS_BIAS: "1", WEIGHTS: "2"}
"""Those that have other numbers in a linear layer."""
QUANTIZED = {"Convolution": 2, "ConvolutionDepthWise": 1, "InnerProduct": 2}
"""Kinds of layers that have int8 weights, and the value of `SCALES` in them."""
WITH_REQUANTIZED_RESULT = 100
"""Number that is added to the setting `SCALES` of a layer that writes its result in int8. The scale of the result is
stored behind those of the weights and of the input."""


@dataclass
class Layer:
    """A line of a file of layers.

    Attributes:
        kind: its kind.
        name: its name.
        inputs: the values that it reads.
        results: the values that it makes.
        settings: its settings by number.
    """

    kind: str
    name: str
    inputs: list[str]
    results: list[str]
    settings: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(line: str) -> Layer:
        """Return the layer of a line."""
        kind, name, reads, makes, *rest = line.split()
        values, first = int(reads), int(reads) + int(makes)
        settings = dict(one.split("=", 1) for one in rest[first:])
        return Layer(kind, name, rest[:values], rest[values:first], settings)

    def line(self) -> str:
        """Return the line."""
        values = [*self.inputs, *self.results]
        settings = [f"{key}={value}" for key, value in self.settings.items()]
        return " ".join([self.kind, self.name, str(len(self.inputs)), str(len(self.results)), *values, *settings])

    def number(self, key: str, default: int = 0) -> int:
        """Return a setting."""
        return int(self.settings.get(OF_LINEAR.get(key, key) if self.kind == "InnerProduct" else key, default))

    def largest_weight(self) -> int:
        """Return the largest integer of its weights."""
        sizes = [self.number(one, 1) for one in ("1", "11", "3", "13", "2", "12")]
        by_winograd = self.kind == "Convolution" and sizes in ([3, 3, 1, 1, 1, 1], [3, 1, 1, 1, 1, 1])
        return 31 if by_winograd else 127


def read_layers(path: Path) -> tuple[list[str], list[Layer]]:
    """Return the first two lines of a file of layers, and the layers."""
    lines = path.read_text().splitlines()
    return lines[:2], [Layer.of(line) for line in lines[2:] if line.strip()]


def write_int8(folder: Path, layers: list[Layer], head: list[str], ranges: Mapping[str, float]) -> tuple[Path, Path]:
    """Write the int8 model beside the float one, ``model.ncnn.param`` and ``model.ncnn.bin``, and return its files.

    Args:
        folder: where the files are.
        layers: layers of the float model, which are changed.
        head: the first two lines of its file.
        ranges: the largest absolute value of each value that a layer reads.
    """
    stored, written = (folder / "model.ncnn.bin").read_bytes(), bytearray()
    start = 0
    for layer in layers:
        if layer.kind not in QUANTIZED:
            continue
        outputs, count, bias = (layer.number(one) for one in (OUTPUTS, WEIGHTS, HAS_BIAS))
        start += 4  # the mark of float32
        rows = layer.number(GROUPS) if layer.kind == "ConvolutionDepthWise" else outputs
        weights = np.frombuffer(stored, np.float32, count, start).reshape(rows, -1)
        start += 4 * count
        largest = np.abs(weights).max(1)
        scales = (layer.largest_weight() / np.where(largest > 0, largest, 1)).astype(np.float32)
        rounded = np.rint(weights * scales[:, None]).astype(np.int8).tobytes()
        written += np.uint32(INT8).tobytes() + rounded + bytes(-len(rounded) % 4)
        written += stored[start : start + 4 * outputs * bool(bias)]
        start += 4 * outputs * bool(bias)
        written += scales.tobytes() + np.float32(127 / ranges[layer.inputs[0]]).tobytes()
        kind = QUANTIZED[layer.kind]
        if (read := value_read_in_int8(layer, layers)) is not None:
            written += np.float32(127 / ranges[read]).tobytes()
            kind += WITH_REQUANTIZED_RESULT
        layer.settings[SCALES] = str(kind)
    assert start == len(stored), "another kind of layer has weights"
    (folder / "int8.param").write_text("\n".join([*head, *(layer.line() for layer in layers), ""]))
    (folder / "int8.bin").write_bytes(written)
    return folder / "int8.param", folder / "int8.bin"


def value_read_in_int8(layer: Layer, layers: list[Layer]) -> str | None:
    """Return the name of the value in which quantized convolutions read the result of a layer, or ``None`` if other
    layers read it too."""
    if layer.kind == "InnerProduct":
        return None
    readers = [one for one in layers if layer.results[0] in one.inputs]
    if len(readers) == 1 and readers[0].kind == "Split":
        copies = readers[0].results
        readers = [one for one in layers if set(copies) & set(one.inputs)]
    elif len(readers) != 1:
        return None
    quantized = all(one.kind in QUANTIZED and one.kind != "InnerProduct" for one in readers)
    return readers[0].inputs[0] if quantized and readers else None


def ranges_of(net: Any, layers: list[Layer], images: Iterator[Any]) -> dict[str, float]:
    """Return the largest absolute value of each value that a layer with weights reads, over some images."""
    names = [layer.inputs[0] for layer in layers if layer.kind in QUANTIZED]
    found = dict.fromkeys(names, 0.0)
    for image in images:
        extractor = net.create_extractor()
        extractor.input("in0", image)
        for name in names:
            values = image if name == "in0" else extractor.extract(name)[1]
            found[name] = max(found[name], float(np.abs(np.array(values)).max()))
    return found
