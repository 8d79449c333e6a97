"""What it costs that every call has another length: random lengths in turn, against calls of one length in a row.

    python benchmarks/lengths.py                          a stack of linear layers, 64 lengths from 8 to 384
    python benchmarks/lengths.py stack,bert-mini,bert-base --threads 1,2

`bert-...` are the encoders of transformers, of random weights, or where it cannot be imported blocks of the same sizes;
`stack` has no attention. A round times each length in turn, in an order of its own, then the third call of each in a
row; figures are the best of all rounds, the first call of a length apart. The ratio is that of time in turn to time in
a row: 1 is a new length for nothing. One JSON line a model and number of threads goes to standard output, with the
ratio of every length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import networks
import record
import torch
from torch import nn
from torch.export import Dim

import intaglio

BERT = {"bert-tiny": (2, 128), "bert-mini": (4, 256), "bert-small": (4, 512), "bert-base": (12, 768)}
"""Layers and width; heads have 64 values."""
WIDTH = 256
"""Of the stack."""


class Attention(nn.Module):
    """Of every token to all, heads of 64 values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(2, (-1, 64)).transpose(1, 2) for part in (make(x) for make in self.parts)]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(mixed))


class Block(nn.Module):
    """Two linear layers with GELU between, the sum with what came in, layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """A BERT that takes tokens and gives its last hidden state."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        networks.declare_operators()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bert(tokens).last_hidden_state


def build(name: str, batch: int) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """The float model, and what makes its input of a length."""
    torch.manual_seed(0)
    if name == "stack":
        return nn.Sequential(*[Block(WIDTH) for _ in range(6)]).eval(), lambda n: torch.randn(batch, n, WIDTH)
    layers, width = BERT[name]
    try:
        return Encoder(layers, width).eval(), lambda n: torch.randint(0, 30000, (batch, n))
    except ImportError:
        blocks = [block(width) for _ in range(layers) for block in (Attention, Block)]
        return nn.Sequential(*blocks).eval(), lambda n: torch.randn(batch, n, width)


@dataclass
class Times:
    """Seconds of a length: the first call of all, the best in turn, the best in a row."""

    first: float = 0.0
    in_turn: float = field(default=float("inf"))
    in_a_row: float = field(default=float("inf"))

    @property
    def ratio(self) -> float:
        return self.in_turn / self.in_a_row


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(model: nn.Module, inputs: dict[int, torch.Tensor], rounds: int) -> dict[int, Times]:
    """Length -> its times; the model must not have seen the lengths."""
    found, order = {length: Times() for length in inputs}, list(inputs)
    for length in order:
        found[length].first = seconds(lambda length=length: model(inputs[length]))
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for length in order:
            found[length].in_turn = min(found[length].in_turn, seconds(lambda length=length: model(inputs[length])))
        for length in order:
            model(inputs[length])
            model(inputs[length])
            found[length].in_a_row = min(found[length].in_a_row, seconds(lambda length=length: model(inputs[length])))
    return found


def summary(times: dict[int, Times]) -> dict:
    """Ratios of each length and of all together; ``first``: the first calls of all against the same in a row."""
    rows = list(times.values())
    row = sum(one.in_a_row for one in rows)
    return {
        "ratio": round(sum(one.in_turn for one in rows) / row, 4),
        "first": round(sum(one.first for one in rows) / row, 4),
        "ratios": {length: round(one.ratio, 4) for length, one in sorted(times.items())},
        "milliseconds": {length: round(1e3 * one.in_a_row, 4) for length, one in sorted(times.items())},
    }


def draw(count: int, least: int, most: int) -> list[int]:
    """Different lengths, in random order."""
    return random.Random(0).sample(range(least, most + 1), min(count, most + 1 - least))


def quantized(name: str, batch: int, most: int) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    model, make = build(name, batch)
    free, example = ({0: Dim.AUTO, 1: Dim.AUTO},), make(min(most, 64))
    data = [example.repeat(2, 1, 1) if example.dim() == 3 else example.repeat(2, 1)]
    return intaglio.quantize(model, data, dynamic_shapes=free, progress=False), make


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="?", default="stack")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--least", type=int, default=8)
    parser.add_argument("--most", type=int, default=384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", default=str(os.cpu_count() or 1))
    parser.add_argument("--record", action="store_true", help="add the figures to benchmarks/results")
    arguments = parser.parse_args(given)
    lengths = draw(arguments.count, arguments.least, arguments.most)
    results = []
    for name in arguments.networks.split(","):
        for threads in map(int, arguments.threads.split(",")):
            torch.set_num_threads(threads)
            model, make = quantized(name, arguments.batch, arguments.most)
            found = summary(measure(model, {length: make(length) for length in lengths}, arguments.rounds))
            results.append({"network": name, "threads": threads, "islands": model.coverage.islands, **found})
            print(json.dumps(results[-1]), flush=True)
    if arguments.record:
        record.append("lengths", arguments, {"idle": record.idle(), "rows": results})


if __name__ == "__main__":
    main()
