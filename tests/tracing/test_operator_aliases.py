"""Aliases of operators, such as torch.multiply, are the operators that they are aliases of."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import eager
from intaglio.ops import BY_TARGET
from intaglio.torch_private import FakeTensorMode, OpOverload, decomposition_of, schema_of
from intaglio.tracing import capture
from intaglio.tracing.operator_aliases import CallLog
from support.nets import Body, randomize
from support.slow_params import slow_params

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
Y = X.flip(0)
OPERANDS: dict[str, Any] = {"Tensor": X, "List[Tensor]": [X, Y], "number": 2, "int": 1, "List[int]": [1]}

CASTS = ("to", "chalf")


def candidates() -> Iterator[tuple[OpOverload, list[Any]]]:
    """Yield the operators without an integer form that change no operand, and operands for each."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or packet.startswith("_") or packet in CASTS:
            continue
        target = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        record = BY_TARGET.get(str(target))
        if target is None or schema_of(target).is_mutable or (record is not None and record.has_integer_form):
            continue
        wanted = [a for a in schema_of(target).arguments if not a.has_default_value() or "number]" in str(a.type)]
        kinds = [str(a.type).replace("Optional[number]", "number") for a in wanted]
        if kinds and set(kinds) <= set(OPERANDS) and not any(a.kwarg_only for a in wanted):
            yield target, [Y if place and kind == "Tensor" else OPERANDS[kind] for place, kind in enumerate(kinds)]


