"""Models that read tensors by strides: the elements are those that PyTorch reads, also where a program keeps channels
last."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import CaptureError
from support.lowering import sqnr
from support.nets import Body
from support.recipes import UNCORRECTED


def windows(m, x):
    """Overlapping windows of the flat image of each sample."""
    y = F.relu(m.image(x))
    return m.last(y.as_strided((y.size(0), 20, 8), (y.stride(0), 24, 1)))


def of_transposed(m, x):
    y = m.tokens(x.flatten(2).transpose(1, 2)).transpose(1, 2).contiguous()
    return m.last(y.as_strided((y.size(0), 7, 8), (y.stride(0), 40, 1), 0))


def of_whole_batch(m, x):
    """Windows across samples, so that the batch is fixed."""
    return m.last(F.relu(m.image(x)).as_strided((9, 8), (100, 2), 3))


MODELS = {
    "windows": Body(windows, image=nn.Conv2d(3, 16, 3, padding=1), last=nn.Linear(8, 4)),
    "of a transposed tensor": Body(of_transposed, tokens=nn.Linear(3, 32), last=nn.Linear(8, 4)),
    "of the whole batch": Body(of_whole_batch, image=nn.Conv2d(3, 16, 3, padding=1), last=nn.Linear(8, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_strides_select_the_elements_that_they_select_in_the_float_model(name):
    model, draw = MODELS[name].eval(), torch.Generator().manual_seed(3)
    x = torch.randn(4, 3, 8, 8, generator=draw)
    program = intaglio.quantize(model, [x], recipe=UNCORRECTED, progress=False)
    assert program.coverage.islands == 0
    for batch in (x, x[:1], x[:3]) if name != "of the whole batch" else (x,):
        assert sqnr(program(batch), model(batch)) > 30


def test_a_view_sees_what_is_written_into_its_tensor_later():
    def body(m, x):
        y = m.tokens(x) * 1.0
        view = y.as_strided((y.size(0), 4), (16, 2))
        y.mul_(-2.0)
        return m.last(view)

    model, x = Body(body, tokens=nn.Linear(16, 16), last=nn.Linear(4, 4)).eval(), torch.randn(6, 16)
    captured = stages.capture(model, (x,))
    assert torch.allclose(captured(x[:3]), model(x[:3]), atol=1e-6)


def test_writes_by_strides_are_refused():
    def body(m, x):
        y = m.tokens(x) * 1.0
        y.as_strided((y.size(0), 4), (16, 2)).zero_()
        return m.last(y)

    model = Body(body, tokens=nn.Linear(16, 16), last=nn.Linear(16, 4)).eval()
    with pytest.raises(CaptureError, match="it writes by strides"):
        stages.capture(model, (torch.randn(6, 16),))
