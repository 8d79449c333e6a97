"""The x86 preset: what gets quantize and dequantize, and whose setting wins."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.annotation import (
    Annotation,
    X86Quantizer,
    annotation_of,
    get_default_x86_inductor_quantization_config,
    get_symmetric_quantization_config,
)
from intaglio.errors import SelectorError
from intaglio.fxgraph.nodes import operator
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.frontends.pt2e_compat import exported_view
from intaglio.quant.frontends.x86_quantizer import TYPES
from intaglio.quant.qdq.convert import convert
from support import nets
from support.annotators import conv, counts
from support.nets import Body
from support.slow_params import slow_params, slow_params_except
from support.x86_models import DYNAMIC, HALF, IMAGE, MODELS, ROWS, TRAINING, example, linear, reference

INT8 = get_symmetric_quantization_config()
TRAINED = get_symmetric_quantization_config(is_qat=True)


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "sums in series",
        "flatten, then int8",
        "a tensor twice",
        "a linear called twice",
        "attention",
        of=MODELS,
        reason="the other models have the same operators",
    ),
)
def test_the_x86_preset_puts_quantize_and_dequantize_where_torchao_does(name):
    model, wanted = MODELS[name]
    quantizer = X86Quantizer().set_global(INT8)
    if "products" in name:
        quantizer.set_function_type(torch.matmul, INT8)
    assert counts(reference(model, quantizer)) == wanted


def test_a_concatenation_of_two_inputs_and_a_convolution_has_six_quantizes():
    model = Body(lambda m, x, y: m.c(F.max_pool2d(torch.cat([m.a(x), m.b(y)], 1), 2)), a=conv(), b=conv(), c=conv(8))
    stage = prepare(stages.capture(nets.randomize(model), (IMAGE, IMAGE + 1)), X86Quantizer().set_global(INT8))
    stage(IMAGE, IMAGE + 1)
    assert counts(convert(stage)) == "6:6:3"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("attention", "1:1:3"), ("a sum of two linear", "1:1:2"), ("linear in series", "3:3:4"), ("linear", "1:1:1")],
)
def test_dynamic_linear_layers_quantize_a_shared_input_once(name, wanted):
    """As many as torchao's ``quantize`` and ``dequantize``; its ``choose_qparams`` is part of our quantize, which gives
    the scales beside the quantized values."""
    found = reference(MODELS[name][0], X86Quantizer().set_global(DYNAMIC))
    assert dynamic_counts(found) == wanted
    assert counts(found).startswith("0:0:")


def dynamic_counts(found) -> str:
    names = [operator(node) for node in found.module.graph.nodes]
    rows = [names.count(f"intaglio.{kind}_rows.default") for kind in ("quantize", "dequantize")]
    return ":".join(map(str, [*rows, counts(found).split(":")[-1]]))


@pytest.mark.usefixtures("without_avx512")
@pytest.mark.parametrize("after", [*slow_params(None, reason="less than with a function behind it"), F.relu])
def test_float16_weights_are_one_cast_only(after):
    """torchao's graph has two: to float16, which we fold as every quantize of a weight is, and back."""
    model = Body(lambda m, x: m.a(x) if after is None else after(m.a(x)), a=linear())
    found = reference(model, X86Quantizer().set_global(HALF))
    assert counts(found) == "0:0:0"
    (cast,) = [node for node in found.module.graph.nodes if operator(node) == "aten._to_copy.default"]
    assert getattr(found.module, cast.args[0].target).dtype is torch.float16
    model = nets.randomize(model)
    with torch.no_grad():
        rounded = F.linear(ROWS, model.a.weight.half().float(), model.a.bias)
        assert torch.equal(found(ROWS), rounded if after is None else after(rounded))
    assert torch.allclose(stages.compile(found)(ROWS), found(ROWS), atol=1e-5)


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "no norm", of=TRAINING, reason="a norm and what follows it are folded in the other frontends, too"
    ),
)
def test_in_training_the_layer_with_a_folded_norm_is_quantized(name):
    """As torchao's quantizer has it for training, also where a float operator reads them."""
    body, wanted = TRAINING[name]
    model = nets.randomize(Body(body, a=conv(), b=nn.BatchNorm2d(4))).train()
    captured = stages.capture(model, IMAGE, train=True)
    prepared = stages.prepare(captured, X86Quantizer().set_global(TRAINED), qat=True)
    prepared(IMAGE).square().mean().backward()
    found = stages.convert(prepared)
    assert counts(found) == wanted
    assert torch.equal(found(IMAGE), prepared.eval()(IMAGE))


def regions(model, quantizer) -> list[str]:
    stage = prepare(stages.capture(nets.randomize(model), example(model)), quantizer)
    return [region.anchor.name for region in stage.annotations.regions]


