"""Buffers that a model changes, kept as quantized values: what is stored, what is read, and what never drifts."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.annotation import Annotation, QuantizedAs, annotate_node
from intaglio.errors import CaptureError, SelectorError, UnsupportedError
from intaglio.fxgraph.node_info import info
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.quantizer import Quantizer
from support import nets
from support.lowering import kinds, sqnr
from support.matmul_library import BEST_ISA_PARAMS
from support.slow_params import slow_params


class Attention(nn.Module):
    """One head with a cache of keys and values, written at the positions of a call."""

    def __init__(self, cells: int = 8, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("keys", torch.zeros(1, cells, width))
        self.register_buffer("values", torch.zeros(1, cells, width))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.keys[:, at] = self.k(x)
        self.values[:, at] = self.v(x)
        weights = torch.softmax(self.q(x) @ self.keys.transpose(1, 2) / 4, -1)
        return self.o(weights @ self.values)


class Window(nn.Module):
    """The last four rows, the newest behind, in front of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("rows", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.copy_(torch.cat([self.rows[1:], self.a(x)]))
        return self.b(self.rows)


class Held(nn.Module):
    """Writes one row by number, and gives all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("rows", torch.linspace(-1, 1, 24).reshape(4, 6))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.rows[at] = self.a(x)
        return self.rows * 1.0


CALLS = {
    Attention: [(torch.randn(1, 2, 16), torch.tensor([2 * i, 2 * i + 1])) for i in range(4)],
    Window: [(torch.randn(1, 6),) for _ in range(4)],
    Held: [(torch.randn(1, 6), torch.tensor([i])) for i in range(4)],
}
NETS = pytest.mark.parametrize("net", CALLS, ids=lambda net: net.__name__)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def reference(net, int8_buffers=True, model=None):
    model = nets.randomize(net()) if model is None else model
    prepared = prepare(stages.capture(model, CALLS[net][0]), Quantizer(int8_buffers=int8_buffers))
    for call in CALLS[net]:
        prepared(*call)
    return model, convert(prepared)


@pytest.mark.case("frontends C8")
@NETS
def test_an_int8_buffer_has_the_same_bytes_in_every_stage(net):
    """C8: the opt-in; reference, interpreter and program agree on quantized values, in a quarter of the memory."""
    model, found = reference(net)
    twin, lowered = copy.deepcopy(model), stages.requantize(found)
    native = stages.compile(lowered)
    for call in CALLS[net]:
        wanted, exact = found(*call), twin(*call)
        for stage in (lowered, native):
            assert sqnr(stage(*call), exact) > 20
        assert sqnr(wanted, exact) > 20
    kept = [getattr(native, f"state{index}") for index in range(len(found.state))]
    for one, other, mine, real in zip(found.state, lowered.state, kept, model.buffers(), strict=True):
        assert one.dtype == other.dtype == mine.dtype == torch.uint8
        assert mine.nbytes * 4 == real.nbytes
        assert torch.equal(other, mine)
        assert (one.int() - mine.int()).abs().max() <= 1


@pytest.mark.case("frontends C8")
def test_buffer_entries_written_once_do_not_drift():
    """However often it is read, and whatever is written beside it."""
    _, found = reference(Held)
    all_stages = [found, stages.requantize(found), stages.compile(found)]
    for stage in all_stages:
        stage(torch.randn(1, 6), torch.tensor([1]))
        first = [buffer.clone() for buffer in (stage._state() if isinstance(stage, nn.Module) else stage.state)]
        for _ in range(50):
            stage(torch.randn(1, 6), torch.tensor([3]))
        last = stage._state() if isinstance(stage, nn.Module) else stage.state
        assert torch.equal(first[0][:3], last[0][:3])
        assert not torch.equal(first[0][3], last[0][3])


@pytest.mark.case("frontends C8")
def test_existing_buffer_rows_are_copied_as_bytes():
    """Quantized values are made of the new row only: nothing is quantized that was quantized values before."""
    _, found = reference(Window)
    lowered = stages.requantize(found)
    (buffer,) = lowered.signature.state
    assert lowered.graph.types[buffer.name].dtype.value == "u8"
    assert kinds(lowered).count("quantize") == 1  # of the input
    assert kinds(lowered).count("dequantize") == 1  # of the result
    sizes = [lowered.graph.types[op.output].shape for op in lowered.graph.ops if op.kind == "requantize"]
    assert sizes == [(1, 6)]


@pytest.mark.case("frontends C8")
def test_a_cache_is_written_by_index_as_bytes():
    _, found = reference(Attention)
    put = [node for node in found.module.graph.nodes if "index_put" in str(node.target)]
    assert [info(node).type.dtype.value for node in put] == ["u8", "u8"]
    assert all(node.args[0].op == "placeholder" for node in put)


def test_requantizing_dequantized_values_returns_them():
    """For every quantized value, zero point and scale that a buffer can have: quantize of dequantize is the
    identity."""
    quantized = np.arange(256, dtype=np.float32)
    rng = np.random.default_rng(0)
    for scale in np.exp2(rng.uniform(-100, 100, 400)).astype(np.float32):
        zero = np.float32(rng.integers(0, 256))
        again = np.rint((quantized - zero) * scale * (np.float32(1) / scale)) + zero
        assert np.array_equal(again, quantized)


@NETS
def test_without_the_flag_buffers_stay_float(net):
    _, found = reference(net, int8_buffers=())
    assert {buffer.dtype for buffer in found.state} == {torch.float32}


def test_buffers_are_chosen_by_name():
    _, found = reference(Attention, int8_buffers="val*")
    kept = {entry.path: entry.type.dtype.value for entry in found.signature.state}
    assert kept == {"keys": "f32", "values": "u8"}
    assert stages.compile(found)(*CALLS[Attention][0]).shape == (1, 2, 16)


def test_an_unknown_buffer_name_is_an_error_that_lists_the_buffers():
    with pytest.raises(SelectorError, match=r"'cache' matches no buffer that the model changes\n.*keys, values"):
        reference(Attention, int8_buffers=("cache",))


def test_aliased_buffers_are_refused():
    """C8, 2.6: bytes under one name and floats under another cannot be one memory."""

    class Twice(Window):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("newest", self.rows[3:])

    with pytest.raises(CaptureError, match=r"rows: .*shares memory with newest"):
        stages.capture(Twice().eval(), (torch.randn(1, 6),))


def test_a_buffer_other_than_float32_is_refused_by_name_and_skipped_with_true():
    class Counts(Window):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    captured = stages.capture(nets.randomize(Counts()), (torch.randn(1, 6),))
    with pytest.raises(UnsupportedError, match=r"calls: .*i64"):
        prepare(captured, Quantizer(int8_buffers="calls"))
    stage = prepare(captured, Quantizer(int8_buffers=True))
    stage(torch.randn(1, 6))
    assert {entry.path: entry.type.dtype.value for entry in convert(stage).signature.state} == {
        "rows": "u8",
        "calls": "i64",
    }


def test_a_buffer_computed_from_itself_is_reported():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(6, 6)
            self.register_buffer("mean", torch.zeros(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.5).add_(self.c(x).mean(0, keepdim=True) * 0.5)
            return x - self.mean

    stage = prepare(stages.capture(nets.randomize(Mean()), (torch.randn(4, 6),)), Quantizer(int8_buffers=True))
    stage(torch.randn(4, 6))
    note = "buffer mean: computed from its own quantized values, and rounded again, in every call"
    assert note in convert(stage).notes


def test_initial_buffer_values_are_quantized_and_observed():
    model, found = reference(Held)
    (entry,) = found.signature.state
    q = entry.type.qparams
    real = (entry.initial.astype(np.float32) - q.zero) * np.float32(q.step)
    assert np.abs(real - model.rows.numpy()).max() <= q.step * 0.51


def test_state_dict_reset_and_files_keep_bytes(tmp_path):
    _, found = reference(Attention)
    native = stages.compile(found)
    fresh = [native.state0.clone(), native.state1.clone()]
    for call in CALLS[Attention]:
        native(*call)
    held = native.state_dict()
    assert held["state0"].dtype == torch.uint8
    other = stages.compile(found)
    other.load_state_dict(held)
    assert torch.equal(other(*CALLS[Attention][0]), native(*CALLS[Attention][0]))
    native.save(tmp_path / "model.intaglio")
    loaded = intaglio.load(tmp_path / "model.intaglio")
    native.reset()
    assert torch.equal(native.state0, fresh[0])
    assert torch.equal(native.state1, fresh[1])
    for call in CALLS[Attention]:
        assert torch.equal(loaded(*call), native(*call))
        assert torch.equal(loaded.state0, native.state0)


def test_recalibrated_ranges_requantize_stored_buffers(tmp_path):
    """A state dictionary holds quantized values and what they stand for; a file of what took it is whole."""
    model, found = reference(Held)
    stage = prepare(stages.capture(model, CALLS[Held][0]), Quantizer(int8_buffers=True))
    stage(CALLS[Held][0][0] * 9, CALLS[Held][0][1])
    wide, narrow = stages.compile(convert(stage)), stages.compile(found)
    assert wide.signature.state[0].type != narrow.signature.state[0].type
    wide(*CALLS[Held][1])
    narrow.load_state_dict(wide.state_dict())
    assert narrow.signature.state[0].type == wide.signature.state[0].type
    assert torch.equal(narrow(*CALLS[Held][2]), wide(*CALLS[Held][2]))
    narrow.reset()
    wide.reset()
    assert (narrow.state0.int() - wide.state0.int()).abs().max() <= 8  # the narrower range was clamped and coarser
    narrow.save(tmp_path / "model.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "model.intaglio").state0, narrow.state0)


def test_quantize_accepts_int8_buffers():
    model = intaglio.quantize(
        nets.randomize(Window()), [call[0] for call in CALLS[Window]], quantizer=stages.Quantizer(int8_buffers="rows")
    )
    assert model.state0.dtype == torch.uint8


class Everything:
    """Quantized values on every edge and every result."""

    def annotate(self, module):
        for node in module.graph.nodes:
            if node.op == "call_function":
                inputs = {value: QuantizedAs() for value in node.all_input_nodes if value.op != "get_attr"}
                annotate_node(node, Annotation(inputs, QuantizedAs()))


@pytest.mark.case("frontends C8")
def test_the_destination_of_a_write_has_no_observer():
    """C8: whatever an annotator wants of the value that is written over."""
    captured = stages.capture(nets.randomize(Held()), CALLS[Held][0])
    prepared = prepare(captured, Everything())
    values = {site.value for site in prepared.annotations.sites if site.role == "activation"}
    assert not values.intersection(entry.name for entry in captured.signature.state)
    assert values


@pytest.mark.case("frontends C8")
def test_an_annotator_and_int8_buffers_work_together():
    model = nets.randomize(Window())
    prepared = prepare(stages.capture(model, CALLS[Window][0]), Quantizer(annotator=Everything(), int8_buffers=True))
    for call in CALLS[Window]:
        prepared(*call)
    found = convert(prepared)
    native = stages.compile(found)
    assert native.state0.dtype == torch.uint8
    for call in CALLS[Window]:
        assert sqnr(native(*call), model(*call)) > 20


class Heads(nn.Module):
    """Two heads over a cache of four axes; written by position, or pushed along."""

    def __init__(self, pushed: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.pushed = pushed
        self.register_buffer("keys", torch.zeros(1, 2, 8, 16))
        self.register_buffer("values", torch.zeros(1, 2, 8, 16))

    def put(self, cache: Tensor, new: Tensor, at: Tensor) -> None:
        if self.pushed:
            cache.copy_(torch.cat([cache[:, :, 2:], new], 2))
        else:
            cache[:, :, at] = new

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (layer(x).view(1, -1, 2, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
        self.put(self.keys, k, at)
        self.put(self.values, v, at)
        found = torch.softmax(q @ self.keys.transpose(2, 3) / 4, -1) @ self.values
        return self.o(found.transpose(1, 2).reshape(1, -1, 32))


@pytest.mark.slow(reason="compiles attention with a cache; its buffers have the same bytes in every stage above")
@pytest.mark.case("frontends C8")
@pytest.mark.parametrize("pushed", [True, *slow_params(False, reason="a cache that is written otherwise")])
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_attention_reads_the_bytes_of_its_cache(pushed, isa):
    """Keys and values go from the layer that makes them to the kernel that reads them without a float between."""
    model = nets.randomize(Heads(pushed))
    calls = [(torch.randn(1, 2, 32), torch.arange(2 * i, 2 * i + 2)) for i in range(4)]
    prepared = prepare(stages.capture(model, calls[0]), Quantizer(int8_buffers=True))
    for call in calls:
        prepared(*call)
    found = convert(prepared)
    graph = stages.requantize(found)
    assert kinds(graph).count("quantize") == kinds(graph).count("dequantize") == kinds(graph).count("attention") == 1
    (attention,) = (op for op in graph.graph.ops if op.kind == "attention")
    assert [graph.graph.types[name].qparams for name in attention.inputs[1:]] == [
        entry.type.qparams for entry in graph.signature.state
    ]
    native = stages.compile(graph, isa=isa)
    for call in calls:
        wanted, exact = graph(*call), model(*call)
        assert sqnr(wanted, exact) > 20
        assert torch.equal(native(*call), wanted)
        assert torch.equal(native.state0, graph.state[0])
        assert torch.equal(native.state1, graph.state[1])
