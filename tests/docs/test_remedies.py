"""Remedies of errors work: each one is provoked by a small case and then followed, which removes the error."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import intaglio
from intaglio import build, eager, patterns, stages
from intaglio.cli import engines
from intaglio.config import cache_limit_bytes
from intaglio.eager.recording.recorder import Recorder
from intaglio.errors import IntaglioError
from intaglio.native import cpu
from intaglio.output_paths import check_folder
from support.custom_operators import MIRROR_ADD, mirror_add, soft_sign
from support.nets import Body
from support.project_files import ROOT, syntax_nodes
from support.slow_params import slow_params

PACKAGE = ROOT / "src" / "intaglio"
TESTED_ELSEWHERE = ("mixed_precision", "quant", "tracing", "tune")
"""Packages whose remedies have cases in `test_search_remedies`, `test_quant_remedies`, `test_capture_remedies` and
`test_tune_remedies`."""
FOLLOWED_ELSEWHERE = {
    "quantize the model with batches of which one has padding": "integrations/test_source_padding.py",
    "copy the file again from its source, or save the model again": "runtime/test_damaged_files.py",
    "save the model with model.save(path) and load it": "runtime/test_files.py",
    "call the model outside of torch.func and of fake tensors": "runtime/test_traced_calls.py",
    "call the model with inputs that the float model accepts": "runtime/saved/test_forged_models.py",
    "rename the module or the input whose name has it": "test_named_files.py",
    "check the path: it must be a text file that you can read": "test_named_files.py",
    "use a loop with a fixed number of iterations": "tracing/loops/test_unroll_scans.py",
    "pass their records again: load(path, operators=[...])": "ops/test_host_operators.py",
    "return quantized values, quantize(...).astype(np.uint8)": "ops/test_host_operators.py",
    "install g++ or clang (Debian, Ubuntu: apt install g++)": "native/test_compile_cache.py",
    "install the Python package: pip install 'intaglio[compiler]'": "native/test_toolchain.py",
    "run chmod go-w on it": "native/test_cache_trust.py",
    "remove it if it is not yours": "native/test_cache_trust.py",
    "delete the file and run the program again": "native/test_cache_trust.py",
    "load the file without trust=True": "runtime/test_files.py",
    "leave the free size that it is computed from": "tracing/test_capture_remedies.py",
    "give OpDef(function=...) a function of (values, attrs)": "ops/test_host_operators.py",
    "quantize again with batches of such sizes": "tracing/test_size_conditions.py",
    "pass smaller batches, one after the other": "runtime/test_new_shapes.py",
    "pass larger inputs": "runtime/test_free_sizes.py",
    "load it into a model of the same float model and recipe": "runtime/test_copies.py",
    "calibrate with data like that of this call": "runtime/reports/test_clipping.py",
    "calibrate with data for which the model runs these operators": "eager/test_control_flow.py",
    "pass tensors to the model, or make them of numbers with torch.tensor": "eager/recording/test_numbers_of_python.py",
    "pass arguments by their names": "integrations/test_quantized_transformers.py",
    "leave it out, or quantize again with batches that have": "integrations/test_quantized_transformers.py",
    "call intaglio.integrations.transformers.from_pretrained(folder)": "integrations/test_quantized_transformers.py",
    "pass a folder that save_pretrained of an int8 model wrote": "integrations/test_quantized_transformers.py",
    "pass grid_thw of the same images": "integrations/test_vision_encoders.py",
    "pass integers of shape [images, 3]": "integrations/test_vision_encoders.py",
    "quantize its modules one by one": "integrations/test_quantized_sentence_transformers.py",
    "pass a list of sentences, or batches that preprocess": "integrations/test_quantized_sentence_transformers.py",
    "pass model_class= if it is a class of yours": "integrations/test_quantized_transformers.py",
    "leave dynamic_shapes out, or set model.config.use_cache": "integrations/test_quantized_generators.py",
    "set model.config.use_cache = False": "integrations/test_quantized_generators.py",
    "pass the positions of the tokens": "integrations/test_quantized_generators.py",
    "leave the part in float: quantize(..., skip=[{}])": "parts/test_partly_quantized.py",
    "export a folder for each kind of processor": "runtime/export/test_export_c.py",
    "pass what quantize, load or eager.convert returns": "reporting/test_collected_numbers.py",
    "leave samples out": "reporting/test_collected_numbers.py",
    "pass 0 to measure no times": "reporting/test_collected_numbers.py",
    "pass {}=1, or leave it out": "serving/test_pool.py",
    "pass a positive {}, or leave it out": "serving/test_pool.py",
    "pass 0 to try no changes": "reporting/test_collected_numbers.py",
    "write it again with this version: report.save_json(path)": "reporting/test_report_json.py",
    "nearest: {}": "reporting/test_explanation.py",
    "print model.text('operators') for all names": "reporting/test_explanation.py",
    "pass the float model that was quantized": "parts/test_partly_quantized.py",
    "pass a float model of the class and sizes that was quantized": "parts/test_partly_quantized.py",
    "call intaglio.load(path)": "parts/test_partly_quantized.py",
    "call intaglio.load_into(path, float_model)": "parts/test_partly_quantized.py",
    "add '": "integrations/test_quantized_generators.py",
    "quantize the model with intaglio.eager, which generates": "integrations/test_quantized_generators.py",
    "pass a mask of the whole sequence": "integrations/test_quantized_generators.py",
    "pass a mask of shape [batch, length]": "integrations/test_quantized_generators.py",
    "pass a mask with a row for every sample": "integrations/test_quantized_generators.py",
    "pass a tensor of shape [batch, length]": "integrations/test_quantized_generators.py",
    "pass the positions of the {} tokens": "integrations/test_quantized_generators.py",
    "pass tokens of every sample of the cache": "integrations/test_quantized_generators.py",
    "compute the loss from the logits": "integrations/test_quantized_transformers.py",
    "pass token_type_ids to the model": "integrations/test_token_blocks.py",
    "leave the cache and cache_implementation out": "integrations/test_quantized_generators.py",
    "pass the number of the last tokens, or a tensor of indices": "integrations/test_quantized_generators.py",
    "save a program of it: model.programs['decoder'].save(path)": "integrations/test_saved_generators.py",
    "begin with an empty cache: transformers.DynamicCache()": "integrations/test_int8_caches.py",
    "call the model with {}": "integrations/test_quantized_generators.py",
    "pass data: from_checkpoint(path, batches)": "checkpoints/test_folders.py",
    "get the file again: it is damaged": "checkpoints/test_folders.py",
    "if you trust it, write a safetensors file": "checkpoints/test_folders.py",
    "pass a folder with config.json and safetensors files, or a GGUF file": "checkpoints/test_folders.py",
    "quantize the float model: intaglio.quantize(model, data)": "checkpoints/test_folders.py",
    "fill a float model of your own: stages.with_weights": "checkpoints/test_gguf_config.py",
    "check that the configuration and the tensors belong together": "checkpoints/test_folders.py",
    "load the state into a model with the same modules": "eager/test_eager_state.py",
    "load a state dictionary that state_dict() of such a model returned": "eager/test_eager_state.py",
}
"""Beginnings of remedies that a test of the behaviour follows, with the file of that test."""
NOT_FOLLOWED = {
    "join its parts: llama-gguf-split --merge": "needs llama.cpp",
    "free some space": "needs a disk that is full",
    "load the file again; to replace it while it is in use": "needs a file that changes during a call",
    "save the model again with the installed version": "needs two versions of intaglio",
    "quantize the float model again with the installed version and save it": "needs two versions of intaglio",
    "load it with the version that saved it, or calibrate again": "needs two versions of intaglio",
    "install a newer version": "needs two versions of intaglio",
    "install the version of PyTorch that saved the file": "needs two versions of PyTorch",
    "install it with pip install 'intaglio[onnx]'": "needs a package registry",
    "install transformers": "needs a package registry",
    "install it with pip install 'intaglio[report]'": "needs a package registry",
    "install it with pip install 'intaglio[plot]'": "needs a package registry",
    "capture the model with an example of larger sizes": "capture refuses such sizes before lowering does",
    "do not use this model on this machine": "needs a machine that computes other bits",
    "save the model with model.save; intaglio.load opens such files on every machine": "needs two machines",
    "write a file with model.save_package('model.pt2')": "TorchInductor compiles for minutes",
    "compile with the native backend and save the model with model.save": "TorchInductor compiles for minutes",
    "leave it in float with skip=[": "TorchInductor compiles for minutes",
    "call the model once, or pass example_inputs= to compile": "TorchInductor compiles for minutes",
    "torch.set_num_threads(": "a line of `intaglio doctor`, not of an error",
}
"""Beginnings of remedies that are not followed here, with the reason; the list only shrinks."""
FEWEST_LETTERS = 10
"""Fewest letters before an inserted value by which a remedy is recognized."""

X = torch.randn(3, 4)
ONES = torch.ones(3, 4)
IMAGES = torch.randn(2, 3, 12, 12)


class Case(NamedTuple):
    """A remedy, a call that fails with it, and the call that follows it; both get an empty folder."""

    remedy: str
    provoke: Callable[[Path], Any]
    follow: Callable[[Path], Any]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.linear(x) * factor


class Selected(nn.Module):
    """The rows of a linear layer's result whose first element is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y[y[:, 0] > y[:, 0].mean()])


