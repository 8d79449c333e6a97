"""Models with real Python in them: early exits, recursion, beams, loops over time; and what goes wrong with them."""

import threading

import pytest
import torch
from torch import Tensor, nn

import nets
from intaglio import eager
from intaglio.errors import CalibrationError, UnsupportedError
from nets import Body
from running import assert_like, assert_near, converted_on, integers, near, prepared_on, same, warnings_of

Tree = Tensor | tuple["Tree", "Tree"]


def draws(*shape: int, count: int = 4, seed: int = 1) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=draw),) for _ in range(count)]


class EarlyExit(nn.Module):
    """Leaves behind the first stage when the input's own brightness says so, so that int8 and float leave alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.early, self.late = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        y = self.first(x)
        if x.mean() > 0:
            return self.early(y.mean((2, 3))), 1
        return self.late(self.second(y).mean((2, 3))), 2


@pytest.mark.parametrize("order", [(1, -1, 1, -1), (-1, 1, -1, 1)])
def test_an_early_exit_network_takes_both_exits_in_int8(order, caplog):
    model = nets.randomize(EarlyExit())
    calls = [(x + sign,) for (x,), sign in zip(draws(2, 3, 8, 8), order, strict=True)]
    converted = converted_on(model, calls)
    assert_near(converted, model, [(x + sign,) for (x,), sign in zip(draws(5, 3, 8, 8, seed=2), order, strict=True)])
    assert not warnings_of(caplog)


class TreeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(8, 16), nn.Linear(32, 16)

    def forward(self, tree: Tree) -> Tensor:
        if isinstance(tree, Tensor):
            return torch.relu(self.leaf(tree))
        left, right = tree
        return torch.relu(self.join(torch.cat([self(left), self(right)], -1)))


def tree(text: str, draw: torch.Generator, batch: int = 2) -> Tree:
    """Of the nesting that the text's brackets say, ``((..).)``."""
    stack: list[list[Tree]] = [[]]
    for letter in text:
        if letter == "(":
            stack.append([])
        elif letter == ".":
            stack[-1].append(torch.randn(batch, 8, generator=draw))
        else:
            left, right = stack.pop()
            stack[-1].append((left, right))
    return stack[0][0]


def test_a_recursive_network_runs_on_trees_deeper_than_those_it_was_calibrated_on(caplog):
    draw = torch.Generator().manual_seed(1)
    model = nets.randomize(TreeNet())
    converted = converted_on(model, [(tree(text, draw),) for text in ("((..).)", "(..)", "((..)(..))", ".")])
    deeper = ("(((..).)(..))", ".", "(((..)(..))((..)(..)))", "(.(.(..)))")
    assert_near(converted, model, [(tree(text, draw, batch=3),) for text in deeper])
    assert not warnings_of(caplog)


class Beam(nn.Module):
    """Keeps the best ``width`` sequences until all of them end, or for ``longest`` steps."""

    def __init__(self, words: int = 12, features: int = 16, width: int = 3) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(words, features), nn.GRUCell(features, features)
        self.out, self.width, self.words = nn.Linear(features, words), width, words

    def forward(self, state: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        state = state.expand(self.width, -1)
        beams = torch.zeros(self.width, 1, dtype=torch.long)
        scores = torch.tensor([0.0, -1e9, -1e9])
        while beams.size(1) < longest and not bool((beams[:, 1:] == 0).any(1).all()):
            state = self.cell(self.embed(beams[:, -1]), state)
            total = scores[:, None] + torch.log_softmax(self.out(state), -1)
            scores, best = total.flatten().topk(self.width)
            origin = best // self.words
            beams = torch.cat([beams.gather(0, origin[:, None].expand_as(beams)), best[:, None] % self.words], 1)
            state = state.index_select(0, origin)
        return beams, scores


def test_a_beam_search_runs_as_long_as_its_data_say(caplog):
    model = nets.randomize(Beam())
    calls = [(x, 6) for (x,) in draws(1, 16)]
    prepared = prepared_on(model, calls)
    converted = eager.convert(prepared)
    for (x,) in draws(1, 16, count=3, seed=2):
        beams, scores = converted(x, 9)
        again, expected = model(x, 9)
        assert beams.dtype is torch.long and beams.shape[0] == 3
        assert (beams >= 0).all() and (beams < 12).all()
        if torch.equal(beams, again):
            near(scores, expected)
    assert not warnings_of(caplog)


class LanguageModel(nn.Module):
    def __init__(self, kind: type[nn.Module], words: int = 20, features: int = 16) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(words, features), kind(features, features), nn.Linear(features, words)
        self.features = features

    def forward(self, ids: Tensor) -> Tensor:
        embedded, state, found = self.embed(ids), None, []
        for time in range(ids.size(1)):
            state = self.cell(embedded[:, time], state)
            found.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(found, 1)


def sentences(*sizes: tuple[int, int], seed: int = 1) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 20, size, generator=draw),) for size in sizes]


@pytest.mark.parametrize("recipe", [None, "int8_dynamic"])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_language_model_that_loops_over_time_takes_sentences_of_any_length(kind, recipe, caplog):
    model = nets.randomize(LanguageModel(kind))
    converted = converted_on(model, sentences((2, 4), (2, 6), (3, 3)), recipe)
    assert_near(converted, model, sentences((2, 4), (1, 1), (4, 9), seed=2))
    assert not warnings_of(caplog)
    assert any("quantize" in name or "rows" in name for name in integers(converted))


class Settling(nn.Module):
    """Repeats until a count that the data gives has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: Tensor, left: Tensor) -> tuple[Tensor, int]:
        turns = 0
        while left.item() > 0:
            x, left, turns = torch.tanh(self.step(x)), left - 1, turns + 1
        return x, turns


def test_a_while_loop_over_data_reuses_its_body(caplog):
    model = nets.randomize(Settling())
    calls = [(x, torch.tensor(turns)) for (x,), turns in zip(draws(2, 8), (2, 3, 1, 0), strict=True)]
    converted = converted_on(model, calls)
    later = [(x, torch.tensor(turns)) for (x,), turns in zip(draws(5, 8, seed=2), (4, 0, 7, 1), strict=True)]
    assert_near(converted, model, later)
    assert not warnings_of(caplog)
