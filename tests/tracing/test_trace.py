"""nn.Module -> graph: structure of calls and results, free batch, refusals, and the model left alone."""

import copy
import re

import pytest
import torch
from torch import fx, nn
from torch.export import Dim
from torch.nn import functional as F

from intaglio.errors import CaptureError, InputError
from intaglio.fxgraph.node_info import info
from intaglio.ir import Expression
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.torch_private import decompose_used_composites
from intaglio.tracing import CAPTURE_PASSES, capture, capture_check
from intaglio.tracing.export_metadata import path_of
from intaglio.tracing.local_decompositions import decompose_single_operators
from support import nets
from support.lowering import captured_net
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **rest)


def body(function, **modules) -> nn.Module:
    return nets.randomize(Body(function, **modules))


def same(captured, model, *args, **kwargs) -> None:
    torch.testing.assert_close(captured(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.case("problem 28")
@pytest.mark.parametrize(
    "net",
    slow_params_except(
        nets.SharedConvBn,
        nets.InplaceMutations,
        nets.ConvThenUnsupported,
        nets.Linears,
        of=nets.ALL,
        reason="layers of the other networks",
    ),
    ids=lambda net: net.__name__,
)
def test_every_net_has_a_dynamic_batch_for_an_example_of_batch_1(net):
    model, captured = captured_net(net)
    assert not captured.notes
    assert isinstance(captured.signature.inputs[0].type.shape[0], Expression)
    for size in (1, 3, 7):
        same(captured, model, nets.example(model, size, seed=size))


@pytest.mark.case("backend 39", "problem 29")
def test_a_size_read_for_a_view_keeps_the_batch_free():
    model = body(lambda m, x: m.c(x).view(x.size(0), -1), c=conv())
    same(capture(model, X[:1]), model, X.repeat(3, 1, 1, 1))


def test_a_model_with_a_fixed_batch_is_captured_with_a_note():
    model = body(lambda m, x: m.c(x).view(2, -1), c=conv())
    captured = capture(model, X)
    (note,) = captured.notes
    assert note.startswith("the batch size is fixed to that of the example: ")
    same(captured, model, X)
    with pytest.raises(InputError, match=r"shape is \[3, 3, 8, 8\]; the model takes \[2, 3, 8, 8\]"):
        captured(torch.zeros(3, 3, 8, 8))


def test_a_view_that_mixes_batch_and_features_is_captured_with_a_fixed_batch():
    model = body(lambda m, x: m.b(m.a(x).view(-1, 12)), a=nn.Linear(6, 6), b=nn.Linear(12, 3))
    captured = capture(model, torch.randn(4, 6))
    assert "is not supported; sums, products" in captured.notes[0]
    same(captured, model, torch.randn(4, 6))


def test_an_input_of_batch_1_with_another_batched_input_has_a_dynamic_batch():
    model = body(lambda m, x, scale: m.c(x) * scale, c=conv())
    captured = capture(model, (X[:1], torch.randn(4, 1, 1)))
    same(captured, model, X, torch.randn(4, 1, 1))


def correlated(m: nn.Module, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Products of all pixels of two images, as networks for optical flow compute them."""
    n = first.shape[0]
    one, other = (part.view(n, 4, 64) for part in m.c(torch.cat((first, second))).chunk(2))
    return (torch.matmul(one.transpose(1, 2), other).reshape(n * 64, 1, 8, 8) * 2).view(n, 8, 8, -1)


@pytest.mark.slow(reason="captures a larger network; inputs that are joined have a free batch above")
def test_inputs_that_are_joined_and_separated_have_one_free_batch():
    model = body(correlated, c=conv())
    captured = capture(model, (X, X + 1))
    assert not captured.notes
    for size in (1, 3):
        same(captured, model, *torch.randn(2, size, 3, 8, 8))
    with pytest.raises(InputError, match=r"its shape is \[1, 3, 8, 8\]; the model takes \[n, 3, 8, 8\]"):
        captured(X, X[:1])


def checked(m: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A check of the values of an input, as models of images and texts compare the numbers of their tokens."""
    torch._check_tensor_all(mask.sum() == mask.numel() // 2, lambda: "half of the mask must be set")
    return m.c(x) * mask


def test_checks_of_values_are_left_out():
    model = body(checked, c=conv())
    mask = torch.tensor([0.0, 1.0]).repeat(4)
    captured = capture(model, (X, mask))
    same(captured, model, X, mask)


def test_an_input_broadcast_over_the_batch_keeps_size_1():
    model = body(lambda m, x, shift: m.c(x) + shift, c=conv())
    captured = capture(model, (X, torch.randn(1, 4, 8, 8)))
    same(captured, model, X.repeat(2, 1, 1, 1), torch.randn(1, 4, 8, 8))


def test_dynamic_image_sizes_are_checked_at_the_size_of_the_example():
    model = body(lambda m, x: m.c(x), c=nn.Conv2d(3, 4, 5))
    auto = torch.export.Dim.AUTO
    captured = capture(model, X, dynamic_shapes={"args": ({0: auto, 2: auto, 3: auto},)})
    assert str(captured.signature.inputs[0].type) == "f32[n, 3, n1, n2]"
    same(captured, model, torch.randn(5, 3, 9, 31))


def test_declared_ranges_hold_for_calls_and_in_words():
    model = body(lambda m, x: m.c(x), c=conv())
    rows, columns = torch.export.Dim("rows", min=4, max=16), torch.export.Dim("columns", min=6)
    captured = capture(model, X, dynamic_shapes={"args": ({2: rows, 3: columns},)})
    assert captured.signature.ranges == {"n": (4, 16), "n1": (6, None)}
    same(captured, model, torch.randn(2, 3, 4, 600))
    for shape, limits in (((2, 3, 17, 8), "n from 4 to 16"), ((2, 3, 8, 5), "n1 of at least 6")):
        with pytest.raises(InputError, match=rf"shape is \[.*\]; the model takes \[2, 3, n, n1\] with {limits}"):
            captured(torch.randn(shape))


def test_a_declared_range_of_the_batch_is_where_the_graph_is_checked():
    model = body(lambda m, x: m.c(x), c=conv())
    captured = capture(model, X.repeat(3, 1, 1, 1), dynamic_shapes={"args": ({0: torch.export.Dim("b", min=5)},)})
    assert captured.signature.ranges == {"n": (5, None)}


class Lookup(nn.Module):
    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.rows, self.out, self.length = nn.Embedding(9, 4), nn.Linear(4 * (length or 1), 3), length

    def forward(self, ids):
        y = self.rows(ids)
        return self.out(y.mean(1) if self.length is None else y.reshape(ids.shape[0], -1))


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 1), (2, 5)])
def test_matrices_of_whole_numbers_have_free_lengths_whatever_the_example(size):
    model = nets.randomize(Lookup())
    captured = capture(model, torch.randint(9, size))
    assert not captured.notes
    assert str(captured.signature.inputs[0].type) == "i64[n, n1]"
    for other in ((1, 1), (5, 2), (2, 30)):
        same(captured, model, torch.randint(9, other))


def test_a_length_that_the_model_specializes_is_static_with_a_reason():
    model = nets.randomize(Lookup(6))
    captured = capture(model, torch.randint(9, (2, 6)))
    (note,) = captured.notes
    assert note.startswith("the length of 'ids' is fixed to that of the example: torch.export cannot trace the model")
    assert str(captured.signature.inputs[0].type) == "i64[n, 6]"
    same(captured, model, torch.randint(9, (7, 6)))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x, shift=None, *, scale=1.0):
        y = self.a(x) * scale
        return y if shift is None else y + shift


