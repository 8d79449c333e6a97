"""The x86 preset: what gets quantize and dequantize, whose setting wins, and torchao's own quantizers beside it."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
import nets
from intaglio.annotation import X86Quantizer, get_symmetric_quantization_config
from intaglio.errors import SelectorError
from intaglio.quant import convert, prepare
from nets import Body
from test_annotation import conv, counts

INT8 = get_symmetric_quantization_config()
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(2))


def linear(inputs: int = 16, outputs: int = 16) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def scores(m, x):
    return torch.matmul(torch.softmax(torch.matmul(m.q(x), m.k(x).transpose(-1, -2)), -1), m.v(x))


def sums(m, x):
    y = m.a(x)
    y = F.relu(m.b(y) + m.c(y))
    return F.relu(m.d(y) + y)


def joined(m, x):
    return F.max_pool2d(torch.cat([m.a(x), m.b(x)], 1), 2)


MODELS = {
    "convolution": (Body(lambda m, x: m.a(x), a=conv()), "1:1:1"),
    "function and pool": (Body(lambda m, x: F.max_pool2d(m.f(m.a(x)), 2), a=conv(), f=nn.Hardswish()), "3:3:1"),
    "a sum with one convolution": (Body(lambda m, x: m.a(x) + F.relu(x), a=conv(3, 3)), "2:2:1"),
    "a sum of two convolutions": (Body(lambda m, x: m.a(x) + m.b(x), a=conv(), b=conv()), "2:3:2"),
    "sums in series": (Body(sums, a=conv(), b=conv(4), c=conv(4), d=conv(4)), "4:6:4"),
    "pool and power": (Body(lambda m, x: F.max_pool2d(m.a(x), 2) ** 2, a=conv()), "3:3:1"),
    "flatten, then int8": (
        Body(lambda m, x: (lambda y: torch.cat([y, y], 1).t())(torch.flatten(m.a(x), 1)), a=conv()), "4:4:1",
    ),
    "flatten, then float": (Body(lambda m, x: torch.flatten(m.a(x), 1).t(), a=conv()), "1:1:1"),
    "concatenation and pool": (Body(lambda m, x: m.c(joined(m, x)), a=conv(), b=conv(), c=conv(8)), "5:6:3"),
    "a tensor twice": (Body(lambda m, x: (lambda y: torch.cat([y, y], 1))(m.a(x)), a=conv()), "3:3:1"),
    "linear": (Body(lambda m, x: m.a(x), a=linear()), "1:1:1"),
    "linear and function": (Body(lambda m, x: F.relu(m.a(x)), a=linear()), "1:1:1"),
    "a sum of two linear": (Body(lambda m, x: m.a(x) + m.b(x), a=linear(), b=linear()), "1:2:2"),
    "linear in series": (
        Body(lambda m, x: m.d(m.c(m.a(x) + m.b(x))), a=linear(), b=linear(), c=linear(), d=linear()), "3:4:4",
    ),
    "a linear called twice": (Body(lambda m, x: m.a(m.a(x)), a=linear()), "2:2:2"),
    "attention": (Body(scores, q=linear(), k=linear(), v=linear()), "1:3:3"),
    "attention with products": (Body(scores, q=linear(), k=linear(), v=linear()), "5:7:3"),
}  # fmt: skip
"""Model -> quantize : dequantize : dequantize of weights. All are those of torchao's quantizer in tests of its own but
for "concatenation and pool": there two inputs are convolved, here it is one, which is quantized once."""


def example(model) -> torch.Tensor:
    return ROWS if isinstance(next(model.children()), nn.Linear) else IMAGE


def reference(model, quantizer):
    stage = prepare(intaglio.capture(nets.randomize(model), example(model)), quantizer)
    stage(example(model))
    return convert(stage)


@pytest.mark.parametrize("name", MODELS)
def test_the_x86_preset_puts_quantize_and_dequantize_where_torchao_does(name):
    model, wanted = MODELS[name]
    quantizer = X86Quantizer().set_global(INT8)
    if "products" in name:
        quantizer.set_function_type(torch.matmul, INT8)
    assert counts(reference(model, quantizer)) == wanted


def test_a_concatenation_of_two_inputs_convolved_has_six():
    model = Body(lambda m, x, y: m.c(F.max_pool2d(torch.cat([m.a(x), m.b(y)], 1), 2)), a=conv(), b=conv(), c=conv(8))
    stage = prepare(intaglio.capture(nets.randomize(model), (IMAGE, IMAGE + 1)), X86Quantizer().set_global(INT8))
    stage(IMAGE, IMAGE + 1)
    assert counts(convert(stage)) == "6:6:3"


def test_dynamic_linear_layers_on_one_input_make_its_levels_once():
    """torchao's graph has 1:1:3 and one node that chooses parameters; ours a dequantize a layer: rows have scales of
    their own, and the layers take them as operands."""
    found = reference(MODELS["attention"][0], X86Quantizer().set_global(
        get_symmetric_quantization_config(is_dynamic=True)))  # fmt: skip
    names = [str(node.target) for node in found.module.graph.nodes]
    assert names.count("intaglio.quantize_rows.default") == 1
    assert names.count("intaglio.dequantize_rows.default") == 3


def regions(model, quantizer) -> list[str]:
    stage = prepare(intaglio.capture(nets.randomize(model), example(model)), quantizer)
    return [region.anchor.name for region in stage.annotations.regions]


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
def test_frontend_a17_names_beat_types_beat_the_rest(quantizer, on):
    """A17: global None and one type; type None and one name; name None and the type on; nested names, underscores."""
    trunk = nn.ModuleDict({"a_1": conv(), "b": conv(4)})
    model = Body(lambda m, x: m.head(m.trunk.b(m.trunk.a_1(x))), trunk=trunk, head=linear(8, 5))
    if not on:
        with pytest.raises(intaglio.errors.UnsupportedError):
            regions(model, quantizer)
    else:
        assert regions(model, quantizer) == on


def test_frontend_b19_a_pattern_that_lies_half_in_a_module_is_not_fused_across_its_border():
    """B19."""
    model = Body(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.ReLU())
    stage = prepare(intaglio.capture(nets.randomize(model), IMAGE), X86Quantizer().set_module_name("a", INT8))
    assert [region.name for region in stage.annotations.regions] == ["conv2d"]


@pytest.mark.parametrize("other", [{"is_dynamic": True}, {"is_qat": True}])
def test_frontend_b20_a_setting_of_another_mode_is_ignored_with_a_warning(other):
    """B20: the earlier one holds."""
    quantizer = X86Quantizer().set_global(INT8)
    with pytest.warns(UserWarning, match="mixes training or run-time"):
        quantizer.set_module_name("b", get_symmetric_quantization_config(**other))
    assert regions(Body(lambda m, x: m.b(m.a(x)), a=linear(), b=linear()), quantizer) == ["linear", "linear_1"]


def test_a_type_without_a_rule_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="LSTM"):
        X86Quantizer().set_module_type(nn.LSTM, INT8)


def test_a_pool_behind_float_is_left_with_a_warning():
    model = Body(lambda m, x: m.a(F.max_pool2d(torch.exp(x), 2)), a=conv())
    with pytest.warns(UserWarning, match="its input is not quantized"):
        assert regions(model, X86Quantizer().set_global(INT8)) == ["conv2d"]


def test_a_name_of_no_module_is_an_error():
    with pytest.raises(SelectorError, match="no operator lies in it"):
        regions(Body(lambda m, x: m.a(x), a=conv()), X86Quantizer().set_module_name("b", INT8))


def test_frontend_b14_what_is_added_is_not_fused_where_it_broadcasts_or_is_a_number():
    """B14: results are those of operators one by one."""
    model = Body(lambda m, x: m.a(x) + m.b(x).mean((2, 3), keepdim=True) + 3, a=conv(), b=conv())
    found = reference(model, X86Quantizer().set_global(INT8))
    lowered = intaglio.requantize(found)
    assert torch.allclose(intaglio.compile(lowered)(IMAGE), found(IMAGE), atol=1e-5)


def test_seven_bits_and_scales_per_tensor():
    config = get_symmetric_quantization_config(is_per_channel=False, reduce_range=True)
    found = reference(MODELS["convolution"][0], X86Quantizer().set_global(config))
    x, weight = found.qparams["#0/input.args_0"], found.qparams["a.weight"]
    assert (x.qmax, len(weight.scales)) == (127, 1)


# -- quantizers of torchao --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_torchaos_own_quantizer_puts_them_at_the_same_places(name):
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    config = x86.get_default_x86_inductor_quantization_config()
    quantizer = x86.X86InductorQuantizer().set_global(config)
    if "products" in name:
        quantizer.set_function_type_qconfig(torch.matmul, config)
    assert counts(reference(MODELS[name][0], quantizer)) == MODELS[name][1]


def test_an_executorch_style_quantizer_agrees_with_torchaos_own_flow():
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    model = nets.randomize(Body(lambda m, x: m.l(F.relu(m.b(F.relu(m.a(x))) + m.c(x)).mean((2, 3))),
                                a=conv(), b=conv(4), c=conv(), l=linear(4, 5)))  # fmt: skip

    def quantizer():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))

    theirs = prepare_pt2e(torch.export.export(model, (IMAGE,)).module(), quantizer())
    theirs(IMAGE)
    found = reference(model, quantizer())
    real, other = model(IMAGE), convert_pt2e(theirs)(IMAGE)
    assert (found(IMAGE) - real).norm() < 1.5 * (other - real).norm() + 0.01 * real.norm()
    assert not intaglio.requantize(found).islands
