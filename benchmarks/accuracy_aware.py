"""Mixed precision on trained networks: `intaglio.search` and NNCF's quantization with accuracy control, for OpenVINO.

    python benchmarks/accuracy_aware.py --data FOLDER --folder ANOTHER --networks cifar_resnet20,cifar_resnet56

Both are calibrated on the same training images, and ask the same metric on the same images for validation: the share of
images with the right label (`--metric labels`), or that get the class that the float model gives them (`classes`), far
harder to keep. `--max-drop` is the loss of it that they accept. The search of intaglio asks for it with `--confidence`,
by the standard error over the images, which NNCF has no option for. The models are scored on test images that neither
has seen, and timed on single images, each in a process of its own, in alternation. OpenVINO's models are timed with
floats in float32, which NNCF validates with, and with OpenVINO's default type, which is bfloat16 on processors that
have it.

NNCF ranks layers by its metric, as in its documentation, or with `--logits` by the error of the results.

ANOTHER keeps the models, so that a run that was interrupted continues. `--steps` does only a part of the work:
nncf and intaglio search, scores counts classes, and times runs the models of both on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fresh
import networks
import numpy as np
import race
import record
import torch
from torch import nn

import intaglio
from intaglio.peers.peer_engines import named_arrays, onnx_file, openvino_file_call

BATCH = 50
"""Number of images in a call of NNCF's validation."""
STEPS = "nncf,intaglio,scores,times"
ENGINES = ("intaglio_int8", "intaglio", "nncf_int8", "nncf_int8_default", "nncf", "nncf_default")
"""Engines that are timed. ``_int8`` is the model before layers are left in float, ``_default`` OpenVINO's type of
floats."""


@dataclass(frozen=True)
class Task:
    """A trained network, images to calibrate on, and images to validate and to score with their classes in float.
    The metric of the searches is the share of the images for validation that get the expected class."""

    model: nn.Module
    calibration: torch.Tensor
    validation: torch.Tensor
    unseen: torch.Tensor
    labels: torch.Tensor
    classes: torch.Tensor
    unseen_classes: torch.Tensor
    expected: torch.Tensor

    @staticmethod
    def of(network: str, arguments: argparse.Namespace) -> Task:
        """Return the task of a network."""
        model, _ = networks.build(network, arguments.data)
        seen, images, labels = networks.cifar10(arguments.data, "jpeg")
        resized = networks.for_imagenet if network == "efficientnet_lite0" else torch.Tensor.contiguous
        first, last = arguments.validation, arguments.validation + arguments.unseen
        parts = resized(images[:first]), resized(images[first:last])
        found = [classes(model, part) for part in parts]
        known = network != "efficientnet_lite0"
        expected = labels[:first] if arguments.metric == "labels" and known else found[0]
        labels = labels[first:last] if known else torch.empty(0)
        return Task(model, resized(seen[: arguments.images]), *parts, labels, *found, expected)


def classes(run: Callable, images: torch.Tensor, size: int = 64) -> torch.Tensor:
    """Return the classes that a model gives to images, in calls with a number of images."""
    with torch.no_grad():
        return torch.cat([run(part).argmax(1).clone() for part in images.split(size)])


