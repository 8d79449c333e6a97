"""Engines that were raced once, for a part of the networks: ExecuTorch, MNN, ncnn, tract and zentorch.

They take and return what the engines of `engines.py` do. Their packages are in requirements-other.txt.
"""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ncnn_files import ranges_of, read_layers, write_int8
from torch import nn

from intaglio.peers.peer_engines import Inputs, PeerRun, onnx_file, onnxruntime_int8_file


def executorch(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """ExecuTorch with the XNNPACK delegate, int8 by XNNPACKQuantizer with weights per channel."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from executorch.exir import to_edge_transform_and_lower
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    chosen = xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))
    observed = prepare_pt2e(torch.export.export(model, example).module(), chosen)
    for inputs in calibration:
        observed(*inputs)
    exported = torch.export.export(convert_pt2e(observed), example)
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    portable_lib._unsafe_reset_threadpool(threads)
    data = program.buffer
    loaded = Runtime.get().load_program(data)
    method = loaded.load_method("forward")
    return lambda *inputs, alive=(data, loaded): method.execute(inputs)[0]  # the method reads the memory of both


def mnn(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """MNN with int8 weights, which are float during a call."""
    return mnn_call(model, example, {"backend": "CPU", "numThread": threads})


def mnn_dynamic(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """MNN with the same file and low memory, which quantizes activations during a call."""
    return mnn_call(model, example, {"backend": "CPU", "numThread": threads, "memory": "low"})


def mnn_int8(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """MNN with calibrated activations, for images. Of the methods of its package, KL and ADMM end the process; EMA is
    left, for batches of one image."""
    return mnn_call(model, example, {"backend": "CPU", "numThread": threads}, [inputs[0] for inputs in calibration])


def mnn_call(
    model: nn.Module, example: Inputs, settings: dict[str, Any], images: Sequence[torch.Tensor] = ()
) -> PeerRun:
    # The commands mnnconvert and mnnquant import a logger that installs a package by pip and reports their use, so
    # the functions behind them are called.
    import _tools
    import MNN

    with tempfile.TemporaryDirectory() as folder:
        source, target = onnx_file(model, example, Path(folder)), Path(folder) / "model.mnn"
        files = ["--modelFile", str(source), "--MNNModel", str(target)]
        bits = [] if images else ["--weightQuantBits", "8"]
        _tools.mnnconvert(["mnnconvert", "-f", "ONNX", *files, "--bizCode", "MNN", *bits])
        if images:
            settings_file, quantized = mnn_settings(torch.cat(list(images)), Path(folder)), target.with_suffix(".int8")
            _tools.mnnquant(["mnnquant", str(target), str(quantized), str(settings_file)])
            target = quantized
        manager = MNN.nn.create_runtime_manager((settings,))
        net = MNN.nn.load_module_from_file(str(target), [], [], runtime_manager=manager)

    def run(images: torch.Tensor) -> torch.Tensor:
        given = MNN.expr.placeholder(list(images.shape), MNN.expr.NCHW)
        given.write(images.numpy())
        found = net.forward([given])
        return torch.tensor((found[0] if isinstance(found, (list, tuple)) else found).read())

    return run


def mnn_settings(images: torch.Tensor, folder: Path) -> Path:
    """Write images [images, 3, height, width] as files of 8 bits, and the settings with which MNN calibrates."""
    from PIL import Image

    low, step = images.min().item(), (images.max() - images.min()).item() / 255
    (folder / "images").mkdir()
    for index, image in enumerate(((images - low) / step).round().byte().permute(0, 2, 3, 1)):
        Image.fromarray(image.numpy()).save(folder / "images" / f"{index}.png")
    height, width = images.shape[2:]
    settings = {"format": "RGB", "mean": [-low / step] * 3, "normal": [step] * 3, "width": width, "height": height}
    settings |= {"path": f"{folder / 'images'}/", "used_image_num": len(images), "batch_size": 1}
    settings |= {"feature_quantize_method": "EMA", "weight_quantize_method": "MAX_ABS"}
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    return file


def ncnn(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """ncnn, float32. Batch 1."""
    return ncnn_call(model, example, threads, [])


def ncnn_int8(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """ncnn with int8 convolutions and linear layers, written by `ncnn_files`. Batch 1."""
    return ncnn_call(model, example, threads, calibration)


def ncnn_call(model: nn.Module, example: Inputs, threads: int, calibration: list[Inputs]) -> PeerRun:
    import ncnn as library
    import pnnx

    def loaded(param: Path, weights: Path) -> Any:
        net = library.Net()
        net.opt.num_threads = threads
        net.load_param(str(param))
        net.load_model(str(weights))
        return net

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.jit.trace(model, example).save(str(folder / "model.pt"))
        shape = f"inputshape={list(example[0].shape)}".replace(" ", "")
        subprocess.run([pnnx.EXEC_PATH, "model.pt", shape, "fp16=0"], cwd=folder, check=True)
        net = loaded(folder / "model.ncnn.param", folder / "model.ncnn.bin")
        if calibration:
            head, layers = read_layers(folder / "model.ncnn.param")
            images = (library.Mat(image.numpy()) for inputs in calibration for image in inputs[0])
            net = loaded(*write_int8(folder, layers, head, ranges_of(net, layers, images)))

    def run(images: torch.Tensor) -> torch.Tensor:
        extractor = net.create_extractor()
        extractor.input("in0", library.Mat(images[0].numpy()))
        return torch.tensor(extractor.extract("out0")[1].numpy())[None]

    return run


def tract(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """tract with the file that ONNX Runtime quantizes. Its Python package has no setting for threads."""
    import tract as library

    with tempfile.TemporaryDirectory() as folder:
        file = onnxruntime_int8_file(model, example, calibration, Path(folder))
        built = library.onnx().load(str(file)).into_model().into_runnable()
    return lambda *inputs: torch.from_numpy(built.run([tensor.numpy() for tensor in inputs])[0].to_numpy())


class ZentorchLinear(nn.Module):
    """A linear layer with int8 weights per channel and inputs that are quantized per token during a call."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.zentorch.zentorch_dynamic_qlinear(x, self.weight, self.scale, self.bias)


def zentorch(model: nn.Module, example: Inputs, calibration: list[Inputs], threads: int) -> PeerRun:
    """zentorch with all linear layers in int8; it has no int8 convolutions. For processors of AMD.

    The backend compiles without frozen weights: with them the results of zentorch 2.13.0.2 are wrong (-3 dB).
    """
    importlib.import_module("zentorch")  # which registers operators and the backend
    int8 = copy.deepcopy(model)
    for name, layer in list(int8.named_modules()):
        if type(layer) is nn.Linear:  # nn.MultiheadAttention reads the float weight of its own kind of layer
            int8.set_submodule(name, ZentorchLinear(layer))
    run = torch.compile(int8, backend="zentorch")
    with torch.no_grad():
        run(*example)
    return run


OTHER_ENGINES = (executorch, mnn, mnn_dynamic, mnn_int8, ncnn, ncnn_int8, tract, zentorch)