@pytest.mark.case("frontends B5")
def test_arguments_by_position_and_by_name():
    model, x, shift = nets.randomize(Keywords()), torch.randn(2, 4), torch.randn(2, 3)
    captured = capture(model, (x,), example_kwargs={"shift": shift, "scale": 2.0})
    wanted = model(x, shift, scale=2.0)
    torch.testing.assert_close(captured(x, shift=shift, scale=2.0), wanted)
    torch.testing.assert_close(captured(x=x, scale=2.0, shift=shift), wanted)
    with pytest.raises(InputError, match=r"its value is 3\.0, but the model was captured with 2\.0"):
        captured(x, shift=shift, scale=3.0)
    for args, kwargs in [((), {}), ((x,), {}), ((x, shift, 2.0), {}), ((x,), {"x": x, "shift": shift, "scale": 2.0})]:
        with pytest.raises(InputError, match=r"keyword arguments scale, shift of forward\(x, shift\)"):
            captured(*args, **kwargs)


def _cond(m, x):
    return torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: x * 2, (x,))


@pytest.mark.slow(reason="torch compiles the branches; models that cannot be captured say why below")
@pytest.mark.case("frontends C8")
def test_branches_with_bodies_of_their_own_are_refused_by_name():
    """C8: the operator, the module in its body, and what to do."""
    with pytest.raises(
        CaptureError, match=r"torch\.ops\.higher_order\.cond.*which operators it runs depends on data"
    ) as raised:
        capture(nets.randomize(Body(_cond, a=nn.Linear(4, 4))), torch.randn(3, 4))
    assert "quantize the modules in the body" in raised.value.remedy
    assert raised.value.where == "a"