def eager_selected() -> torch.Tensor:
    prepared = intaglio.eager.prepare(Selected().eval(), X)
    prepared(X)
    return intaglio.eager.convert(prepared)(X)


class FirstOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        return self.linear(x[0] if isinstance(x, list) else x)


class ReadsData(nn.Module):
    """``.data`` of an activation cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.second(torch.relu(self.first(x)))
        return self.second(self.first(x).data * 2)


class Identity(nn.Module):
    """A model that another tool quantized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        given = (0.05, 128, 0, 255, torch.uint8)
        values = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *given), *given)
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(torch.relu(values), *given), *given)


class Branches(nn.Module):
    """A model whose operators depend on its input, so that it has a recording for each of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.sigmoid(y) if x.sum() > 0 else torch.relu(y) + 1


class CreatesModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.activation = nn.ReLU()
        return self.activation(self.linear(x))


@cache
def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def writing() -> stages.Captured:
    """Capture a model that writes to the first of two inputs."""
    model = Body(lambda m, x, y: (x.add_(1), m.linear(y))[1], linear=nn.Linear(4, 4))
    return stages.capture(model, (X.clone(), X.clone()))


@cache
def captured() -> stages.Captured:
    return stages.capture(linears(), X)


@cache
def scaled() -> stages.Captured:
    return stages.capture(Scaled(), (X, 2.0))


@cache
def windows() -> stages.Captured:
    """A convolution over images of any size that its window fits into."""
    sizes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    return stages.capture(nn.Sequential(nn.Conv2d(3, 4, 8)), IMAGES, dynamic_shapes=sizes)


@cache
def lowered() -> stages.Lowered:
    prepared = stages.prepare(captured())
    return stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [X])))


@cache
def compiled() -> intaglio.QuantizedModel:
    return stages.compile(lowered(), isa="portable")


@cache
def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()


@cache
def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches().eval()


def compiled_body(body: Callable[..., Any], *example: torch.Tensor, count: bool = False) -> intaglio.QuantizedModel:
    """Quantize and compile a function of a linear layer and tensors, with a buffer ``count`` if the model needs one."""
    model = Body(body, linear=nn.Linear(4, 4)).eval()
    model.register_buffer("offset", torch.full((4,), 2.0))
    if count:
        model.register_buffer("count", torch.zeros(4))
    return compiled_model(model, example)


def compiled_model(model: nn.Module, example: Any, **options: Any) -> intaglio.QuantizedModel:
    prepared = stages.prepare(stages.capture(model, example), **options)
    return stages.compile(
        stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [example]))), isa="portable"
    )


def reference_of(model: nn.Module) -> stages.Reference:
    prepared = stages.prepare(stages.capture(model, X))
    return stages.convert(prepared, stages.calibrate(prepared, [X]))


def counts_calls(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.linear(x) + m.count


def with_island(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a function that only PyTorch has between two layers."""
    return m.linear(torch.special.zeta(m.linear(x).abs() + 2, m.offset))


