"""Engines of the race of decoders. Each has a file of a network, and computes a text and then one token at a time.

``prepare(model, bits, path)`` writes the file of an engine, which is not timed. ``load(network, path, threads)`` gives
an object whose ``text(ids)`` forgets all tokens before and whose ``step(ids)`` continues with one token; both return
the logits of the last token. If it has ``program_step``, that is a step without the Python code around it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from decoder_networks import NEW, PAST, SIZES, PlainDecoder, causal_mask
from torch import Tensor


class Session(Protocol):
    def text(self, ids: Tensor) -> Tensor: ...

    def step(self, ids: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Engine:
    """The functions that prepare and load an engine, and the bits that its weights take.

    Attributes:
        file: ending of the name of what ``prepare`` writes; engines that share it share the file.
        scales: bits that scales add to a weight of 4 bits and of 8 bits.
        output: bits of a weight of the output layer if the others have 4 bits, when these are more.
    """

    file: str
    prepare: Callable[[Any, int, Path], None]
    load: Callable[[str, Path, int], Session]
    scales: tuple[float, float]
    output: float | None = None

    def bytes_of_a_step(self, bits: int, weights: dict[str, int]) -> float:
        """Return the bytes of the weights that a step reads, for the numbers of `weights_of_a_step`."""
        width = bits + self.scales[bits == 8]
        output = self.output if bits == 4 and self.output else width
        return (weights["layers"] * width + weights["output"] * output) / 8


# -- intaglio ---------------------------------------------------------------------------------------------------------

NEAREST = {"equalize": 0.0, "rounding": "nearest", "rotate": False}
"""Corrections of weights, which change no time, are off: the weights of all engines are rounded to the nearest."""
INT4 = {"weights_dtype": "s4", "weights": "group:32"}


def prepare_intaglio(model: Any, bits: int, path: Path) -> None:
    """Quantize as the recipes "w4a8" and "w8a8_dynamic" with a cache of 8 bits do."""
    import intaglio

    linear = {**NEAREST, "activations": "token", **(INT4 if bits == 4 else {})}
    torch.manual_seed(1)
    data = [{"input_ids": torch.randint(3, 1000, (2, 32))} for _ in range(2)]
    recipe = {"*": {**NEAREST, "cache": "int8"}, "type:Linear": linear}
    intaglio.quantize(model, data, recipe=recipe, progress=False).save(path)


class Intaglio:
    """Calls forward, as `generate` does."""

    def __init__(self, network: str, path: Path, threads: int) -> None:
        import intaglio

        self.model = intaglio.load(path, trust=True)
        self.cache: Any = None
        self.past: list[tuple[Tensor, Tensor]] = []

    def text(self, ids: Tensor) -> Tensor:
        logits = self.keep(self.model(ids, logits_to_keep=1))
        self.past = [(layer.keys, layer.values) for layer in self.cache.layers]
        return logits

    def step(self, ids: Tensor) -> Tensor:
        return self.keep(self.model(ids, past_key_values=self.cache, logits_to_keep=1))

    def keep(self, found: Any) -> Tensor:
        self.cache = found.get("cache", found.get("past_key_values"))
        return found.logits[:, -1]

    def program_step(self, ids: Tensor) -> Tensor:
        """Call the program of the decoder with the text as its past, to which nothing is appended."""
        before = self.past[0][0].shape[2]
        inputs = {
            "tokens": ids,
            "mask": torch.ones(1, 1, dtype=torch.long),
            "past_mask": torch.ones(1, before, dtype=torch.long),
            "positions": torch.tensor([[before]]),
            "kept": torch.tensor([0]),
        }
        return self.model.programs["decoder"](inputs, self.past)[0]


# -- llama.cpp --------------------------------------------------------------------------------------------------------


def prepare_llama_cpp(model: Any, bits: int, path: Path) -> None:
    """Quantize as llama-quantize does. With 4 bits the output layer then has 6."""
    quantize_gguf(model, bits, path, pure=False)


def prepare_llama_cpp_pure(model: Any, bits: int, path: Path) -> None:
    """The same with --pure: the output layer has the bits of all others."""
    quantize_gguf(model, bits, path, pure=True)


def quantize_gguf(model: Any, bits: int, path: Path, pure: bool) -> None:
    from decoder_files import write_gguf
    from llama_cpp import llama_cpp as library

    source = path.with_suffix(".f16.gguf")
    write_gguf(model, source)
    settings = library.llama_model_quantize_default_params()
    settings.ftype = library.LLAMA_FTYPE_MOSTLY_Q4_0 if bits == 4 else library.LLAMA_FTYPE_MOSTLY_Q8_0
    settings.pure = pure
    failed = library.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(settings))
    source.unlink()
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")


class LlamaCpp:
    """Calls llama_decode of a build for this processor, with the settings of llama-bench."""

    def __init__(self, network: str, path: Path, threads: int, flash: bool = True) -> None:
        from llama_cpp import llama_cpp as library

        self.library, self.vocabulary = library, SIZES[network][1]["vocab_size"]
        library.llama_backend_init()
        model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        settings = library.llama_context_default_params()
        settings.n_ctx = PAST + NEW
        settings.n_threads = settings.n_threads_batch = threads
        if not flash:
            settings.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = library.llama_init_from_model(model, settings)

    def text(self, ids: Tensor) -> Tensor:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        return self.step(ids)

    def step(self, ids: Tensor) -> Tensor:
        given = (ctypes.c_int32 * ids.numel())(*ids[0].tolist())
        if failed := self.library.llama_decode(self.context, self.library.llama_batch_get_one(given, ids.numel())):
            raise RuntimeError(f"llama_decode returned {failed}")
        logits = self.library.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (1, self.vocabulary)).copy())


def llama_cpp_without_flash(network: str, path: Path, threads: int) -> Session:
    """Return the same with attention as matrix products."""
    return LlamaCpp(network, path, threads, flash=False)


def llama_cpp_vnni(network: str, path: Path, threads: int) -> Session:
    """Return the same with the build in the folder LLAMA_CPP_VNNI, which has AVX512-VNNI and no AMX."""
    os.environ["LLAMA_CPP_LIB_PATH"] = os.environ["LLAMA_CPP_VNNI"]
    return LlamaCpp(network, path, threads)


# -- ONNX Runtime -----------------------------------------------------------------------------------------------------


def prepare_onnxruntime(model: Any, bits: int, path: Path) -> None:
    from decoder_files import write_onnx

    write_onnx(model, bits, path)


class OnnxRuntime:
    """Keys and values stay in one memory, to which the operator of attention appends."""

    def __init__(self, network: str, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.binding, self.length = self.session.io_binding(), 0
        for given in self.session.get_inputs():
            if given.name.startswith("past"):
                room = np.zeros((1, given.shape[1], PAST + NEW, given.shape[3]), np.float32)
                memory = onnxruntime.OrtValue.ortvalue_from_numpy(room)
                self.binding.bind_ortvalue_input(given.name, memory)
                self.binding.bind_ortvalue_output(given.name.replace("past", "present"), memory)

    def text(self, ids: Tensor) -> Tensor:
        self.length = 0
        return self.step(ids)

    def step(self, ids: Tensor) -> Tensor:
        self.length += ids.shape[1]
        self.binding.bind_cpu_input("ids", ids.numpy())
        self.binding.bind_cpu_input("lengths", np.array([self.length - 1], np.int32))
        self.binding.bind_cpu_input("total", np.array([self.length], np.int32))
        self.binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(self.binding)
        return torch.from_numpy(self.binding.get_outputs()[-1].numpy()[:, -1])


# -- OpenVINO ---------------------------------------------------------------------------------------------------------


def prepare_openvino(group: int) -> Callable[[Any, int, Path], None]:
    """Return the preparation with weights in groups of ``group``; int8 weights have one scale for each output."""

    def prepare(model: Any, bits: int, path: Path) -> None:
        import nncf
        import openvino

        converted = stateful(model)
        if bits == 4:
            mode = nncf.CompressWeightsMode.INT4_SYM
            compressed = nncf.compress_weights(converted, mode=mode, group_size=group, ratio=1.0, all_layers=True)
        else:
            compressed = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
        openvino.save_model(compressed, path)

    return prepare


def stateful(model: Any) -> Any:
    """Return a model of OpenVINO that keeps keys and values, with the inputs that those of optimum-intel have."""
    import openvino
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    plain, config = PlainDecoder(model), model.config
    past = [torch.zeros(1, config.num_key_value_heads, 3, plain.layers[0].size)] * (2 * config.num_hidden_layers)
    example = (torch.ones(1, 2, dtype=torch.long), causal_mask(2, 3), torch.arange(3, 5)[None], *past)
    with torch.no_grad():
        converted = openvino.convert_model(torch.jit.trace(plain, example, check_trace=False), example_input=example)
    names = ["ids", "mask", "positions", *(f"past.{index}" for index in range(len(past)))]
    for given, name in zip(converted.inputs, names, strict=True):
        given.get_tensor().set_names({name})
    shapes = {"ids": [1, -1], "mask": [1, 1, -1, -1], "positions": [1, -1]}
    shapes |= {name: [1, past[0].shape[1], -1, past[0].shape[3]] for name in names[3:]}
    converted.reshape({given: openvino.PartialShape(shapes[given.get_any_name()]) for given in converted.inputs})
    for index, result in enumerate(converted.outputs):
        result.get_tensor().set_names({f"present.{index - 1}" if index else "logits"})
    beams = opset13.parameter([1], np.int32, name="beams")
    beams.output(0).get_tensor().set_names({"beams"})
    converted.add_parameters([beams])
    for given in converted.inputs:
        if given.get_any_name().startswith("past."):
            readers = given.get_target_inputs()
            gathered = opset13.gather(given, beams, opset13.constant(0))
            for reader in readers:
                reader.replace_source_output(gathered.output(0))
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, {name: name.replace("past", "present") for name in names[3:]})
    empty = opset13.constant(np.zeros((1, past[0].shape[1], 0, past[0].shape[3]), np.float32))
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    converted.validate_nodes_and_infer_types()
    return converted


def openvino(settings: dict[str, Any]) -> Callable[[str, Path, int], Session]:
    """Return what loads a file with these settings of OpenVINO besides threads."""
    return lambda network, path, threads: OpenVino(path, {**settings, "INFERENCE_NUM_THREADS": threads})


class OpenVino:
    """Calls an infer request with a state."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import openvino

        compiled = openvino.Core().compile_model(path, "CPU", {"PERFORMANCE_HINT": "LATENCY", **settings})
        self.request, self.length = compiled.create_infer_request(), 0
        self.beams = np.zeros(1, np.int32)

    def text(self, ids: Tensor) -> Tensor:
        self.request.reset_state()
        self.length = 0
        return self.step(ids)

    def step(self, ids: Tensor) -> Tensor:
        new = ids.shape[1]
        mask = causal_mask(new, self.length).numpy()
        positions = np.arange(self.length, self.length + new)[None]
        self.length += new
        given = {"ids": ids.numpy(), "mask": mask, "positions": positions, "beams": self.beams}
        found = self.request.infer(given, share_inputs=True)
        return torch.from_numpy(found["logits"][:, -1].copy())


