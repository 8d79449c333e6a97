"""Calls of `QuantizedModel`: inputs in any memory, results with their structure, refusals."""

import copy
import gc
import weakref
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.ir import DType, External
from intaglio.runtime.calls.call_plans import ExternalInput
from support import nets
from support.int8_models import assert_same, built, compiled, picture
from support.lowering import quantized
from support.slow_params import slow_params

# ---- calls


def test_calls_with_changing_batch_sizes_match_the_reference():
    model, lowered = compiled(nets.Residual)
    for batch in (1, 2, 3, 4, 5, 0, 1):
        assert_same(model(picture(batch, batch)), lowered(picture(batch, batch)))


def test_channels_last_inputs_give_channels_last_results():
    model, lowered = compiled(nets.ConvBnRelu)
    plain, last = model(picture()), model(picture().to(memory_format=torch.channels_last))
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    assert_same((plain, last), (lowered(picture()),) * 2)


STRIDED = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a part of a larger one": lambda x: torch.nn.functional.pad(x, (3, 4, 1, 2))[:, :, 1:-2, 3:-4],
    "every second image": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded channels": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "expanded images": lambda x: x[:1].expand(7, -1, -1, -1),
    "imaginary parts": lambda x: torch.complex(x, x).conj().imag,
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_image_inputs_of_any_strides_are_read_without_a_copy(view):
    model, lowered = compiled(nets.ConvBnRelu)
    x = view(picture())
    before = x.clone()
    assert_same(model(x), lowered(before.resolve_neg()))
    assert torch.equal(x, before)


FORMS = {
    "dense": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "bytes": lambda x: (x * 64 + 128).to(torch.uint8),
    "bytes, channels last": lambda x: (x * 64 + 128).to(torch.uint8, memory_format=torch.channels_last),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_program_reads_the_memory_of_the_caller(form):
    model, x = of_images(), form(picture())
    model(x)
    frame = model._frames[-1]
    (entry,) = model._segments[0].read
    assert frame.external[entry.index] == x.data_ptr()
    assert tuple(frame.strides[5 * entry.index : 5 * entry.index + 4]) == x.stride()


@cache
def of_images() -> intaglio.QuantizedModel:
    image, net = intaglio.Image(0.5, 0.5), nets.randomize(nets.ConvBnRelu())
    return intaglio.quantize(net, [picture()], input=image, progress=False)


def test_row_major_inputs_of_any_strides_are_read_without_a_copy():
    model, lowered = compiled(nets.Linears)
    x = torch.randn(32, 5).t()[:, ::2]
    assert_same(model(x), lowered(x.contiguous()))


def test_autograd_autocast_and_default_dtypes_do_not_change_results():
    model, lowered = compiled(nets.ConvThenUnsupported)
    x = torch.randn(2, 3, 10, 10)
    expected = lowered(x)
    y = model(x.requires_grad_())
    assert not y.requires_grad
    with torch.inference_mode():
        assert_same(model(x), expected)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert_same((y, model(x)), (expected, expected))


@pytest.mark.slow(reason="compiles a model with float parts; modes around calls are tested above")
def test_autocast_does_not_reach_the_float_parts():
    model, lowered = built(lambda m, x: m.c(torch.einsum("nchw,ndhw->ncdw", y := m.c(x), y)), picture(size=3))
    expected = lowered(picture(size=3))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model(picture(size=3)), expected)


def test_float_parts_of_another_type_are_refused_before_their_bytes_are_misread():
    model, _ = built(lambda m, x: m.c(m.c(x).atan2(torch.tensor([1.5] * 11 + [2.5]))), picture())
    model.islands.double()
    with pytest.raises(InputError, match=r"data type is torch\.float64, but the program reads f32"):
        model(picture())


