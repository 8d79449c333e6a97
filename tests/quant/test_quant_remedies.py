"""Every remedy of an error of `intaglio.quant` is provoked by a small model, and then followed: the error is gone."""

import functools
import json
from collections.abc import Callable

import numpy as np
import pytest
import re2
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.annotation import (
    Annotation,
    Composed,
    CustomObserver,
    Fixed,
    Observed,
    QuantizedAs,
    SameAs,
    X86Quantizer,
    annotate_node,
    annotation_of,
    get_symmetric_quantization_config,
)
from intaglio.calibration import CalibrationCallback, DatasetManager
from intaglio.errors import IntaglioError
from intaglio.fxgraph.nodes import operator
from intaglio.ir import QParams
from intaglio.patterns import OpDef, QuantizerPattern, Roles, builtin, op, wildcard
from intaglio.stages import Parameters, Quantizer, Ranges
from support import nets
from support.annotators import Shifted
from support.nets import Body
from support.qat_models import trainable

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 6, 6, generator=DRAW)
NAN = X.clone().index_fill(0, torch.tensor(0), float("nan"))
IMAGE = intaglio.Image(mean=0.5, std=0.5)


def conv(inputs: int = 3, outputs: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Requested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = conv()

    def forward(self, request):
        return self.a(request["pixels"])


# Models that several rows use are captured once.


@functools.cache
def captured(kind: str = "two") -> stages.Captured:
    two = {"a": conv(), "b": conv()}
    bodies = {
        "two": lambda: (Body(lambda m, x: m.b(F.relu(m.a(x))), **two), (X,)),
        "one": lambda: (Body(lambda m, x: F.relu(m.a(x)), a=conv()), (X,)),
        "sum": lambda: (Body(lambda m, x: m.a(x) + x, a=conv()), (X,)),
        "inputs": lambda: (Body(lambda m, x, y: m.a(x) + m.b(y), **two), (X, X)),
        "vectors": lambda: (nn.Linear(8, 4), (torch.randn(2, 8, generator=DRAW),)),
        "doubles": lambda: (conv().double(), (X.double(),)),
        "sample": lambda: (conv(), (X[0],)),
        "nothing": lambda: (nn.Hardshrink(), (X,)),
        "transposed": lambda: (nn.ConvTranspose2d(4, 4, 3), (torch.randn(2, 4, 6, 6, generator=DRAW),)),
        "buffers": lambda: (Averages(), (X,)),
    }
    model, example = bodies[kind]()
    return stages.capture(nets.randomize(model).eval(), example)


class Averages(nn.Module):
    """A mean and a count as buffers that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = conv()
        self.register_buffer("mean", torch.zeros(2, 3, 6, 6))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(self.a(x) * 0.5)
        self.count.add_(1)
        return self.a(self.mean)


def prepared(kind: str = "two", quantizer: object = None) -> stages.Prepared:
    return stages.prepare(captured(kind), quantizer)


def recipe(default: dict | None = None, **entries: object) -> Quantizer:
    """A quantizer by a recipe: default settings, and settings of modules."""
    return Quantizer(intaglio.Recipe.of({**({"*": default} if default else {}), **entries}))


def recipe_without(selector: str) -> Quantizer:
    return Quantizer(intaglio.Recipe().with_selection(skip=selector))


def calibrated(data: object, kind: str = "two", quantizer: object = None, **options: object) -> Ranges:
    return stages.calibrate(prepared(kind, quantizer), data, progress=False, **options)


def reference(kind: str = "two", quantizer: object = None, data: object = None) -> stages.Reference:
    """The stage after one batch of calibration."""
    stage, example = prepared(kind, quantizer), data
    if example is None:
        example = [captured(kind).signature and EXAMPLES.get(kind, (X,))]
    return stages.convert(stage, stages.calibrate(stage, example, progress=False))


EXAMPLES = {
    "inputs": (X, X),
    "vectors": (torch.randn(2, 8, generator=DRAW),),
    "transposed": (torch.randn(2, 4, 6, 6, generator=DRAW),),
}


@functools.cache
def plain() -> stages.Reference:
    return reference()


@functools.cache
def plain_ranges() -> Ranges:
    return calibrated([X])


class Chooses(CalibrationCallback):
    """Returns the parameters that a function finds for the region."""

    def __init__(self, found: Callable) -> None:
        self.found = found

    def calibrate(self, info):
        return self.found(info)


def chosen(found: Callable, **options: object) -> Ranges:
    patterns = builtin("conv2d", calibration=Chooses(found))
    return calibrated([X], "one", Quantizer(patterns=patterns, **options))


class By:
    """An annotator from a table: operator -> function of a node that gives its annotation; ``specs`` if it is given."""

    def __init__(self, specs: Callable | None = None, **rules: Callable) -> None:
        self.rules = rules
        if specs is not None:
            self.specs = specs

    def annotate(self, module):
        for node in module.graph.nodes:
            for name, rule in self.rules.items():
                if operator(node).split(".")[1:2] == [name] and (made := rule(node)) is not None:
                    annotate_node(node, made)


def layer(node) -> Annotation:
    return Annotation({node.args[0]: QuantizedAs(), node.args[1]: QuantizedAs("s8")}, QuantizedAs())


def layer_once(node) -> Annotation | None:
    return layer(node) if annotation_of(node) is None else None


class Forgets(Shifted):
    def convert(self, module, node):
        pass


def observed_by(kind: type) -> By:
    return By(conv2d=lambda node: Annotation({node.args[0]: CustomObserver(kind), node.args[1]: QuantizedAs("s8")}))


def seen(stage: stages.Prepared) -> stages.Reference:
    stage(X)
    return stages.convert(stage)


def of_text(text: str, change: tuple[str, str], read: Callable) -> object:
    return read(text.replace(*change))


CALIBRATION = {
    "data that cannot be iterated": (lambda: calibrated(3), "pass a list of batches", lambda: calibrated([X])),
    "an empty iterator": (
        lambda: calibrated(iter(())),
        "pass a list or a DataLoader",
        lambda: calibrated([X]),
    ),
    "texts as batches": (
        lambda: calibrated(["text"]),
        "give batches that are tensors, tuples of tensors, dictionaries, or (inputs, label) pairs",
        lambda: [calibrated([batch]) for batch in (X, (X,), (X, torch.tensor([1, 0])))],
    ),
    "unknown keys": (
        lambda: calibrated([{"pixels": torch.ones(2, 8)}], "vectors"),
        "name the keys after the parameters of forward",
        lambda: calibrated([{"input": torch.ones(2, 8)}], "vectors"),
    ),
    "a dictionary that forward takes itself": (
        lambda: intaglio.quantize(Requested(), [{"pixels": X}]),
        "is the dictionary itself, make the batch a tuple with it: (batch,)",
        lambda: intaglio.quantize(Requested(), [({"pixels": X},)]),
    ),
    "empty batches": (
        lambda: calibrated([X[:0]]),
        "give batches whose first axis is not empty",
        lambda: calibrated([X]),
    ),
    "values that are not finite": (
        lambda: calibrated([NAN]),
        "or ignore them: stages.calibrate(..., nonfinite='ignore')",
        lambda: calibrated([NAN], nonfinite="ignore"),
    ),
    "an observer with a scale per channel": (
        lambda: seen(prepared("one", By(conv2d=lambda n: observing(n, 3)))),
        "use an observer with a single scale",
        lambda: seen(prepared("one", By(conv2d=lambda n: observing(n, 1)))),
    ),
    "a function as data of callbacks": (
        lambda: calibrated(
            lambda run: run(X), "one", Quantizer(patterns=builtin("conv2d", calibration=CHOOSES_NOTHING))
        ),
        "pass an iterable of batches",
        lambda: chosen(lambda info: {}),
    ),
    "a callback that names another site": (
        lambda: chosen(lambda info: {"elsewhere": (0.0, 1.0)}),
        "return parameters for #0/input",
        lambda: chosen(lambda info: {info.sites.inputs[0]: (0.0, 1.0)}),
    ),
    "a callback with another range of integers": (
        lambda: chosen(lambda info: {info.sites.inputs[0]: QParams((1.0,), (0,), -128, 127)}),
        "return a pair of scale and zero point in 0..255",
        lambda: chosen(lambda info: {info.sites.inputs[0]: (1.0, 128)}),
    ),
    "ranges without those of a callback": (
        lambda: seen(prepared("one", Quantizer(patterns=builtin("conv2d", calibration=CHOOSES_NOTHING)))),
        "call ranges = intaglio.stages.calibrate(prepared, data), then convert(prepared, ranges)",
        lambda: reference("one", Quantizer(patterns=builtin("conv2d", calibration=CHOOSES_NOTHING))),
    ),
    "an observer that has seen no data": (
        lambda: stages.convert(prepared("one", observed_by(Shifted)), plain_of("one", observed_by(Shifted))),
        "run prepared(batch) or calibrate first",
        lambda: seen(prepared("one", observed_by(Shifted))),
    ),
    "an observer that leaves its node": (
        lambda: seen(prepared("one", observed_by(Forgets))),
        "call node.replace_all_uses_with(...), then module.graph.erase_node(node)",
        lambda: seen(prepared("one", observed_by(Shifted))),
    ),
    "a model with nothing to quantize": (
        lambda: prepared("nothing"),
        "that the model has convolutions or linear layers with float32 weights",
        lambda: prepared("one"),
    ),
    "a model of doubles": (
        lambda: prepared("doubles"),
        "convert the model with model.float(), and the data with .to(torch.float32)",
        lambda: stages.prepare(stages.capture(conv().double().float().eval(), X.double().to(torch.float32))),
    ),
    "samples without a batch axis": (
        lambda: prepared("sample"),
        "pass batches, of a data set for example with torch.utils.data.DataLoader(data, batch_size=8)",
        lambda: intaglio.quantize(conv().eval(), torch.utils.data.DataLoader(list(X), batch_size=2)),
    ),
    "no data": (
        lambda: stages.convert(prepared()),
        "calibrate(prepared, data), or run prepared(batch)",
        lambda: [seen(prepared()), reference()],
    ),
    "ranges of another model": (
        lambda: stages.convert(prepared("sum"), plain_ranges()),
        "use the model and the recipe that they were made with, or calibrate(prepared, data) again",
        lambda: [stages.convert(prepared(), plain_ranges()), reference("sum")],
    ),
    "ranges of two models": (
        lambda: calibrated([X], "sum").merge(plain_ranges()),
        "merge ranges of the same model, prepared with the same recipe",
        lambda: calibrated([X]).merge(plain_ranges()),
    ),
    "merged parameters of callbacks": (
        lambda: (lambda ranges: ranges.merge(ranges))(chosen(lambda info: {info.sites.inputs[0]: (0.0, 1.0)})),
        "calibrate with all batches in one call",
        lambda: calibrated([X, X], "one", Quantizer(patterns=builtin("conv2d", calibration=CHOOSES_NOTHING))),
    ),
    "ranges of another version": (
        lambda: of_text(plain_ranges().to_json(), ('"version": 2', '"version": 1'), Ranges.from_json),
        "calibrate again, and save the ranges with this version",
        lambda: Ranges.from_json(calibrated([X]).to_json()),
    ),
    "no file of ranges": (lambda: Ranges.merge_files([]), "pass one path or more", None),
    "a callback that returns nothing": (
        lambda: chosen(lambda info: None),
        "return {} to choose nothing, or parameters by name for #0/input.args_0, a.weight",
        lambda: [chosen(lambda info: {}), chosen(lambda info: {"a.weight": (0.1, 0)})],
    ),
    "a zero point that is a float": (
        lambda: chosen(lambda info: {info.sites.inputs[0]: (np.float32(0.02), np.round(127.6))}),
        "return (scale, zero point) with an integer zero point, int(zero_point), or (low, high) with low at most 0",
        lambda: [
            chosen(lambda info: {info.sites.inputs[0]: (np.float32(0.02), int(np.round(127.6)))}),
            chosen(lambda info: {info.sites.inputs[0]: (0.0, 128.0)}),
        ],
    ),
    "scales of other channels": (
        lambda: chosen(lambda info: {info.sites.weight: (np.full(5, 0.1), 0)}),
        "return one scale, or one for each channel",
        lambda: [chosen(lambda info, n=n: {info.sites.weight: (np.full(n, 0.1), 0)}) for n in (1, 3)],
    ),
    "a callback without its method": (
        lambda: calibrated([X], "one", Quantizer(patterns=builtin("conv2d", calibration=OfTheDocument()))),
        "define calibrate(self, info), which returns a dictionary from site name to parameters",
        lambda: chosen(lambda info: {}),
    ),
}


class OfTheDocument(CalibrationCallback):
    """A callback with the method name of another framework."""

    def calibrate_pattern(self, info):
        return {}


def observing(node, scales: int) -> Annotation:
    return Annotation(
        {node.args[0]: QuantizedAs(spec=Observed(observer=lambda: Counts(scales))), node.args[1]: QuantizedAs("s8")}
    )


class Counts(nn.Module):
    """An observer of a user's own, with one scale or several."""

    def __init__(self, scales: int) -> None:
        super().__init__()
        self.scales = scales

    def forward(self, x):
        return x

    def calculate_qparams(self):
        return torch.full((self.scales,), 0.1), torch.zeros(self.scales, dtype=torch.int64)


CHOOSES_NOTHING = Chooses(lambda info: {})


def plain_of(kind: str, quantizer: object) -> Ranges:
    return Ranges.from_json(calibrated([X], kind, quantizer).to_json())


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class OnlyBatches(DatasetManager):
    """A subclass with one of its methods only."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def get_next_batch(self):
        return next(self.batches)


class AllMethods(OnlyBatches):
    """A subclass with all of its methods."""

    def reset(self):
        self.left = 1

    def is_empty(self):
        return not self.left

    def num_batches(self):
        return 1

    def get_next_batch(self):
        self.left = 0
        return X


DATASETS = {
    "a function that returns nothing": (
        lambda: list(DatasetManager(lambda: None)),
        "return an iterable of batches",
        lambda: list(DatasetManager(lambda: iter([X]))),
    ),
    "a nested tensor": (
        lambda: DatasetManager(ragged()),
        "convert it with .cpu(), .to_dense() or torch.nested.to_padded_tensor",
        lambda: list(DatasetManager(torch.nested.to_padded_tensor(ragged(), 0.0))),
    ),
    "a subclass without methods that are needed": (
        lambda: calibrated(OnlyBatches([X])),
        "define get_next_batch, num_batches, is_empty and reset, or call super().__init__(data)",
        lambda: calibrated(AllMethods([])),
    ),
    "an object that is no data": (
        lambda: DatasetManager(3),
        "pass an array, a tensor, an iterable of batches, a data set, or a function that returns one",
        lambda: [list(DatasetManager(data)) for data in (np.ones((2, 3)), X, [X], lambda: iter([X]))],
    ),
    "the size of batches that exist": (
        lambda: DatasetManager([X], batch_size=2),
        "leave batch_size out, or pass one array or tensor",
        lambda: [DatasetManager([X]), DatasetManager(X, batch_size=2)],
    ),
    "an iterator that is read twice": (
        lambda: twice(DatasetManager(iter([X]))),
        "pass a list, a DataLoader, or a function that returns an iterator: DatasetManager(lambda: ...)",
        lambda: [twice(DatasetManager([X])), twice(DatasetManager(lambda: iter([X])))],
    ),
    "a column that does not exist": (
        lambda: list(DatasetManager({"pixels": X}, columns=["image"])),
        "choose columns from pixels",
        lambda: list(DatasetManager({"pixels": X}, columns=["pixels"])),
    ),
    "a column of objects": (
        lambda: list(DatasetManager({"pixels": X, "tags": [["a"], object()]})),
        "choose other columns=[...], or convert and pad the data before",
        lambda: list(DatasetManager({"pixels": X, "tags": [["a"], object()]}, columns=["pixels"])),
    ),
}


def twice(data: DatasetManager) -> None:
    for _ in range(2):
        list(data)


PARAMETERS = {
    "a zero point of a file that is a float": (
        lambda: plain().parameters.changed("#0/relu.0", scale=0.02, zero_point=128.0),
        "write the entry as reference.parameters.save(path) does, such as scale 0.02 and zero_point 128",
        lambda: plain().parameters.changed("#0/relu.0", scale=0.02, zero_point=128),
    ),
    "a site that does not exist": (
        lambda: plain().parameters.changed("nothing", scale=0.1),
        "choose from #0/input",
        lambda: plain().parameters.changed("#0/input.args_0", scale=0.1),
    ),
    "parameters of another model": (
        lambda: stages.convert(prepared("sum"), plain().parameters),
        "use the model and the recipe that they were saved with",
        lambda: stages.convert(prepared(), plain().parameters),
    ),
    "parameters of another datatype": (
        lambda: stages.convert(prepared("two", recipe({"activations_dtype": "u7"})), plain().parameters),
        "change the recipe's weights, weights_dtype or activations_dtype",
        lambda: stages.convert(prepared("two", recipe({"activations_dtype": "u8"})), plain().parameters),
    ),
    "parameters of another version": (
        lambda: of_text(plain().parameters.to_json(), ('"version": 1', '"version": 9'), Parameters.from_json),
        "save reference.parameters with this version",
        lambda: Parameters.from_json(plain().parameters.to_json()),
    ),
    "corrections of another model": (
        lambda: stages.convert(prepared("sum"), calibrated([X], "sum"), corrections("two")),
        "correct(prepared, ranges, data)",
        lambda: stages.convert(prepared("sum"), calibrated([X], "sum"), corrections("sum")),
    ),
    "corrections of weights that do not exist": (
        lambda: stages.convert(prepared(), with_section("biases", {"nothing": ["0x1p0"]})),
        "use the model and the recipe that they were saved with",
        lambda: stages.convert(prepared(), plain().parameters),
    ),
    "int8 results of 16 bits": (
        lambda: seen(prepared("one", Quantizer(annotator=By(conv2d=wide, relu=wide_result), outputs="int8"))),
        "leave out outputs='int8'",
        lambda: seen(prepared("one", Quantizer(annotator=By(conv2d=wide, relu=wide_result)))),
    ),
    "a weight that is not finite": (
        lambda: of_weight(float("nan")),
        "leave it in float: skip=['a']",
        lambda: of_weight(float("nan"), skip=["a"]),
    ),
    "groups of s8 weights": (
        lambda: reference("vectors", recipe({"weights": "group:4", "weights_dtype": "s8"})),
        'set weights = "channel"',
        lambda: reference("vectors", recipe({"weights": "channel", "weights_dtype": "s8"})),
    ),
    "groups of a transposed convolution": (
        lambda: reference("transposed", recipe({"weights": "group:4", "weights_dtype": "s4"})),
        'set weights = "channel"',
        lambda: reference("transposed", recipe({"weights": "channel", "weights_dtype": "s4"})),
    ),
    "float16 weights of int8 activations": (
        lambda: reference("vectors", recipe({"weights_dtype": "f16"})),
        'set activations = "float"',
        lambda: reference("vectors", recipe({"weights_dtype": "f16", "activations": "float"})),
    ),
    "weights of float8 only": (
        lambda: reference("vectors", recipe({"weights_dtype": "f8e4m3", "activations": "float"})),
        'set weights_dtype = "f16"',
        lambda: reference("vectors", recipe({"weights_dtype": "f16", "activations": "float"})),
    ),
    "a model that is already equalized": (
        lambda: stages.equalize(equalized(), [X]),
        "start again from prepare(captured)",
        lambda: equalized(),
    ),
}


def wide(node) -> Annotation:
    return Annotation({node.args[0]: QuantizedAs(), node.args[1]: QuantizedAs("s8")})


def wide_result(node) -> Annotation:
    return Annotation(output=QuantizedAs("s16"))


def corrections(kind: str):
    stage = prepared(kind)
    return stages.correct(stage, stages.calibrate(stage, [X], progress=False), [X])


def with_section(name: str, content: dict) -> Parameters:
    return Parameters.from_json(json.dumps({**json.loads(plain().parameters.to_json()), name: content}))


def of_weight(value: float, skip: tuple = ()) -> stages.Reference:
    model = nets.randomize(Body(lambda m, x: m.b(m.a(x)), a=conv(), b=conv())).eval()
    with torch.no_grad():
        model.a.weight[0, 0, 0, 0] = value
    stage = stages.prepare(stages.capture(model, X), Quantizer(intaglio.Recipe().with_selection(skip=list(skip))))
    ranges = plain_ranges_of(stage)
    return stages.convert(stage, ranges)


def plain_ranges_of(stage: stages.Prepared) -> Ranges:
    for observer in stage.observers.values():
        observer(X)
    return Ranges({name: observer.statistics for name, observer in stage.observers.items()}, 1, 2)


def equalized() -> stages.Prepared:
    return stages.equalize(prepared(), [X])


RECIPES = {
    "a selector that is no string": (
        lambda: intaglio.Recipe().with_selection(skip=iter([None])),
        "pass strings such as 'layer1.*' or 'type:Linear'",
        lambda: intaglio.Recipe().with_selection(skip=["layer1.*", "type:Linear"]),
    ),
    "a number as a recipe": (
        lambda: intaglio.Recipe.of(7),
        "write {'layer1.*': {'bits': 7}, 'head': None}",
        lambda: intaglio.Recipe.of({"layer1.*": {"bits": 7}, "head": None}),
    ),
    "a number as settings": (
        lambda: intaglio.Recipe.of({"a": 7}),
        "write settings such as {'bits': 7}",
        lambda: intaglio.Recipe.of({"a": {"bits": 7}}),
    ),
    "a backreference": (
        lambda: prepared("two", recipe_without(r"re:(a)\1")),
        "select what it matches by several selectors: skip=['layer1.*', 're:layer[23]']",
        lambda: prepared("two", recipe_without("a")),
    ),
    "an open bracket": (
        lambda: prepared("two", recipe_without("re:(a")),
        "write \\ before signs that are part of a name",
        lambda: re2.compile(r"\(a"),
    ),
    "a number as a pattern": (
        lambda: Quantizer(patterns=iter([5])),
        "pass patterns as builtin(...) returns them",
        lambda: Quantizer(patterns=iter([builtin("conv2d"), builtin("dense")])),
    ),
    "pixels of other channels": (
        lambda: intaglio.Image((0.5, 0.5), 0.5).normalize(X),
        "pass a tensor [n, c, h, w] of as many channels",
        lambda: intaglio.Image((0.5, 0.5), 0.5).normalize(X[:, :2]),
    ),
    "an image without channels": (
        lambda: IMAGE.pixels(0),
        "pass the number of channels of the input",
        lambda: IMAGE.pixels(3),
    ),
    "an image with a deviation of zero": (
        lambda: intaglio.Image(std=0.0),
        "give one number, or one number per channel",
        lambda: [intaglio.Image(std=0.5), intaglio.Image(std=(0.1, 0.2, 0.3))],
    ),
    "an image with a mean of bytes": (
        lambda: intaglio.Image(mean=127.5),
        "give mean and std of pixels that were divided by 255",
        lambda: intaglio.Image(mean=127.5 / 255),
    ),
    "an image with too few means": (
        lambda: prepared("one", Quantizer(input=intaglio.Image(mean=(0.5, 0.5)))),
        "give one number, or one number per channel",
        lambda: prepared("one", Quantizer(input=intaglio.Image(mean=(0.5, 0.5, 0.5)))),
    ),
    "an image that is a vector": (
        lambda: prepared("vectors", Quantizer(input=IMAGE)),
        "do not declare this input as an Image",
        lambda: prepared("vectors"),
    ),
    "one image for two inputs": (
        lambda: prepared("inputs", Quantizer(input=IMAGE)),
        "name the input: input={'args_0': image}",
        lambda: prepared("inputs", Quantizer(input={"args_0": IMAGE})),
    ),
    "an image for an unknown input": (
        lambda: prepared("inputs", Quantizer(input={"xx": IMAGE})),
        "nearest: args_0",
        lambda: prepared("inputs", Quantizer(input={"args_0": IMAGE})),
    ),
    "an unknown buffer": (
        lambda: prepared("buffers", Quantizer(int8_buffers="means")),
        "choose from mean, count",
        lambda: prepared("buffers", Quantizer(int8_buffers="mean")),
    ),
    "a buffer where there is none": (
        lambda: prepared("one", Quantizer(int8_buffers="mean")),
        "leave out int8_buffers",
        lambda: prepared("one"),
    ),
    "a buffer of integers": (
        lambda: prepared("buffers", Quantizer(int8_buffers=("mean", "count"))),
        "remove it from int8_buffers",
        lambda: prepared("buffers", Quantizer(int8_buffers=("mean",))),
    ),
    "a buffer of 16 bits": (
        lambda: prepared("buffers", buffer_of_16_bits(("mean",))),
        "remove the buffer from int8_buffers",
        lambda: prepared("buffers", buffer_of_16_bits(())),
    ),
    "a selector that matches nothing": (
        lambda: prepared("two", recipe(**{"type:Conv": None})),
        "nearest: type:Conv2d",
        lambda: prepared("two", recipe({"bits": 8}, **{"type:Conv2d": {"bits": 7}})),
    ),
    "an unknown key": (
        lambda: recipe({"weight_dtype": "s4"}),
        "did you mean 'weights_dtype'?",
        lambda: recipe({"weights_dtype": "s4"}),
    ),
    "bits and a datatype": (
        lambda: recipe({"bits": 7, "activations_dtype": "s16"}),
        "leave one of them out",
        lambda: [recipe({"bits": 7}), recipe({"activations_dtype": "s16"})],
    ),
    "an annotator and patterns": (
        lambda: Quantizer(annotator=By(conv2d=layer), patterns=["conv2d"]),
        "leave these out",
        lambda: Quantizer(annotator=By(conv2d=layer)),
    ),
    "an unknown built-in pattern": (
        lambda: builtin("conv2"),
        "nearest: conv2d",
        lambda: builtin("conv2d"),
    ),
    "two patterns of one name": (
        lambda: prepared("one", patterns(QuantizerPattern("mine", op("conv2d")), QuantizerPattern("mine", op("relu")))),
        "give each pattern a name of its own",
        lambda: prepared("one", patterns(QuantizerPattern("mine", op("conv2d")), QuantizerPattern("other", op("add")))),
    ),
    "a pattern without a root": (
        lambda: prepared("one", patterns(QuantizerPattern("mine", wildcard()))),
        "begin with op(...)",
        lambda: prepared("one", patterns(QuantizerPattern("mine", op("conv2d")))),
    ),
    "an unknown operator": (
        lambda: prepared("one", patterns(QuantizerPattern("mine", op("conv2")))),
        "nearest: conv2d",
        lambda: prepared("one", patterns(QuantizerPattern("mine", op("conv2d")))),
    ),
    "leaves of other names": (
        lambda: prepared("one", patterns(swish("y"))),
        "name the leaves after the operands of the operator: wildcard('x')",
        lambda: prepared("one", patterns(swish("x"), "conv2d")),
    ),
    "a module without operators": (
        lambda: prepared("one", x86("b")),
        "give a path of model.named_modules()",
        lambda: prepared("one", x86("a")),
    ),
}


def patterns(*given: object) -> Quantizer:
    return Quantizer(patterns=given)


def swish(leaf: str) -> QuantizerPattern:
    record = OpDef(
        "swish_of_remedies", roles=Roles(x=(0,)), operands=("x",), function=F.silu, reference=lambda call, x: x
    )
    return QuantizerPattern("swish", op("clamp", wildcard(leaf)), operator=record)


def x86(name: str) -> X86Quantizer:
    return X86Quantizer().set_module_name(name, get_symmetric_quantization_config())


def buffer_of_16_bits(buffers: tuple) -> Quantizer:
    annotator = By(
        conv2d=lambda n: Annotation({n.args[0]: QuantizedAs(), n.args[1]: QuantizedAs("s8")}), mul=wide_result
    )
    return Quantizer(annotator=annotator, int8_buffers=buffers)


ANNOTATIONS = {
    "a list of annotations": (
        lambda: Annotation([QuantizedAs()]),
        "pass inputs={node.args[0]: QuantizedAs()}",
        lambda: prepared(
            "one",
            By(conv2d=lambda node: Annotation(inputs={node.args[0]: QuantizedAs(), node.args[1]: QuantizedAs("s8")})),
        ),
    ),
    "a node that is annotated twice": (
        lambda: prepared("one", Composed([By(conv2d=layer), By(conv2d=layer)])),
        "annotate a node only if annotation_of(node) is None",
        lambda: prepared("one", Composed([By(conv2d=layer), By(conv2d=layer_once)])),
    ),
    "shared with what is not annotated": (
        lambda: prepared("sum", By(add=lambda n: Annotation({n.args[0]: SameAs(n.args[1]), n.args[1]: None}))),
        "or give this value QuantizedAs instead of SameAs",
        lambda: prepared("sum", By(add=lambda n: Annotation(dict.fromkeys(n.args, QuantizedAs()), QuantizedAs()))),
    ),
    "shared in a circle": (
        lambda: prepared("sum", By(add=lambda n: Annotation({n.args[0]: SameAs((n.args[0], n))}))),
        "give one of them QuantizedAs instead of SameAs",
        lambda: prepared("sum", By(add=lambda n: Annotation(dict.fromkeys(n.args, QuantizedAs()), QuantizedAs()))),
    ),
    "specs of an unknown site": (
        lambda: prepared("one", By(lambda sites: {"nothing": Observed()}, conv2d=layer)),
        "return only names of the given sites whose spec is Observed or Fixed",
        lambda: prepared("one", By(lambda sites: {free(sites): Fixed(0.1, 0)}, conv2d=layer)),
    ),
}


def free(sites) -> str:
    return next(site.name for site in sites if isinstance(site.spec, Observed))


IMPORTS = {
    "a float model": (
        lambda: stages.from_qdq(nn.Linear(4, 4), torch.ones(2, 4)),
        "quantize a float model with quantize(model, data)",
        lambda: reference("vectors"),
    ),
    "a quantized model": (
        lambda: stages.prepare(stages.capture(rounded(), X)),
        "intaglio.stages.from_qdq(model, example_inputs)",
        lambda: stages.from_qdq(rounded(), X),
    ),
    "scales that are computed": (
        lambda: stages.from_qdq(Body(lambda m, x: quantized(x, x.abs().max() / 127)), X),
        "quantize the float model with intaglio",
        lambda: reference("one"),
    ),
}


def quantized(x: torch.Tensor, scale: object) -> torch.Tensor:
    library = torch.ops.quantized_decomposed
    kind = "tensor" if isinstance(scale, torch.Tensor) else "default"
    zero = torch.zeros((), dtype=torch.int64) if isinstance(scale, torch.Tensor) else 0
    given = scale, zero, 0, 255, torch.uint8
    q_values = getattr(library.quantize_per_tensor, kind)(x, *given)
    return getattr(library.dequantize_per_tensor, kind)(q_values, *given)


def rounded() -> nn.Module:
    return Body(lambda m, x: quantized(torch.max_pool2d(quantized(x, 0.1), 2), 0.1))


TRAINING = {
    "a model captured in evaluation": (
        lambda: stages.prepare(captured("one"), qat=True),
        "capture(model, example_inputs, train=True)",
        lambda: trainable(conv(), X),
    ),
    "scales without a start": (
        lambda: trainable(conv(), X).learn_scales(),
        "call calibrate(prepared, data) first, or train some batches before",
        lambda: [run(trainable(conv(), X)).learn_scales(), calibrated_qat().learn_scales()],
    ),
    "no training": (
        lambda: stages.convert(trainable(conv(), X)),
        "train some batches, or call calibrate(prepared, data)",
        lambda: [stages.convert(run(trainable(conv(), X))), stages.convert(calibrated_qat())],
    ),
    "a recurrent layer": (
        lambda: trainable(recurrent(), ROWS),
        "leave it in float, in the recipe: {'r': None}",
        lambda: trainable(recurrent(), ROWS, recipe(r=None)),
    ),
    "a weight-only layer": (
        lambda: trainable(conv_and_linear(), X, recipe(l={"activations": "float", "weights_dtype": "s4"})),
        "leave it in float, in the recipe: {'l': None}",
        lambda: trainable(conv_and_linear(), X, recipe(l=None)),
    ),
    "float8 activations": (
        lambda: trainable(conv(), X, recipe({"activations_dtype": "f8e4m3"})),
        "choose an integer datatype in the recipe",
        lambda: trainable(conv(), X, recipe({"activations_dtype": "u7"})),
    ),
    "random numbers other than dropout": (
        lambda: trainable(Body(lambda m, x: m.b(torch.bernoulli(torch.sigmoid(m.a(x)))), a=conv(), b=conv()), X),
        "train the parts of the model before and after it separately",
        lambda: [trainable(conv(), X), trainable(conv(), X)],
    ),
    "a buffer that changes": (
        lambda: trainable(Averages(), X),
        "train the parts of the model before and after it separately",
        lambda: trainable(Averages().a, X),
    ),
    "statistics of the model itself": (
        lambda: trainable(OwnStatistics(), X),
        "use an nn.BatchNorm module",
        lambda: trainable(nn.Sequential(conv(), nn.BatchNorm2d(3)), X),
    ),
}

ROWS = torch.randn(5, 2, 4, generator=DRAW)


def run(model):
    model(X)
    return model


def calibrated_qat():
    made = trainable(conv(), X)
    stages.calibrate(made, [X], progress=False)
    return made


def recurrent() -> nn.Module:
    return Body(lambda m, x: m.l(m.r(x)[0]), r=nn.LSTM(4, 4), l=nn.Linear(4, 4))


def conv_and_linear() -> nn.Module:
    return Body(lambda m, x: m.l(m.a(x)), a=conv(), l=nn.Linear(6, 4))


class OwnStatistics(nn.Module):
    """Calls batch norm with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = conv()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(self.a(x), self.running_mean, self.running_var, training=self.training)


ROWS_OF_ALL = CALIBRATION | DATASETS | PARAMETERS | RECIPES | ANNOTATIONS | IMPORTS | TRAINING


@pytest.mark.parametrize(("wrong", "remedy", "right"), ROWS_OF_ALL.values(), ids=ROWS_OF_ALL)
def test_following_the_remedy_of_an_error_removes_it(wrong, remedy, right):
    with pytest.raises(IntaglioError) as raised:
        wrong()
    assert remedy in raised.value.remedy
    if right is not None:
        right()
