"""Recurrent layers with packed sequences: the sequences of each length are computed together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import intaglio
from intaglio.parts.packed_sequences import PackedCall

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def packed_sequences(lengths: list[int], features: int, sorted_first: bool) -> PackedSequence:
    lengths = sorted(lengths, reverse=True) if sorted_first else lengths
    x = torch.randn(len(lengths), max(lengths), features)
    return pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=sorted_first)


@given(
    name=st.sampled_from(list(LAYERS)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    sorted_first=st.booleans(),
    batch_first=st.booleans(),
    bidirectional=st.booleans(),
    layers=st.integers(1, 2),
    with_states=st.booleans(),
    by_name=st.booleans(),
)
def test_groups_of_equal_lengths_give_the_results_of_the_packed_sequence(
    name, lengths, sorted_first, batch_first, bidirectional, layers, with_states, by_name
):
    layer = LAYERS[name](4, 3, layers, batch_first=batch_first, bidirectional=bidirectional).eval()
    packed = packed_sequences(lengths, 4, sorted_first)
    first = torch.randn(layers * (1 + bidirectional), len(lengths), 3)
    states = (first, -first) if name == "lstm" else first
    args = (packed, states) if with_states else (packed,)
    kwargs = dict(zip(("input", "hx"), args, strict=False)) if by_name else {}
    call = PackedCall.of(() if by_name else args, kwargs, batch_first)
    with torch.no_grad():
        expected, last = layer(*args)
        found, found_last = call.run(layer)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_last, last)


def test_other_calls_are_not_those_of_packed_sequences():
    assert PackedCall.of((torch.zeros(2, 3, 4),), {}, True) is None
    assert PackedCall.of((), {}, None) is None


class Tagger(nn.Module):
    """Tags the words of sentences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.layers = nn.LSTM(12, 10, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(20, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.tags(pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0])


def sentences(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.randint(50, (len(lengths), max(lengths))), torch.tensor(lengths)


def test_a_model_that_packs_sequences_is_int8_for_sequences_of_any_length(tmp_path):
    torch.manual_seed(0)
    model = Tagger().eval()
    int8 = intaglio.quantize(model, [sentences(5, 2, 5, 5), sentences(4, 4)], progress=False)
    int8.assert_int8(macs=1.0)
    assert list(int8.parts) == ["layers", "tags"]
    int8.save(tmp_path / "tagger.intaglio")
    again = intaglio.load_into(tmp_path / "tagger.intaglio", Tagger())
    for batch in (sentences(3, 8, 1, 8), sentences(1), sentences(2, 2)):
        exact, found = model(*batch), int8(*batch)
        assert 10 * torch.log10(exact.square().sum() / (exact - found).square().sum()) > 25
        assert torch.equal(again(*batch), found)
    assert {path: one.samples for path, one in int8.compare(model, [sentences(4, 2, 4)]).items()} == {
        "layers": 3,
        "tags": 3,
    }


class WithStates(Tagger):
    """The same from given first states."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        states = torch.full((2, len(lengths), 10), 0.1)
        return self.tags(pad_packed_sequence(self.layers(packed, (states, -states))[0], batch_first=True)[0])


@pytest.mark.slow(reason="quantizes a model with first states")
def test_any_number_of_sequences_may_have_a_length_if_the_first_states_are_given():
    torch.manual_seed(0)
    model = WithStates().eval()
    int8 = intaglio.quantize(model, [sentences(5, 5), sentences(4, 4)], progress=False)
    assert list(int8.parts) == ["layers", "tags"]
    for batch in (sentences(3, 8, 1, 8, 8), sentences(1)):
        exact, found = model(*batch), int8(*batch)
        assert 10 * torch.log10(exact.square().sum() / (exact - found).square().sum()) > 25


@pytest.mark.slow(reason="quantizes the model again with fewer lengths")
def test_the_layer_takes_sequences_of_lengths_that_the_data_lacks_but_no_other_features():
    torch.manual_seed(0)
    model = Tagger().eval()
    int8 = intaglio.quantize(model, [sentences(5, 5)], progress=False)
    packed = packed_sequences([3, 2, 8], 12, sorted_first=False)
    torch.testing.assert_close(int8.model.layers(packed)[0].data, model.layers(packed)[0].data, rtol=0, atol=0.05)
    with pytest.raises(intaglio.errors.InputError, match="layers"):
        int8.model.layers(packed_sequences([3, 2], 11, sorted_first=False))
