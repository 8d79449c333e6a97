"""Masks of attention as callers give them: they hold minus infinity and stay floats, and everything else is int8."""

import pytest
import torch
from torch import Tensor, nn

from intaglio.errors import CalibrationError
from intaglio.fxgraph.nodes import operator
from intaglio.stages import calibrate, capture, compile, prepare
from intaglio.tracing.trace import PADDING_SKIPPED
from support.lowering import assert_equal_quantized, quantized, sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

LENGTH, WIDTH, HEADS, INF = 10, 32, 4, float("inf")
X = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
PADDING = torch.arange(LENGTH) >= torch.tensor([10, 7, 3, 5])[:, None]
"""True for what is padding, as torch's modules have it."""
BEHIND = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def added(hidden: Tensor, number: float = -INF) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, number)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


def over_keys(m, x, mask):
    return m.layers(x, src_key_padding_mask=mask)


def over_pairs(m, x, mask):
    return m.layers(x, mask=mask, is_causal=False)


def causal_and_over_keys(m, x, mask):
    return m.layers(x, mask=m.behind, src_key_padding_mask=mask, is_causal=True)


def attended_keys(m, x, mask):
    return m.layers(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def attended_pairs(m, x, mask):
    return m.layers(x, x, x, attn_mask=mask, need_weights=False)[0]


def with_weights(m, x, mask):
    return m.layers(x, x, x, key_padding_mask=mask)


def extended(m, x, mask):
    """As libraries extend a mask of ones and zeros: the least float where nothing is to be seen."""
    far = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
    q, k, v = (m.layers(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for _ in range(3))
    return ((q @ k.transpose(-1, -2) / 8**0.5 + far).softmax(-1) @ v).transpose(1, 2).flatten(2)


PER_HEAD = PADDING.repeat_interleave(HEADS, 0)[:, None, :].expand(-1, LENGTH, -1)
WAYS = {
    "boolean, of keys": (over_keys, encoder, PADDING),
    "added, of keys": (over_keys, encoder, added(PADDING)),
    "boolean, of pairs": (over_pairs, encoder, BEHIND),
    "added, of pairs": (over_pairs, encoder, added(BEHIND)),
    "the least float, of pairs": (over_pairs, encoder, added(BEHIND, torch.finfo(torch.float32).min)),
    "causal, and boolean of keys": (causal_and_over_keys, encoder, PADDING),
    "causal, and added of keys": (causal_and_over_keys, encoder, added(PADDING)),
    "attention, boolean of keys": (attended_keys, attention, PADDING),
    "attention, added of keys": (attended_keys, attention, added(PADDING)),
    "attention, added of pairs": (attended_pairs, attention, added(BEHIND)),
    "attention, boolean of every head": (attended_pairs, attention, PER_HEAD),
    "attention, added of every head": (attended_pairs, attention, added(PER_HEAD)),
    "attention that gives its weights": (with_weights, attention, PADDING),
    "attention that gives its weights, added": (with_weights, attention, added(PADDING)),
    "extended by a library": (extended, lambda: nn.Linear(WIDTH, WIDTH), (~PADDING).long()),
}


def model_of(way: str) -> tuple[Body, Tensor]:
    forward, make, mask = WAYS[way]
    torch.manual_seed(1)
    model = Body(forward, layers=make())
    model.register_buffer("behind", added(BEHIND))
    return model.eval(), mask


def several(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    "way",
    slow_params_except(
        "added, of pairs",
        of=WAYS,
        reason="other combinations of the same kinds of masks and modules",
    ),
)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_a_mask_stays_float_and_everything_else_is_int8(way):
    model, mask = model_of(way)
    reference, lowered = quantized(model, X, mask)
    assert_equal_quantized(reference, lowered, X, mask)
    running = compile(lowered)
    assert running.coverage.macs == 1
    assert not running.islands
    found, exact, wanted = (several(run(X, mask)) for run in (running, lowered, model))
    assert all(map(torch.equal, found, exact))
    assert min(map(sqnr, found, wanted)) > 30


@pytest.mark.parametrize(
    "way",
    [
        "attention, added of keys",
        *slow_params("extended by a library", reason="a mask that a library extends reaches the same operator"),
        *slow_params("attention, boolean of keys", reason="the same mask as booleans"),
    ],
)
def test_a_fully_masked_row_has_attention_zero(way):
    """As `scaled_dot_product_attention` has it; written out, torch gives NaN, or a mean under the least float."""
    model, mask = model_of(way)
    _, lowered = quantized(model, X, mask)
    closed = mask.clone()
    closed[2] = {torch.bool: True, torch.float32: -INF, torch.int64: 0}[mask.dtype]
    running = compile(lowered)
    found = running(X, closed)
    assert torch.equal(found, lowered(X, closed))
    assert torch.equal(found[[0, 1, 3]], running(X, mask)[[0, 1, 3]])
    assert (found[2] == found[2, 0]).all()  # at most the bias of a last layer: the same in every place


@pytest.mark.slow(reason="captures attention that returns its weights")
def test_attention_weights_of_a_fully_masked_row_are_nan_and_named():
    model, mask = model_of("attention that gives its weights")
    closed = mask.clone()
    closed[2] = True
    prepared = prepare(capture(model, (X, closed)))
    with pytest.raises(CalibrationError, match="NaN"):
        calibrate(prepared, [(X, closed)])
    _, lowered = quantized(model, X, mask)
    weights = compile(lowered)(X, closed)[1]
    assert weights[2].isnan().all()
    assert weights[[0, 1, 3]].isfinite().all()


@pytest.mark.slow(reason="captures an encoder again for one test of its mask")
def test_an_encoder_that_tests_its_mask_for_causality_takes_it_as_it_is():
    model, mask = model_of("added, of pairs")
    model.body = lambda m, x, mask: m.layers(x, mask=mask)
    captured = capture(model, (X, mask))
    torch.testing.assert_close(captured(X, mask), model(X, mask))


@pytest.mark.slow(reason="captures two encoders that run on nested tensors")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_skips_padding_is_quantized_with_a_note():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    model = Body(over_keys, layers=nn.TransformerEncoder(layer, 1)).eval()
    captured, whole = (capture(model, (X, mask)) for mask in (PADDING, PADDING & False))
    assert PADDING_SKIPPED in captured.notes
    assert PADDING_SKIPPED not in whole.notes
    with torch.no_grad():
        skipped, computed = model(X, PADDING), captured(X, PADDING)
    assert not skipped[PADDING].any()
    torch.testing.assert_close(skipped[~PADDING], computed[~PADDING], rtol=1e-4, atol=1e-5)


class PackedTexts(nn.Module):
    """Masks the tokens of other texts in a row, which begin where positions do not follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv = nn.Embedding(20, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[None].expand(ids.shape[0], -1)
        texts = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        q, k, v = self.qkv(self.words(ids))[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, texts[:, None, :, None] == texts[:, None, None, :])


def test_positions_that_are_a_range_are_one_text():
    torch.manual_seed(0)
    model, ids = PackedTexts().eval(), torch.randint(20, (2, 6))
    captured = capture(model, ids)
    names = {operator(node) for node in captured.module.graph.nodes}
    assert not names & {"aten.diff.default", "aten.cumsum.default", "aten.ne.Scalar", "aten.eq.Tensor"}
    torch.testing.assert_close(captured(ids), model(ids))
