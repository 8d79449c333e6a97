"""The counter of running operators agrees with counts by hand, for the fused operators of PyTorch too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intaglio.mac_counter import MacCounter

X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False, False, False, True], [False, False, False, False]])


def counted(call):
    with torch.no_grad(), MacCounter() as counter:
        call()
    return counter.total


def packed(*lengths):
    return nn.utils.rnn.pack_padded_sequence(X, torch.tensor(lengths), batch_first=True)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()


ATTENTION, FEEDFORWARD = 16 * 4 * 16, 2 * 16 * 32
CALLS = {
    "linear": (lambda: nn.Linear(16, 3)(X), 8 * 16 * 3),
    "convolution": (lambda: nn.Conv1d(4, 3, 3, padding=1)(X), 2 * 16 * 4 * 3 * 3),
    "lstm": (lambda: nn.LSTM(16, 8, batch_first=True)(X), 8 * 4 * 8 * (16 + 8)),
    "two layers and directions": (
        lambda: nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True)(X),
        8 * 2 * 4 * 8 * ((16 + 8) + (16 + 8)),
    ),
    "gru": (lambda: nn.GRU(16, 8)(X), 8 * 3 * 8 * (16 + 8)),
    "rnn": (lambda: nn.RNN(16, 8)(X), 8 * 8 * (16 + 8)),
    "packed": (lambda: nn.LSTM(16, 8, batch_first=True)(packed(4, 4)), 8 * 4 * 8 * (16 + 8)),
    "packed, of two lengths": (lambda: nn.LSTM(16, 8, batch_first=True)(packed(4, 2)), 6 * 4 * 8 * (16 + 8)),
    "bilinear": (lambda: nn.Bilinear(16, 16, 3)(X, X), 8 * 16 * 16 * 3),
    "attention": (lambda: F.scaled_dot_product_attention(X[:, None], X[:, None], X[:, None]), 2 * 2 * 4 * 4 * 16),
    "multihead attention": (
        lambda: nn.MultiheadAttention(16, 2, batch_first=True).eval()(X, X, X),
        8 * ATTENTION + 2 * 2 * 4 * 4 * 16,
    ),
    "encoder": (lambda: encoder()(X), 8 * (ATTENTION + FEEDFORWARD) + 2 * 2 * 4 * 4 * 16),
    "encoder that skips padding": (
        lambda: encoder()(X, src_key_padding_mask=PADDING),
        7 * (ATTENTION + FEEDFORWARD) + 2 * (3 * 3 + 4 * 4) * 16,
    ),
    "nested tensor": (lambda: nn.Linear(16, 3)(torch.nested.nested_tensor([X[0], X[1, :2]])), 6 * 16 * 3),
    "jagged tensor": (
        lambda: nn.Linear(16, 3)(torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged)),
        6 * 16 * 3,
    ),
    "sparse matrix": (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), X[0]), 4 * 16),
    "elementwise": (lambda: X * X + X, 0),
}
"""Name -> call, and its multiply-accumulates."""


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("name", CALLS)
def test_multiply_accumulates_of_a_call(name):
    call, expected = CALLS[name]
    assert counted(call) == expected


@pytest.mark.parametrize("name", ["multihead attention", "encoder"])
def test_fused_operators_count_what_they_replace(name):
    call, expected = CALLS[name]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert counted(call) == expected
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