@pytest.mark.case("problem 1")
def test_variadic_and_nested_arguments_are_captured():
    model = body(lambda m, x, *rest: m.a(x) + sum(m.a(r) for r in rest), a=nn.Linear(4, 3))
    args = tuple(torch.randn(3, 1, 4))
    captured = capture(model, args)
    assert not captured.notes
    same(captured, model, *torch.randn(3, 5, 4))
    nested = body(lambda m, batch: m.a(batch["a"]) + m.a(batch["b"][0]), a=nn.Linear(4, 3))
    captured = capture(nested, ({"a": args[0], "b": [args[1]]},))
    same(captured, nested, {"a": torch.randn(5, 4), "b": [torch.randn(5, 4)]})
    with pytest.raises(InputError, match="nesting of the arguments must be the same"):
        captured({"a": args[0]})


@pytest.mark.case("frontends B5")
def test_results_keep_their_structure_constants_and_repeats():
    model = body(lambda m, x: (lambda y: {"a": y, "b": (y, [3, None, "s"]), "n": x.shape[0]})(m.c(x)), c=conv())
    captured = capture(model, X)
    wanted, got = model(X[:1]), captured(X[:1])
    assert got["b"][1] == [3, None, "s"]
    assert got["n"] == 1
    assert list(got) == list(wanted)
    torch.testing.assert_close((got["a"], got["b"][0]), (wanted["a"], wanted["b"][0]))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (torch.zeros(2, 4, 8, 8), r"shape is \[2, 4, 8, 8\]; the model takes \[n, 3, 8, 8\]"),
        (torch.zeros(3, 8, 8), r"shape is \[3, 8, 8\]"),
        (X.double(), "data type is torch.float64; the model takes torch.float32"),
        (X.numpy(), "of type ndarray; the model takes a tensor here"),
        (None, "NoneType"),
    ],
)
def test_inputs_that_do_not_fit_are_named(wrong, problem):
    captured = capture(body(lambda m, x: m.c(x), c=conv()), X)
    with pytest.raises(InputError, match=f"input 'args_0': .*{problem}"):
        captured(wrong)


