"""Models that keep results for inputs of one size in plain attributes, as detectors keep their anchors."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import intaglio
from intaglio import stages
from intaglio.errors import CaptureError

SIZES = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)


class Anchored(nn.Module):
    shape = None
    anchors = torch.empty(0)

    def __init__(self):
        super().__init__()
        self.conv, self.stride = nn.Conv2d(3, 4, 3), torch.tensor([4.0, 8.0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.shape != y.shape:
            height, width = y.shape[2:]
            rows = torch.arange(height).type_as(y)[:, None].expand(height, width) + 0.5
            self.anchors = rows * y.new_full((1, 1), self.stride[1])
            self.shape = y.shape
        return y * self.anchors


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Anchored().eval()


def images(count: int, height: int = 9, width: int = 10) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("calls_before", [(), (2,), (3,)])
def test_the_batch_is_free_whatever_the_model_keeps_from_earlier_calls(model, calls_before):
    for count in calls_before:
        model(images(count))
    captured = stages.capture(model, images(2))
    assert not captured.notes
    for count in (1, 5):
        torch.testing.assert_close(captured(images(count)), model(images(count)))


def test_sizes_of_images_are_free_on_request(model):
    captured = stages.capture(model, images(2), dynamic_shapes=SIZES)
    for shape in ((1, 7, 12), (3, 20, 5)):
        torch.testing.assert_close(captured(images(*shape)), model(images(*shape)))


def test_what_the_model_keeps_is_not_changed(model):
    model(images(2))
    kept = model.anchors
    stages.capture(model, images(4))
    assert model.anchors is kept
    assert model.shape == (2, 4, 7, 8)
    assert "forward" not in vars(model)


def test_numbers_of_tensors_of_the_model_are_constants(model):
    text = stages.capture(model, images(2)).text()
    assert "item" not in text
    assert "new_full.default(%conv2d, [1, 1], 8" in text


def test_numbers_of_buffers_that_calls_change_are_no_constants():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            count = self.count[1]
            return self.layer(x) * (count if self.as_tensor else count.item())

    counting, x = Counting().eval(), torch.ones(2, 4)
    counting.as_tensor = False
    with pytest.raises(CaptureError) as caught:
        stages.capture(counting, x)
    assert caught.value.remedy == "compute with the element as a tensor, without item() or float()"
    counting.as_tensor = True
    assert torch.equal(stages.capture(counting, x)(x), counting.layer(x) * 2)


@pytest.mark.slow(reason="quantizes a model that keeps results of several sizes")
def test_an_int8_model_computes_for_each_size_what_it_keeps(model):
    int8 = intaglio.quantize(model, [images(8) for _ in range(2)], dynamic_shapes=SIZES)
    for shape in ((1, 7, 12), (3, 20, 5)):
        exact = model(images(*shape))
        assert (int8(images(*shape)) - exact).abs().max() < 0.02 * exact.abs().max()
