"""Models with real Python in them: early exits, recursion, beams, loops over time; and what goes wrong with them."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import intaglio
from intaglio import eager
from intaglio.errors import CalibrationError, CaptureError, InputError, UnsupportedError
from support import nets
from support.eager_models import assert_like, assert_near, converted_on, integers, near, prepared_on, warnings_of
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

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


@pytest.mark.slow(reason="images through both exits; a recursive network takes more ways below")
@pytest.mark.parametrize(
    "order", slow_params_except((1, -1, 1, -1), of=[(1, -1, 1, -1), (-1, 1, -1, 1)], reason="the other exit first")
)
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


@pytest.mark.slow(reason="a program for every step; loops as long as the data say run below")
def test_a_beam_search_runs_a_data_dependent_number_of_steps(caplog):
    model = nets.randomize(Beam())
    calls = [(x, 4) for (x,) in draws(1, 16)]
    prepared = prepared_on(model, calls)
    converted = eager.convert(prepared)
    for (x,) in draws(1, 16, count=2, seed=2):
        beams, scores = converted(x, 6)
        again, expected = model(x, 6)
        assert (beams.dtype, beams.shape[0]) == (torch.long, 3)
        assert ((beams >= 0) & (beams < 12)).all()
        if torch.equal(beams, again):
            near(scores, expected)
    assert not warnings_of(caplog)


class LanguageModel(nn.Module):
    def __init__(self, kind: type[nn.Module], words: int = 20, features: int = 16) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(words, features), kind(features, features)
        self.out = nn.Linear(features, words)

    def forward(self, ids: Tensor) -> Tensor:
        embedded, state, found = self.embed(ids), None, []
        for time in range(ids.size(1)):
            state = self.cell(embedded[:, time], state)
            found.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(found, 1)


def sentences(*sizes: tuple[int, int], seed: int = 1) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 20, size, generator=draw),) for size in sizes]


MANY_PROGRAMS = pytest.mark.slow(reason="a program for every run of steps; other loops over time run below")


@pytest.mark.parametrize(
    "recipe", [None, *slow_params("int8_dynamic", reason="scales made per call run in tests of their own")]
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(nn.LSTMCell, marks=MANY_PROGRAMS),
        pytest.param(nn.GRUCell, marks=MANY_PROGRAMS),
        pytest.param(nn.RNNCell, marks=MANY_PROGRAMS),
    ],
)
def test_a_language_model_that_loops_over_time_takes_sentences_of_any_length(kind, recipe, caplog):
    model = nets.randomize(LanguageModel(kind))
    converted = converted_on(model, sentences((2, 3), (2, 4), (3, 2)), recipe)
    assert_near(converted, model, sentences((2, 3), (1, 1), (4, 6), seed=2))
    assert not warnings_of(caplog)
    assert any("quantize" in name or "rows" in name for name in integers(converted))
    for (ids,) in sentences((2, 2), (2, 5)):
        assert not torch.equal(converted(ids), model(ids)), "shorter and longer sentences run in float"


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


@pytest.mark.slow(reason="trees reuse recordings above")
def test_a_while_loop_over_data_reuses_its_body(caplog):
    model = nets.randomize(Settling())
    calls = [(x, torch.tensor(turns)) for (x,), turns in zip(draws(2, 8), (2, 3, 1, 0), strict=True)]
    converted = converted_on(model, calls)
    later = [(x, torch.tensor(turns)) for (x,), turns in zip(draws(5, 8, seed=2), (4, 0, 7, 1), strict=True)]
    assert_near(converted, model, later)
    assert not warnings_of(caplog)


# -- what calibration has not seen ----------------------------------------------------------------------------------


class Turning(nn.Module):
    """Does what the words say, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Words()

    def forward(self, x: Tensor, words: str) -> Tensor:
        return self.inner(x, words)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, words: str) -> Tensor:
        for word in words:
            if word == "a":
                x = self.a(x)
            elif word == "b":
                x = self.b(x)
            elif word == "c":
                x = self.c(x)
            else:
                x = torch.relu(x)
        return x


def uniform(count: int = 3, batch: int = 64, seed: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(batch, 8, generator=draw) * 2 - 1 for _ in range(count)]


