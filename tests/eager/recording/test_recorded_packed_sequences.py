"""Define-by-run: layers around recurrent layers of packed sequences run in int8."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from intaglio import eager
from support.eager_models import warnings_of

Call = tuple[Tensor, Tensor]


class Tagger(nn.Module):
    def __init__(self, is_sorted: bool = False) -> None:
        super().__init__()
        self.inside, self.out, self.is_sorted = nn.Linear(6, 12), nn.Linear(10, 3), is_sorted
        self.lstm = nn.LSTM(12, 10, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.inside(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


class OfPacked(Tagger):
    """Maps the values of a packed sequence."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        inside = self.inside(packed.data)
        result, _ = self.lstm(PackedSequence(inside, *packed[1:]))
        return self.out(result.data)


def call(*lengths: int) -> Call:
    return torch.randn(len(lengths), 8, 6, generator=torch.Generator().manual_seed(1)), torch.tensor(lengths)


@pytest.mark.parametrize("net", [Tagger(), Tagger(is_sorted=True), OfPacked()], ids=["tagger", "sorted", "of packed"])
def test_layers_around_a_recurrent_layer_run_in_int8(net: nn.Module, caplog) -> None:
    net.eval()
    prepared = eager.prepare(net, call(7, 5, 3, 1))
    for lengths in ((7, 5, 3, 1), (8, 6, 5, 5), (6, 4)):
        assert torch.allclose(prepared(*call(*lengths)), net(*call(*lengths)), atol=1e-5)
    model = eager.convert(prepared, strict=True)
    for lengths in ((7, 5, 3, 1), (6, 6, 2), (2,)):
        found, expected = model(*call(*lengths)), net(*call(*lengths))
        assert found.shape == expected.shape
        assert (found - expected).norm() < 0.1 * expected.norm()
        assert not torch.equal(found, expected)
    report = eager.coverage(model)
    assert report.macs_int8 > 0
    (lstm,) = [part for part in report.floats if part.path == "lstm"]
    assert lstm.reason == "it takes a packed sequence, which torch.export cannot trace"
    assert lstm.macs > 0
    assert not warnings_of(caplog)
