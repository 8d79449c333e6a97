"""A model that both doors take gets the same parameters, graph and integers from both (frontends.md A4)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intaglio import eager, stages
from support.nets import (
    Body,
    Grouped,
    MaxPoolNet,
    MultiOutput,
    OptionA,
    Residual,
    SharedConv,
    SharedConvBn,
    example,
    randomize,
)
from support.slow_params import slow_params_except


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = (part.view(n, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).split(32, 2))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, -1)
        x = x + self.out(y)
        return x + self.narrow(F.gelu(self.wide(x)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.tags = nn.Embedding(50, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, ids):
        return self.tags(self.lstm(self.words(ids))[0])


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.v = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        x = F.conv2d(x, self.w, bias=self.b, padding=1).relu_()
        x = torch.flatten(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1), 1)
        return {"scores": F.linear(x, self.v), "size": x.size(0)}


class Encoder(nn.TransformerEncoder):
    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)


IMAGES = (Grouped, MaxPoolNet, MultiOutput, OptionA, Residual, SharedConv, SharedConvBn)
OTHERS = {
    Attends: lambda seed: torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(seed)),
    Words: lambda seed: torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(seed)),
    Functions: lambda seed: torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),
    Encoder: lambda seed: torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(seed)),
}


def batches(kind):
    model = randomize(kind().eval())
    return model, [OTHERS[kind](seed) if kind in OTHERS else example(model, seed=seed) for seed in range(3)]


@pytest.mark.case("frontends A4")
@pytest.mark.parametrize(
    "kind",
    slow_params_except(Grouped, of=[*IMAGES, *OTHERS], reason="larger networks, and layers of the other networks"),
    ids=lambda kind: kind.__name__,
)
def test_eager_and_export_mode_give_the_same_parameters_and_program(kind):
    model, data = batches(kind)
    prepared = stages.prepare(stages.capture(model, (data[0],)))
    watched = eager.prepare(model, (data[0],))
    for batch in data:
        expected, found = prepared(batch.clone()), watched(batch.clone())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    reference, converted = stages.convert(prepared), eager.convert(watched)
    rewritten = eager.rewrite(converted)
    assert rewritten.parameters.to_json() == reference.parameters.to_json()
    lowered = stages.requantize(reference)
    assert stages.requantize(rewritten).graph.types.keys() == lowered.graph.types.keys()
    program = stages.compile(lowered)
    assert stages.compile(rewritten).text("program") == program.text("program")
    for batch in (data[0], data[1][:1]):
        torch.testing.assert_close(converted(batch.clone()), program(batch.clone()), rtol=0, atol=0)


@pytest.mark.slow(reason="calibrates a residual network in both doors")
def test_the_comparison_detects_other_parameters():
    model, data = batches(Residual)
    watched = eager.prepare(model, (data[0],))
    prepared = stages.prepare(stages.capture(model, (data[0],)))
    watched(data[0]), prepared(data[1])
    mine, theirs = eager.rewrite(eager.convert(watched)), stages.convert(prepared)
    assert mine.parameters.to_json() != theirs.parameters.to_json()


@pytest.mark.slow(reason="a further recipe in both doors")
def test_results_without_rounding_have_the_same_bits_through_both_doors():
    """Behind functions and sums, and of values that the next layer reads too."""

    def body(m, x):
        y = F.relu(m.a(x))
        return y, F.gelu(m.b(y) + y), m.b(y).sigmoid().flatten(1)

    model = randomize(Body(body, a=nn.Conv2d(6, 6, 3, padding=1), b=nn.Conv2d(6, 6, 3, padding=1)))
    x = torch.randn(4, 6, 9, 9)
    prepared = eager.prepare(model, (x,))
    prepared(x)
    exported = stages.prepare(stages.capture(model, (x,)), stages.Quantizer())
    program = stages.compile(stages.requantize(stages.convert(exported, stages.calibrate(exported, [x]))))
    for found, expected in zip(eager.convert(prepared)(x), program(x), strict=True):
        assert torch.equal(found, expected)
        assert expected.unique().numel() > 256
