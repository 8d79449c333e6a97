"""Attention written out becomes one operator; masks that say nothing vanish; parts of constants are one constant."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import operator
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES
from intaglio.tracing import capture, run
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

HEADS, WIDTH = 2, 8
X = torch.randn(3, 5, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
SEEN = torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(2)).gt(0.3).logical_or(torch.eye(5).bool())
ADDED = torch.randn(3, 1, 5, 5, generator=torch.Generator().manual_seed(3))


def split(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, WIDTH).transpose(1, 2)


def attend(scores, mask: Tensor | None = None):
    """The rest of a model: ``scores(q, k, mask)``, then softmax and values."""

    def body(m: nn.Module, x: Tensor, *masks: Tensor) -> Tensor:
        q, k, v = split(m.q(x)), split(m.k(x)), split(m.v(x))
        return torch.softmax(scores(m, q, k, *masks), -1) @ v

    return body, mask


def permuted(m, q, k):
    return q @ k.transpose(1, 2).permute(0, 2, 3, 1) / math.sqrt(WIDTH)


JOINED = {
    "no scale": attend(lambda m, q, k: q @ k.transpose(-1, -2)),
    "divided": attend(lambda m, q, k: q @ k.transpose(-1, -2) / math.sqrt(WIDTH)),
    "times one, plus zero": attend(lambda m, q, k: (q @ k.mT) * 1.0 + 0),
    "keys permuted at once": attend(permuted),
    "queries scaled": attend(lambda m, q, k: (q * 0.3) @ k.transpose(2, 3)),
    "keys scaled, before and behind": attend(lambda m, q, k: q @ ((k * 0.5).transpose(2, 3) / 3)),
    "scaled by a constant": attend(lambda m, q, k: m.scale * (q @ k.transpose(2, 3))),
    "a mask added": attend(lambda m, q, k, mask: mask + 0.3 * (q @ k.transpose(2, 3)), ADDED),
    "scaled behind the mask, which is boolean": attend(
        lambda m, q, k, mask: (q @ k.transpose(2, 3)).masked_fill(~mask, -1e9) * 0.3, SEEN
    ),
    "a mask filled in": attend(
        lambda m, q, k, mask: (q @ k.transpose(2, 3)).masked_fill(mask.logical_not(), float("-inf")), SEEN
    ),
    "a choice": attend(lambda m, q, k, mask: torch.where(mask, q @ k.transpose(2, 3), torch.tensor(-1e30)), SEEN),
    "a choice of minus infinity": attend(
        lambda m, q, k, mask: torch.where(mask.float() < 0.5, float("-inf"), q @ k.transpose(2, 3)), SEEN
    ),
    "keys masked": attend(lambda m, q, k, mask: (q @ k.mT).masked_fill(~mask, -1e9), torch.arange(5) < 4),
    "a number for each key added": attend(lambda m, q, k, mask: q @ k.mT + mask, torch.arange(5.0)),
    "a choice added": attend(
        lambda m, q, k, mask: q @ k.transpose(2, 3) + torch.where(mask, 0.0, torch.finfo(torch.float32).min), SEEN
    ),
}
FINITE = ("scaled behind the mask, which is boolean", "a choice", "keys masked", "a choice added")
"""Those whose boolean mask stands for a finite number; it is a float mask of the operator."""
LEFT = {
    "an added mask is scaled": attend(lambda m, q, k, mask: (q @ k.transpose(2, 3) + mask) * 0.3, ADDED),
    "two masks": attend(lambda m, q, k, mask: q @ k.transpose(2, 3) + mask + mask * mask, ADDED),
    "a choice of little": attend(lambda m, q, k, mask: (q @ k.transpose(2, 3)).masked_fill(~mask, -3.0), SEEN),
    "scores clamped": attend(lambda m, q, k: (q @ k.transpose(2, 3)).clamp(-5, 5)),
}


def passed(body, *args: Tensor):
    """The captured graph, what the passes make of it, and how often each rewrote; both compute the same."""
    layers = {name: nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for name in "qkv"}
    model = Body(body, **layers, scale=nn.Parameter(torch.tensor([0.7]))).eval()
    captured = capture(model, args)
    assert not captured.notes
    module = copy_graph(captured.module)
    counts = run(module, PTQ_PASSES.patterns)
    for wanted, found in zip(captured.module(*args), module(*args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}, "idempotent"
    return captured, module, counts


def operators(module) -> list[str]:
    return [operator(node).split(".")[1] for node in module.graph.nodes if operator(node)]


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        *("a choice added", "keys scaled, before and behind", "keys masked"),
        of=JOINED,
        reason="other orders of the same operators",
    ),
)
def test_written_out_attention_is_one_operator(name):
    body, mask = JOINED[name]
    _, module, counts = passed(body, X, *(() if mask is None else (mask,)))
    assert counts["fuse_attention"] == 1
    assert not {"softmax", "matmul", "div", "masked_fill"}.intersection(operators(module))
    assert operators(module).count("where") == (name in FINITE)  # of the mask


FINITE_MASKS = {
    "filled in": lambda scores, mask: scores.masked_fill(~mask, -1e9),
    "a choice": lambda scores, mask: torch.where(mask, scores, torch.tensor(-1e4)),
    "a choice added": lambda scores, mask: scores + torch.where(mask, 0.0, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("name", FINITE_MASKS)
def test_a_query_whose_keys_all_have_a_finite_number_gives_the_mean_of_the_values(name):
    mask = SEEN.clone()
    mask[..., 1, :] = False
    body, _ = attend(lambda m, q, k, mask: FINITE_MASKS[name](q @ k.mT, mask), mask)
    _, module, counts = passed(body, X, mask)  # compares the results
    assert counts["fuse_attention"] == 1
    assert "softmax" not in operators(module)


def twice(m, x, seen):
    q, k, v = (split(layer(x)) for layer in (m.q, m.k, m.v))
    for _ in range(2):
        v = torch.softmax(torch.where(seen, q @ k.mT, -1e9), -1) @ v
    return v


def test_two_layers_share_a_float_mask():
    _, module, counts = passed(twice, X, SEEN)
    assert counts["fuse_attention"] == 2
    assert operators(module).count("where") == 1


@pytest.mark.parametrize("columns", [5, 6])
def test_a_constant_with_a_key_for_every_query_stays_boolean(columns):
    """The first key of the larger constant is seen by all queries, so a part of it has one, too."""
    table = torch.eye(5, columns).bool()
    table[:, 0] = True
    _, module, counts = passed(lambda m, x: twice(m, x, table[:, : x.shape[1]]), X)
    assert counts["fuse_attention"] == 2
    assert "where" not in operators(module)


@pytest.mark.parametrize("name", LEFT)
def test_graphs_that_are_not_attention_are_unchanged(name):
    body, mask = LEFT[name]
    _, module, counts = passed(body, X, *(() if mask is None else (mask,)))
    assert counts["fuse_attention"] == 0
    assert operators(module).count("matmul") == 2


@pytest.mark.slow(reason="captures attention for one further reader")
def test_probabilities_that_are_returned_stay():
    def body(m, x):
        p = torch.softmax(split(m.q(x)) @ split(m.k(x)).mT, -1)
        return p @ split(m.v(x)), p

    assert passed(body, X)[2]["fuse_attention"] == 0


@pytest.mark.parametrize(("positions", "fused"), [(256, True), (257, False)])
def test_heads_that_are_too_wide_stay_two_products(positions, fused):
    """Attention between channels, whose heads are as wide as an image has positions."""
    x = torch.randn(2, 3, positions, 4)
    _, module, counts = passed(lambda m, x: torch.softmax(x.mT @ x, -1) @ x.mT, x)
    assert counts["fuse_attention"] == fused
    assert operators(module).count("matmul") == (0 if fused else 2)


@pytest.mark.case("backend 12")
def test_products_of_matrices_of_all_heads_keep_their_rank():
    """Case 12: bmm, a factor, a mask, softmax in a type of its own, dropout, bmm."""

    def body(m, x, mask):
        q, k, v = (split(layer(x)).reshape(-1, x.shape[1], WIDTH) for layer in (m.q, m.k, m.v))
        p = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(WIDTH) + mask
        return torch.bmm(F.dropout(p.softmax(-1, dtype=torch.float32).to(q.dtype), 0.1, False), v)

    _, module, counts = passed(body, X, ADDED[0, 0])
    assert counts["fuse_attention"] == 1
    (attention,) = [node for node in module.graph.nodes if "attention" in operator(node)]
    assert info(attention).type.shape[1:2] == (1,)
    assert [len(info(user).type.shape) for user in attention.users] == [3]


# ---- masks


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges over queries and keys, as vectorised mask functions make them."""
    found = torch.arange(x.shape[1])
    return found[None, None, :, None] + 0, found[None, None, None, :] + 0