def share(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the share of equal elements."""
    return (one == other).double().mean().item()


def nncf_search(network: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Quantize a network with NNCF, with and without its accuracy control, and keep both models."""
    import nncf
    import openvino as ov

    torch.set_num_threads(arguments.threads)
    task, calls = Task.of(network, arguments), Counter()
    folder = arguments.folder
    begin = time.perf_counter()
    file = onnx_file(task.model, (task.calibration[:1],), folder)
    items = list(zip(task.validation.split(1), task.expected.tolist(), strict=True))

    def validate(compiled: Any, chosen: Any) -> tuple[float, list]:
        request, results, hits, listed = compiled.create_infer_request(), [], [], list(chosen)
        for start in range(0, len(listed), BATCH):
            images, expected = zip(*listed[start : start + BATCH], strict=True)
            found = request.infer([torch.cat(images).numpy()])[0].copy()
            hits += (found.argmax(1) == expected).astype(float).tolist()
            results += [[one] for one in np.split(found, len(found))]
        calls["images"] += len(hits)
        return sum(hits) / len(hits), results if arguments.logits else hits

    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([named_arrays((image,)) for image in task.calibration.split(1)])
    checked = nncf.Dataset(items, lambda item: named_arrays(item[:1]))
    options = {"subset_size": len(task.calibration)}
    source = ov.Core().read_model(file)
    source.reshape([-1, *task.calibration.shape[1:]])  # to validate in batches
    found = nncf.quantize_with_accuracy_control(source, data, checked, validate, max_drop=arguments.max_drop, **options)
    taken = time.perf_counter() - begin
    found.reshape([1, *task.calibration.shape[1:]])
    ov.save_model(found, folder / f"{network}.nncf.xml", compress_to_fp16=False)
    plain = nncf.quantize(ov.Core().read_model(file), data, **options)
    ov.save_model(plain, folder / f"{network}.nncf_int8.xml", compress_to_fp16=False)
    return {"seconds": taken, "evaluations": calls["images"] / len(items), "in_float": reverted(found, plain)}


def reverted(found: Any, plain: Any) -> int:
    """Return the number of operators with weights that one model of OpenVINO has in float and another in int8."""

    def quantized(model: Any) -> int:
        kinds = ("Convolution", "GroupConvolution", "MatMul")
        layers = (op for op in model.get_ops() if op.get_type_name() in kinds)
        return sum(op.input_value(0).get_node().get_type_name() == "FakeQuantize" for op in layers)

    return quantized(plain) - quantized(found)


def intaglio_search(network: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search with intaglio, and keep the model and the one that it starts from."""
    torch.set_num_threads(arguments.threads)
    task, calls = Task.of(network, arguments), Counter()

    def evaluate(model: Any) -> torch.Tensor:
        calls["all"] += 1
        return classes(model, task.validation) == task.expected

    begin = time.perf_counter()
    limits = {"max_drop": arguments.max_drop, "relative": False, "confidence": arguments.confidence}
    limits["evaluations"] = arguments.evaluations
    options = {"budget": arguments.minutes, "journal": arguments.folder / f"{network}.jsonl", "progress": False}
    data = [(part,) for part in task.calibration.split(64)]
    found = intaglio.search(task.model, data, evaluate, **limits, **options)
    taken = time.perf_counter() - begin
    found.model.save(arguments.folder / f"{network}.intaglio")
    intaglio.quantize(task.model, data, progress=False).save(arguments.folder / f"{network}.intaglio_int8")
    changes = dict(Counter(found.chosen.assignment.values()))
    return {"seconds": taken, "evaluations": calls["all"], "changes": changes, "reached": found.reached}


def loaded(engine: str, network: str, arguments: argparse.Namespace) -> Callable:
    """Return a function that runs a model of a search."""
    if engine.startswith("intaglio"):
        return intaglio.load(arguments.folder / f"{network}.{engine}")
    path = arguments.folder / f"{network}.{engine.removesuffix('_default')}.xml"
    return openvino_file_call(path, arguments.threads, None if engine.endswith("_default") else "f32")


def scores(network: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the scores of the models of all engines."""
    torch.set_num_threads(arguments.threads)
    task, results = Task.of(network, arguments), {}
    for engine in ("float", *ENGINES):
        run = task.model if engine == "float" else loaded(engine, network, arguments)
        found = classes(run, task.unseen, 1)
        results[engine] = {
            "validation": 100 * share(classes(run, task.validation, 1), task.expected),
            "agreement": 100 * share(found, task.unseen_classes),
            "top1": 100 * share(found, task.labels) if len(task.labels) else None,
        }
    return results


def serve(channel: Connection, engine: str, network: str, arguments: argparse.Namespace) -> None:
    """Run the process of one engine: time one block per request."""
    torch.set_num_threads(arguments.threads)
    run, image = loaded(engine, network, arguments), torch.randn(1, *networks.build(network, arguments.data)[1])
    channel.send((True, None))
    with torch.no_grad():
        while True:
            seconds = channel.recv()
            for _ in range(10):
                run(image)
            channel.send((True, race.block(lambda: run(image), seconds)))


def timed(network: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return times of all engines, which run in alternation."""
    quiet = record.idle()
    with contextlib.ExitStack() as stack:
        channels = {engine: stack.enter_context(fresh.opened(serve, engine, network, arguments)) for engine in ENGINES}
        for channel in channels.values():
            fresh.receive(channel)
        results: dict[str, dict[str, Any]] = {engine: {"blocks_ms": []} for engine in channels}
        for _ in range(arguments.rounds):
            for engine, channel in channels.items():
                time.sleep(race.PAUSE)
                channel.send(arguments.seconds)
                results[engine]["blocks_ms"].append(fresh.receive(channel))
    quiet = record.still_idle(quiet)
    for found in results.values():
        found |= {"best_ms": min(found["blocks_ms"]), "median_ms": statistics.median(found["blocks_ms"])}
    return {**results, "idle": quiet}


KEPT = {"nncf": nncf_search, "intaglio": intaglio_search, "scores": scores}
"""Steps whose figures a file keeps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of weights and images; see README.md")
    parser.add_argument("--folder", type=Path, required=True, help="for models and journals")
    parser.add_argument("--networks", default="cifar_resnet20,cifar_resnet56")
    parser.add_argument("--max-drop", type=float, default=0.005, help="accepted share of images with another class")
    parser.add_argument("--metric", choices=("labels", "classes"), default="classes", help="classes of the float model")
    parser.add_argument("--images", type=int, default=256, help="to calibrate on")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the search of intaglio")
    parser.add_argument("--validation", type=int, default=5000, help="images that the searches ask about")
    parser.add_argument("--unseen", type=int, default=5000, help="images to score")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each search of intaglio")
    parser.add_argument("--evaluations", type=int, default=24)
    parser.add_argument("--logits", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a block")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", default=STEPS)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for network in arguments.networks.split(","):
        searches = {}
        for step in KEPT:
            path = arguments.folder / f"{network}.{step}.json"
            if step in arguments.steps.split(",") and not path.exists():
                path.write_text(json.dumps(fresh.call(KEPT[step], network, arguments)), encoding="utf-8")
            searches[step] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            print(network, step, searches[step])
        if "times" in arguments.steps.split(","):
            found, engines = timed(network, arguments), searches.pop("scores")
            scored = {engine: found.get(engine, {}) | figures for engine, figures in engines.items()}
            results[network] = {"searches": searches, "idle": found["idle"], **scored}
            print(network, json.dumps(results[network], indent=1))
    if results:
        record.append("accuracy_aware", arguments, results)


if __name__ == "__main__":
    main()