@pytest.mark.case("frontends A17")
@pytest.mark.parametrize(
    ("quantizer", "on"),
    [
        (X86Quantizer().set_global(INT8), ["conv2d", "conv2d_1", "linear"]),
        (X86Quantizer().set_global(None).set_function_type(F.conv2d, INT8), ["conv2d", "conv2d_1"]),
        (X86Quantizer().set_module_type(nn.Conv2d, None).set_module_name("trunk.b", INT8), ["conv2d_1"]),
        (X86Quantizer().set_module_type(nn.Conv2d, INT8).set_module_name("trunk", None), []),
        (X86Quantizer().set_global(INT8).set_module_name("trunk.a_1", None), ["conv2d_1", "linear"]),
    ],
)
def test_names_beat_types_beat_the_rest(quantizer, on):
    """A17: global None and one type; type None and one name; name None and the type on; nested names, underscores."""
    trunk = nn.ModuleDict({"a_1": conv(), "b": conv(4)})
    model = Body(lambda m, x: m.head(m.trunk.b(m.trunk.a_1(x))), trunk=trunk, head=linear(8, 5))
    if not on:
        with pytest.raises(intaglio.errors.UnsupportedError):
            regions(model, quantizer)
    else:
        assert regions(model, quantizer) == on


@pytest.mark.case("frontends B19")
@pytest.mark.parametrize(("name", "fused"), [("part.conv_1", False), ("part.act_1", None), ("part", True)])
def test_a_pattern_partly_inside_a_module_is_not_fused_across_its_border(name, fused):
    """B19: names with underscores, of parts of parts; a function alone is nothing."""
    part = nn.Sequential()
    part.add_module("conv_1", conv())
    part.add_module("act_1", nn.Hardswish())
    found = annotated(Body(lambda m, x: torch.exp(m.part(x)), part=part), X86Quantizer().set_module_name(name, INT8))
    wanted = {None: [], False: ["aten.conv2d.default"], True: ["aten.conv2d.default", "aten.hardswish.default"]}
    assert list(found) == wanted[fused]


MODES = {"static": INT8, "dynamic": DYNAMIC, "trained": TRAINED}


@pytest.mark.case("frontends B20")
@pytest.mark.parametrize("later", MODES)
@pytest.mark.parametrize("earlier", MODES)
def test_a_setting_of_another_mode_is_ignored_with_a_warning(earlier, later):
    """B20: the earlier one holds, whichever setter the later one comes by."""
    setters = {
        "set_global": [],
        "set_module_name": ["b"],
        "set_module_type": [nn.Linear],
        "set_function_type": [F.linear],
    }
    for name, place in setters.items():
        quantizer = X86Quantizer().set_module_name("a", MODES[earlier])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            getattr(quantizer, name)(*place, MODES[later])
        assert ["differs in training or in dynamic scales" in str(one.message) for one in said] == [True] * (
            earlier != later
        )
        found = annotated(Body(lambda m, x: m.b(torch.exp(m.a(x))), a=linear(), b=linear()), quantizer)
        assert len(found) == 1 + (earlier == later)


def annotated(model, quantizer) -> dict[str, Annotation]:
    """Annotations by operator; of calls of one operator by its number too."""
    view = exported_view(stages.capture(nets.randomize(model), example(model)).module)
    quantizer.annotate(view)
    found: dict[str, Annotation] = {}
    for node in view.graph.nodes:
        if annotation_of(node) is not None:
            found[operator(node) + "'" * sum(name.startswith(operator(node)) for name in found)] = annotation_of(node)
    return found


# -- what can be set --------------------------------------------------------------------------------------------------


def test_the_names_of_torchao_are_other_names_of_the_same_methods():
    for name in ("set_module_name", "set_module_type", "set_function_type"):
        assert getattr(X86Quantizer, f"{name}_qconfig") is getattr(X86Quantizer, name)
    assert X86Quantizer.get_global_quantization_config is X86Quantizer.get_global
    assert get_default_x86_inductor_quantization_config() == INT8
    assert get_default_x86_inductor_quantization_config(True) == TRAINED


def test_setters_return_the_quantizer_and_the_global_setting_can_be_read():
    quantizer = X86Quantizer()
    assert quantizer.get_global() is None
    chained = quantizer.set_global(INT8).set_module_name("a", INT8).set_module_type(nn.Linear, None)
    assert chained.set_function_type(torch.matmul, INT8) is quantizer
    assert quantizer.get_global() is INT8


