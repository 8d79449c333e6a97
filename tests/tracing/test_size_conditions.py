"""Calls with sizes at which a model takes another branch than in the graph are errors."""

from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils._sympy.functions import Max, Min

import intaglio
from intaglio import eager, stages
from intaglio.errors import CaptureError, InputError
from intaglio.fxgraph.nodes import dim_of_expression
from intaglio.ir import SizeCondition, evaluate, symbol
from intaglio.ir.dims import RELATIONS
from intaglio.tracing.capture_check import has_fixed_sizes
from intaglio.tracing.sizes.size_conditions import comparisons_of, is_model_code, nearest_sizes

AUTO = Dim.AUTO
FREE_LENGTH = ({0: AUTO, 1: AUTO},)


class TwoBranches(nn.Module):
    """Runs one layer for sizes with a condition and another one for others."""

    def __init__(self, condition: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.first, self.second, self.condition = nn.Linear(6, 8), nn.Linear(6, 8), condition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if self.condition(x) else self.second(x)


CONDITIONS = {
    "other than a number": (lambda x: x.shape[1] != 20, [(2, 15), (2, 21)], [(2, 20)]),
    "odd": (lambda x: x.shape[1] % 2 == 1, [(2, 15), (3, 7)], [(2, 16)]),
    "in a tuple": (lambda x: x.shape[1] not in (8, 32), [(2, 15), (3, 9)], [(2, 8), (2, 32)]),
    "number of elements": (lambda x: x.numel() <= 1000, [(2, 15)], [(20, 32)]),
    "square": (lambda x: x.shape[1] ** 2 <= 300, [(2, 15), (2, 17)], [(2, 18)]),
    "smallest": (lambda x: min(x.shape[0], x.shape[1]) > 3, [(4, 15)], [(3, 15), (4, 3)]),
    "quotient": (lambda x: x.shape[1] / x.shape[0] > 2, [(4, 15), (2, 5)], [(8, 16), (4, 8)]),
    "batch": (lambda x: x.shape[0] != 3, [(1, 15), (2, 15)], [(3, 15)]),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_branch_of_the_example_takes_no_calls_of_the_other_branch(condition):
    torch.manual_seed(0)
    rule, same, other = CONDITIONS[condition]
    model = TwoBranches(rule).eval()
    graph = stages.capture(model, torch.randn(4, 15, 6), dynamic_shapes=FREE_LENGTH)
    for shape in same:
        x = torch.randn(*shape, 6)
        torch.testing.assert_close(graph(x), model(x))
    for shape in other:
        with pytest.raises(InputError, match=r"test_size_conditions\.py:\d+ takes another branch for others"):
            graph(torch.randn(*shape, 6))
    assert any("calls must have sizes with" in note for note in graph.notes)
    assert not has_fixed_sizes(graph)


class LongerFirst(nn.Module):
    """Swaps two texts so that the longer one is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape[1] < b.shape[1]:
            a, b = b, a
        return self.layer(self.words(a)).mean(1) - 0.5 * self.layer(self.words(b)).mean(1)


def texts(first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(50, (2, first)), torch.randint(50, (2, second))


def test_two_texts_keep_the_order_of_their_lengths(tmp_path):
    torch.manual_seed(0)
    model = LongerFirst().eval()
    quantized = intaglio.quantize(model, [texts(12, 7) for _ in range(4)])
    quantized.save(tmp_path / "net.intaglio")
    for one in (quantized, intaglio.load(tmp_path / "net.intaglio")):
        for lengths in ((12, 7), (9, 5), (6, 6), (1, 1)):
            call = texts(*lengths)
            torch.testing.assert_close(one(*call), model(*call), atol=0.05, rtol=0)
        with pytest.raises(InputError, match=r"inputs 'a' \[n, n1\], 'b' \[n, n2\]: n1 is 5 and n2 is 9; ") as raised:
            one(*texts(5, 9))
    assert raised.value.remedy.startswith("quantize again with batches of such sizes")
    other = intaglio.quantize(model, [texts(5, 9) for _ in range(4)])
    call = texts(5, 9)
    torch.testing.assert_close(other(*call), model(*call), atol=0.05, rtol=0)
    prepared = eager.prepare(model, texts(5, 9))
    for lengths in ((5, 9), (9, 5)):
        prepared(*texts(*lengths))
    both = eager.convert(prepared)
    for call in (texts(5, 9), texts(9, 5)):
        torch.testing.assert_close(both(*call), model(*call), atol=0.05, rtol=0)


class Positions(nn.Module):
    """Interpolates a table of positions unless the image has its size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 8, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.shape[2:] == self.table.shape[2:]:
            return y + self.table
        return y + F.interpolate(self.table, y.shape[2:], mode="bilinear")


def test_branches_that_compute_the_same_are_no_condition():
    torch.manual_seed(0)
    model = Positions().eval()
    free = ({0: AUTO, 2: AUTO, 3: AUTO},)
    graph = stages.capture(model, torch.randn(2, 3, 32, 48), dynamic_shapes=free)
    assert graph.signature.conditions == ()
    for height, width in ((24, 24), (24, 32), (16, 24), (40, 20)):
        x = torch.randn(2, 3, height, width)
        torch.testing.assert_close(graph(x), model(x), atol=1e-4, rtol=1e-4)


class OddLengths(TwoBranches):
    """Refuses even lengths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 2 == 0:
            raise ValueError("even length")
        return self.first(x)


def test_sizes_that_the_model_refuses_are_refused_without_a_note():
    graph = stages.capture(OddLengths(len).eval(), torch.randn(4, 7, 6), dynamic_shapes=FREE_LENGTH)
    assert graph(torch.randn(2, 9, 6)).shape == (2, 9, 8)
    with pytest.raises(InputError, match="takes another branch"):
        graph(torch.randn(2, 8, 6))
    assert graph.notes == ()


class EitherSize(nn.Module):
    """Compares sizes by an expression that cannot be tested in calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if max(x.shape[0], x.shape[1]) % min(x.shape[0], x.shape[1]) == 3 else self.second(x)


def test_conditions_that_cannot_be_tested_fix_the_sizes():
    torch.manual_seed(0)
    model = EitherSize().eval()
    x = torch.randn(4, 15, 6)
    graph = stages.capture(model, x, dynamic_shapes=FREE_LENGTH)
    torch.testing.assert_close(graph(x), model(x))
    assert [note.split(": ")[0] for note in graph.notes] == ["axes with Dim.AUTO are fixed to the sizes of the example"]
    with pytest.raises(
        CaptureError, match=r"py:\d+ tests the condition .*Max\(n, n1\).* which cannot be tested"
    ) as raised:
        stages.capture(model, x, dynamic_shapes={"x": {0: Dim("batch"), 1: Dim("length")}})
    assert raised.value.remedy == "leave these sizes out of dynamic_shapes, so that they are those of the example"
    torch.testing.assert_close(stages.capture(model, x, dynamic_shapes={"x": {}})(x), model(x))


NAMES = ("n", "m")
SIZES = {sympy.Symbol(name, integer=True, positive=True): symbol(name) for name in NAMES}
N, M = SIZES
TERMS = st.sampled_from([N, M, N + 3, 2 * M - 1, N * M, sympy.Integer(7), sympy.Min(N, M), N + M - 5])
RELATION_TYPES = [sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge]


@given(TERMS, TERMS, st.sampled_from(RELATION_TYPES), st.integers(1, 30), st.integers(1, 30))
def test_conditions_hold_where_their_expressions_do(left, right, relation, n, m):
    expression = relation(left, right, evaluate=False)
    try:
        parts = [SizeCondition(*part) for part in comparisons_of(expression, SIZES)]
    except CaptureError:
        assert expression.has(sympy.Min)
        return
    assert all(part.holds({"n": n, "m": m}) for part in parts) == bool(expression.subs({N: n, M: m}).doit())


@given(
    st.sampled_from(sorted(RELATIONS)), st.integers(-20, 20), st.integers(2, 60), st.integers(2, 60), st.integers(2, 80)
)
def test_the_nearest_sizes_are_wanted_and_none_is_nearer(relation, constant, n, m, high):
    condition = SizeCondition(symbol("n") * 2, relation, symbol("m") + constant)
    found = nearest_sizes({"n": n, "m": m}, condition.holds, NAMES, {"n": (2, max(high, n))})
    if condition.holds({"n": n, "m": m}):
        assert found == {"n": n, "m": m}
    elif found is not None:
        assert condition.holds(found)
        assert 2 <= found["n"] <= max(high, n)
        if found["m"] == m:
            between = range(min(n, found["n"]) + 1, max(n, found["n"]))
            assert not any(condition.holds({"n": value, "m": m}) for value in between)


def test_code_of_models_is_told_from_that_of_operators():
    assert is_model_code(__file__)
    assert is_model_code(F.__file__)
    assert not is_model_code(nn.modules.module.__file__)
    assert not is_model_code(torch._prims_common.__file__)


class Coordinates(nn.Module):
    """Adds channels with the coordinates of each pixel, whose number torch.export fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 8, 3, padding=1)

    def forward(self, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        x = pair["image"]
        n, _, h, w = x.shape
        grid = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        return self.conv(torch.cat([x, torch.stack(grid).expand(n, 2, h, w)], 1))


def test_a_note_names_automatic_axes_that_the_model_fixes():
    shapes = ({"image": {0: AUTO, 2: AUTO, 3: AUTO}},)
    graph = stages.capture(Coordinates().eval(), ({"image": torch.randn(4, 3, 8, 6)},), dynamic_shapes=shapes)
    why = "the code of the model does not allow other sizes"
    assert graph.notes == (
        f"axis 2 of 'pair_image' is fixed to 8: {why}",
        f"axis 3 of 'pair_image' is fixed to 6: {why}",
    )
    assert graph({"image": torch.randn(3, 3, 8, 6)}).shape == (3, 8, 8, 6)


class RelativePlaces(nn.Module):
    """Adds the last rows of a table, or all of them to longer texts, as the positions of MPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(6, 8), nn.Parameter(torch.randn(20, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table[-x.shape[1] :]


def test_the_largest_of_sizes_is_that_of_the_example():
    torch.manual_seed(0)
    model = RelativePlaces().eval()
    graph = stages.capture(model, torch.randn(3, 9, 6), dynamic_shapes=FREE_LENGTH)
    assert graph.signature.ranges["n1"][1] == 20
    for length in (2, 9, 20):
        x = torch.randn(2, length, 6)
        torch.testing.assert_close(graph(x), model(x))
    with pytest.raises(InputError, match=r"n1 from \d to 20"):
        graph(torch.randn(2, 21, 6))


class Square(nn.Module):
    """Pads images to squares."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[2:]
        return self.conv(F.pad(x, (0, max(h - w, 0), 0, max(w - h, 0))))


def test_images_padded_to_squares_keep_the_longer_side_of_the_example():
    torch.manual_seed(0)
    model = Square().eval()
    graph = stages.capture(model, torch.randn(2, 3, 8, 12), dynamic_shapes=({0: AUTO, 2: AUTO, 3: AUTO},))
    for height, width in ((8, 12), (5, 20), (9, 9)):
        x = torch.randn(2, 3, height, width)
        torch.testing.assert_close(graph(x), model(x))
    with pytest.raises(
        InputError, match="n1 is 12 and n2 is 8; the model takes calls with n2 >= n1, because the code of the model "
    ):
        graph(torch.randn(2, 3, 12, 8))


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-5, 5)), min_size=2, max_size=3), st.booleans())
def test_a_size_that_is_always_the_largest_or_smallest_needs_no_condition(parts, largest):
    function = Max if largest else Min
    extreme = function(*(factor * N + added for factor, added in parts), evaluate=False)
    try:
        found = dim_of_expression(extreme, SIZES)
    except CaptureError:
        return
    choose = max if largest else min
    for n in range(1, 40):
        assert evaluate(found, {"n": n}) == choose(factor * n + added for factor, added in parts)


def test_no_size_is_shorter_than_none():
    assert dim_of_expression(Max(0, 1 - N, evaluate=False), SIZES) == 0
    assert dim_of_expression(Min(N, N + 3, evaluate=False), SIZES) == symbol("n")
