"""Operators of a user's own: their reference in NumPy runs in interpreter and program, on the same quantized values."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, InputError, SelectorError, UnsupportedError
from intaglio.patterns import OpDef, QuantizerPattern, Roles, builtin, op, wildcard
from support import nets
from support.custom_operators import MIRROR_ADD, SOFT_SIGN, SWISH, WEIGH, mirror_add, soft_sign, weigh
from support.nets import Body
from support.slow_params import slow_params

DRAW = torch.Generator().manual_seed(1)
DATA = [torch.randn(4, 3, 9, 9, generator=DRAW) for _ in range(2)]


def conv(inputs: int = 3, outputs: int = 8, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2)


def all_stages(body, data=DATA, quantizer=None, **modules):
    model = nets.randomize(Body(body, **modules))
    prepared = stages.prepare(stages.capture(model, data[0]), quantizer)
    reference = stages.convert(prepared, stages.calibrate(prepared, data))
    lowered = stages.requantize(reference)
    return model, reference, lowered, stages.compile(lowered)


def beside(m, x):
    """Between two convolutions, with a halo for the second, and with a table of its own."""
    y = mirror_add(F.relu(m.a(x)), m.b(x), 0.5)
    return m.c(y) * torch.sigmoid(y)


@pytest.fixture(scope="module")
def mirrored():
    quantizer = stages.Quantizer(operators=[MIRROR_ADD])
    return all_stages(beside, quantizer=quantizer, a=conv(), b=conv(), c=conv(8, 8, 5))


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_a_host_operator_is_bit_identical_to_the_interpreter(mirrored, batch):
    _, _, lowered, model = mirrored
    x = torch.randn(batch, 3, 9, 9, generator=DRAW)
    assert torch.equal(model(x), lowered(x))


def test_a_host_operator_gives_the_result_of_the_reference_model(mirrored):
    float_model, reference, _, model = mirrored
    step = model.graph.types[model.graph.ops[-1].inputs[0]].qparams.step
    assert (model(DATA[0]) - reference(DATA[0])).abs().max() <= 1.01 * step
    assert F.mse_loss(model(DATA[0]), float_model(DATA[0])) < 0.01 * float_model(DATA[0]).var()


def test_no_dequantize_is_inserted_before_a_host_operator(mirrored):
    _, _, lowered, model = mirrored
    (host,) = [op for op in lowered.graph.ops if op.kind == "host"]
    assert host.attrs == {"key": "host0", "operator": "mirror_add", "scale": 0.5}
    assert {lowered.graph.types[name].dtype.value for name in (*host.inputs, host.output)} == {"u8"}
    assert [op.kind for op in lowered.graph.ops].count("dequantize") == 1
    assert model.coverage.islands == 0


def test_coverage_and_profile_name_host_operators(mirrored):
    *_, model = mirrored
    assert "1 host operator:\n  mirror_add: mirror_add: a NumPy implementation, no kernel" in str(model.coverage)
    assert "1 host operator" in repr(model)
    profile = model.profile(DATA[0], calls=2)
    assert [part.kinds for part in profile.parts if part.kernel == "host operator"] == ["host"]
    assert profile.islands == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_a_host_operator_gets_read_only_values_in_any_thread(mirrored, threads, many_threads):
    *_, lowered, model = mirrored
    many_threads(threads)
    assert torch.equal(copy.deepcopy(model)(DATA[1]), lowered(DATA[1]))


def test_a_file_needs_the_operators_again(mirrored, tmp_path):
    *_, model = mirrored
    path = tmp_path / "model.intaglio"
    model.save(path, example=DATA[0])
    with pytest.raises(
        ArtifactError,
        match=r"user-defined operators whose code is not in the file: mirror_add.*\n.*load\(path, operators=",
    ):
        intaglio.load(path)
    for trust in (False, True):
        loaded = intaglio.load(path, operators=[SWISH, MIRROR_ADD], trust=trust)
        assert torch.equal(loaded(DATA[0]), model(DATA[0]))
        loaded.verify()
        assert loaded.coverage == model.coverage
    again = copy.deepcopy(model)
    again.load_state_dict(loaded.state_dict())


def test_a_file_with_another_shape_rule_is_refused(mirrored, tmp_path):
    *_, model = mirrored
    model.save(tmp_path / "model.intaglio")
    other = OpDef(
        "mirror_add",
        operands=("x", "y"),
        roles=Roles(x=(0, 1)),
        reference=MIRROR_ADD.reference,
        infer=lambda attrs, shapes: shapes[0][:1],
    )
    with pytest.raises(ArtifactError, match=r"mirror_add|host gives"):
        intaglio.load(tmp_path / "model.intaglio", operators=[other])


def test_constants_are_passed_to_host_operators_unchanged():
    gain = nn.Parameter(torch.linspace(-1, 2, 8))
    quantizer = stages.Quantizer(operators=[WEIGH])
    parts = {"a": conv(), "c": conv(8), "g": gain}
    _, _, lowered, model = all_stages(lambda m, x: m.c(weigh(m.g, m.a(x))), quantizer=quantizer, **parts)
    assert torch.equal(model(DATA[0]), lowered(DATA[0]))
    (host,) = [op for op in lowered.graph.ops if op.kind == "host"]
    assert [lowered.graph.types[name].dtype.value for name in host.inputs] == ["f32", "u8"]


def test_a_function_of_one_value_is_a_table_and_needs_no_host(tmp_path):
    quantizer = stages.Quantizer(operators=[SOFT_SIGN])
    parts = {"a": conv(), "c": conv(8)}
    float_model, _, lowered, model = all_stages(lambda m, x: m.c(soft_sign(m.a(x))), quantizer=quantizer, **parts)
    assert "host" not in {op.kind for op in lowered.graph.ops}
    assert torch.equal(model(DATA[0]), lowered(DATA[0]))
    assert F.mse_loss(model(DATA[0]), float_model(DATA[0])) < 0.01 * float_model(DATA[0]).var()
    model.save(tmp_path / "model.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "model.intaglio")(DATA[0]), model(DATA[0]))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda values: values**3, r"raises TypeError: .* takes 1 positional argument but 2 were given"),
        (lambda values, attrs: values[:1], r"returns the shape \[1\] for values of shape \[256\]"),
        (lambda values, attrs: values * np.nan, "returns NaN for all values"),
    ],
    ids=["another signature", "another shape", "no number"],
)
def test_a_function_that_computes_no_table_is_an_error(function, problem):
    record = OpDef("soft_sign", SOFT_SIGN.targets, ("x",), Roles(x=(0,)), function=function)
    parts = {"a": conv(), "c": conv(8)}
    with pytest.raises(UnsupportedError, match=problem) as raised:
        all_stages(lambda m, x: m.c(soft_sign(m.a(x))), quantizer=stages.Quantizer(operators=[record]), **parts)
    assert raised.value.remedy.startswith("give OpDef(function=...) a function of (values, attrs)")


SELF_GATED = QuantizerPattern(
    "self_gated", op("mul", wildcard("x"), op("sigmoid", wildcard("x")), commutative=True), operator=SWISH
)


def test_one_meaning_may_replace_a_whole_matched_pattern():
    quantizer = stages.Quantizer(patterns=[*builtin(), SELF_GATED])

    def body(m, x):
        return (lambda y: m.c(torch.sigmoid(y) * y))(m.a(x))

    float_model, _, lowered, model = all_stages(body, quantizer=quantizer, a=conv(), c=conv(8))
    assert [op.attrs["operator"] for op in lowered.graph.ops if op.kind == "host"] == ["swish"]
    assert "%c_acc" in lowered.text()
    assert torch.equal(model(DATA[0]), lowered(DATA[0]))
    assert F.mse_loss(model(DATA[0]), float_model(DATA[0])) < 0.01 * float_model(DATA[0]).var()


def test_host_operators_may_begin_and_end_the_quantized_part():
    quantizer = stages.Quantizer(operators=[MIRROR_ADD], patterns=[QuantizerPattern("own", op("mirror_add"))])
    _, _, lowered, model = all_stages(lambda m, x: torch.sin(mirror_add(x.abs(), x, 2.0)), quantizer=quantizer)
    kinds = [op.kind for op in lowered.graph.ops]
    assert kinds.count("host") == 1
    assert torch.equal(model(DATA[0]), lowered(DATA[0]))


@pytest.mark.parametrize(
    "result",
    [
        *slow_params(
            lambda args: args[0].astype(np.int64), reason="a result of another type is checked as one of another shape"
        ),
        lambda args: args[0][:1, :, :, :3],
    ],
)
def test_a_reference_that_does_not_return_uint8_is_an_error(result):
    roles = Roles(x=(0, 1))
    record = OpDef("wrong", MIRROR_ADD.targets, ("x", "y"), roles, reference=lambda op, args, *types: result(args))
    model = all_stages(beside, quantizer=stages.Quantizer(operators=[record]), a=conv(), b=conv(), c=conv(8, 8, 5))[3]
    with pytest.raises(
        InputError, match=r"its reference implementation returned .*, but the program reads uint8\[4, 8, 9, 9\]"
    ):
        model(DATA[0])


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (OpDef("own"), "neither a reference .*nor a function"),
        (OpDef("add", ("x.y.default",), reference=SWISH.reference), "another operator already has this name"),
        (
            OpDef("own", ("aten.relu.default",), reference=SWISH.reference),
            "another operator already has the targets aten.relu.default",
        ),
        (
            OpDef("own", ("x.y.default",), reference=SWISH.reference, kernel="fast"),
            "cannot have a kernel",
        ),
        (
            OpDef("own", ("intaglio_tests.soft_sign.default",), reference=SWISH.reference),
            "its arguments are x",
        ),
    ],
)
def test_invalid_host_operator_records_are_refused(record, problem):
    model = Body(lambda m, x: soft_sign(m.a(x)), a=conv())
    with pytest.raises(UnsupportedError, match=problem):
        stages.annotate(stages.capture(model.eval(), DATA[0]), stages.Quantizer(operators=[record]))


def test_leaves_of_a_host_pattern_must_be_named_like_the_operands():
    pattern = QuantizerPattern("swish", op("mul", wildcard("y"), op("sigmoid", wildcard("y"))), operator=SWISH)
    model = Body(lambda m, x: m.a(x), a=conv())
    with pytest.raises(SelectorError, match="no leaf named x; its leaves are y"):
        stages.annotate(stages.capture(model.eval(), DATA[0]), stages.Quantizer(patterns=[pattern]))
