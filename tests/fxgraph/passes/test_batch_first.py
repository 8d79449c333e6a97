"""Moves that carry the batch away and back leave nothing behind; values stay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import tensor_type, update_info
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.passes.batch_first import keep_batch_first
from intaglio.ir import DType, Origin, TensorType, symbols_of
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing import capture, run
from support.lowering import quantized, sqnr
from support.nets import Body, randomize
from support.slow_params import slow_params

ATEN = torch.ops.aten
X = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))


def passed(model: nn.Module, *args: torch.Tensor, **settings) -> tuple[fx.GraphModule, int]:
    """The graph after the passes of `prepare`, checked to compute the same, and rewrites of `keep_batch_first`."""
    captured = capture(model.eval(), args, **settings)
    module = copy_graph(captured.module)
    count = run(module, PTQ_PASSES.patterns)["keep_batch_first"]
    for wanted, found in zip(captured.module(*args), module(*args), strict=True):
        torch.testing.assert_close(found, wanted)
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}, "idempotent"
    return module, count


def away(module: fx.GraphModule) -> list[fx.Node]:
    """Values whose first axis is not the batch."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and tensor_type(node)]
    return [node for node in nodes if "n" not in symbols_of(tensor_type(node).shape[0])]


@pytest.mark.parametrize("free", [True, *slow_params(False, reason="a length that is fixed")])
@pytest.mark.parametrize(
    "weights", [False, *slow_params(True, reason="attention written out, as weights are returned")]
)
def test_attention_of_torch_keeps_the_batch_first(free, weights):
    model = nn.MultiheadAttention(24, 3, batch_first=True)
    one = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    shapes = dict.fromkeys(("query", "key", "value"), one) | {"need_weights": None}
    module, count = passed(
        model, X, X, X, example_kwargs={"need_weights": weights}, dynamic_shapes=shapes if free else None
    )
    assert count
    assert not away(module)
    kinds = [operator(node) for node in module.graph.nodes]
    assert kinds.count("aten.linear.default") == 4


@pytest.mark.slow(reason="captures a layer of a transformer; a layout that stays is tested below")
def test_a_sequence_first_layout_is_kept():
    free = {"src": {1: torch.export.Dim.AUTO}}
    module, _ = passed(nn.TransformerEncoderLayer(24, 3, 48), X, dynamic_shapes=free)
    (result,) = next(node for node in module.graph.nodes if node.op == "output").args[0]
    assert str(tensor_type(result)) == "f32[3, n, 24]"


def linears(body) -> Body:
    return Body(body, a=nn.Linear(24, 12), b=nn.Linear(12, 6))


CARRIED = {
    "there and back": lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1),
    "merged behind the sequence": lambda m, x: (
        m.b(m.a(x.transpose(0, 1)).reshape(-1, 12)).view(7, -1, 6).transpose(0, 1)
    ),
    "heads": lambda m, x: m.a(x.permute(1, 0, 2)).reshape(7, x.shape[0] * 4, 3).transpose(0, 1).view(-1, 4, 7, 3),
    "a part of the channels": lambda m, x: m.a(x.transpose(0, 1))[..., 4:10].permute(1, 2, 0),
}


@pytest.mark.parametrize("name", CARRIED)
def test_linear_layers_and_transposes_keep_the_batch_first(name):
    module, count = passed(linears(CARRIED[name]), X)
    assert count
    assert not away(module)


LEFT = {
    "windows": lambda m, x: m.a(x.view(-1, 7, 1, 24).permute(0, 2, 1, 3)).flatten(1),
    "channels last": lambda m, x: m.a(x.view(x.shape[0], 24, 7, 1).permute(0, 2, 3, 1)),
    "a result that stays away": lambda m, x: x.transpose(0, 1) * 2.0,
}


@pytest.mark.parametrize("name", LEFT)
def test_transposes_that_keep_the_batch_first_or_are_not_undone_stay(name):
    assert passed(linears(LEFT[name]), X)[1] == 0


