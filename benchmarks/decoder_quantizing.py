"""Measure the seconds and the memory that quantizing a decoder with corrected weights takes.

    pip install transformers
    python benchmarks/decoder_quantizing.py
    python benchmarks/decoder_quantizing.py --sizes qwen25_05b --layers 24 --vocabulary 151936 --recipe w8a8_dynamic

Sizes are those of decode_steps.py, with random weights, in a process of its own. ``w4a8`` rounds weights by GPTQ and
``w4a8_accurate`` by Qronos. The clock starts with the float model and the texts in memory and ends when the quantized
model could be called. Pages of files, such as those of large weights that stages of `quantize` make, can be taken by
the system for something else, so memory is counted with and without them.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator

import decode_steps
import fresh
import record
from decoder_loading import MB, memory
from rich.console import Console

COLUMNS = {
    "seconds": "seconds",
    "peak": "largest memory, MB",
    "anonymous": "largest memory without files, MB",
    "before": "memory before, MB",
    "model": "float model, MB",
    "packed": "constants of the quantized model, MB",
}
"""Titles of the printed results, by their names in the recorded line."""


SECONDS_BETWEEN = 0.05
"""Seconds between two measurements of the memory without files, of which the system has no largest value."""


@contextlib.contextmanager
def largest_anonymous(found: dict) -> Iterator[None]:
    """Measure the largest memory without pages of files in this block, in MB."""
    stop, values = threading.Event(), [memory("RssAnon")]

    def watch() -> None:
        while not stop.wait(SECONDS_BETWEEN):
            values.append(memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    found["anonymous"] = max(values)


def cost(
    sizes: str, layers: int, vocabulary: int, recipe: str, samples: int, length: int, threads: int, dtype: str
) -> dict:
    """Return the seconds and the memory in MB."""
    import torch

    import intaglio

    torch.set_num_threads(threads)
    model = decode_steps.decoder(sizes, layers, vocabulary).to(getattr(torch, dtype))
    texts = torch.randint(3, vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": part} for part in texts.split(8)]
    found = {"before": memory("VmRSS"), "model": sum(p.nbytes for p in model.parameters()) / MB}
    begin = time.perf_counter()
    with largest_anonymous(found):
        quantized = intaglio.quantize(model, data, recipe=recipe, progress=False)
    found["seconds"] = time.perf_counter() - begin
    packed = sum(program.artifact.constants.nbytes for program in quantized.programs.values())
    return found | {"peak": memory("VmHWM"), "packed": packed / MB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=decode_steps.SIZES, default="llama32_1b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    quiet = record.idle()
    with tempfile.TemporaryDirectory() as folder:
        found = fresh.call(cost, *vars(arguments).values(), environment={"INTAGLIO_CACHE_DIR": folder})
    Console(highlight=False).print({title: round(found[name], 1) for name, title in COLUMNS.items()})
    record.append("decoder_quantizing", arguments, {"idle": record.still_idle(quiet), **found})


if __name__ == "__main__":
    main()
