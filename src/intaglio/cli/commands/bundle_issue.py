"""`intaglio bundle-issue`: a zip file with what a maintainer needs to look at a problem, without weights."""

from __future__ import annotations

import io
import json
import os
import platform
import traceback
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import intaglio
from intaglio import stages
from intaglio.cli import targets
from intaglio.cli.commands import doctor
from intaglio.cli.show import Result, coverage_result
from intaglio.formatting.number_text import size_text
from intaglio.native.cpu import CPUINFO, read_flags
from intaglio.output_paths import check_file, read_text, replace_file

RELATED_PACKAGES = (
    *("intaglio", "torch", "numpy", "safetensors", "rich", "google-re2", "typer", "ziglang"),
    *("torchvision", "timm", "transformers", "sentence-transformers", "onnx", "onnxscript", "onnxruntime"),
)
"""Packages whose versions a problem may depend on."""
RELATED_VARIABLES = ("INTAGLIO_", "OMP_", "MKL_", "KMP_", "CXX", "TORCH_")
"""Beginnings of the names of environment variables that may change what happens."""
README = """This file was written by `intaglio bundle-issue`. It holds no weights, no data and no results.

doctor.json   what `intaglio doctor` found: processor, compiler, caches, measured rates, problems
versions.json versions of Python, the system and packages, and environment variables that matter
cpu.txt       features of the processor
error.txt     the error
model/        what is known about the model: coverage, and the texts of its stages with module names, source lines,
              shapes, scales and zero points

Look at the texts before you send them: names of modules, and lines and paths of source files, are yours.
"""


def run(out: Path, target: str | None, data: str | None, shapes: Sequence[str], error: Path | None) -> dict[str, Any]:
    """Write the file and return its contents' names and sizes for JSON."""
    check_file(out)
    texts = {
        "README.txt": README,
        "doctor.json": _as_json(doctor.run()),
        "versions.json": _as_json(_versions()),
        "cpu.txt": _cpu_features(),
    }
    said = ""
    if error is not None:
        texts["error.txt"] = read_text(error)
    if target is not None:
        found, failure, said = _attempted(target, data, shapes)
        texts.update({f"model/{name}": text for name, text in found.items()})
        if failure:
            texts["error.txt"] = "\n".join(filter(None, (texts.get("error.txt"), failure)))
    replace_file(out, lambda file: file.write(_zipped(texts)))
    return {
        "out": str(out),
        "bytes": out.expanduser().stat().st_size,
        "files": {name: len(text.encode(errors="replace")) for name, text in texts.items()},
        "error": said or None,
    }


def _versions() -> dict[str, Any]:
    """Return versions of Python, the system and packages, and environment variables."""
    installed = {}
    for name in RELATED_PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(RELATED_VARIABLES)}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": installed,
        "environment": settings,
    }


def _cpu_features() -> str:
    """Return the flags of the processor, one a line."""
    try:
        return "\n".join(sorted(read_flags(CPUINFO.read_text()))) + "\n"
    except OSError as problem:
        return f"not known: {problem}\n"


def _attempted(target: str, data: str | None, shapes: Sequence[str]) -> tuple[dict[str, str], str, str]:
    """Return the texts of a model by file name, and traceback and message if something failed."""
    texts: dict[str, str] = {}
    try:
        model = targets.load_saved(target)
        if model is None:
            model = _quantized(target, data, shapes, texts)
        texts["coverage.json"] = _as_json(coverage_result(model.coverage))
        texts.update({f"{stage}.txt": model.text(stage) for stage in model.model_info.texts})
        if model.example is not None:
            model.verify()
    except Exception as error:  # whatever it is, it is what the file is written for
        return texts, traceback.format_exc(), f"{type(error).__name__}: {error}".splitlines()[0]
    return texts, "", ""


def _quantized(target: str, data: str | None, shapes: Sequence[str], texts: dict[str, str]) -> intaglio.QuantizedModel:
    """Quantize a float model step by step, and add the text of every stage that is reached."""
    model = targets.float_model(target)
    (args, kwargs), batches = targets.call_and_batches(model, data, shapes)
    captured = stages.capture(model, args, example_kwargs=kwargs)
    texts["captured.txt"] = captured.text()
    prepared = stages.prepare(captured)
    texts["sites.txt"] = prepared.annotations.text()
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, batches)))
    texts["integer.txt"] = lowered.text()
    return stages.compile(lowered)


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _zipped(texts: Mapping[str, str]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text.encode(errors="replace"))
    return memory.getvalue()


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    yield f"{result['out']} ({size_text(result['bytes'])}) holds {', '.join(result['files'])}, and no weights"
    if result["error"]:
        yield f"error: {result['error']}"
    yield "Look at the texts before you send it: names of modules, and lines and paths of source files, are yours."