STRICT = {
    "another operator": ("acr", "inner.c", "call of the module", "inner.b"),
    "one that is known elsewhere": ("aabr", "inner.a", "call of the module", "inner.b"),
    "one more": ("abrr", "inner", "torch.relu", "the end of the call"),
    "one fewer": ("ab", "inner", "torch.relu", "the call ended"),
}


@pytest.mark.case("frontends A7")
@pytest.mark.parametrize(
    "case",
    slow_params_except(
        "one that is known elsewhere", "one more", of=STRICT, reason="another operator is found in the same place"
    ),
)
def test_strict_names_module_operator_and_line_of_a_sequence_that_is_new(case):
    """A7: another operator, one more, one fewer; the call after the error is right."""
    words, *found = STRICT[case]
    model = nets.randomize(Turning())
    prepared = prepared_on(model, [(x, "abr") for x in uniform()])
    converted = eager.convert(prepared, strict=True)
    with pytest.raises(UnsupportedError) as caught:
        converted(uniform()[0], words)
    for text in (*found, "test_control_flow.py:"):
        assert text in str(caught.value)
    assert_like(converted, model, (uniform()[0], "abr"), near)


CLIPPED = "outside of the calibrated range"
"""Part of the warning of a layer whose operand other layers computed during calibration."""


@pytest.mark.parametrize(
    "words",
    [
        "acr",
        *slow_params("aabr", reason="shorter and longer sequences of the same operators"),
        "abrr",
        *slow_params("ab", reason="shorter and longer sequences of the same operators"),
        "rcrab",
    ],
)
def test_without_strict_new_sequences_work_and_new_operators_are_logged_once(words, caplog):
    """A7: one warning for every operator that was never seen."""
    model = nets.randomize(Turning())
    converted = eager.convert(prepared_on(model, [(x, "abr") for x in uniform()]))
    for _ in range(2):
        for mine in (uniform()[0], uniform(batch=7)[0]):
            with torch.no_grad():
                assert cosine_similarity(converted(mine, words), model(mine, words), dim=1).mean() > 0.9
    messages = [message for message in warnings_of(caplog) if CLIPPED not in message]
    assert len(messages) == words.count("c")
    assert all("inner.c" in m and "call of the module" in m and "test_control_flow.py:" in m for m in messages)


@pytest.mark.slow(reason="converts a loop strictly; new sequences are refused above")
@pytest.mark.case("frontends A7")
def test_loops_of_other_lengths_and_float_operators_are_no_new_sequence():
    """A7: a body seen twice in a row may run any number of times; what is not quantized is free."""
    model = nets.randomize(Turning())
    converted = eager.convert(prepared_on(model, [(x, "ararb") for x in uniform()]), strict=True)
    for words in ("arararb", "ararararb"):
        converted(uniform()[0], words)


@pytest.mark.slow(reason="one warning for each operator is counted above")
def test_one_warning_for_each_new_operator_that_names_where_it_is(caplog):
    def body(m, x, more):
        x = m.f(x)
        if more:
            x = torch.tanh(m.h(x)) * 2
        return m.g(x)

    model = nets.randomize(Body(body, f=nn.Linear(8, 8), g=nn.Linear(8, 4), h=nn.Linear(8, 8)))
    converted = eager.convert(prepared_on(model, [(x, False) for x in uniform()]))
    for _ in range(3):
        with torch.no_grad():
            near(converted(uniform()[0], False), model(uniform()[0], False))
            converted(uniform()[0], True)
    messages = warnings_of(caplog)
    assert len(messages) == 3
    for message, name in zip(messages, ("h, call of the module", "torch.tanh", "torch.Tensor.mul"), strict=True):
        assert all(part in message for part in (name, "test_control_flow.py:", "not seen"))


# -- bad input ------------------------------------------------------------------------------------------------------


def test_a_prepared_model_that_was_never_run_is_not_converted():
    prepared = eager.prepare(nn.Linear(8, 8), uniform()[0])
    with pytest.raises(CalibrationError, match="never called"):
        eager.convert(prepared)


def nested(m, pair):
    x, y = pair["x"], pair.get("y")
    return m.f(x) if y is None else m.f(x) + m.g(y)