@pytest.mark.parametrize(
    ("given", "activation", "method"),
    [
        ({}, ("u8", 255), "mse"),
        ({"reduce_range": True}, ("u7", 127), "mse"),
        ({"is_qat": True}, ("u8", 255), "ema:0.01"),
        ({"is_qat": True, "reduce_range": True}, ("u7", 127), "ema:0.01"),
    ],
)
@pytest.mark.parametrize("channels", [True, False])
def test_a_qconfig_gives_data_types_and_observers(given, activation, method, channels):
    """Weights are -127..127 here, a symmetric range, where torchao's are -128..127."""
    config = get_symmetric_quantization_config(is_per_channel=channels, **given)
    stage = prepare(stages.capture(nets.randomize(conv()), IMAGE), X86Quantizer().set_global(config))
    by_role = {site.role: site for site in stage.annotations.sites}
    x, weight, bias = (by_role[role] for role in ("activation", "weight", "bias"))
    assert (x.datatype, x.qmax, x.spec.method, x.spec.symmetric) == (*activation, method, False)
    assert (weight.datatype, weight.qmin, weight.qmax) == ("s8", -127, 127)
    assert (weight.axis, bias.axis) == ((0, 0) if channels else (None, None))


@pytest.mark.parametrize("qat", [False, True])
def test_a_dynamic_configuration_needs_no_data(qat):
    config = get_symmetric_quantization_config(is_qat=qat, is_dynamic=True)
    captured = stages.capture(nets.randomize(nn.Sequential(linear())).train(qat), ROWS, train=qat)
    found = stages.convert(stages.prepare(captured, X86Quantizer().set_global(config), qat=qat))
    assert dynamic_counts(found) == "1:1:1"


def every_type(m, x):
    y = F.avg_pool2d(torch.cat([F.max_pool2d(m.a(x), 2)] * 2, 1), 2)
    z = m.b(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))
    return torch.matmul(z * torch.exp(z), m.c(z.unsqueeze(1)))


@pytest.mark.parametrize(
    "kind",
    slow_params_except(
        nn.Conv2d,
        F.linear,
        F.max_pool2d,
        torch.matmul,
        torch.mul,
        of=TYPES,
        reason="another type that is left out by the same rule",
    ),
)
def test_every_type_can_be_left_out(kind):
    """Modules and the functions of the same name are one type. torchao's table has ``nn.Conv2d`` in the place of
    ``nn.Conv1d``; ours has what is meant."""
    model = Body(every_type, a=conv(), b=linear(8, 6), c=nn.Conv1d(1, 6, 1))
    quantizer = X86Quantizer().set_function_type(torch.matmul, INT8)
    everything = annotated(model, quantizer.set_global(INT8))
    assert {name for name, one in everything.items() if one.inputs} == set(TYPES.values())
    setter = quantizer.set_module_type if isinstance(kind, type) else quantizer.set_function_type
    assert annotated(model, setter(kind, None))[TYPES[kind]] == Annotation()


@pytest.mark.slow(reason="captures a model for one rule; types are left out above")
def test_skipping_a_convolution_skips_its_function_but_skipping_a_pool_does_not():
    model = Body(lambda m, x: F.max_pool2d(F.relu(m.a(x)), 2), a=conv())
    found = annotated(model, X86Quantizer().set_global(INT8).set_function_type(F.max_pool2d, None))
    assert found["aten.max_pool2d.default"] == Annotation()
    assert found["aten.conv2d.default"].inputs
    model = Body(lambda m, x: m.b(F.relu(m.a(x)).mean((2, 3))), a=conv(), b=linear(4, 4))
    found = annotated(model, X86Quantizer().set_global(INT8).set_module_type(nn.Conv2d, None))
    assert found["aten.conv2d.default"] == found["aten.relu.default"] == Annotation()
    assert found["aten.linear.default"].inputs


@pytest.mark.parametrize(
    "function",
    [
        nn.ReLU,
        *slow_params(nn.Hardtanh, reason="bounds like those of ReLU"),
        nn.Hardswish,
        *slow_params(nn.ReLU6, reason="bounds like those of ReLU"),
        nn.SiLU,
    ],
)
def test_a_convolution_is_annotated_with_the_function_after_it(function):
    model = Body(lambda m, x: torch.exp(m.f(m.a(x))), a=conv(), f=function())
    assert list(annotated(model, X86Quantizer().set_global(INT8)).values())[1:] == [Annotation()]


