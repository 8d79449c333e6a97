"""Time and memory of a process that loads a decoder with 4-bit or int8 weights and computes the first new token.

    pip install transformers
    python benchmarks/decoder_loading.py
    python benchmarks/decoder_loading.py --sizes llama32_1b --layers 16 --vocabulary 128256 --recipe w8a8_dynamic

Sizes are those of decode_steps.py, with random weights, and all layers and tokens by default. Corrections of weights,
which change neither time nor memory, are off. The file is loaded by two new processes, one after the other: the first
finds an empty cache, and packs the weights for its kernels; the second reads them from the cache. "packed" is the size
of what kernels read of the model. "transformers" is the memory after the import of what any of its models needs to
generate, so that "resident" less "transformers" is what the model takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import decode_steps
import fresh
import record
import transformers
from rich.console import Console
from rich.table import Table

MB = 1e6
FILE = "decoder.intaglio"
RECIPES = ("w4a8", "w8a8_dynamic")


def save(sizes: str, layers: int, vocabulary: int, recipe: str, folder: str) -> float:
    """Write the file of a quantized decoder, and return its size in MB."""
    import torch

    import intaglio

    model = decode_steps.decoder(sizes, layers, vocabulary)
    data = [{"input_ids": torch.randint(3, 1000, (2, 32))} for _ in range(2)]
    named = intaglio.Recipe.named(recipe)
    entries = {selector: {**_fields(setting), **decode_steps.NEAREST} for selector, setting in named.entries}
    everywhere = {**_fields(named.default), **decode_steps.NEAREST}
    intaglio.quantize(model, data, recipe={"*": everywhere, **entries}, progress=False).save(Path(folder, FILE))
    return Path(folder, FILE).stat().st_size / MB


def _fields(setting: Any) -> dict[str, Any]:
    """Return the fields of a setting that are set."""
    return {name: value for name, value in vars(setting).items() if value is not None}


def load(folder: str, threads: int) -> dict[str, float]:
    """Return seconds until the model is loaded and until the first token, and MB in memory at each stage."""
    import torch

    import intaglio

    torch.set_num_threads(threads)
    found = {"imported": memory("VmRSS")}
    for name in ("DynamicCache", "GenerationConfig", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        getattr(transformers, name)  # imports its module
    found["transformers"] = memory("VmRSS")
    begin = time.perf_counter()
    model = intaglio.load(Path(folder, FILE), trust=True)
    found["load_s"] = time.perf_counter() - begin
    tokens = torch.randint(3, 1000, (1, 16))
    with torch.no_grad():
        model(tokens, logits_to_keep=1)  # as `generate` calls it
    found["first_s"] = time.perf_counter() - begin
    packed = sum(program.artifact.constants.nbytes for program in model.programs.values())
    return found | {"resident": memory("VmRSS"), "peak": memory("VmHWM"), "packed": packed / MB}


def memory(field: str) -> float:
    """Return a field of the status of this process in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024 / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=decode_steps.SIZES, default="qwen25_05b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        described = (arguments.sizes, arguments.layers, arguments.vocabulary, arguments.recipe)
        size = fresh.call(save, *described, folder)
        environment = {"INTAGLIO_CACHE_DIR": os.path.join(folder, "cache")}
        quiet = record.idle()
        rows = [fresh.call(load, folder, arguments.threads, environment=environment) for _ in range(2)]
    table = Table(title=f"{arguments.sizes}, {arguments.layers} layers, {arguments.recipe}: file of {size:.0f} MB")
    for column in ("cache", *rows[0]):
        table.add_column(column)
    for name, row in zip(("empty", "filled"), rows, strict=True):
        table.add_row(name, *(f"{value:.2f}" if key.endswith("_s") else f"{value:.0f}" for key, value in row.items()))
    Console(highlight=False).print(table)
    record.append("decoder_loading", arguments, {"idle": record.still_idle(quiet), "file": size, "rows": rows})


if __name__ == "__main__":
    main()