def only_call(target: OpOverload, given: list[Any]) -> OpOverload | None:
    """Return the operator with a record by which PyTorch computes another one, or ``None``."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        try:
            with CallLog() as log:
                decomposition_of(target)(*fake)
        except Exception:  # these operands do not suit the operator
            return None
    record = BY_TARGET.get(str(log.calls[0][0])) if len(log.calls) == 1 else None
    if record is None or (str(target) in BY_TARGET and not record.has_integer_form):
        return None
    return log.calls[0][0]


class Calls(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x, y):
        own = {id(X): x, id(Y): y}
        return [target(*[_own(operand, own) for operand in given]) for target, given in self.calls]


def _own(operand, own):
    if isinstance(operand, list):
        return [own.get(id(part), part) for part in operand]
    return own.get(id(operand), operand)


@pytest.mark.slow(reason="looks at every operator of PyTorch, which changes with PyTorch only")
def test_every_alias_of_an_operator_with_a_record_is_captured_as_that_operator(caplog):
    caplog.set_level(logging.CRITICAL, "torch")
    found = [(target, given) for target, given in candidates() if decomposition_of(target) is not None]
    pairs = {target: (given, only) for target, given in found if (only := only_call(target, given)) is not None}
    names = {str(target).split(".")[1] for target in pairs}
    assert {"multiply", "subtract", "concat", "concatenate", "rsub", "true_divide", "divide", "absolute", "negative",
            "clip", "greater", "less_equal", "not_equal", "special_expit", "hstack", "vstack"} <= names  # fmt: skip
    captured = capture(Calls([(target, given) for target, (given, _) in pairs.items()]), (X, Y))
    called = [str(node.target) for node in captured.module.graph.nodes if node.op == "call_function"]
    plain = {"aten.round.decimals": "aten.round.default"}  # without decimals
    assert called == [plain.get(str(only), str(only)) for _, only in pairs.values()]
    for ours, theirs in zip(captured(X, Y), [target(*given) for target, (given, _) in pairs.items()], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


ALIASES = {
    "special.softmax": (lambda x: torch.special.softmax(x, 1), lambda x: torch.softmax(x, 1)),
    "special.log_softmax": (lambda x: torch.special.log_softmax(x, 1), lambda x: torch.log_softmax(x, 1)),
    "special.round": (torch.special.round, torch.round),
    "special.erf": (torch.special.erf, torch.erf),
    "special.exp2": (torch.special.exp2, torch.exp2),
    "special.log1p": (lambda x: torch.special.log1p(x.abs()), lambda x: torch.log1p(x.abs())),
    "arcsinh": (torch.arcsinh, torch.asinh),
    "arctan2": (lambda x: torch.arctan2(x, x + 2), lambda x: torch.atan2(x, x + 2)),
    "fix": (torch.fix, torch.trunc),
    "round with decimals": (lambda x: torch.round(x, decimals=0), torch.round),
}
"""Aliases of operators with and without a record, and the operators themselves."""


@pytest.mark.slow(
    reason="all aliases in one model that is quantized twice; they give the bits of their operators below"
)
@pytest.mark.parametrize(
    "door",
    [
        *slow_params(
            "quantize",
            reason="all aliases in one model that is quantized twice; they give the bits of their operators below",
        ),
        "eager",
    ],
)
def test_aliases_resolve_like_their_operators_in_both_doors(door, subtests):
    """All aliases in one model, and all operators in another; each stands between layers of its own."""
    texts, results = [], []
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    for functions in zip(*ALIASES.values(), strict=True):
        parts = [
            Body(lambda m, x, function=function: m.b(function(m.a(x))), a=nn.Linear(16, 16), b=nn.Linear(16, 4))
            for function in functions
        ]
        model = randomize(Body(lambda m, x: [part(x) for part in m.parts], parts=nn.ModuleList(parts)))
        if door == "quantize":
            int8 = intaglio.quantize(model, [x], progress=False)
            texts.append(str(int8.coverage))
        else:
            prepared = eager.prepare(model, x)
            prepared(x)
            int8 = eager.convert(prepared)
            texts.append(str(eager.coverage(int8)))
        results.append(int8(x))
    assert re.sub(r"\([^()]*\)", "", texts[0]) == re.sub(r"\([^()]*\)", "", texts[1])
    for name, found, expected in zip(ALIASES, *results, strict=True):
        with subtests.test(name):
            assert torch.equal(found, expected)


def test_decimals_of_a_rounding_stay():
    captured = capture(Body(lambda m, x: torch.special.round(x, decimals=2)), X)
    assert torch.equal(captured(X), torch.round(X, decimals=2))


class Aliases(nn.Module):
    def __init__(self, plain: bool):
        super().__init__()
        self.plain, self.a, self.b, self.c = plain, nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(24, 4, 1)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        if self.plain:
            parts = [torch.mul(a, b), torch.sub(torch.abs(b), torch.neg(a))]
            third = torch.clamp(torch.div(a, 3), -1, 1)
            return self.c(torch.cat([torch.cat(parts, 1), third], 1).transpose(2, 3))
        parts = [torch.multiply(a, b), torch.rsub(torch.negative(a), torch.absolute(b))]
        third = torch.clip(torch.true_divide(a, 3), -1, 1)
        return self.c(torch.swapaxes(torch.concat([torch.concatenate(parts, 1), third], 1), 2, 3))


def images() -> list[torch.Tensor]:
    return list(torch.randn(3, 4, 3, 8, 8, generator=torch.Generator().manual_seed(2)))


@pytest.mark.filterwarnings("ignore:data")
def test_aliases_are_int8_and_give_the_bits_of_their_operators():
    ours, theirs = (randomize(Aliases(plain)).eval() for plain in (False, True))
    theirs.load_state_dict(ours.state_dict())
    quantized = [intaglio.quantize(model, images()) for model in (ours, theirs)]
    assert not quantized[0].coverage.islands
    assert torch.equal(quantized[0](images()[0]), quantized[1](images()[0]))
    assert str(quantized[0].coverage).splitlines()[0] == str(quantized[1].coverage).splitlines()[0]


@pytest.mark.slow(reason="the aliases of the test above are recorded by the same door")
def test_define_by_run_models_run_aliases_in_int8():
    model = randomize(Aliases(plain=False)).eval()
    prepared = eager.prepare(model, images()[0])
    for batch in images():
        prepared(batch)
    converted = eager.convert(prepared)
    converted(images()[0])
    assert "in float" not in str(converted._auto_quant_state)
    eager.assert_int8(converted, macs=1.0)


class BatchStatistics(nn.Module):
    def __init__(self, given: bool):
        super().__init__()
        self.given, self.a = given, nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.a(x)
        if self.given:
            return F.batch_norm(y, y.mean((0, 2, 3)), y.var((0, 2, 3)), training=False)
        return F.batch_norm(y, None, None, training=True)


@pytest.mark.parametrize("given", [False, True], ids=["of the batch", "given"])
def test_a_batch_norm_with_computed_statistics_says_so(given):
    prepared = intaglio.stages.prepare(capture(randomize(BatchStatistics(given)).eval(), images()[0]))
    (reason,) = [skip.reason for skip in prepared.annotations.skipped if "batch_norm" in skip.origin.operator]
    assert reason == "the statistics or parameters of this batch norm are computed while the model runs"


class Empty(nn.Module):
    """The kernel of empty_like creates a tensor, whose size is free with the batch."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x):
        y = self.a(x)
        order = y.sum(1).argsort()
        return y, torch.empty_like(order).scatter(0, order, torch.ones_like(order).cumsum(0))


def test_kernels_that_create_tensors_get_free_sizes():
    model = Empty().eval()
    captured = capture(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    x = torch.randn(5, 4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured(x), model(x), strict=True))