def with_changed_island(change: Callable[[torch.Tensor], torch.Tensor]) -> intaglio.QuantizedModel:
    model = compiled_body(with_island, X)
    for island in model.islands.values():
        for name, tensor in list(island.named_buffers()):
            setattr(island, name, change(tensor))
    return model


def with_custom_operator(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return soft_sign(m.linear(x))


def with_host_operator() -> intaglio.QuantizedModel:
    body = Body(lambda m, x: mirror_add(m.a(x), m.b(x), 0.5), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3))
    return compiled_model(body.eval(), IMAGES, quantizer=stages.Quantizer(operators=[MIRROR_ADD]))


def example_saved(model: intaglio.QuantizedModel, file: Path) -> Path:
    model.save(file, example=X)
    return file


def prepared_eagerly(
    model: nn.Module, calls: int = 1, inputs: tuple[torch.Tensor, ...] = (X,), skip: tuple[str, ...] = ()
) -> nn.Module:
    """Prepare a model with the first input, then call it with all of them, ``calls`` times."""
    prepared = eager.prepare(model, (inputs[0],), recipe=intaglio.Recipe().with_selection(skip=skip))
    for _ in range(calls):
        for x in inputs:
            prepared(x)
    return prepared


def state_of(model: nn.Module, **options: Any) -> dict[str, Any]:
    return prepared_eagerly(model, **options).state_dict()


