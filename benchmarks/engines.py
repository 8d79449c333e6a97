"""What is raced: ``engine(model, example, calibration, threads)`` gives a callable.

``example`` is a tuple of inputs whose shapes are those of every later call; ``calibration`` a list of such tuples.
Each engine is set up the way its own documentation tells a user to, with its defaults.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]
Run = Callable[..., torch.Tensor]


def eager(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """PyTorch as it is, float32."""
    return model


def inductor(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """torch.compile with weights frozen, float32."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return torch.compile(model)


def torchao(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """PT2E quantization for x86, lowered by torch.compile, int8."""
    import torch._inductor.config
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch._inductor.config.freezing = True
    chosen = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    last = tuple(channels_last(tensor) for tensor in example)
    observed = prepare_pt2e(torch.export.export(model, last).module(), chosen)
    for inputs in calibration:
        observed(*(channels_last(tensor) for tensor in inputs))
    converted = convert_pt2e(observed)
    move_exported_model_to_eval(converted)
    return torch.compile(converted)


def onnxruntime(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """ONNX Runtime, float32."""
    with tempfile.TemporaryDirectory() as folder:
        return onnxruntime_call(onnx_file(model, example, Path(folder)), threads)


def onnxruntime_int8(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """ONNX Runtime, static quantization to u8 activations and per-channel s8 weights in QDQ form."""
    with tempfile.TemporaryDirectory() as folder:
        return onnxruntime_call(onnxruntime_int8_file(model, example, calibration, Path(folder)), threads)


def onnxruntime_int8_file(model: nn.Module, example: Inputs, calibration: list[Inputs], folder: Path) -> Path:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Batches(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(calibration)

        def get_next(self) -> dict | None:
            inputs = next(self.left, None)
            return None if inputs is None else named(inputs)

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


def openvino(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """OpenVINO, float32."""
    import openvino as ov

    with tempfile.TemporaryDirectory() as folder:
        return openvino_call(ov.Core().read_model(onnx_file(model, example, Path(folder))), threads)


def openvino_int8(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """OpenVINO after NNCF's post-training quantization."""
    with tempfile.TemporaryDirectory() as folder:
        return openvino_call(openvino_int8_model(model, example, calibration, Path(folder)), threads)


def openvino_int8_default(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same with OpenVINO's default precision of float values, which is bfloat16 on processors that have it."""
    with tempfile.TemporaryDirectory() as folder:
        built = openvino_int8_model(model, example, calibration, Path(folder))
        return openvino_call(built, threads, precision=None)


def openvino_int8_model(model: nn.Module, example: Inputs, calibration: list[Inputs], folder: Path) -> Any:
    import nncf
    import openvino as ov

    nncf.set_log_level(logging.ERROR)
    source = ov.Core().read_model(onnx_file(model, example, folder))
    data = nncf.Dataset([named(inputs) for inputs in calibration])
    attention = any("ttention" in type(module).__name__ for module in model.modules())
    kind = nncf.ModelType.TRANSFORMER if attention else None
    return nncf.quantize(source, data, subset_size=len(calibration), model_type=kind)


def intaglio(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """intaglio.quantize."""
    import intaglio

    return intaglio.quantize(model, calibration, example_inputs=example)


def intaglio_precise(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same with functions behind layers in float32 instead of tables."""
    import intaglio

    recipe = intaglio.Recipe.from_toml('[default]\nfunctions = "precise"')
    return intaglio.quantize(model, calibration, example_inputs=example, recipe=recipe)


def intaglio_accurate(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same with shortcuts of 16 bits."""
    import intaglio

    return intaglio.quantize(model, calibration, example_inputs=example, recipe="accurate")


def intaglio_inductor(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """intaglio's reference model, compiled by TorchInductor."""
    from intaglio import stages

    return stages.compile(intaglio_reference(model, example, calibration), backend="inductor", example_inputs=example)


def intaglio_onnxruntime(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """intaglio's reference model, written as ONNX and run by ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        return onnxruntime_call(intaglio_onnx_file(model, example, calibration, Path(folder)), threads)


def intaglio_openvino(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> Run:
    """The same file, run by OpenVINO."""
    import openvino as ov

    with tempfile.TemporaryDirectory() as folder:
        file = intaglio_onnx_file(model, example, calibration, Path(folder))
        return openvino_call(ov.Core().read_model(file), threads)


def intaglio_onnx_file(model: nn.Module, example: Inputs, calibration: list[Inputs], folder: Path) -> Path:
    from intaglio import stages

    path = folder / "intaglio.onnx"
    stages.compile(intaglio_reference(model, example, calibration), backend="onnx", path=path)
    return path


def intaglio_reference(model: nn.Module, example: Inputs, calibration: list[Inputs]) -> Any:
    """With integer weights and quantize and dequantize, which every backend takes."""
    from intaglio import stages

    prepared = stages.prepare(stages.capture(model, example))
    return stages.convert(prepared, stages.calibrate(prepared, calibration))


ENGINES: dict[str, Callable[..., Run]] = {
    engine.__name__: engine
    for engine in (
        eager,
        inductor,
        torchao,
        onnxruntime,
        onnxruntime_int8,
        openvino,
        openvino_int8,
        openvino_int8_default,
        intaglio,
        intaglio_precise,
        intaglio_accurate,
        intaglio_inductor,
        intaglio_onnxruntime,
        intaglio_openvino,
    )
}


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def named(inputs: Inputs) -> dict:
    return {f"input{index}": tensor.numpy() for index, tensor in enumerate(inputs)}


def onnx_file(model: nn.Module, example: Inputs, folder: Path) -> Path:
    path = folder / "model.onnx"
    names = list(named(example))
    torch.onnx.export(model, example, path, input_names=names, dynamo=True, external_data=False, verbose=False)
    return path


def onnxruntime_call(path: Path, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    built = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in built.get_inputs()]
    return lambda *inputs: torch.from_numpy(
        built.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})[0]
    )


def openvino_options(threads: int, precision: str | None = "f32") -> dict[str, Any]:
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    return options if precision is None else {**options, "INFERENCE_PRECISION_HINT": precision}


def openvino_call(model: object, threads: int, precision: str | None = "f32") -> Run:
    import openvino as ov

    asked = ov.Core().compile_model(model, "CPU", openvino_options(threads, precision)).create_infer_request()
    return lambda *inputs: torch.from_numpy(asked.infer([tensor.numpy() for tensor in inputs])[0])
