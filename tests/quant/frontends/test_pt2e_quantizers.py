"""Quantizers written for PyTorch's export flow, by classes of the same names: torchao itself is not needed."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions

from intaglio import stages
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import operator
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from support import nets
from support.annotators import Shifted, conv
from support.nets import Body

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CONV = torch.ops.aten.conv2d.default


@dataclass(frozen=True)
class QuantizationSpec:
    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: Any = None
    ch_axis: int | None = None
    is_dynamic: bool = False


@dataclass(frozen=True)
class SharedQuantizationSpec:
    edge_or_node: Any


@dataclass(frozen=True)
class FixedQParamsQuantizationSpec:
    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None


@dataclass(frozen=True)
class DerivedQuantizationSpec:
    derived_from: list
    derive_qparams_fn: Any
    dtype: torch.dtype


@dataclass
class QuantizationAnnotation:
    input_qspec_map: dict = field(default_factory=dict)
    output_qspec: Any = None
    allow_implicit_sharing: bool = True
    _annotated: bool = True


class HistogramObserver:
    """Only its name matters."""


class MovingAverageMinMaxObserver(HistogramObserver):
    pass


S8 = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(torch.int8, HistogramObserver, -127, 127, torch.per_channel_symmetric, 0)


class Backend:
    """Every convolution, its bias derived."""

    spec = S8
    output: Any = S8
    weight = WEIGHT

    def transform_for_annotation(self, module):
        return module

    def annotate(self, module):
        for node in module.graph.nodes:
            if node.target is CONV:
                x, weight, bias = node.args[:3]
                derived = DerivedQuantizationSpec([(x, node), (weight, node)], None, torch.int32)
                inputs = {x: self.spec, weight: self.weight, bias: derived}
                node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, self.output)
        return module

    def validate(self, module):
        self.seen = module


def prepared(quantizer, model=None):
    model = model or Body(lambda m, x: m.b(F.relu(m.a(x))), a=conv(), b=conv(4))
    return prepare(stages.capture(nets.randomize(model), X), quantizer)


def test_a_pt2e_quantizer_quantizes_a_model():
    quantizer = Backend()
    stage = prepared(quantizer)
    stage(X)
    reference = convert(stage)
    assert [region.name for region in stage.annotations.regions] == ["conv2d", "conv2d"]
    assert len(reference.qparams["a#0/conv2d.0:bias"].scales) == 4
    model = stages.compile(reference)
    assert torch.allclose(model(X), reference(X), atol=reference.qparams["b#0/conv2d.0"].step)


def test_signed_activations_become_unsigned_with_zero_point_plus_128():
    fixed = FixedQParamsQuantizationSpec(torch.int8, 0.125, -28, -128, 127)
    quantizer = Backend()
    quantizer.output = fixed
    stage = prepared(quantizer)
    stage(X)
    q = convert(stage).qparams["b#0/conv2d.0"]
    assert (q.step, q.zero, q.qmin, q.qmax) == (0.125, 100, 0, 255)


@pytest.mark.parametrize(
    ("make", "method"),
    [(HistogramObserver, "mse"), (functools.partial(MovingAverageMinMaxObserver, averaging_constant=0.1), "ema:0.1")],
)
def test_observers_become_the_method_that_chooses_as_they_do(make, method):
    quantizer = Backend()
    quantizer.spec = QuantizationSpec(torch.uint8, make, 0, 127, torch.per_tensor_affine)
    site = prepared(quantizer).annotations.by_value["args_0", "activation"]
    assert (site.spec.method, site.spec.observer, site.qmax) == (method, None, 127)


def test_pt2e_quantizers_see_the_origin_of_operators():
    """What quantizers look for: partitions by source, module stacks, shapes in ``val``; our own meta stays."""
    quantizer = Backend()
    model = Body(lambda m, x: torch.flatten(m.a(x) * 2 + m.a(x), 1), a=conv())
    prepared(quantizer, model)
    nodes = [node for node in quantizer.seen.graph.nodes if node.op == "call_function" and "val" in node.meta]
    assert [operator(node) for node in nodes] == [
        "aten.conv2d.default",
        "aten.mul.Tensor",
        "aten.conv2d.default",
        "aten.add.Tensor",
        "aten.flatten.using_ints",
    ]
    assert list(nodes[0].meta["nn_module_stack"].values())[-1] == ("a", "torch.nn.modules.conv.Conv2d")
    assert nodes[0].meta["val"].shape[1:] == (4, 8, 8)
    assert len(get_source_partitions(quantizer.seen.graph, [nn.Conv2d])[nn.Conv2d]) == 2


class FixedQParamsObserver:
    dtype = torch.int8
    scale, zero_point = 0.125, 42 - 128


def test_the_custom_observer_hook_replaces_observers_group_by_group():
    """2.2: a scale of 0.125 and a zero point of 42 for a whole group."""

    class Hooked(Backend):
        def prepare_obs_or_fq_callback(self, module, observers):
            (end,) = (node for node in module.graph.nodes if node.op == "output")
            old = observers[end.args[0][0]]
            observers.update({place: FixedQParamsObserver() for place, one in observers.items() if one is old})

    stage = prepared(Hooked())
    stage(X)
    q = convert(stage).qparams["b#0/conv2d.0"]
    assert (q.step, q.zero) == (0.125, 42)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (QuantizationSpec(torch.int16, HistogramObserver), "int16"),
        (DerivedQuantizationSpec([], None, torch.int8), "DerivedQuantizationSpec"),
    ],
)
def test_specs_without_an_equivalent_are_refused(spec, problem):
    quantizer = Backend()
    quantizer.spec = spec
    with pytest.raises(UnsupportedError, match=problem):
        prepared(quantizer)


def test_shared_specs_of_pt2e_quantizers_share_parameters():
    class Pools(Backend):
        def annotate(self, module):
            super().annotate(module)
            for node in module.graph.nodes:
                if operator(node) == "aten.max_pool2d.default":
                    shared = SharedQuantizationSpec((node.args[0], node))
                    node.meta["quantization_annotation"] = QuantizationAnnotation({node.args[0]: S8}, shared)

    stage = prepared(Pools(), Body(lambda m, x: F.max_pool2d(m.a(x), 2), a=conv()))
    assert stage.annotations.leaders["#0/max_pool2d.0"] == "a#0/conv2d.0"


@pytest.mark.case("frontends C10")
def test_an_observer_may_convert_its_own_node():
    """C10: known by its method, as in torchao's flow."""

    class Quantizes(Backend):
        spec = QuantizationSpec(torch.int8, Shifted, -128, 127, torch.per_tensor_affine)
        output = None

    stage = prepared(Quantizes())
    stage(X)
    layers = [node for node in convert(stage).module.graph.nodes if node.target is CONV]
    for node in layers:
        assert info(node.args[0]).observer is True
        assert operator(node.args[0]) == "quantized_decomposed.dequantize_per_tensor.default"
        assert node.args[0].args[2] == -3