def loaded_and_called(model: nn.Module, state: dict[str, Any], **options: Any) -> torch.Tensor:
    prepared = prepared_eagerly(model, **options)
    prepared.load_state_dict(state)
    return prepared(X)


def parameters_of_both_branches() -> Any:
    return eager.parameters(eager.convert(prepared_eagerly(branches(), inputs=(ONES, -ONES))))


def prepared_for_training() -> stages.PreparedQat:
    prepared = stages.prepare(stages.capture(linears(), X, train=True), qat=True)
    stages.calibrate(prepared, [X])
    return prepared


def with_own_forward() -> nn.Module:
    model = nn.Sequential(Scaled())
    model[0].forward = lambda x: x * 2
    return model


def without_own_forward() -> nn.Module:
    model = with_own_forward()
    del model[0].forward
    return model


def limit_with(value: str | None) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("INTAGLIO_CACHE_MB", raising=False)
        if value is not None:
            patch.setenv("INTAGLIO_CACHE_MB", value)
        return cache_limit_bytes()


def isas_on_a_plain_machine(*asked: str) -> tuple[str, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "isas", lambda: ("portable",))
        return build.isas_to_build(asked)


def touched(path: Path) -> Path:
    path.touch()
    return path


def torch_file(folder: Path) -> Path:
    torch.save({"x": X}, folder / "weights.pt")
    return folder / "weights.pt"


def each_form_of(reference: stages.Reference) -> None:
    stages.compile(reference, isa="portable")
    torch.jit.script(eager.scriptable(reference))
    torch.export.export(reference.as_module(), (X,))


def cyclic() -> list[Any]:
    found: list[Any] = [X]
    found.append(found)
    return found