# -- PyTorch, zentorch, AutoRound -------------------------------------------------------------------------------------


def prepare_torch(model: Any, bits: int, path: Path) -> None:
    """Write the number of bits: the model is quantized and compiled when it is loaded."""
    path.write_text(str(bits))


def compiled(name: str) -> Callable[[str, Path, int], Session]:
    """Return what loads a model whose linear layers have these kernels of `decoder_torch`."""

    def load(network: str, path: Path, threads: int) -> Session:
        from decoder_torch import Compiled

        return Compiled(network, int(path.read_text()), name)

    return load


Q6_K = 6.5625
"""Bits of a weight in the format that llama-quantize chooses for the output layer."""
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}
ENGINES: dict[str, Engine] = {
    "intaglio": Engine("intaglio", prepare_intaglio, Intaglio, (0.125, 0)),
    "llama_cpp": Engine("gguf", prepare_llama_cpp, LlamaCpp, (0.5, 0.5), Q6_K),
    "llama_cpp_pure": Engine("pure.gguf", prepare_llama_cpp_pure, LlamaCpp, (0.5, 0.5)),
    "llama_cpp_pure_no_flash": Engine("pure.gguf", prepare_llama_cpp_pure, llama_cpp_without_flash, (0.5, 0.5)),
    "llama_cpp_vnni": Engine("pure.gguf", prepare_llama_cpp_pure, llama_cpp_vnni, (0.5, 0.5)),
    "onnxruntime": Engine("onnx", prepare_onnxruntime, OnnxRuntime, (1, 1)),
    "openvino_32": Engine("g32.xml", prepare_openvino(32), openvino({}), (0.5, 0)),
    "openvino_32_float32": Engine("g32.xml", prepare_openvino(32), openvino(FLOAT32), (0.5, 0)),
    "openvino_128": Engine("g128.xml", prepare_openvino(128), openvino({}), (0.125, 0)),
    "openvino_128_float32": Engine("g128.xml", prepare_openvino(128), openvino(FLOAT32), (0.125, 0)),
    "torch": Engine("torch", prepare_torch, compiled("torch"), (1, 0)),
    "zentorch": Engine("torch", prepare_torch, compiled("zentorch"), (0.5, 0)),
    "zentorch_dynamic": Engine("torch", prepare_torch, compiled("zentorch_dynamic"), (0.5, 0)),
    "autoround": Engine("torch", prepare_torch, compiled("autoround"), (1, 1)),
}