@pytest.mark.parametrize(
    "function",
    [
        nn.ReLU(),
        *slow_params(nn.LeakyReLU(), nn.Tanh(), reason="functions like the others"),
        nn.GELU(),
        nn.GELU("tanh"),
    ],
)
def test_a_linear_layer_is_annotated_with_the_function_after_it(function):
    model = Body(lambda m, x: torch.exp(m.f(m.a(x))), a=linear(), f=function)
    assert list(annotated(model, X86Quantizer().set_global(INT8)).values())[1:] == [Annotation()]
    model = Body(lambda m, x: torch.exp(m.f(m.a(x))), a=linear(), f=nn.SiLU())
    assert len(annotated(model, X86Quantizer().set_global(INT8))) == 1


@pytest.mark.parametrize("other", [INT8, DYNAMIC])
def test_float16_weights_go_with_any_other_setting(other):
    quantizer = X86Quantizer().set_global(other).set_module_name("b", HALF)
    found = reference(Body(lambda m, x: m.b(m.a(x)), a=linear(), b=linear()), quantizer)
    assert (dynamic_counts(found) if other is DYNAMIC else counts(found)) == "1:1:1"
    assert found.module.get_buffer("b_weight_f16").dtype is torch.float16


# -- what follows a product -------------------------------------------------------------------------------------------


def test_a_type_without_a_rule_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="LSTM"):
        X86Quantizer().set_module_type(nn.LSTM, INT8)


def test_a_pool_after_a_float_operator_stays_float_with_a_warning():
    model = Body(lambda m, x: m.a(F.max_pool2d(torch.exp(x), 2)), a=conv())
    with pytest.warns(UserWarning, match="the input of this pool is not quantized"):
        assert regions(model, X86Quantizer().set_global(INT8)) == ["conv2d"]


def test_a_name_of_no_module_is_an_error():
    with pytest.raises(SelectorError, match="no operator in a module"):
        regions(Body(lambda m, x: m.a(x), a=conv()), X86Quantizer().set_module_name("b", INT8))


@pytest.mark.case("frontends B14")
@pytest.mark.parametrize(
    "body",
    [
        *slow_params(
            lambda m, x: m.a(x) + m.b(x).mean((2, 3), keepdim=True) + 3,
            reason="longer sums; what fuses and what does not is in the others",
        ),
        lambda m, x: m.a(x) + m.a.weight.sum(),
        *slow_params(
            lambda m, x: (lambda y: F.relu(m.a(x) + y) + m.c(y) + torch.exp(y))(m.b(x)),
            reason="longer sums; what fuses and what does not is in the others",
        ),
        lambda m, x: (lambda y: F.relu(y + m.b(x)) + y)(m.a(x)),
        *slow_params(
            lambda m, x: (lambda y: m.c(y) + y + y)(m.a(x)),
            reason="longer sums; what fuses and what does not is in the others",
        ),
        lambda m, x: (lambda y: y + y)(m.a(x)),
    ],
    ids=["broadcast", "number", "read elsewhere", "two readers", "own input", "itself"],
)
def test_sums_of_convolutions_match_unfused_operators(body):
    """B14: results are those of operators one by one."""
    found = reference(Body(body, a=conv(), b=conv(), c=conv(4)), X86Quantizer().set_global(INT8))
    lowered = stages.requantize(found)
    steps = [q.step for name, q in found.qparams.items() if "weight" not in name and "bias" not in name]
    same = (stages.compile(lowered, isa="portable")(IMAGE) - found(IMAGE)).abs()
    assert same.max() <= 1.001 * max(steps)
    assert same.mean() < 1e-3 * max(steps)


@pytest.mark.case("frontends B17")
@pytest.mark.parametrize("channels", [True, False])
def test_the_bias_scale_is_the_product_of_input_and_weight_scale(channels):
    """B17: int32, zero point 0, per tensor and per channel; also in the numbers of the graph."""
    config = get_symmetric_quantization_config(is_per_channel=channels)
    model = Body(lambda m, x: m.a(x), a=conv())
    found = reference(model, X86Quantizer().set_global(config))
    x, weight, bias = (found.qparams[name] for name in ("#0/input.args_0", "a.weight", "a#0/conv2d.0:bias"))
    assert bias.scales == pytest.approx([x.step * scale for scale in weight.scales], rel=1e-6)
    assert set(bias.zeros) == {0}
    (quantized,) = [buffer for buffer in found.module.buffers() if buffer.dtype is torch.int32]
    steps = torch.tensor(bias.scales, dtype=torch.float64)
    assert quantized.tolist() == (model.a.bias.double() / steps).round().tolist()


def test_seven_bits_and_per_tensor_scales_are_supported():
    config = get_symmetric_quantization_config(is_per_channel=False, reduce_range=True)
    found = reference(MODELS["convolution"][0], X86Quantizer().set_global(config))
    x, weight = found.qparams["#0/input.args_0"], found.qparams["a.weight"]
    assert (x.qmax, len(weight.scales)) == (127, 1)