class Windows(nn.Module):
    """Attention within windows of an image, as in Twins: queries of all windows are [n, windows, heads, pixels, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.reshape(x.shape[0], 2, 3, 2, 3, 8).transpose(2, 3)
        qkv = self.qkv(windows).reshape(x.shape[0], 4, 9, 3, 2, 4).permute(3, 0, 1, 4, 2, 5)
        y = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(2, 3)
        return self.last(y.reshape(x.shape[0], 2, 2, 3, 3, 8).transpose(2, 3).reshape(x.shape))


@pytest.mark.slow(reason="quantizes windows of a transformer; they are permuted with merged axes below")
def test_neighbouring_axes_are_merged_where_a_permutation_has_too_many():
    x = torch.randn(3, 6, 6, 8, generator=torch.Generator().manual_seed(3))
    model = randomize(Windows())
    reference, lowered = quantized(model, x, recipe=Recipe.named("transformer"))
    assert not lowered.islands
    for batch in (x, x[:1]):
        torch.testing.assert_close(lowered(batch), reference(batch), rtol=1e-4, atol=1e-4)
        assert sqnr(lowered(batch), model(batch)) > 30


class VideoWindows(nn.Module):
    """Windows of a video as in Swin Transformer 3D, which divide three axes and permute eight."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, frames, height, width, channels = x.shape
        windows = x.view(n, frames // 2, 2, height // 3, 3, width // 2, 2, channels)
        windows = windows.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, 12, channels)
        windows = self.inside(windows).relu()
        windows = windows.view(n, frames // 2, height // 3, width // 2, 2, 3, 2, channels)
        return self.outside(windows.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape))


def test_windows_of_three_axes_are_permuted_with_merged_axes():
    x = torch.randn(3, 4, 6, 6, 8, generator=torch.Generator().manual_seed(3))
    model = randomize(VideoWindows())
    reference, lowered = quantized(model, x, recipe=Recipe.named("transformer"))
    assert not lowered.islands, lowered.skipped
    for batch in (x, x[:1]):
        torch.testing.assert_close(lowered(batch), reference(batch), rtol=1e-4, atol=1e-4)
        assert sqnr(lowered(batch), model(batch)) > 30


class Drawn:
    """A graph that grows by drawn operators, each computed at once."""

    def __init__(self) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.value = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2))
        self.x, self.node = self.value, self.graph.placeholder("x")
        update_info(self.node, type=TensorType((4, 6, 8), DType.F32))

    def add(self, target, *args) -> None:
        nodes = [self.constant(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.value = target(self.value, *args)
        self.node = self.graph.call_function(target, (self.node, *nodes))
        update_info(self.node, type=TensorType(tuple(self.value.shape), DType.F32), origin=Origin("", str(target), ""))

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        name = f"w{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, tensor)
        node = self.graph.get_attr(name)
        update_info(node, type=TensorType(tuple(tensor.shape), DType.F32), path=name)
        return node

    def draw(self, data) -> None:
        """One operator more."""
        shape, draw = list(self.value.shape), data.draw
        axis = draw(st.integers(0, len(shape) - 1))
        before, size, after = shape[:axis], shape[axis], shape[axis + 1 :]
        kind = draw(st.sampled_from(["permute", "slice", "linear", "merge", "split"][: 5 if len(shape) < 9 else 4]))
        if kind == "permute":
            self.add(ATEN.permute.default, draw(st.permutations(range(len(shape)))))
        elif kind == "slice":
            start = draw(st.integers(0, size - 1))
            self.add(ATEN.slice.Tensor, axis, start, draw(st.integers(start + 1, size)))
        elif kind == "linear":
            self.add(ATEN.linear.default, torch.randn(draw(st.integers(1, 6)), shape[-1]))
        elif kind == "split":
            outer = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
            self.add(ATEN.reshape.default, [*before, outer, size // outer, *after])
        elif len(after) > 0 and len(shape) > 2:
            self.add(ATEN.reshape.default, [*before, size * after[0], *after[1:]])


@given(st.data())
def test_random_chains_of_transposes_and_linear_layers_are_equivalent_after_rewriting(data):
    drawn = Drawn()
    for _ in range(data.draw(st.integers(1, 8))):
        drawn.draw(data)
    drawn.add(ATEN.neg.default)
    drawn.graph.output((drawn.node,))
    module = fx.GraphModule(drawn.root, drawn.graph)
    run(module, (keep_batch_first,))
    torch.testing.assert_close(module(drawn.x)[0], drawn.value)
    assert keep_batch_first(module) == 0
