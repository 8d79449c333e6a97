"""Every name of intaglio that the recording uses, looked up where this version has it.

The script runs against two versions, whose stages may live in different modules. Only public names are used.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

HOMES = ("intaglio.stages", "intaglio", "intaglio.patterns", "intaglio.annotation", "intaglio.calibration")
"""Modules that are asked for a name, in this order."""


def public(name: str) -> Any:
    """Return the function or class of this name from the first public module that has it."""
    for home in HOMES:
        try:
            found = getattr(import_module(home), name, None)
        except ModuleNotFoundError:
            continue
        if callable(found):
            return found
    raise LookupError(f"intaglio has no public name {name!r} in {', '.join(HOMES)}")


def quantizer(options: dict[str, Any]) -> Any:
    """Return a `Quantizer` of these options, or the annotator among them."""
    if "annotator" in options:
        return options["annotator"]()
    recipe = options.get("recipe")
    return public("Quantizer")(**{**options, "recipe": public("Recipe").given(recipe)})


def capture(model: Any, args: tuple[Any, ...], **options: Any) -> Any:
    return public("capture")(model, args, **options)


def quantize(model: Any, data: Any, **options: Any) -> Any:
    """Return the int8 model of the whole way in one call."""
    whole = import_module("intaglio").quantize
    known = signature(whole).parameters
    if "quantizer" in known and any(name not in known for name in options):
        example = {name: options.pop(name) for name in ("example_inputs",) if name in options}
        options = {"quantizer": quantizer(options), **example}
    return whole(model, data, **options)


def build(stage: Any, isa: str) -> Any:
    """Return the native program of a reference or an integer graph; `None` if this machine cannot run it."""
    from intaglio.errors import BuildError

    try:
        return public("compile")(stage, isa=isa)
    except BuildError as error:
        if "this machine" in str(error) or "processor" in str(error):
            return None
        raise


def inductor(reference: Any, args: tuple[Any, ...]) -> Any:
    return public("compile")(reference, backend="inductor", example_inputs=args)


def onnx(reference: Any, path: str) -> None:
    try:
        write = public("to_onnx")
    except LookupError:
        public("compile")(reference, backend="onnx", path=path)
    else:
        write(reference, path)