def with_a_defect(model: nn.Module) -> nn.Module:
    """Prepare a model while recording is broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "record", lambda *_: None)
        return eager.prepare(model, X)


FAST = [
    Case(
        "nest lists and dictionaries less deeply, and none in itself",
        lambda _: stages.capture(linears(), (cyclic(),)),
        lambda _: stages.capture(linears(), (X,)),
    ),
    Case(
        "report this defect of intaglio with the traceback, and try intaglio.quantize(model, data)",
        lambda _: with_a_defect(linears()),
        lambda _: intaglio.quantize(linears(), [X], progress=False),
    ),
    Case(
        "pass a copy of one of them: tensor.clone()",
        lambda _: writing()((x := X.clone()), x),
        lambda _: writing()((x := X.clone()), x.clone()),
    ),
    Case(
        "did you mean 'skip'?",
        lambda _: intaglio.quantize(linears(), [X], skp="0"),
        lambda _: intaglio.Recipe().with_selection(skip="0"),
    ),
    Case(
        "check that model(*example_inputs, **example_kwargs) runs",
        lambda _: eager.prepare(linears(), X[:, :2]),
        lambda _: (linears()(X), eager.prepare(linears(), X)),
    ),
    Case(
        "convert the model and make a graph of it: reference = eager.rewrite(converted); compile(reference) for speed, "
        "eager.scriptable(reference) for TorchScript, reference.as_module() for torch.export",
        lambda _: torch.export.export(eager.convert(prepared_eagerly(linears())), (X,)),
        lambda _: each_form_of(eager.rewrite(eager.convert(prepared_eagerly(linears())))),
    ),
    Case(
        "call the prepared model with each batch: it collects its statistics itself",
        lambda _: stages.calibrate(prepared_eagerly(linears()), [X]),
        lambda _: eager.convert(prepared_eagerly(linears())),
    ),
    Case(
        "call eager.convert(prepared)",
        lambda _: stages.convert(prepared_eagerly(linears())),
        lambda _: eager.convert(prepared_eagerly(linears())),
    ),
    Case(
        "convert the model if it is only prepared, and take its graph: compile(eager.rewrite(converted))",
        lambda _: stages.compile(prepared_eagerly(linears())),
        lambda _: stages.compile(eager.rewrite(eager.convert(prepared_eagerly(linears())))),
    ),
    Case(
        "call it, or call eager.rewrite(converted) for its graph",
        lambda _: eager.convert(eager.convert(prepared_eagerly(linears()))),
        lambda _: (
            eager.convert(prepared_eagerly(linears()))(X),
            eager.rewrite(eager.convert(prepared_eagerly(linears()))),
        ),
    ),
    Case(
        "pass operators=[record, ...]",
        lambda folder: intaglio.load(folder / "nothing", operators=iter(["mirror_add"])),
        lambda _: stages.Quantizer(operators=[MIRROR_ADD]),
    ),
    Case(
        "pass numbers as parameters, or arrays that broadcast against the values",
        lambda _: patterns.quantize(np.ones((2, 3)), np.ones(2), 0, 0, 255),
        lambda _: patterns.quantize(np.ones((2, 3)), np.ones((2, 1)), 0, 0, 255),
    ),
    Case(
        "pass a share, such as macs=0.95",
        lambda _: compiled().assert_int8(macs=95),
        lambda _: compiled().assert_int8(macs=0.95),
    ),
    Case("leave calls out", lambda _: compiled().profile(X, calls=0), lambda _: compiled().profile(X)),
    Case(
        "quantize the model with intaglio.eager, which takes sizes as they come",
        lambda _: intaglio.quantize(Selected().eval(), [X], progress=False, strict=True),
        lambda _: eager_selected(),
    ),
    Case(
        "pass isa to plan(lowered, isa=...)",
        lambda _: stages.compile(stages.plan(lowered()), isa="portable"),
        lambda _: stages.plan(lowered(), isa="portable"),
    ),
    Case(
        "leave isa out for the best one of this machine",
        lambda _: stages.compile(lowered(), isa="sse9"),
        lambda _: stages.compile(lowered()),
    ),
    Case(
        "add one of those; the file of a model can hold libraries for several instruction sets",
        lambda _: isas_on_a_plain_machine("avx2"),
        lambda _: isas_on_a_plain_machine("avx2", "portable"),
    ),
    Case(
        "set it to a whole number, or unset it to use 1024",
        lambda _: limit_with("much"),
        lambda _: (limit_with("64"), limit_with(None)),
    ),
    Case(
        "call it with a few batches",
        lambda _: eager.convert(prepared_eagerly(linears(), calls=0)),
        lambda _: eager.convert(prepared_eagerly(linears())),
    ),
    Case(
        "call eager.convert(model) first",
        lambda _: eager.rewrite(prepared_eagerly(linears())),
        lambda _: eager.rewrite(eager.convert(prepared_eagerly(linears()))),
    ),
    Case(
        "call eager.prepare(model, example_inputs) first",
        lambda _: eager.convert(linears()),
        lambda _: eager.convert(prepared_eagerly(linears())),
    ),
    Case(
        "define forward in the class instead, or undo the wrapper",
        lambda _: prepared_eagerly(with_own_forward()),
        lambda _: prepared_eagerly(without_own_forward()),
    ),
    Case(
        "call the model as in calibration, or convert without strict=True",
        lambda _: eager.convert(prepared_eagerly(FirstOf()), strict=True)([X]),
        lambda _: (
            eager.convert(prepared_eagerly(FirstOf()), strict=True)(X),
            eager.convert(prepared_eagerly(FirstOf()))([X]),
        ),
    ),
    Case(
        "convert without strict=True to run these operators in float",
        lambda _: eager.convert(prepared_eagerly(ReadsData(), inputs=(ONES, -ONES)), strict=True),
        lambda _: eager.convert(prepared_eagerly(ReadsData(), inputs=(ONES, -ONES)))(-ONES),
    ),
    Case(
        "load the state into a prepared model, and convert that",
        lambda _: eager.convert(prepared_eagerly(linears())).load_state_dict(prepared_eagerly(linears()).state_dict()),
        lambda _: load_and_convert(),
    ),
    Case(
        "prepare and call the model as when the parameters were computed",
        lambda _: eager.convert(prepared_eagerly(branches(), inputs=(ONES,)), parameters_of_both_branches()),
        lambda _: eager.convert(prepared_eagerly(branches(), inputs=(ONES, -ONES)), parameters_of_both_branches()),
    ),
    Case(
        "prepare, convert and rewrite submodules",
        lambda _: eager.rewrite(eager.convert(prepared_eagerly(branches(), inputs=(ONES, -ONES)))),
        lambda _: eager.rewrite(eager.convert(prepared_eagerly(branches().linear, inputs=(ONES, -ONES)))),
    ),
    Case(
        "prepare the model with the same recipe",
        lambda _: loaded_and_called(three_layers(), state_of(three_layers(), skip=("0",))),
        lambda _: loaded_and_called(three_layers(), state_of(three_layers(), skip=("0",)), skip=("0",)),
    ),
    Case(
        "prepare the model with the same example inputs",
        lambda _: loaded_and_called(branches(), state_of(branches(), inputs=(ONES, -ONES)), inputs=(ONES,)),
        lambda _: loaded_and_called(branches(), state_of(branches(), inputs=(ONES, -ONES)), inputs=(ONES, -ONES)),
    ),
    Case(
        "create modules in __init__, and let forward choose between them",
        lambda _: prepared_eagerly(CreatesModules()),
        lambda _: prepared_eagerly(linears()),
    ),
    Case(
        "use data of tensors or tuples, or measure against eager and compile only",
        lambda folder: engines.ENGINES["onnxruntime"](linears(), ((), {"input": X}), 1, [], folder),
        lambda folder: engines.ENGINES["eager"](linears(), ((), {"input": X}), 1, [], folder)(((), {"input": X})),
    ),
    Case(
        "choose a file in an existing folder",
        lambda folder: intaglio.Recipe().save(folder / "missing" / "recipe.toml"),
        lambda folder: intaglio.Recipe().save(folder / "recipe.toml"),
    ),
    Case(
        "choose a folder that can be created",
        lambda folder: check_folder(touched(folder / "file") / "out"),
        lambda folder: check_folder(folder / "out"),
    ),
    Case(
        "pass a file that model.save wrote; open files of torch.save with torch.load",
        lambda folder: intaglio.load(torch_file(folder)),
        lambda folder: torch.load(torch_file(folder)),
    ),
    Case(
        "call the model with arguments of the same structure as the example inputs",
        lambda _: captured()(X, X),
        lambda _: captured()(X),
    ),
    Case(
        "quantize again with this value in the example inputs",
        lambda _: scaled()(X, 3.0),
        lambda _: stages.capture(Scaled(), (X, 3.0))(X, 3.0),
    ),
    Case(
        "pass a tensor of that shape, or quantize again",
        lambda _: captured()(X[None]),
        lambda _: (captured()(X), stages.capture(linears(), X[None])(X[None])),
    ),
    Case(
        "split, pad or crop the input to such a size",
        lambda _: windows()(IMAGES[:, :, :4, :4]),
        lambda _: windows()(torch.nn.functional.pad(IMAGES[:, :, :4, :4], (2, 2, 2, 2))),
    ),
    Case(
        "convert the array with torch.from_numpy",
        lambda _: captured()(X.numpy()),
        lambda _: captured()(torch.from_numpy(X.numpy())),
    ),
    Case(
        "convert it with .to(torch.float32)",
        lambda _: captured()(X.double()),
        lambda _: captured()(X.double().to(torch.float32)),
    ),
    Case(
        "convert it with .cpu(), .to_dense()",
        lambda _: captured()(X.to_sparse()),
        lambda _: captured()(X.to_sparse().to_dense()),
    ),
    Case(
        "call convert(prepared) without them",
        lambda _: stages.convert(prepared_for_training(), stages.Ranges({}, 0, 0, "")),
        lambda _: stages.convert(prepared_for_training()),
    ),
    Case(
        "call from_qdq(model, example_inputs)",
        lambda _: stages.from_qdq(Identity()),
        lambda _: stages.from_qdq(Identity(), X),
    ),
]
SLOW = [
    Case(
        "pass an iterable of batches",
        lambda _: intaglio.search(linears(), lambda model: model(X), lambda model: 1.0, example_inputs=X),
        lambda _: intaglio.search(linears(), [X], lambda model: 1.0, example_inputs=X),
    ),
    Case(
        "pass them to the quantizer: Quantizer(recipe, input)",
        lambda _: intaglio.quantize(linears(), [X], recipe="accurate", quantizer=stages.Quantizer()),
        lambda _: intaglio.quantize(linears(), [X], quantizer=stages.Quantizer(intaglio.Recipe.named("accurate"))),
    ),
    Case(
        "pass float_model=",
        lambda _: stages.compile(lowered(), on_new_shape="fallback"),
        lambda _: stages.compile(lowered(), on_new_shape="fallback", float_model=linears()),
    ),
    Case(
        "keep the int8 model on the CPU and in its data types",
        lambda _: compiled().half(),
        lambda _: compiled()(X.half().float()).half(),
    ),
    Case(
        "check the path and its permissions",
        lambda folder: intaglio.load(folder / "missing.int8"),
        lambda folder: intaglio.load(example_saved(compiled(), folder / "model.int8")),
    ),
    Case(
        "store one with model.save(path, example=x) and load the file",
        lambda _: compiled().verify(),
        lambda folder: intaglio.load(example_saved(compiled(), folder / "model.int8")).verify(),
    ),
    Case(
        "quantize a module that takes and returns only these",
        lambda folder: compiled_body(lambda m, x: {torch.int8: m.linear(x)}, X).save(folder / "model.int8"),
        lambda folder: compiled_body(lambda m, x: {"int8": m.linear(x)}, X).save(folder / "model.int8"),
    ),
    Case(
        "quantize only the part of the model without it",
        lambda folder: compiled_body(with_custom_operator, X).save(folder / "model.int8"),
        lambda folder: compiled_body(lambda m, x: m.linear(x), X).save(folder / "model.int8"),
    ),
    Case(
        "quantize only the part of the model without them",
        lambda folder: with_host_operator().export_c(folder / "out", isa="portable"),
        lambda folder: compiled_model(nn.Conv2d(3, 8, 3).eval(), IMAGES).export_c(folder / "out", isa="portable"),
    ),
    Case(
        "write them with operators of docs/reference/operators.md",
        lambda folder: compiled_body(with_island, X).export_c(folder / "out", isa="portable"),
        lambda folder: compiled_body(lambda m, x: m.linear(1 / m.linear(x).abs()), X).export_c(
            folder / "out", isa="portable"
        ),
    ),
    Case(
        "take the value as an input and return the new value as a result",
        lambda folder: compiled_body(counts_calls, X, count=True).export_c(folder / "out", isa="portable"),
        lambda folder: compiled_body(lambda m, x, n: (m.linear(x) + n + 1, n + 1), X, torch.zeros(4)).export_c(
            folder / "out", isa="portable"
        ),
    ),
    Case(
        "remove it from the results of the model",
        lambda folder: compiled_body(lambda m, x: (m.linear(x), x), X).export_c(folder / "out", isa="portable"),
        lambda folder: compiled_body(lambda m, x: m.linear(x), X).export_c(folder / "out", isa="portable"),
    ),
    Case(
        "do not change the data types of the float parts",
        lambda _: with_changed_island(torch.Tensor.double)(X),
        lambda _: with_changed_island(lambda tensor: tensor)(X),
    ),
    Case(
        "do not change or move the float parts",
        lambda _: with_changed_island(lambda tensor: tensor.expand(5, 3, 4))(X),
        lambda _: with_changed_island(lambda tensor: tensor)(X),
    ),
    Case(
        "pass path= to compile",
        lambda _: stages.compile(reference_of(linears()), backend="onnx"),
        lambda folder: stages.compile(reference_of(linears()), backend="onnx", path=folder / "model.onnx"),
    ),
    Case(
        "write this part of the model with other operators, or export the parts before and after it",
        lambda folder: stages.compile(
            reference_of(nn.Sequential(nn.Linear(4, 4), Body(lambda m, x: torch.special.zeta(x, x)))),
            backend="onnx",
            path=folder / "model.onnx",
        ),
        lambda folder: stages.compile(reference_of(nn.Linear(4, 4)), backend="onnx", path=folder / "model.onnx"),
    ),
]


def load_and_convert() -> nn.Module:
    prepared = prepared_eagerly(linears())
    prepared.load_state_dict(prepared_eagerly(linears()).state_dict())
    return eager.convert(prepared)


SEVERAL = (
    "quantize the model with intaglio.eager, which takes sizes as they come",
    "prepare and call the model as when the parameters were computed",
    "convert without strict=True to run these operators in float",
)
"""Remedies that take several models."""


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in FAST if case.remedy not in SEVERAL),
        *slow_params(
            *((case,) for case in FAST if case.remedy in SEVERAL), reason="captures or records several models"
        ),
    ],
    ids=lambda case: case.remedy,
)
def test_a_remedy_removes_the_error(case, tmp_path):
    follow(case, tmp_path)


@pytest.mark.slow(reason="compiles a model for each remedy")
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.remedy)
def test_a_remedy_that_compiles_removes_the_error(case, tmp_path):
    follow(case, tmp_path)


def follow(case: Case, folder: Path) -> None:
    with pytest.raises(IntaglioError) as raised:
        case.provoke(folder)
    assert raised.value.remedy.startswith(case.remedy)
    case.follow(folder)


def remedies() -> Iterator[tuple[str, str]]:
    """Yield the file and the text of each remedy, with ``{}`` for values that are inserted."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in TESTED_ELSEWHERE:
            continue
        texts = {}
        for node in syntax_nodes(path):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts.setdefault(node.targets[0].id, []).extend(plain_texts(node.value))
        found = [text for text in texts.get("remedy", []) if text]
        for node in syntax_nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                found += texts.get(node.value.id, []) if isinstance(node.value, ast.Name) else plain_texts(node.value)
        yield from ((str(path.relative_to(PACKAGE)), text) for text in dict.fromkeys(found))


