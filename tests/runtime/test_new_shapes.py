"""What a new shape costs and does: one plan, one memory for all, or the float model."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.export import Dim

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.ir import evaluate, evaluator, substitute, symbol
from intaglio.runtime import QuantizedModel
from support.int8_models import assert_same
from support.nets import randomize

FREE = ({0: Dim.AUTO, 1: Dim.AUTO},)
FLOAT = randomize(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 4)))


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def lowered():
    captured = stages.capture(FLOAT, tokens(9), dynamic_shapes=FREE)
    prepared = stages.prepare(captured)
    return stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [tokens(9)])))


@pytest.fixture
def model(lowered) -> QuantizedModel:
    return stages.compile(lowered)


def test_all_shapes_share_one_arena_as_large_as_the_largest(model):
    """64 lengths: one frame, and what it takes is not the sum of their plans."""
    for length in range(1, 65):
        model(tokens(length))
    (frame,) = model._frames
    plans = [shapes.layout.bytes for shapes in model._plans.values()]
    assert len(plans) == 64
    assert max(plans) <= frame.arena.numel() < 1.5 * max(plans)


def test_a_call_that_needs_more_memory_than_there_is_is_an_error(model):
    """Its input has stride 0, so that it takes no memory itself."""
    with pytest.raises(InputError, match=r"one of its buffers needs \d{15,} bytes of memory") as raised:
        model(tokens(3, 1).expand(1 << 40, 3, 16))
    assert raised.value.remedy == "pass smaller batches, one after the other"
    assert model(tokens(3)).shape == (2, 3, 4)


def test_concurrent_calls_never_share_memory(model, lowered):
    """Case 33: eight threads, lengths of their own; one plan a length."""
    inputs = [tokens(1 + i % 20) for i in range(160)]
    expected = [lowered(x) for x in inputs[:20]] * 8
    with ThreadPoolExecutor(8) as pool:
        assert_same(list(pool.map(model, inputs)), expected)
    assert len(model._plans) == 20
    assert len({frame.arena.data_ptr() for frame in model._frames}) == len(model._frames) <= 8


def test_the_number_of_plans_is_bounded_as_asked(lowered, monkeypatch):
    monkeypatch.setenv("INTAGLIO_PLANS", "3")
    model = stages.compile(lowered)
    for length in range(1, 9):
        assert_same(model(tokens(length)), lowered(tokens(length)))
    assert len(model._plans) == 3


def test_an_empty_batch_has_the_float_models_shape(model):
    assert model(tokens(5, 0)).shape == FLOAT(tokens(5, 0)).shape == (0, 5, 4)


# ---- policies


def test_shapes_that_were_not_planned_run_the_float_model(lowered):
    model = stages.compile(lowered, on_new_shape="fallback", float_model=FLOAT)
    assert model.on_new_shape == "fallback"
    with torch.no_grad():
        for x in (tokens(9), tokens(10), tokens(9), tokens(9, 3)):
            assert torch.equal(model(x), lowered(x) if x.shape == (2, 9, 16) else FLOAT(x))
    assert not torch.equal(lowered(tokens(10)), FLOAT(tokens(10)))


@pytest.mark.parametrize(
    "call",
    [(2, 10, 16), torch.Size((2, 10, 16)), tokens(10), (tokens(10),), [(2, 10, 16)]],
    ids=["sizes", "torch.Size", "tensor", "arguments", "a list"],
)
def test_shapes_are_planned_ahead(call, lowered):
    """Then the first call is no exception."""
    model = stages.compile(lowered, on_new_shape="fallback", float_model=FLOAT)
    model.warm(call, (1, 3, 16))
    with torch.no_grad():
        assert torch.equal(model(tokens(9)), FLOAT(tokens(9)))
    assert torch.equal(model(tokens(10)), lowered(tokens(10)))
    assert torch.equal(model(tokens(3, 1)), lowered(tokens(3, 1)))


def test_strides_belong_to_what_was_planned_and_gradients_do_not(lowered):
    """Document 001 compares shape, strides, element type and device."""
    model, x = stages.compile(lowered, on_new_shape="fallback", float_model=FLOAT), tokens(9)
    model.warm(x)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        assert torch.equal(model(turned), FLOAT(turned))
    assert torch.equal(model(x.clone().requires_grad_()), lowered(x))


def test_static_sizes_fall_back_to_the_float_model_and_other_types_are_refused():
    """A model of one size, for which another would be an error."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    model = intaglio.quantize(
        net, [torch.randn(2, 3, 8, 8)], progress=False, options=intaglio.CompileOptions(on_new_shape="fallback")
    )
    model(torch.randn(2, 3, 8, 8))
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert torch.equal(model(x), net(x))
    for wrong in (x.double(), x.to("meta")):
        with pytest.raises(InputError):
            model(wrong)


def test_the_first_fallback_is_logged_once(lowered, caplog):
    model = stages.compile(lowered, on_new_shape="fallback", float_model=FLOAT)
    with caplog.at_level(logging.WARNING, "intaglio"):
        for length in (5, 6, 7):
            model(tokens(length))
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "runs in the float model" in caplog.text


def test_a_file_says_that_it_has_no_float_model(lowered, tmp_path, caplog):
    model, path = stages.compile(lowered, on_new_shape="fallback", float_model=FLOAT), tmp_path / "m.intaglio"
    assert not list(model.parameters())
    model.save(path)
    with caplog.at_level(logging.WARNING, "intaglio"):
        loaded = intaglio.load(path)
    assert "no float model" in caplog.text
    assert loaded.on_new_shape == "plan"
    assert_same([loaded(tokens(n)) for n in (9, 10)], [lowered(tokens(n)) for n in (9, 10)])
    assert loaded.fall_back_to(FLOAT).on_new_shape == copy.deepcopy(loaded).on_new_shape == "fallback"


@pytest.mark.parametrize(
    ("given", "said"),
    [({"on_new_shape": "guess"}, "'guess' is not a policy"), ({"on_new_shape": "fallback"}, "none was given")],
)
def test_invalid_policies_are_refused(lowered, given, said):
    with pytest.raises(InputError, match=said):
        stages.compile(lowered, **given)


# ---- dimensions


def test_equal_quotients_are_one_value():
    """However a shape rule and a trace came to them."""
    h, w = symbol("h"), symbol("w")
    assert (h - 6) // 2 == h // 2 - 3
    assert (h // 2 + 3) // 2 == (h + 6) // 4
    assert (h * 4 + 6) // 8 == (h * 2 + 3) // 4
    assert ((h - 1) // 2 * w) + w == (h + 1) // 2 * w
    assert (w + h // 3 - 5) // 2 == (w * 3 + h - 15) // 6
    assert h // 2 != h // 3


def test_evaluating_dimensions_together_equals_evaluating_each():
    h, w = symbol("h"), symbol("while")
    dims = [h, 3, (h + w * 2) // 3 * w - 4, h, (h - 1) // 2]
    found = evaluator(dims, ("h", "while"))(11, 5)
    assert found == tuple(evaluate(dim, {"h": 11, "while": 5}) for dim in dims)
    assert substitute(dims[2], {"h": w * 3}) == (w * 5) // 3 * w - 4
