"""The time of a step of a decoder: one new token after a text, and of the text itself, by data types of its weights.

    pip install transformers
    python benchmarks/decode_steps.py
    python benchmarks/decode_steps.py --sizes llama32_1b --layers 2 --past 512 --threads 2

The sizes are those of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.2-3B or Gemma 3 1B, of which five layers in six have a
sliding window of 512 tokens. Weights are random, layers are fewer and the vocabulary is smaller, so that quantizing
does not take longer than measuring; "bytes" is what a step reads of the weights. Calls are those of `generate`: a step
gets the cache of the step before. Corrections of weights, which change no time, are off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import record
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torchvision_operators import declare_operators

import intaglio

declare_operators()  # transformers imports torchvision if it is installed

SIZES = {
    "qwen25_05b": (transformers.Qwen2Config, 896, 4864, 14, 2),
    "llama32_1b": (transformers.LlamaConfig, 2048, 8192, 32, 8),
    "llama32_3b": (transformers.LlamaConfig, 3072, 8192, 24, 8),
    "gemma3_1b": (transformers.Gemma3TextConfig, 1152, 6912, 4, 1),
}
"""Configuration, channels, channels of the MLP, and heads of queries and of keys."""
MORE = {"gemma3_1b": {"head_dim": 256, "sliding_window": 512}}
LONGEST = 32768
"""Largest number of tokens of a text with those after it."""
NEAREST = {"equalize": 0.0, "rounding": "nearest", "rotate": False}
CALIBRATED = {**NEAREST, "activations": "static", "cache": "int8"}
INT4 = {"weights_dtype": "s4", "weights": "group:32"}
RECIPES = {
    "int8": {"*": CALIBRATED},
    "int8, per token": {"*": {**NEAREST, "cache": "int8"}},
    "4 bits": {"*": CALIBRATED, "type:Linear": INT4},
    "4 bits, per token": {"*": {**NEAREST, "cache": "int8"}, "type:Linear": INT4},
}


def decoder(sizes: str, layers: int, vocabulary: int) -> transformers.PreTrainedModel:
    configuration, channels, inner, heads, key_heads = SIZES[sizes]
    config = configuration(
        hidden_size=channels,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        **MORE.get(sizes, {}),
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def measure(model: Any, past: int, steps: int) -> dict[str, float]:
    """Milliseconds of the text and of steps after it, at best and in the median."""
    text, token = torch.randint(3, 1000, (1, past)), torch.randint(3, 1000, (1, 1))
    with torch.no_grad():
        model(text)
        begin = time.perf_counter()
        found = model(text)
        text_ms, step_ms = 1e3 * (time.perf_counter() - begin), []
        for _ in range(steps):
            cache = found.get("cache", found.get("past_key_values"))  # releases before 5.24 have the second
            begin = time.perf_counter()
            found = model(token, past_key_values=cache)
            step_ms.append(1e3 * (time.perf_counter() - begin))
    return {"text_ms": text_ms, "step_ms": min(step_ms), "median_step_ms": statistics.median(step_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, default="qwen25_05b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--past", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = decoder(arguments.sizes, arguments.layers, arguments.vocabulary)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    data = [{"input_ids": torch.randint(3, 1000, (2, 32))} for _ in range(2)]
    made = {name: intaglio.quantize(model, data, recipe=recipe, progress=False) for name, recipe in RECIPES.items()}
    quiet, rows = record.idle(), []
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        found: dict[str, dict[str, float]] = {}
        for _ in range(arguments.rounds):
            for name, quantized in made.items():
                figures = measure(quantized, arguments.past, arguments.steps)
                best = found.get(name, figures)
                found[name] = {key: min(value, best[key]) for key, value in figures.items()}
        rows += [{"threads": threads, "recipe": name, **figures} for name, figures in found.items()]
    table = Table(title=f"{arguments.sizes}, {arguments.layers} layers, {weights / 1e6:.0f} M weights: ms")
    for column in ("threads", "recipe", f"{arguments.past} tokens", "step, best", "step, median"):
        table.add_column(column)
    for row in rows:
        times = (f"{row[key]:.2f}" for key in ("text_ms", "step_ms", "median_step_ms"))
        table.add_row(str(row["threads"]), row["recipe"], *times)
    Console(highlight=False).print(table)
    record.append("decode_steps", arguments, {"idle": record.still_idle(quiet), "weights": weights, "rows": rows})


if __name__ == "__main__":
    main()