def plain_texts(value: ast.expr) -> list[str]:
    """Return the text of a string, the texts of both branches of a conditional, and nothing for other expressions."""
    if isinstance(value, ast.IfExp):
        return plain_texts(value.body) + plain_texts(value.orelse)
    if isinstance(value, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in value.values)]
    return [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []


def is_covered(remedy: str, beginning: str) -> bool:
    """Return whether a remedy begins with a text, up to the first value that is inserted or with any value there."""
    fixed, _, after = remedy.partition("{}")
    with_any_value = ".+".join(map(re.escape, remedy.split("{}")))
    return (
        remedy.startswith(beginning)
        or (len(fixed) >= FEWEST_LETTERS and beginning.startswith(fixed))
        or (len(fixed + after) >= FEWEST_LETTERS and re.match(with_any_value, beginning) is not None)
    )


def test_each_remedy_is_followed_or_listed_with_a_reason():
    known = [*NOT_FOLLOWED, *FOLLOWED_ELSEWHERE, *(case.remedy for case in (*FAST, *SLOW))]
    missing = [f"{file}: {text}" for file, text in remedies() if not any(is_covered(text, one) for one in known)]
    assert not missing, "add a case that follows them:\n" + "\n".join(missing)


def test_the_list_of_remedies_that_are_not_followed_only_names_existing_ones():
    texts = [text for _, text in remedies()]
    listed = (*NOT_FOLLOWED, *FOLLOWED_ELSEWHERE)
    assert [one for one in listed if not any(is_covered(text, one) for text in texts)] == []


def test_no_case_follows_a_listed_remedy():
    assert not {case.remedy for case in (*FAST, *SLOW)} & {*NOT_FOLLOWED, *FOLLOWED_ELSEWHERE}


def test_files_of_tests_that_follow_remedies_exist():
    assert [file for file in FOLLOWED_ELSEWHERE.values() if not (ROOT / "tests" / file).exists()] == []
