"""Draws networks and recipes from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuzz.builder import Builder
from fuzz.generators import COMPOSITIONS, GENERATORS, LAYERS
from fuzz.network import Network
from intaglio.patterns import BUILT_IN

TRIES = 60


def draw_network(seed: int) -> Network:
    """Return the network of a seed: two to eight lines, and what the last block adds to them."""
    rng = random.Random(seed)
    most, tries = rng.randint(2, 8), 0
    builder = Builder(seed, free_sizes=rng.random() < 0.5)
    names = [*GENERATORS, *COMPOSITIONS]
    subject = names[seed % len(names)]  # every record is the subject of its share of the networks
    wanted = [subject] if rng.random() < 0.3 else [rng.choice(LAYERS), subject]
    while len(builder.lines) < most and tries < TRIES:
        tries += 1
        name = wanted.pop(0) if wanted else rng.choice(LAYERS if rng.random() < 0.4 else names)
        if not builder.attempt((GENERATORS | COMPOSITIONS)[name], name) and name == subject and tries < TRIES // 2:
            wanted.insert(0, name)
    network = builder.network()
    if not network.lines or not network.inputs:  # nothing was drawn, or constants only
        return draw_network(seed + 2**31)
    return replace(network, settings=draw_settings(rng, network))


def draw_settings(rng: random.Random, network: Network) -> dict[str, Any]:
    """Return the recipe's settings of one network; mostly few."""
    choices: dict[str, Sequence[Any]] = {
        "method": ("minmax", "mse", "percentile", "percentile:99", "kl", "average", "ema"),
        "weights": ("channel", "tensor", "group:4"),
        "functions": ("precise", "table"),
        "bits": (7,),
        "weights_dtype": ("s8", "s4", "s3", "f16", "f8e4m3"),
        "activations_dtype": ("u7", "u4", "s16", "f8e4m3"),
        "shortcut": (8, 16),
        "residual": ("int8", "float"),
        "activations": ("static", "token", "tensor", "float"),
        "embeddings": ("int8",),
        "rounding": ("gptq", "adaround", "nearest", "qronos"),
        "bias": ("none", "weights", "outputs"),
        "equalize": (0.0, 0.5, 1.0),
        "results": ("int8", "float"),
        "two_bytes_below": (0.0, 200.0),
        "operand_bytes": (1, 2),
        "weight_bytes": (1, 2),
        "rotate": (True,),
    }
    frequent = (
        "method",
        "weights",
        "functions",
        "shortcut",
        "residual",
        "activations",
        "embeddings",
        "results",
        "two_bytes_below",
        "operand_bytes",
        "weight_bytes",
    )
    found: dict[str, Any] = {}
    for name, values in choices.items():
        if rng.random() < (0.25 if name in frequent else 0.06):
            found[name] = rng.choice(values)
    if found.get("bits") == 7:
        found.pop("activations_dtype", None)
    if found.get("weights_dtype") == "f16":
        found["activations"] = "float"
    if any("ConvTranspose" in part for part in network.parts.values()) and found.get("weights") == "group:4":
        found.pop("weights")  # an error that names the layer
    if found.get("weights") == "group:4" and found.get("weights_dtype") not in ("s4", "s3"):
        found["weights_dtype"] = "s4"
    return found


@dataclass(frozen=True)
class Options:
    """Settings of all networks of a module.

    Attributes:
        isa: instruction set.
        shapes: "fixed", "batch" (the first axis is free), "sizes" (those of images too), or "default" (as without
            `dynamic_shapes`).
        corrections: whether `equalize` and `correct` run.
        skip: selectors that stay in float.
        only: selectors of all that is quantized.
        patterns: built-in patterns, the only ones that are quantized.
        average: whether the patterns have a calibration callback.
        outputs: "float" or "int8".
        ends: skip_first and skip_last.
        saved: whether the model is saved and loaded.
    """

    isa: str = ""
    shapes: str = "fixed"
    corrections: bool = False
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    average: bool = False
    outputs: str = "float"
    ends: tuple[bool, bool] = (False, False)
    saved: bool = False


SHAPES = ("fixed", "batch", "fixed", "sizes", "fixed", "batch", "fixed", "default")
"""In turn: with free sizes, torch.export takes three times as long."""


def draw_options(index: int, isas: Sequence[str]) -> Options:
    """Return the options of a module."""
    rng = random.Random(index ^ 0x5EED)
    one = rng.random()
    skip = tuple(rng.sample(("type:Conv2d", "type:Linear", "op:aten.add", "op:aten.cat"), 1)) if one < 0.1 else ()
    only = ("type:Conv2d", "type:Linear") if 0.1 <= one < 0.15 else ()
    patterns = tuple(rng.sample(sorted(BUILT_IN), rng.choice((2, 5, 20)))) if 0.15 <= one < 0.25 else ()
    ends = (rng.random() < 0.5, rng.random() < 0.5) if 0.25 <= one < 0.3 else (False, False)
    outputs = "int8" if 0.3 <= one < 0.35 else "float"
    return Options(
        isa=isas[(index // len(SHAPES) + index) % len(isas)],
        shapes=SHAPES[index % len(SHAPES)],
        corrections=rng.random() < 0.25,
        skip=skip,
        only=only,
        patterns=("conv2d", "linear", *patterns) if patterns else (),
        average=bool(patterns) and rng.random() < 0.3,
        outputs=outputs,
        ends=ends,
        saved=rng.random() < 0.25,
    )