def test_an_input_changed_in_place_is_an_extra_result():
    model = body(lambda m, x: m.c(x.add_(1)), c=conv())
    x = X.clone()
    captured = capture(model, x)
    assert torch.equal(x, X), "the example is not written"
    ((leaf, name),) = captured.signature.updated_inputs.items()
    results = captured.module(x)
    assert leaf == 0
    assert len(results) == 2
    assert results[1].shape == x.shape
    torch.testing.assert_close(results[1], X + 1)
    assert name in captured.text()
    assert torch.equal(x, X)


class Dies(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("there is only one of me")


REFUSED = {
    "data-dependent": lambda: (body(lambda m, x: m.c(x) if x.sum() > 0 else m.c(-x), c=conv()), X),
    "depend on data or on random numbers": lambda: (body(lambda m, x: m.c(x) + torch.rand(1), c=conv()), X),
    "not an nn.Module": lambda: (lambda x: x, X),
    "the model is TorchScript": lambda: (torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)), torch.zeros(1, 4)),
    "only one of me": lambda: (Dies(), X),
    "to have 3 channels, but got 5": lambda: (body(lambda m, x: m.c(x), c=conv()), torch.zeros(2, 5, 8, 8)),
    "positional arguments but 5 were given": lambda: (nets.randomize(nets.Linears()), (torch.zeros(2, 16), X, X, X)),
}


