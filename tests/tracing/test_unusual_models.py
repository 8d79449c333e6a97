"""Models that tools for tracing refuse or record wrongly: control flow, reused modules, training mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intaglio import stages
from intaglio.errors import CaptureError
from intaglio.ir import Expression
from support import nets
from support.lowering import kinds, quantized
from support.nets import Body
from support.slow_params import slow_params

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def branching(m: nn.Module, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return m.c(x)
    return -m.c(x)


def counting(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().max())):
        x = m.c(x)
    return x


@pytest.mark.case("problem 1", "problem 2")
@pytest.mark.parametrize(("body", "line"), [(branching, "if x.sum() > 0:"), (counting, "int(x.abs().max())")])
def test_control_flow_on_data_is_refused_with_the_line_of_the_model(body, line):
    """Problems 1 and 2."""
    with pytest.raises(CaptureError, match="data-dependent") as raised:
        stages.capture(nets.randomize(Body(body, c=conv(3, 3))), X)
    assert f"in {body.__name__}" in str(raised.value)
    assert line in str(raised.value)
    assert "quantize the submodules" in raised.value.remedy


@pytest.mark.case("problem 1", "problem 2")
def test_loops_over_sizes_and_lists_of_arguments_are_no_obstacle():
    """Problems 1 and 2: what depends on shapes and on Python values only is unrolled, and the batch stays free."""

    def body(m: nn.Module, *images: Tensor, flip: bool = False) -> Tensor:
        total = m.c(images[0])
        for image in images[1:]:
            total = total + m.c(image.flip(-1) if flip else image)
        for channel in range(total.shape[1] - 2):
            total = F.relu(total) if channel % 2 else m.d(total)
        return total

    model = nets.randomize(Body(body, c=conv(), d=conv(4, 4)))
    captured = stages.capture(model, (X, X, X), example_kwargs={"flip": True})
    assert not captured.notes
    few = torch.randn(3, 1, 3, 8, 8).unbind(0)
    torch.testing.assert_close(captured(*few, flip=True), model(*few, flip=True))


def test_distributions_in_a_model_do_not_check_their_parameters():
    def likelihood(m: nn.Module, x: Tensor) -> Tensor:
        mean, width = m.a(x).chunk(2, -1)
        return torch.distributions.Normal(mean, F.softplus(width)).log_prob(x)

    model, x = nets.randomize(Body(likelihood, a=nn.Linear(6, 12))), torch.randn(4, 6)
    torch.distributions.Distribution.set_default_validate_args(True)
    captured = stages.capture(model, x)
    torch.testing.assert_close(captured(x[:2]), model(x[:2]))
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(0.0, -1.0)


@pytest.mark.case("problem 2")
def test_observing_adds_no_condition_to_the_graph():
    """Problem 2: an observer is a module that counts, not operators with a branch on data among them."""
    captured = stages.capture(nets.randomize(nets.Residual()), torch.zeros(1, 3, 12, 12))
    before = [node.name for node in captured.module.graph.nodes if node.op == "call_function"]
    prepared = stages.prepare(captured)
    added = [node for node in prepared.module.graph.nodes if node.name not in before and node.op == "call_function"]
    assert {str(node.target).split(".")[1] for node in added} <= {"adaptive_avg_pool2d", "flatten"}, "folds only"
    assert isinstance(prepared.signature.inputs[0].type.shape[0], Expression)
    assert torch.isfinite(prepared(torch.zeros(5, 3, 12, 12))).all()


@pytest.mark.case("problem 3")
def test_one_linear_called_in_an_unrolled_loop_is_one_weight_and_a_range_per_call():
    """Problem 3."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.relu(m.a(x)) * 2
        return x

    reference, lowered = quantized(nets.randomize(Body(body, a=nn.Linear(8, 8))), torch.randn(16, 8))
    assert not lowered.islands
    assert kinds(lowered).count("linear") == 3
    assert len({op.inputs[1] for op in lowered.graph.ops if op.kind == "linear"}) == 1
    inputs = [lowered.graph.types[op.inputs[0]].q for op in lowered.graph.ops if op.kind == "linear"]
    assert len(set(inputs)) == 3
    assert len([name for name in reference.qparams if name == "a.weight"]) == 1


@pytest.mark.case("problem 3")
def test_functions_need_no_modules():
    """Problem 3: nothing has to be rewritten into modules to be quantized or fused."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        x = F.relu(F.batch_norm(F.conv2d(x, m.k, padding=1), m.mean, m.var) + torch.conv2d(x, m.k, m.b, 1, 1))
        return F.linear(F.max_pool2d(x, 2).flatten(1), m.w)

    parts = {"k": (4, 3, 3, 3), "b": (4,), "mean": (4,), "w": (5, 64)}
    model = nets.randomize(Body(body, **{name: nn.Parameter(torch.randn(shape)) for name, shape in parts.items()}))
    model.register_buffer("var", torch.rand(4) + 0.5)
    _, lowered = quantized(model, X)
    assert not lowered.islands
    assert kinds(lowered) == [
        "quantize",
        "conv2d",
        "requantize",
        "conv2d",
        "add",
        "max_pool2d",
        "reshape",
        "linear",
        "dequantize",
    ]


@pytest.mark.case("problem 4")
@pytest.mark.parametrize(
    "region",
    [
        torch.no_grad,
        *slow_params(
            torch.enable_grad,
            lambda: torch.autocast("cpu", enabled=False),
            reason="another mode around the same operators",
        ),
    ],
    ids=["no_grad", "enable_grad", "autocast off"],
)
def test_a_torch_function_mode_inside_forward_hides_no_operator(region):
    """Problem 4: what stands under ``no_grad`` is quantized as what does not."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        with region():
            y = m.c(x)
        return m.d(F.relu(y))

    model = nets.randomize(Body(body, c=conv(), d=conv(4, 2)))
    plain = nets.randomize(Body(lambda m, x: m.d(F.relu(m.c(x))), c=conv(), d=conv(4, 2)))
    plain.load_state_dict(model.state_dict())
    _, lowered = quantized(model, X)
    assert lowered.macs[0] == lowered.macs[1] > 0
    assert torch.equal(lowered(X), quantized(plain, X)[1](X))


@pytest.mark.case("problem 8", "calibration 41")
def test_a_model_in_training_mode_is_quantized_as_in_evaluation_and_left_in_training():
    """Problem 8, calibration case 41: dropout and batch statistics are gone from the graph, not from the model."""
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU(), nn.Dropout2d(0.5), conv(4, 2))
    _, in_evaluation = quantized(nets.randomize(model), X)
    model.train()
    captured = stages.capture(model, X)
    prepared = stages.prepare(captured)
    stages.calibrate(prepared, [X])
    lowered = stages.requantize(stages.convert(prepared))
    assert all(module.training for module in model.modules())
    assert "dropout" not in captured.text()
    assert lowered.text() == in_evaluation.text()
    assert torch.equal(lowered(X), in_evaluation(X))