@pytest.mark.slow(reason="nested arguments have tests in test_calls_and_results.py")
def test_arguments_nested_otherwise_than_the_examples_run_and_are_an_error_with_strict():
    model = nets.randomize(Body(nested, f=nn.Linear(8, 8), g=nn.Linear(8, 8)))
    prepared = prepared_on(model, [({"x": x, "y": x},) for x in uniform()])
    assert_like(eager.convert(prepared), model, ({"x": uniform()[0]},), near)
    with pytest.raises(InputError, match="nested"):
        eager.convert(prepared, strict=True)({"x": uniform()[0]})
    with pytest.raises(KeyError):
        eager.convert(prepared)({"y": uniform()[0]})


class Growing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList([nn.Linear(8, 8)]), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "adds":
            self.layers.append(nn.Linear(8, 8))
        elif self.how == "replaces":
            self.layers[0] = nn.Linear(8, 8)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow(reason="records models that change while they are called")
@pytest.mark.parametrize("how", [*slow_params("adds", reason="a module more is found by the same names"), "replaces"])
def test_a_model_that_replaces_its_modules_is_refused(how):
    with pytest.raises(CaptureError, match="layers"):
        eager.prepare(Growing(how), uniform()[0])
    late = Growing("")
    prepared = prepared_on(late, [(x,) for x in uniform()])
    converted = eager.convert(prepared)
    prepared.how = converted.how = how
    with pytest.raises(CaptureError, match="layers"):
        prepared(uniform()[0])
    with pytest.raises(CaptureError, match="layers"):
        converted(uniform()[0])