@pytest.mark.parametrize("problem", REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_models_that_cannot_be_captured_say_why(problem):
    model, example = REFUSED[problem]()
    with pytest.raises(CaptureError, match=problem):
        capture(model, example)


def test_no_grad_inside_forward_and_mutations_leave_one_functional_graph():
    def forward(m, x):
        with torch.no_grad():
            y = F.relu_(m.c(x))
        y.view(-1).mul_(2)
        return y

    model = body(forward, c=conv())
    captured = capture(model, X)
    same(captured, model, X)
    assert {node.op for node in captured.module.graph.nodes} == {"placeholder", "get_attr", "call_function", "output"}
    assert "_(" not in captured.text().replace("_to_copy", "")


def test_calls_of_a_module_have_numbered_paths_and_source_lines():
    model = nets.randomize(nets.SharedConv())
    nodes = [n for n in capture(model, nets.example(model)).module.graph.nodes if "conv2d" in str(n.target)]
    assert [info(n).origin.path for n in nodes] == ["conv", "conv@1"]
    assert all("nets.py" in info(n).origin.source for n in nodes)


def test_casts_without_effect_are_removed():
    model = body(lambda m, x: F.relu(m.c(x).float().contiguous()), c=conv())
    assert [str(n.target) for n in capture(model, X).module.graph.nodes if n.op == "call_function"] == [
        "aten.conv2d.default",
        "aten.relu.default",
    ]


@pytest.mark.parametrize(
    "net",
    [nets.InplaceMutations, *slow_params(nets.OptionA, reason="a larger network through the same passes")],
    ids=lambda net: net.__name__,
)
def test_capture_passes_are_idempotent(net):
    _, captured = captured_net(net)
    text = captured.text()
    assert [step(captured.module) for step in CAPTURE_PASSES] == [0] * len(CAPTURE_PASSES)
    assert captured.text() == text


def snapshot(model: nn.Module) -> tuple:
    state = {name: (t.clone(), t.data_ptr(), t.grad_fn) for name, t in model.state_dict(keep_vars=True).items()}
    return state, [m.training for m in model.modules()], [(p.requires_grad, p.grad) for p in model.parameters()]


def assert_same(before: tuple, after: tuple) -> None:
    for (a, b), name in zip(zip(before[0].values(), after[0].values(), strict=True), before[0], strict=True):
        assert torch.equal(a[0], b[0]), name
        assert a[1:] == b[1:], name
    assert before[1:] == after[1:]


def mixed_modes() -> nn.Module:
    """Half in training mode, one parameter frozen: nothing to be evened out."""
    model = nets.randomize(nets.Residual())
    model.blocks[0].train()
    model.fc.weight.requires_grad_(False)
    return model


def whole_way(model: nn.Module) -> None:
    prepared = prepare(capture(model, nets.example(model)))
    convert(prepared, calibrate(prepared, [nets.example(model)]))(nets.example(model))


FAILING = {
    "capture": lambda m: capture(m, torch.zeros(2, 9, 12, 12)),
    "a selector": lambda m: prepare(capture(m, nets.example(m)), Quantizer(Recipe().with_selection(skip="nowhere"))),
    "calibration": lambda m: calibrate(prepare(capture(m, nets.example(m))), [nets.example(m) * float("nan")]),
    "no calibration": lambda m: convert(prepare(capture(m, nets.example(m)))),
}


@pytest.mark.case("calibration 41")
@pytest.mark.parametrize(
    "step",
    slow_params_except(
        "nothing", "calibration", of=["nothing", *FAILING], reason="other steps leave the model alone, too"
    ),
)
def test_the_float_model_is_the_same_afterwards_also_when_a_step_fails(step):
    model = mixed_modes()
    before, rng, twin = snapshot(model), torch.get_rng_state(), copy.deepcopy(model)
    if step == "nothing":
        whole_way(model)
    else:
        with pytest.raises(Exception, match="remedy"):
            FAILING[step](model)
    assert_same(before, snapshot(model))
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert all(len(m._forward_hooks) == 0 for m in model.modules())
    torch.testing.assert_close(model.eval()(nets.example(model)), twin.eval()(nets.example(model)), rtol=0, atol=0)


def test_capturing_a_random_model_keeps_the_generator_state():
    model = body(lambda m, x: m.c(x) + torch.rand(1), c=conv())
    state = torch.get_rng_state()
    with pytest.raises(CaptureError):
        capture(model, X)
    assert torch.equal(torch.get_rng_state(), state)


class Shapes(nn.Module):
    """Operators whose results are views or have sizes that are computed."""

    def forward(self, x):
        parts = torch.split(x.transpose(1, 2), 2, -1)
        return torch.cat(parts, -1).mean(1) + x.new_zeros(x.shape[0], x.shape[1]), x.softmax(-1).unsqueeze(0)


class Residual(nn.Module):
    """An in-place sum and an in-place function, as residual networks have them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = conv(4), conv(4), nn.BatchNorm2d(4)

    def forward(self, x):
        y = torch.relu_(self.norm(self.a(x)))
        y += self.b(y)
        return torch.relu_(y).flatten(1)


class Seen(nn.Module):
    """In-place operators whose writes are read: through a view, and by a reader behind them."""

    def forward(self, x):
        y = x + 1
        rows = y.view(-1)
        y.mul_(2)
        z = x * 3
        w = z.tanh_()
        return rows.sum() + z + w


class Halves(nn.Module):
    def forward(self, x):
        y = x.half() * 2
        y.add_(x)
        return y.float()


class Copies(nn.Module):
    """Dropout, and casts that change nothing or the element type."""

    def forward(self, x):
        x = nn.functional.dropout(x.to(torch.float32), training=self.training).relu().contiguous()
        return x.transpose(0, 1).contiguous().to(torch.float64), x.to("cpu"), x.softmax(-1, dtype=torch.float32)


class Divided(nn.Module):
    """Divisions of axes, expansions, and in-place operators that change nothing."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(inplace=True)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        heads = self.dropout(a + b).unflatten(-1, (2, -1)).transpose(1, 2)
        return heads * heads.mean(-1, keepdim=True).expand_as(heads), x.transpose(1, 2).unflatten(1, (3, 4))


class Lifted(nn.Module):
    """A number as a tensor of its own, without a gradient, as DeBERTa has it, and values without one."""

    def forward(self, x):
        return x * torch.tensor(2.0).detach_() + (x + 1).detach_()


class Flattened(nn.Module):
    """Flattened tensors that need a copy, whose size is a product, and whose first axis is flattened."""

    def forward(self, x):
        return x.transpose(1, 2).flatten(1), x.flatten(2), x.flatten(0, 1), x.flatten(), x[0, 0, 0].flatten()


DECOMPOSED = {
    "lifted": (Lifted(), (2, 3)),
    "seen writes": (Seen(), (2, 4)),
    "types": (Halves(), (2, 4)),
}
LEFT_ALONE = {
    "convolutions": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), (2, 3, 6, 6)),
    "norm": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (2, 3, 6, 6)),
    "residual": (Residual(), (2, 4, 12, 12)),
    "flatten": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), (2, 3, 6, 6)),
    "in place": (nn.Sequential(nn.Linear(8, 4), nn.Hardtanh(inplace=True), nn.SiLU(inplace=True)), (2, 8)),
    "layers": (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Softmax(-1)), (2, 8)),
    "views": (Shapes(), (2, 4, 6)),
    "copies": (Copies(), (2, 4, 6)),
    "divided": (Divided(), (2, 3, 12)),
    "recurrent": (nn.GRU(8, 4, batch_first=True), (2, 3, 8)),
}


