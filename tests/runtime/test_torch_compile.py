"""Quantized models inside `torch.compile`: no graph break, sizes that stay free, results as of a plain call."""

import copy
import pickle
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import intaglio
from intaglio.errors import InputError
from intaglio.runtime import QuantizedModel
from support import nets
from support.int8_models import assert_same, built, compiled, picture
from support.lowering import tensors
from support.nets import randomize
from support.slow_params import slow_params

INDUCTOR = pytest.mark.slow(reason="Inductor compiles every model; aot_eager traces the same")
BACKENDS = ("eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR))


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pipeline(nn.Module):
    """Work before and after the int8 model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 0.5 + 0.1).softmax(-1)


class Nested(nn.Module):
    """Tensors by name and in lists, a size, a constant, one tensor twice; images of one to three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Conv1d(3, 6, 3)

    def forward(self, images: dict[str, Tensor], scale: int = 2):
        x = images["x"]
        y = self.a(x)
        line = self.c(x.flatten(2))
        return {"y": y, "rest": [self.b(y.mean((2, 3))), (x.shape[0], None)], "again": y, "line": line}


@cache
def nested() -> QuantizedModel:
    return intaglio.quantize(randomize(Nested()), [({"x": picture()},)], progress=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pipeline_is_one_graph_for_all_batches(backend):
    pipeline, counter = Pipeline(compiled(nets.Residual)[0]), CompileCounterWithBackend(backend)
    fast = torch.compile(pipeline, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 8):
        torch.testing.assert_close(fast(picture(batch, batch)), pipeline(picture(batch, batch)))
    assert counter.frame_count == 2  # the second batch made the size free


@pytest.mark.parametrize(
    "backend",
    [
        *slow_params("eager", reason="results of several kinds; a pipeline of one result is compiled above"),
        *slow_params("aot_eager", reason="another backend of the same graph"),
        BACKENDS[-1],
    ],
)
def test_nested_results_keep_structure_bits_and_strides(backend):
    model = nested()

    def pipeline(x: Tensor):
        return model(images={"x": x * 1.0})

    fast = torch.compile(pipeline, fullgraph=True, backend=backend, dynamic=True)
    for batch in (2, 4):
        for x in (picture(batch), picture(batch).contiguous(memory_format=torch.channels_last)):
            found, expected = fast(x), pipeline(x)
            assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(expected)
            assert found["rest"][1] == (batch, None)
            assert_same(found, expected)
            assert [t.stride() for t in tensors(found)] == [t.stride() for t in tensors(expected)]


def test_the_custom_operator_matches_its_fake():
    model = compiled(nets.ConvBnRelu)[0]
    for x in (picture(), picture().contiguous(memory_format=torch.channels_last)):
        torch.library.opcheck(torch.ops.intaglio.call.default, ([x], model._model_id))
    torch.library.opcheck(torch.ops.intaglio.call.default, ([picture(4)], nested()._model_id))


def test_gradients_stop_at_the_int8_model():
    model = compiled(nets.ConvBnRelu)[0]
    fast = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")
    assert not fast(picture().requires_grad_()).requires_grad


def test_two_models_copies_and_pickles_each_run_their_own_program():
    first, second = compiled(nets.ConvBnRelu)[0], compiled(nets.Residual)[0]
    models = [first, second, copy.deepcopy(first), pickle.loads(pickle.dumps(second))]
    assert len({model._model_id for model in models}) == 4
    fast = torch.compile(lambda x: [model(x) for model in models], fullgraph=True, backend="eager")
    assert_same(fast(picture()), [model(picture()) for model in models])


def test_a_model_with_float_parts_is_one_operator_too():
    model, _ = built(lambda m, x: m.c(torch.erf(m.c(x))), picture())
    assert model.coverage.islands
    fast = torch.compile(lambda x: model(x + 1), fullgraph=True, backend="aot_eager")
    assert_same(fast(picture()), model(picture() + 1))


def test_an_invalid_call_raises_the_error_of_the_float_model():
    model = compiled(nets.ConvBnRelu)[0]
    fast = torch.compile(lambda x: model(x) + 1, backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"shape is \[2, 4, 12, 12\]; the model takes"):
        fast(torch.randn(2, 4, 12, 12))


@pytest.mark.slow(
    reason="torch compiles a model that changes a buffer; buffers are kept from call to call in test_mutated_state.py"
)
def test_an_int8_model_updates_its_buffers_like_the_float_model():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 3, 3)
            self.register_buffer("calls", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.c(x) + self.calls

    model = intaglio.quantize(randomize(Counting()), [picture()], progress=False)
    alike = copy.deepcopy(model)
    fast = torch.compile(lambda x: model(x) * 2, backend="eager")
    for _ in range(3):
        assert_same(fast(picture()), alike(picture()) * 2)


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_exporting_an_int8_model_is_an_error(strict):
    with pytest.raises(InputError, match="already quantized"):
        torch.export.export(Pipeline(compiled(nets.ConvBnRelu)[0]), (picture(),), strict=strict)
