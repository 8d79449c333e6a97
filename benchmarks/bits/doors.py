"""Digests of results, and texts, of one case, door by door."""

from __future__ import annotations

import hashlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bits import api, kernels
from bits.cases import CASES, Case
from bits.flows import FLOWS

NEEDS = {"amx_int8": "amx_int8", "avx512vnni": "avx512_vnni", "avx2": "avx2", "portable": "fpu"}
"""Instruction set -> a word in /proc/cpuinfo of processors that run it."""
Found = dict[str, Any]


def warm_up() -> None:
    """Quantize something small, so that processes which are forked afterwards need not import what that takes."""
    with torch.no_grad():
        case = Case(lambda: nn.Linear(4, 4), lambda batch: (torch.randn(batch, 4),))
        reference, _ = FLOWS[case.flow](case, case.net().eval(), [case.inputs(4)])
        api.public("requantize")(reference)


def record(name: str, flip: bool = False) -> tuple[str, Found, float]:
    """Return the name of a case, all that is recorded of it (digests, texts, kernels by name), and seconds of CPU."""
    found: Found = {}
    try:
        _record_case(found, CASES[name], flip)
    except Exception as error:
        traceback.print_exc()
        found["case"] = f"FAILED: {type(error).__name__}: {error}"
    return name, found, sum(os.times()[:4])


def _record_case(found: Found, case: Case, flip: bool) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = _random(case.net())
        if flip:  # to see the comparison fail
            next(model.parameters()).view(-1)[0].neg_()
        batches = [case.inputs(call) for call in case.calibration]
        calls = {call: case.inputs(call) for call in case.calls}
    with torch.set_grad_enabled(case.flow.startswith("trained")):
        reference, more = FLOWS[case.flow](case, model, batches)
    found |= {key: value if isinstance(value, str) else digest(value) for key, value in more.items()}
    with torch.no_grad():
        if reference is not None:
            _record_reference(found, case, reference, calls)
        for door in case.doors:
            _try(found, door, lambda door=door: DOORS[door](case, model, reference, batches, calls))


def digest(value: Any) -> str:
    """Return the SHA-256 of the bytes, shapes and types of every tensor in a nested result."""
    found = hashlib.sha256()
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            found.update(
                leaf.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:16]


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested mappings and sequences in order."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from leaves(value[key])
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part)
    else:
        yield torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def runnable() -> list[str]:
    """Return the instruction sets that this processor runs."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return [isa for isa, word in NEEDS.items() if word in words]


def _random(model: nn.Module) -> nn.Module:
    """Draw what fresh modules have as zeros and ones, so that folding it changes something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.6, 1.4)
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0, 0.1)
    return model.eval()


def _try(found: Found, key: str, door: Callable[[], Any]) -> Any:
    """Record what a door gives: a digest, or that it refuses. Other errors are recorded with their last line."""
    from intaglio.errors import IntaglioError

    try:
        result = door()
    except IntaglioError as error:
        found[key] = f"refused: {type(error).__name__}"
        return None
    except Exception as error:
        traceback.print_exc()
        found[key] = f"FAILED: {type(error).__name__}: {error}"
        return None
    if isinstance(result, dict):
        found |= {f"{key} {part}": value for part, value in result.items()}
    elif result is not None:
        found[key] = result
    return result


def _results(model: Callable[..., Any], calls: Mapping[int, tuple[Tensor, ...]]) -> str:
    """Return the digest of the results of all calls, in order; arguments are copied, for models that change them."""
    return digest([model(*[tensor.clone() for tensor in args]) for args in calls.values()])


def _record_reference(found: Found, case: Case, reference: Any, calls: Mapping[int, tuple[Tensor, ...]]) -> None:
    """Texts, the reference model, the interpreter, and every door of the native program."""
    found["parameters"] = reference.parameters.to_json()
    lowered = api.public("requantize")(reference)
    found["integer graph"] = lowered.text()
    models = {isa: api.public("compile")(api.public("requantize")(reference), isa=isa) for isa in runnable()}
    for isa, model in models.items():
        _try(found, isa, lambda model=model: _results(model, calls))
    first = next(iter(models.values()))
    found["constants"] = digest(first.state_dict()) if not case.options().get("int8_buffers") else "state"
    _try(found, "interpreter", lambda: _results(lowered, calls))
    _try(found, "reference", lambda: _results(reference, calls))
    _try(found, "file", lambda: _saved(reference, calls))
    if case.options().get("outputs") != "int8":
        _try(found, "c", lambda: _exported(first, calls))
    _try(found, "avx512vnni", lambda: _packed(first, "avx512vnni"))


def _saved(reference: Any, calls: Mapping[int, tuple[Tensor, ...]]) -> str:
    model = api.public("compile")(reference, isa=runnable()[0])
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model.intaglio"))
        return _results(api.public("load")(Path(folder, "model.intaglio")), calls)


def _exported(model: Any, calls: Mapping[int, tuple[Tensor, ...]]) -> Found:
    """Return what the exported program computes, on 2 threads, and the kernels in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.export_c(folder)
        objects = kernels.build(folder)
        results = []
        for args in calls.values():
            like = [leaf for leaf in leaves(model(*args)) if isinstance(leaf, Tensor)]
            results.append(kernels.run(folder, [tensor.contiguous() for tensor in args], like))
        return {"results": digest(results), "kernels": kernels.kernels(objects)}


def _packed(model: Any, isa: str) -> Found:
    """Return kernels and packed constants of an instruction set that need not run here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.export_c(folder, isa=isa)
        return {"kernels": kernels.kernels(kernels.build(folder, only_kernels=True)), "packed": kernels.weights(folder)}


def _quantize(case: Case, model: nn.Module, reference: Any, batches: Any, calls: Any) -> Found:
    """The whole way in one call, with corrections; its calls once more on 2 threads."""
    options = case.options()
    if case.flow == "dynamic":
        quantized = api.quantize(model, None, example_inputs=batches[0], **(options or {"recipe": "int8_dynamic"}))
    else:
        quantized = api.quantize(model, batches, **options)
    torch.set_num_threads(2)
    threads = _results(quantized, calls)
    torch.set_num_threads(1)
    return {"results": _results(quantized, calls), "2 threads": threads, "graph": quantized.text("integer")}


def _inductor(case: Case, model: nn.Module, reference: Any, batches: Any, calls: Any) -> str:
    number = case.calls[-1]
    return _results(api.inductor(reference, calls[number]), {number: calls[number]})


def _onnx(case: Case, model: nn.Module, reference: Any, batches: Any, calls: Any) -> str:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        api.onnx(reference, path := str(Path(folder, "model.onnx")))
        session = onnxruntime.InferenceSession(path, options)
        names = [given.name for given in session.get_inputs()]

        def run(*args: Tensor) -> list[np.ndarray]:
            return session.run(None, dict(zip(names, [tensor.numpy() for tensor in args], strict=True)))

        return _results(run, calls)


DOORS = {"quantize": _quantize, "inductor": _inductor, "onnx": _onnx}
