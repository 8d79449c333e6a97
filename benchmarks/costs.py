"""What quantizing itself costs: calibration time and memory, compile time cold and warm, import and load time.

    python benchmarks/costs.py                  ResNet-50; needs nothing but intaglio (make bench)
    python benchmarks/costs.py --image 64       smaller images, to see that it runs

Every figure is the median of --repeats runs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import fresh
import networks
import record
import torch
from rich.console import Console
from rich.table import Table

BATCH = 4
TIMED, FEW, MANY = 16, 4, 64
"""Batches: for times, and the two numbers whose peaks of memory are compared."""


def batches(count: int, image: int):
    """Drawn one at a time, so that the data itself takes no memory."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(BATCH, 3, image, image, generator=draw)


def prepared_network(image: int, threads: int):
    from intaglio import stages

    torch.set_num_threads(threads)
    model, _ = networks.build("resnet50", image=image)
    return model, stages.prepare(stages.capture(model, next(batches(1, image))))


def calibration_time(image: int, threads: int) -> dict[str, float]:
    """Seconds for the same 64 images through the float model, and through calibration."""
    from intaglio import stages

    model, prepared = prepared_network(image, threads)
    data = list(batches(TIMED, image))
    stages.calibrate(prepared, data[:1])  # compiles the counting kernels, touches memory
    with torch.no_grad():
        model(data[0])
        begin = time.perf_counter()
        for batch in data:
            model(batch)
        middle = time.perf_counter()
    ranges = stages.calibrate(prepared, data)
    counted = time.perf_counter()
    stages.convert(prepared, ranges)
    end = time.perf_counter()
    return {"float_s": middle - begin, "calibrate_s": counted - middle, "convert_s": end - counted}


def peak_memory(count: int, image: int, threads: int) -> dict[str, float]:
    """MB resident before calibrating on ``count`` batches, and at most while it did."""
    from intaglio import stages

    _, prepared = prepared_network(image, threads)
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak that capturing the model had
    stages.calibrate(prepared, batches(count, image))
    return {"before_mb": before, "peak_mb": resident_mb("VmHWM")}


def resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def stage_times(image: int, threads: int) -> dict[str, float]:
    """Seconds of every stage but calibration, in a process that has done nothing yet."""
    from intaglio import stages

    torch.set_num_threads(threads)
    model, _ = networks.build("resnet50", image=image)
    data = list(batches(2, image))
    clock = [time.perf_counter()]
    captured = stages.capture(model, data[0])
    clock.append(time.perf_counter())
    prepared = stages.prepare(captured)
    clock.append(time.perf_counter())
    ranges = stages.calibrate(prepared, data)
    clock.append(time.perf_counter())
    reference = stages.convert(prepared, ranges)
    clock.append(time.perf_counter())
    lowered = stages.requantize(reference)
    clock.append(time.perf_counter())
    stages.compile(lowered)
    clock.append(time.perf_counter())
    names = ("capture_s", "prepare_s", "calibrate_2_batches_s", "convert_s", "requantize_s", "compile_s")
    return {name: after - before for name, before, after in zip(names, clock, clock[1:], strict=False)}


def import_time() -> float:
    """Seconds that `import intaglio` takes once torch is there."""
    begin = time.perf_counter()
    importlib.import_module("intaglio")

    return time.perf_counter() - begin


def save_network(path: str, image: int) -> float:
    """MB of the file of an int8 ResNet-50 without example."""
    import intaglio

    model, _ = networks.build("resnet50", image=image)
    intaglio.quantize(model, list(batches(1, image)), progress=False).save(path)
    return Path(path).stat().st_size / 1e6


def first_answer(path: str, image: int, trust: bool, threads: int) -> float:
    """Seconds from `import intaglio`, torch being there, to the first result of the model in the file."""
    torch.set_num_threads(threads)
    x = torch.zeros(1, 3, image, image)
    begin = time.perf_counter()
    import intaglio

    intaglio.load(path, trust=trust)(x)
    return time.perf_counter() - begin


def load_times(arguments: argparse.Namespace) -> dict[str, float]:
    """The file's size, and medians of loading it with a warm cache."""
    with tempfile.TemporaryDirectory() as folder:
        path, image = str(Path(folder) / "resnet50"), arguments.image
        found = {"file_mb": fresh.call(save_network, path, image)}
        for trust, name in ((False, "load_s"), (True, "load_trusted_s")):
            run = (first_answer, path, image, trust, arguments.threads)
            fresh.call(*run)
            found[name] = statistics.median(fresh.call(*run) for _ in range(2 * arguments.repeats + 1))
        return found


def compile_times(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every stage with an empty cache folder, then in another process with what the first left in it."""
    with tempfile.TemporaryDirectory() as folder:
        run = (stage_times, arguments.image, arguments.threads)
        return {kind: fresh.call(*run, environment={"INTAGLIO_CACHE_DIR": folder}) for kind in ("cold", "warm")}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    image, threads, repeats = arguments.image, arguments.threads, range(arguments.repeats)
    console = Console(highlight=False)
    quiet = record.idle()

    importing = statistics.median(fresh.call(import_time) for _ in repeats)
    times = medians([fresh.call(calibration_time, image, threads) for _ in repeats])
    memory = {
        count: medians([fresh.call(peak_memory, count, image, threads) for _ in repeats]) for count in (FEW, MANY)
    }
    compiled = [compile_times(arguments) for _ in repeats]
    all_stages = {kind: medians([run[kind] for run in compiled]) for kind in ("cold", "warm")}
    loaded = load_times(arguments)

    table = Table(
        title=f"ResNet-50, images of {image} pixels, {threads} threads, median of {arguments.repeats} processes"
    )
    table.add_column("what")
    table.add_column("cost", justify="right")
    table.add_row("import intaglio, after torch (functions load at first use)", f"{importing:.3f} s")
    table.add_row(f"float model, {TIMED * BATCH} images", f"{times['float_s']:.2f} s")
    ratio = times["calibrate_s"] / times["float_s"]
    table.add_row("calibrating on them", f"{times['calibrate_s']:.2f} s ({ratio:.2f} times the float model)")
    table.add_row("converting", f"{times['convert_s']:.2f} s")
    for count, found in memory.items():
        cost = f"{found['peak_mb']:.0f} MB (+{found['peak_mb'] - found['before_mb']:.0f} when calibrating)"
        table.add_row(f"peak memory, {count} batches of {BATCH}", cost)
    for kind, found in all_stages.items():
        table.add_row(f"compile, {kind} cache", f"{found['compile_s']:.2f} s")
    for stage in ("capture", "prepare", "requantize"):
        table.add_row(stage, f"{all_stages['warm'][f'{stage}_s']:.2f} s")
    table.add_row("file", f"{loaded['file_mb']:.1f} MB")
    table.add_row("load to first answer, after torch", f"{loaded['load_s']:.2f} s")
    table.add_row("the same with trust=True", f"{loaded['load_trusted_s']:.2f} s")
    console.print(table)
    if not quiet:
        console.print("Others used this machine: figures that are not worth quoting.")
    results = {
        "idle": quiet,
        "import_s": importing,
        "calibration": times,
        "memory": memory,
        "all_stages": all_stages,
        "load": loaded,
    }
    record.append("costs", arguments, results)


if __name__ == "__main__":
    main()