WITH_FREE_SIZES = ("seen writes", "views", "copies", "divided")
FURTHER = ("convolutions", "divided", "layers", "norm", "residual")
MATCHED = [(name, name in WITH_FREE_SIZES) for name in (*DECOMPOSED, *LEFT_ALONE)]


@pytest.mark.parametrize(
    ("name", "free"),
    [
        *(pair for pair in MATCHED if pair[0] not in FURTHER),
        *slow_params(
            *(pair for pair in MATCHED if pair[0] in FURTHER), reason="operators that the other models have as well"
        ),
        *slow_params(
            *((name, not free) for name, free in MATCHED),
            reason="sizes are free in the models of views and copies always, and fixed in the others",
        ),
    ],
)
def test_functionalization_matches_that_of_torch(name, free):
    model, example = {**DECOMPOSED, **LEFT_ALONE}[name]
    shapes = ({0: torch.export.Dim.AUTO},) if free else None
    program = torch.export.export(model.eval(), (torch.randn(example),), dynamic_shapes=shapes)
    long = program.run_decompositions({})
    decompose_single_operators(program)
    short = decompose_used_composites(program)
    assert (short is program) == (name in LEFT_ALONE)
    assert operators_of(short) == operators_of(long)


@pytest.mark.parametrize(
    ("model", "example", "free"),
    [
        *[(Flattened(), (4, 5, 6, 7), free) for free in [(), (0,), (0, 2), (1, 2, 3)]],
        *[(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8), free) for free in [(), (0,), (0, 1)]],
    ],
)
def test_tensors_are_reshaped_without_a_second_trace(model, example, free):
    shapes = (dict.fromkeys(free, torch.export.Dim.AUTO),)
    program = torch.export.export(model.eval(), (torch.randn(example),), dynamic_shapes=shapes)
    decompose_single_operators(program)
    assert decompose_used_composites(program) is program
    assert "flatten" not in str(program.graph)
    for extra in (0, 2):
        x = torch.randn([size + extra if axis in free else size for axis, size in enumerate(example)])
        torch.testing.assert_close(program.module()(x), model(x))


def operators_of(program):
    """Return every operator with its operands by position, and its result; sizes are texts, as torch writes them."""
    places, found = {}, []

    def of_operand(node):
        value = node.meta["val"]
        return places[node] if isinstance(value, torch.Tensor | tuple) else str(value)

    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "output" or isinstance(value, torch.Tensor | tuple):
            places[node] = f"#{len(found)}"
            operands = fx.map_arg((node.args, node.kwargs), of_operand)
            result = (value.shape, value.dtype, value.stride()) if isinstance(value, torch.Tensor) else None
            found.append((str(node.target), str(operands), str(result), path_of(node, program)))
    return found


