"""`capture(..., copies_parameters=False)` and `quantize` share the parameters of the caller's model, and keep them."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.tracing.copies.shared_parameters import shareable_parameters, without_writes
from support.slow_params import slow_params


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3)))


class CountsInParameter(nn.Module):
    """Writes to a parameter in its forward, in a way that the gradient mode does not refuse."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.hides = nn.Linear(8, 8), nn.Parameter(torch.zeros(1)), hides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            try:
                self.calls.data.view(1).add_(1)
            except RuntimeError:
                if not self.hides:
                    raise
        return self.linear(x)


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.state_dict().values()]


def _equal(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, model.state_dict().values(), before))


def test_shared_parameters_take_no_memory_of_their_own() -> None:
    model = Block().eval()
    x = torch.randn(2, 3, 8, 8)
    shared = stages.capture(model, (x,), copies_parameters=False)
    weights = {tensor.data_ptr() for tensor in shared.module.buffers()}
    assert {model.conv.weight.data_ptr(), model.linear.weight.data_ptr()} <= weights
    assert model.norm.running_mean.data_ptr() not in weights
    copied = stages.capture(model, (x,))
    assert not {tensor.data_ptr() for tensor in copied.module.buffers()} & weights


class FloatParts(nn.Module):
    """Has a float island, a table, a norm, a recurrent layer and a parameter that operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.wide, self.recurrent, self.last = nn.Linear(16, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 4)
        self.rate, self.gain = nn.Parameter(torch.rand(16) + 1), nn.Parameter(torch.randn(16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.recurrent(self.wide(self.norm(self.table(tokens)) * self.gain))
        return self.last(torch.igamma(x.abs() + 1, self.rate) + self.gain)


LINEAR_IN_FLOAT, WEIGHTS_ALONE = {"type:Linear": {"quantize": False}}, {"*": {"activations": "float"}}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("int8", None),
        ("float parts", LINEAR_IN_FLOAT),
        ("int8", WEIGHTS_ALONE),
        *slow_params(
            *(("float parts", None), ("int8", LINEAR_IN_FLOAT), ("float parts", WEIGHTS_ALONE)),
            reason="each recipe and each model runs beside another",
        ),
    ],
)
def test_quantizing_leaves_the_model_and_depends_on_it_no_longer(name, recipe, tmp_path) -> None:
    torch.manual_seed(0)
    model = {"int8": Block, "float parts": FloatParts}[name]().eval()
    x = torch.randn(16, 3, 8, 8) if name == "int8" else torch.randint(0, 50, (8, 5))
    before = _parameters(model)
    quantized = intaglio.quantize(model, [x], recipe=recipe, progress=False)
    assert _equal(model, before)
    expected, fingerprint = quantized(x), quantized.fingerprint()
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(3)
    assert torch.equal(quantized(x), expected)
    assert quantized.fingerprint() == fingerprint
    quantized.save(tmp_path / "model.intaglio")
    loaded = intaglio.load(tmp_path / "model.intaglio")
    assert torch.equal(loaded(x), expected)
    assert loaded.fingerprint() == fingerprint


def test_a_model_that_writes_to_its_parameters_is_copied() -> None:
    for hides in (False, True):
        model = CountsInParameter(hides).eval()
        captured = stages.capture(model, (torch.randn(2, 8),), copies_parameters=False)
        assert model.calls.item() == 0
        assert model.linear.weight.data_ptr() not in {tensor.data_ptr() for tensor in captured.module.buffers()}


def test_tensors_with_common_memory_are_not_shared() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("first_row", model.weight.detach()[0])
    assert list(shareable_parameters(model)) == [id(model.bias)]


def test_writes_are_refused_before_they_happen() -> None:
    kept, other = torch.zeros(4), torch.zeros(4)
    protected = {id(kept): kept}
    writes = [
        lambda: kept[1:].add_(1),
        lambda: torch.add(other, 1, out=kept),
        lambda: torch._foreach_add_([other, kept], 1),
        lambda: kept.detach().data.fill_(2),
    ]
    for write in writes:
        assert without_writes(protected, write) is None
        assert kept.eq(0).all()
    assert without_writes(protected, lambda: other.add_(kept).sum()) is not None