def masked(mask):
    def body(m, x, *rest):
        shape = (x.shape[0], 1, x.shape[1], x.shape[1])
        seen = mask(x, *rest).expand(shape)
        return F.scaled_dot_product_attention(split(m.q(x)), split(m.k(x)), split(m.v(x)), seen)

    return body


def attention_of(captured):
    (node,) = [node for node in captured.module.graph.nodes if "attention" in operator(node)]
    return node


IDLE = {
    "at least zero": lambda x: positions(x)[0] >= 0,
    "above -1": lambda x: positions(x)[1] > -1,
    "below the length": lambda x: positions(x)[1] < x.shape[1],
    "ones": lambda x: x.new_ones((), dtype=torch.bool) & (positions(x)[0] >= 0),
    "not never": lambda x: ~(positions(x)[0] < 0) | (positions(x)[1] > 2),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("not never", "below the length", of=IDLE, reason="other comparisons that are always true"),
)
def test_an_all_true_mask_is_removed(name):
    captured, _, _ = passed(masked(IDLE[name]), X)
    assert attention_of(captured).args[3] is None
    assert "ge" not in operators(captured.module)
    assert "expand" not in operators(captured.module)


def test_a_mask_that_hides_elements_is_kept():
    captured, _, _ = passed(masked(lambda x: positions(x)[1] < 4), X)
    assert attention_of(captured).args[3] is not None


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: (positions(x)[0] >= positions(x)[1]) & (positions(x)[0] >= 0),
        *slow_params(lambda x: positions(x)[1] <= positions(x)[0], reason="the same comparison turned round"),
    ],
)
def test_a_lower_triangular_mask_is_causal(mask):
    captured, _, _ = passed(masked(mask), X)
    assert attention_of(captured).args[3:] == (None, 0.0, True)


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: positions(x)[1] < positions(x)[0] + 1,
        *slow_params(
            lambda x: positions(x)[0] <= positions(x)[1],
            lambda x: positions(x)[1] <= positions(x)[0] + 1,
            reason="other comparisons that are not causal",
        ),
    ],
)
def test_other_comparisons_of_positions_are_unchanged(mask):
    captured, _, _ = passed(masked(mask), X)
    assert isinstance(attention_of(captured).args[3], torch.fx.Node)