# -- around the model -----------------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.inner = nn.Linear(8, 8), Body(lambda m, x, fail: self.checked(m.g(x), fail), g=nn.Linear(8, 8))

    @staticmethod
    def checked(x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise ArithmeticError("on purpose")
        return x

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        return torch.relu(self.inner(self.f(x), fail))


@pytest.mark.slow(reason="prepares a failing model; failed calibration calls change nothing below")
@pytest.mark.case("frontends B10")
def test_an_exception_in_forward_leaves_no_state():
    """B10: in the example's call, in calibration, after convert; PyTorch itself is as it was."""
    model = nets.randomize(Failing())
    with pytest.raises(ArithmeticError):
        eager.prepare(model, (uniform()[0], True))
    prepared = eager.prepare(model, uniform()[0])
    for running in (prepared, eager.convert(prepared_on(model, [(x,) for x in uniform()]))):
        with pytest.raises(ArithmeticError):
            running(uniform()[0], True)
        assert type(torch.ones(2) + 1) is Tensor
        assert torch.overrides._get_current_function_mode() is None
        assert torch.is_grad_enabled()
        assert_like(running, model, (uniform()[0],), near)


@pytest.mark.parametrize("where", ["", "f"])
def test_a_forward_that_is_an_attribute_is_refused_by_name(where):
    """It would be lost in the copies, or call the model it was made for."""
    model = nets.randomize(Body(lambda m, x: m.f(x), f=nn.Linear(8, 8)))
    owner = model.get_submodule(where)
    owner.forward = lambda x: x * 2
    with pytest.raises(CaptureError, match=f"^{where or 'Body'}: .*instance attribute named forward"):
        eager.prepare(model, uniform()[0])


class Breaking(str):
    """Words that end with an error."""

    def __iter__(self) -> Iterator[str]:
        yield from str.__iter__(self)
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize(
    "words", [*slow_params("abr", "aab", reason="calls that fail in the same places of a sequence"), "rrb", "c"]
)
def test_a_failed_calibration_call_changes_nothing(words):
    """Its numbers are not counted, its operators not recorded, wherever it ends: in a known sequence or a new one."""
    model = nets.randomize(Turning())
    kept, failed = (eager.prepare(model, (uniform()[0], "abr")) for _ in range(2))
    for x in uniform():
        kept(x, "abr")
        failed(x, "abr")
        with pytest.raises(ArithmeticError):
            failed(x * 50, Breaking(words))
        assert failed.state_dict().keys() == kept.state_dict().keys()
        for name, found in kept.state_dict().items():
            assert torch.equal(failed.state_dict()[name], found), name
    assert failed(uniform()[0], words).shape == model(uniform()[0], words).shape


@pytest.mark.slow(reason="stress of threads; two calibrate below")
@pytest.mark.case("frontends B10")
def test_threads_may_share_a_model_or_use_two():
    """B10: every thread has its own call."""
    draw = torch.Generator().manual_seed(3)
    models = [nets.randomize(Turning(), seed) for seed in (1, 2)]
    converted = [eager.convert(prepared_on(model, [(x, "abr") for x in uniform()])) for model in models]
    data = [torch.rand(16, 8, generator=draw) for _ in range(8)]
    expected = [[running(x, words) for x in data for words in ("abr", "ab", "aabr")] for running in converted]
    found: dict[int, list[Tensor]] = {}

    def work(thread: int) -> None:
        running = converted[thread % 2]
        found[thread] = [running(x, words) for _ in range(3) for x in data for words in ("abr", "ab", "aabr")]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in range(4):
        assert all(map(torch.equal, found[thread], expected[thread % 2] * 3))


@pytest.mark.case("frontends B10")
def test_two_threads_calibrate_the_same_model():
    """B10: what is counted is what one thread counts."""
    model = nets.randomize(Turning())
    data = uniform(8)
    alone, shared = (eager.prepare(model, (data[0], "abr")) for _ in range(2))
    for x in data:
        alone(x, "abr")
    halves = (data[:4], data[4:])
    threads = [threading.Thread(target=lambda h=half: [shared(x, "abr") for x in h]) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (eager.rewrite(eager.convert(prepared)).qparams for prepared in (alone, shared))
    assert first == second


@pytest.mark.slow(reason="calibrates a model within a model; an int8 submodule is unchanged below")
@pytest.mark.case("frontends B10")
def test_a_converted_model_inside_another_that_is_prepared(caplog):
    """B10: it stays what it is, its calls are its own."""
    inner_model = nets.randomize(Body(lambda m, x: torch.relu(m.f(x)), f=nn.Linear(8, 8)))
    inner = converted_on(inner_model, [(x,) for x in uniform()])
    outer, model = (Body(lambda m, x: m.h(m.part(m.g(x))) + 1, g=nn.Linear(8, 8), h=nn.Linear(8, 4)) for _ in range(2))
    for owner in (outer, model):
        nets.randomize(owner).part = inner
    prepared = eager.prepare(outer, uniform()[0])
    for x in uniform():
        prepared(x)
    converted = eager.convert(prepared)
    for x in uniform():
        with torch.no_grad():
            near(prepared(x), model(x))
            near(converted(x), model(x))
            near(inner(x), inner_model(x))
    assert all(CLIPPED in message for message in warnings_of(caplog))  # the part was calibrated with other data


CONTEXTS = [torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu")]


@pytest.mark.parametrize(
    "around", slow_params_except(torch.enable_grad, of=CONTEXTS, reason="other managers around the same calls")
)
def test_context_managers_around_calls_do_not_change_results(around, caplog):
    model = nets.randomize(Turning())
    with around():
        data = [x + 0 for x in uniform()]
        prepared = eager.prepare(model, (data[0], "abr"))
        for x in data:
            prepared(x, "abr")
        converted = eager.convert(prepared)
        inside = converted(data[0], "abr")
    assert torch.equal(inside, converted(uniform()[0], "abr"))
    assert inside.dtype is torch.float32
    near(inside, model(uniform()[0], "abr").detach())
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    "kind", [*slow_params("converted", reason="a program is called in the same way as a converted model"), "program"]
)
def test_an_int8_submodule_is_unchanged_in_a_prepared_model(kind):
    draw = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 8, generator=draw) for _ in range(3)]
    inner = nets.randomize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    if kind == "program":
        part = intaglio.quantize(inner, data)
    else:
        prepared = eager.prepare(inner, data[0])
        for batch in data:
            prepared(batch)
        part = eager.convert(prepared)
    outer = Body(lambda m, x: m.head(torch.relu(m.part(x))), part=part, head=nn.Linear(8, 3)).eval()
    watched = eager.prepare(outer, data[0])
    for batch in data:
        assert torch.equal(watched(batch), outer(batch))
    assert watched.part is not part
    assert torch.equal(eager.convert(watched).part(data[0]), part(data[0]))