@pytest.mark.slow(reason="compiles a model with several float parts")
def test_values_between_float_parts_are_freed_after_their_last_use():
    def chain(model: nn.Module, x: Tensor) -> Tensor:
        first = model.c(x.atan2(torch.tensor(1.5)))
        for _ in range(3):
            x = model.c(x.atan2(torch.tensor(1.5)))
        return x + first

    model, lowered = built(chain, picture())
    alive: list[weakref.ref[Tensor]] = []
    counts = []

    def count(*arguments: object) -> None:
        counts.append(sum(value() is not None for value in alive))

    def add(module: nn.Module, values: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
        alive.extend(map(weakref.ref, results))

    expected = lowered(picture())
    for island in model.islands.values():
        island.register_forward_pre_hook(count)
        island.register_forward_hook(add)
    assert len(model.islands) >= 3
    assert_same(model(picture()), expected)
    assert max(counts) == 0, counts


def test_keyword_calls_equal_positional_calls():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.conv(left) + self.conv(right)

    a, b = picture(), picture(seed=1)
    model = stages.compile(quantized(nets.randomize(Two()), a, b)[1])
    expected = model(a, b)
    assert_same((model(a, right=b), model(right=b, left=a)), (expected, expected))
    assert not torch.equal(model(b, a), expected)


def test_results_keep_their_structure():
    model, lowered = compiled(nets.MultiOutput)
    found = model(nets.example(nets.MultiOutput()))
    assert list(found) == ["logits", "pair"]
    assert isinstance(found["pair"], tuple)
    assert_same(found, lowered(nets.example(nets.MultiOutput())))


def test_constants_and_none_in_results_are_unchanged():
    model, _ = built(lambda m, x: {"y": m.c(x), "none": None, "n": 3, "s": "text", "batch": x.shape[0]}, picture())
    found = model(picture(5))
    assert (found["none"], found["n"], found["s"], found["batch"]) == (None, 3, "text", 5)


def test_an_input_the_model_writes_is_written():
    def body(m: nn.Module, x: Tensor) -> Tensor:
        y = m.c(x)
        x.add_(1)
        return y

    model, lowered = built(body, picture())
    x, other = picture(2, 3), picture(2, 3)
    assert_same(model(x), lowered(other))
    assert_same(x, picture(2, 3) + 1)
    assert_same(other, x)


def test_a_model_that_only_writes_returns_none():
    def body(m: nn.Module, x: Tensor) -> None:
        x.copy_(m.c(x))

    model, _ = built(body, picture())
    x = picture()
    assert model(x) is None
    assert not torch.equal(x, picture())


# ---- what does not fit


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_an_image_that_the_program_needs_with_channels_last_is_copied_to_them(channels):
    entry = ExternalInput(0, External("x", (2, channels, 5, 7), DType.F32, False, dense=True), False)
    image = torch.randn(2, channels, 5, 7)
    for given in (image, image.to(memory_format=torch.channels_last), image.transpose(2, 3).contiguous().mT):
        copy = entry.prepared(given)
        assert torch.equal(copy, image)
        assert copy.movedim(1, -1).is_contiguous()


def test_images_of_few_channels_are_copied_by_the_calling_thread():
    """Threads of PyTorch would wait for more work on the cores that the program needs."""
    entry = ExternalInput(0, External("x", (1, 3, 64, 64), DType.F32, False, dense=True), False)
    with torch.profiler.profile() as profile:
        entry.prepared(torch.randn(1, 3, 64, 64))
    assert "aten::copy_" not in {event.name for event in profile.events()}


WRONG = {
    "shape": (lambda x: (x[:, :2],), "input 'x': its shape is [4, 2, 12, 12]; the model takes [n, 3, 12, 12]"),
    "rank": (lambda x: (x[0],), "input 'x': its shape is [3, 12, 12]; the model takes [n, 3, 12, 12]"),
    "dtype": (lambda x: (x.double(),), "input 'x': its data type is torch.float64; the model takes torch.float32"),
    "device": (lambda x: (x.to("meta"),), "input 'x': it is on device meta; the model runs on the CPU"),
    "layout": (lambda x: (x.to_sparse(),), "input 'x': its layout is torch.sparse_coo; the model takes dense tensors"),
    "kind": (lambda x: (x.numpy(),), "input 'x': it is of type ndarray; the model takes a tensor here"),
    "too many": (
        lambda x: (x, x),
        "call: it has 2 positional arguments and no keyword arguments, but the model was captured with 1 positional",
    ),
    "none at all": (
        lambda x: (),
        "call: it has 0 positional arguments and no keyword arguments, but the model was captured with 1 positional",
    ),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_inputs_that_do_not_fit_are_refused(change, text, warm):
    model = copy.deepcopy(compiled(nets.Residual)[0])
    if warm:
        model(picture())
    with pytest.raises(InputError) as raised:
        model(*change(picture()))
    assert str(raised.value).startswith(text)


def test_a_keyword_the_model_does_not_have_is_refused():
    with pytest.raises(InputError, match=r"of forward\(x\)"):
        compiled(nets.Residual)[0](picture(), scale=2)


def test_a_model_of_a_dictionary_refuses_an_empty_call():
    model, lowered = built(lambda m, d: m.c(d["image"]), {"image": picture()})
    assert_same(model({"image": picture(3)}), lowered({"image": picture(3)}))
    with pytest.raises(InputError):
        model()


# ---- calls of tensors whose result is one tensor, which take fewer operations in Python than others


def quantized_quietly(model: nn.Module, *inputs: torch.Tensor, **options: object) -> nn.Module:
    return intaglio.quantize(model.eval(), [inputs], example_inputs=inputs, progress=False, **options)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return quantized_quietly(nn.Sequential(*layers), torch.rand(2, 3, 12, 12), input=intaglio.Image())


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "every second row": lambda x: torch.stack([x, -x], 3).reshape(len(x), 3, 24, 12)[:, :, ::2],
    "reversed axes": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand(len(x), 3, 12, 12),
    "bytes": lambda x: (255 * x).to(torch.uint8),
    "with gradients": lambda x: x.clone().requires_grad_(),
}


def test_results_are_those_of_other_calls_in_any_order_of_layouts_and_sizes(classifier):
    assert classifier._direct is not None
    for _ in range(2):
        for count in (2, 1, 3):
            for change in LAYOUTS.values():
                given = change(images(count))
                result = classifier(given)
                assert torch.equal(result, classifier.results([given.detach()])[0])
                assert not result.requires_grad


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv1d(3, 5, 3), (2, 3, 9)), (nn.Conv3d(3, 5, 3), (2, 3, 5, 6, 7))], ids=["line", "volume"]
)
def test_results_with_adjacent_channels_are_direct(layer, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    model = quantized_quietly(layer, x)
    assert model._direct is not None
    assert torch.equal(model(x), model.results([x])[0])
    assert (model(x) - layer(x)).abs().max() < 0.1


@pytest.mark.slow(reason="a classifier of images; results that are kept have tests in runtime/calls")
def test_results_are_kept_when_the_model_is_called_again(classifier):
    first = classifier(images(2))
    expected = first.clone()
    for _ in range(5):
        classifier(images(3))
    gc.collect()
    assert torch.equal(first, expected)


def test_copies_call_directly_too(classifier):
    copied = copy.deepcopy(classifier)
    assert torch.equal(copied(images(2)), classifier(images(2)))


class Both(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.linear, self.container = nn.Linear(4, 4), container

    def forward(self, x):
        return self.container(self.linear(x))


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.linear(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(3, 4, 1), (1, 3, 5, 5)),
        *slow_params((Both(lambda y: (y, y + 1)), (2, 4)), reason="the tensors of a tuple, as of a dictionary"),
        (Both(lambda y: {"y": y}), (2, 4)),
        (Count(), (2, 4)),
    ],
    ids=["image", "tuple", "dictionary", "buffer"],
)
def test_calls_that_need_more_are_not_direct(model, shape):
    assert quantized_quietly(model, torch.rand(shape))._direct is None


def test_memory_of_a_call_with_a_wrong_index_is_dropped():
    model = quantized_quietly(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 3)), torch.tensor([[1, 2, 6]]))
    assert model._direct is not None
    expected = model(torch.tensor([[3, 4, 5]]))
    with pytest.raises(IndexError):
        model(torch.tensor([[3, 7, 5]]))
    assert torch.equal(model(torch.tensor([[3, 4, 5]])), expected)
