"""Engines that run a model beside intaglio, each set up as its own documentation tells a user to, with its defaults.

An engine takes the float model, example inputs whose shapes are those of every later call, a list of such inputs for
calibration and the number of threads. It returns a function of the inputs that returns the first result.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]
PeerRun = Callable[..., torch.Tensor]


def torchao(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], threads: int) -> PeerRun:
    """Return PT2E quantization for x86, lowered by torch.compile, int8."""
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    chosen = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    last = tuple(channels_last(tensor) for tensor in example)
    observed = prepare_pt2e(torch.export.export(model, last).module(), chosen)
    for inputs in calibration:
        observed(*(channels_last(tensor) for tensor in inputs))
    converted = convert_pt2e(observed)
    move_exported_model_to_eval(converted)
    return compiled(converted, example, {})


def compiled(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a module compiled by torch.compile with frozen weights. It is called once, which compiles it."""
    import torch._inductor.config

    run = torch.compile(model)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        run(*args, **kwargs)
    return run


def onnxruntime(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], threads: int) -> PeerRun:
    """Return ONNX Runtime, float32."""
    with tempfile.TemporaryDirectory() as folder:
        return onnxruntime_call(onnx_file(model, example, Path(folder)), threads)


def onnxruntime_int8(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], threads: int) -> PeerRun:
    """Return ONNX Runtime, static quantization to u8 activations and per-channel s8 weights in QDQ form."""
    with tempfile.TemporaryDirectory() as folder:
        return onnxruntime_call(onnxruntime_int8_file(model, example, calibration, Path(folder)), threads)


def onnxruntime_int8_file(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], folder: Path) -> Path:
    """Write the ONNX file that ONNX Runtime quantizes, and return its path."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Batches(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            inputs = next(self.left, None)
            return None if inputs is None else named_arrays(inputs)

    source = onnx_file(model, example, folder)
    clean, target = source.with_name("clean.onnx"), source.with_name("int8.onnx")
    quant_pre_process(source, clean)
    quantization.quantize_static(
        clean,
        target,
        Batches(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return target


def openvino(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], threads: int) -> PeerRun:
    """Return OpenVINO, float32."""
    import openvino as ov

    with tempfile.TemporaryDirectory() as folder:
        return openvino_call(ov.Core().read_model(onnx_file(model, example, Path(folder))), threads)


def openvino_int8(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], threads: int) -> PeerRun:
    """Return OpenVINO after NNCF's post-training quantization, with float32 for float values."""
    with tempfile.TemporaryDirectory() as folder:
        return openvino_call(openvino_int8_model(model, example, calibration, Path(folder)), threads)


def openvino_int8_default(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], threads: int) -> PeerRun:
    """Return the same with OpenVINO's default type of float values, which is bfloat16 on processors that have it."""
    with tempfile.TemporaryDirectory() as folder:
        built = openvino_int8_model(model, example, calibration, Path(folder))
        return openvino_call(built, threads, precision=None)


def openvino_int8_model(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], folder: Path) -> Any:
    """Return the model of OpenVINO that NNCF quantizes."""
    import nncf
    import openvino as ov

    nncf.set_log_level(logging.ERROR)
    source = ov.Core().read_model(onnx_file(model, example, folder))
    data = nncf.Dataset([named_arrays(inputs) for inputs in calibration])
    attention = any("ttention" in type(module).__name__ for module in model.modules())
    kind = nncf.ModelType.TRANSFORMER if attention else None
    return nncf.quantize(source, data, subset_size=len(calibration), model_type=kind)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a batch of images in the memory format that convolutions of PyTorch prefer; other tensors unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def named_arrays(inputs: Inputs) -> dict[str, Any]:
    """Return the inputs as arrays by the names that `onnx_file` gives them."""
    return {f"input{index}": tensor.numpy() for index, tensor in enumerate(inputs)}


def onnx_file(model: nn.Module, example: Inputs, folder: Path) -> Path:
    """Write a model as ONNX with the shapes of the example, and return the path."""
    path = folder / "model.onnx"
    names = list(named_arrays(example))
    torch.onnx.export(model, example, path, input_names=names, dynamo=True, external_data=False, verbose=False)
    return path


def onnxruntime_call(path: Path, threads: int) -> PeerRun:
    """Return a function that runs an ONNX file in ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    built = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in built.get_inputs()]
    return lambda *inputs: torch.from_numpy(
        built.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})[0]
    )


def openvino_options(threads: int, precision: str | None = "f32") -> dict[str, Any]:
    """Return the options of OpenVINO for this number of threads and type of float values (``None``: its default)."""
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    return options if precision is None else {**options, "INFERENCE_PRECISION_HINT": precision}


def openvino_call(model: object, threads: int, precision: str | None = "f32") -> PeerRun:
    """Return a function that runs a model of OpenVINO."""
    import openvino as ov

    asked = ov.Core().compile_model(model, "CPU", openvino_options(threads, precision)).create_infer_request()
    return lambda *inputs: torch.from_numpy(asked.infer([tensor.numpy() for tensor in inputs])[0])


# -- engines that run a file -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFile:
    """An engine that runs a file, so that a process which only runs it does not need the float model.

    Attributes:
        file: name of the file within its folder.
        write: writes it, from the float model, example inputs, inputs for calibration and the folder.
        run: returns a function that runs it, from its path and the number of threads.
    """

    file: str
    write: Callable[[nn.Module, Inputs, Sequence[Inputs], Path], object]
    run: Callable[[Path, int], PeerRun]


def openvino_file_call(path: Path, threads: int, precision: str | None = "f32") -> PeerRun:
    """Return a function that runs a file of OpenVINO or an ONNX file in OpenVINO."""
    import openvino as ov

    return openvino_call(ov.Core().read_model(path), threads, precision)


def _float_file(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], folder: Path) -> object:
    return onnx_file(model, example, folder)


def _openvino_int8_file(model: nn.Module, example: Inputs, calibration: Sequence[Inputs], folder: Path) -> object:
    """Write the model that NNCF quantizes, with its float32 constants as they are."""
    import openvino as ov

    built = openvino_int8_model(model, example, calibration, folder)
    return ov.save_model(built, folder / "int8.xml", compress_to_fp16=False)


ONNXRUNTIME = EngineFile("model.onnx", _float_file, onnxruntime_call)
ONNXRUNTIME_INT8 = EngineFile("int8.onnx", onnxruntime_int8_file, onnxruntime_call)
OPENVINO = EngineFile("model.onnx", _float_file, openvino_file_call)
OPENVINO_INT8 = EngineFile("int8.xml", _openvino_int8_file, openvino_file_call)
OPENVINO_INT8_DEFAULT = EngineFile("int8.xml", _openvino_int8_file, partial(openvino_file_call, precision=None))