def test_a_dynamic_number_as_input_is_refused_and_a_fixed_one_is_not():
    model, shapes = Body(lambda m, x, factor: m.f(x) * factor, f=nn.Linear(4, 4)), (({0: Dim.AUTO}, Dim.DYNAMIC),)
    with pytest.raises(
        CaptureError, match=r"this number is dynamic.*\n  remedy: set its entry in dynamic_shapes to None"
    ):
        capture(model, (torch.ones(2, 4), 3), dynamic_shapes=shapes)
    capture(model, (torch.ones(2, 4), 3), dynamic_shapes=(({0: Dim.AUTO}, None),))


def test_a_batch_whose_slice_has_one_element_in_the_example_is_fixed():
    """torch.export takes the one element for the size of all calls."""
    captured = capture(body(lambda m, x: F.hardsigmoid(x[1:-1:3])), torch.ones(3, 4))
    (note,) = captured.notes
    assert note.endswith("returns shape [0, 4], but torch.export states [1, 4]")
    assert captured.signature.inputs[0].type.shape == (3, 4)


def test_an_axis_whose_slice_has_one_element_in_the_example_is_captured_with_a_larger_one():
    model = body(lambda m, x: F.hardsigmoid(x[:, 1:-1:3]))
    captured = capture(model, torch.ones(3, 4), dynamic_shapes={"args": ({1: Dim.AUTO},)})
    for size in (4, 5, 6, 11):
        x = torch.randn(3, size)
        assert torch.equal(captured(x), model(x))


def test_operators_that_fail_at_larger_sizes_do_not_hide_other_wrong_types():
    """Positions reach over the end of their table of 5 vectors."""

    def forward(m, x):
        return m.p(torch.arange(x.shape[1])), F.hardsigmoid(x[:, 1:-1:3])

    model = body(forward, p=nn.Embedding(5, 2))
    captured = capture(model, torch.ones(3, 4), dynamic_shapes={"args": ({1: Dim.AUTO},)})
    for size in (4, 5):
        x = torch.randn(3, size)
        assert torch.equal(captured(x)[1], model(x)[1])


def test_automatic_axes_that_the_model_does_not_allow_are_fixed_and_noted():
    model = body(lambda m, x: F.interpolate(x, scale_factor=1.5))
    shapes = {"args": ({0: Dim.AUTO, 2: Dim.AUTO},)}
    captured = capture(model, torch.ones(3, 2, 4), dynamic_shapes=shapes)
    (note,) = captured.notes
    assert re.match(
        r"axes with Dim.AUTO behind the batch are fixed .* example: the dimension 1\.5.* not supported", note
    )
    assert captured.signature.inputs[0].type.shape[1:] == (2, 4)
    assert captured(torch.ones(7, 2, 4)).shape == (7, 2, 6)


def test_sizes_are_enlarged_until_a_quotient_differs():
    """A window every 8 elements occurs once in twice the example, too."""
    model = body(lambda m, x: F.hardsigmoid(m.c(x)), c=nn.Conv1d(2, 2, 3, stride=8))
    captured = capture(model, torch.ones(3, 2, 5), dynamic_shapes={"args": ({2: Dim.AUTO},)})
    for size in (5, 10, 11, 19, 40):
        assert captured(torch.ones(3, 2, size)).shape == model(torch.ones(3, 2, size)).shape


@pytest.mark.parametrize("compiling", [True, False])
def test_calls_of_the_float_model_leave_a_core_to_compilers_in_the_background(compiling, monkeypatch):
    cores, seen = 4, set[int]()
    monkeypatch.setattr(capture_check, "builds_in_background", lambda: compiling)
    monkeypatch.setattr(capture_check.os, "sched_getaffinity", lambda process: range(cores))

    def record_threads(module: nn.Module, inputs: tuple) -> None:
        if not torch.compiler.is_exporting():
            seen.add(torch.get_num_threads())

    model = nn.Linear(8, 8).eval()
    model.register_forward_pre_hook(record_threads)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores)
        capture(model, (torch.randn(1, 8),))
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)
    assert seen == {cores - compiling}