def test_a_mask_indexed_by_all_of_its_axes_is_reshaped():
    def padding(x, seen):
        rows, (queries, keys) = torch.arange(x.shape[0])[:, None, None, None], positions(x)
        return (queries >= 0) & seen.bool()[rows, keys]

    captured, _, _ = passed(masked(padding), X, torch.ones(3, 5).tril())
    assert str(captured.signature.inputs[1].type) == "f32[n, 5]", "one batch, not two"
    kinds = operators(captured.module)
    assert kinds[: kinds.index("linear")] == ["sym_size", "_to_copy", "reshape", "expand"]


def test_a_mask_indexed_by_a_part_of_an_axis_stays():
    def padding(x, seen):
        return seen.bool()[torch.arange(x.shape[0])[:, None, None, None], positions(x)[1] + 1]

    assert "index" in operators(passed(masked(padding), X, torch.ones(3, 6))[0].module)


# ---- parts of constants


class Embeddings(nn.Module):
    """Words, their kinds and their places, as encoders sum them."""

    def __init__(self, words: int = 50, longest: int = 16) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, 8) for n in (words, longest, 2))
        self.register_buffer("ids", torch.arange(longest)[None], persistent=False)
        self.register_buffer("kind_ids", torch.zeros(1, longest, dtype=torch.int64), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        ids = self.ids[:, : words.shape[1]]
        kinds = torch.gather(self.kind_ids, 1, ids).expand(words.shape)
        return self.words(words) + self.kinds(kinds) + self.places(ids)


def test_position_and_token_type_embeddings_are_one_constant():
    model, words = Embeddings().eval(), torch.randint(50, (2, 7))
    captured = capture(model, words)
    assert str(captured.signature.inputs[0].type) == "i64[n, n1]"
    module = copy_graph(captured.module)
    counts = run(module, PTQ_PASSES.patterns)
    assert counts["lift_slices"]
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}, "idempotent"
    assert operators(module) == ["sym_size", "embedding", "slice", "add"]
    for length in (1, 4, 16):
        some = torch.randint(50, (3, length))
        torch.testing.assert_close(module(some)[0], model(some))


def test_a_constant_that_would_be_large_is_not_made(monkeypatch):
    from intaglio.fxgraph.passes import lift_slices as slices

    monkeypatch.setattr(slices, "MAX_CONSTANT_BYTES", 16 * 8 * 4 - 1)
    module = copy_graph(capture(Embeddings().eval(), torch.randint(50, (2, 7))).module)
    run(module, PTQ_PASSES.patterns)
    assert operators(module).count("embedding") == 3
