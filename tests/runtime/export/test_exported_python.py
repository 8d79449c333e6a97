"""The Python file of an export: it calls the library with NumPy alone, and has the bits of the model."""

import importlib.util
import re
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import intaglio
from support import nets
from support.exported_c import build
from support.int8_models import compiled, picture

Pair = namedtuple("Pair", "first second")


def loaded(folder: Path, module: str) -> ModuleType:
    """Import the Python file of an export."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{module}", folder / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> ModuleType:
    folder = tmp_path_factory.mktemp("images")
    compiled(nets.ConvBnRelu)[0].export_c(folder)
    build(folder)
    return loaded(folder, "convbnrelu")


@pytest.fixture
def network(exported):
    with exported.Network() as opened:
        yield opened


def equal(found: np.ndarray, expected: Tensor) -> bool:
    return found.dtype == expected.numpy().dtype and np.array_equal(found, expected.numpy())


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_results_have_the_bits_of_the_model_at_every_batch_and_number_of_threads(network):
    model = compiled(nets.ConvBnRelu)[0]
    for batch in (1, 3, 3, 0, 2):
        for network.threads in (0, 1, 2):
            assert equal(network(picture(batch, batch).numpy()), model(picture(batch, batch)))


@given(
    order=st.permutations(range(4)),
    steps=st.tuples(*[st.sampled_from([1, 2, -1])] * 4),
    byte=st.booleans(),
)
def test_arrays_are_read_in_any_strides(exported, order, steps, byte):
    model, network = compiled(nets.ConvBnRelu)[0], exported.Network()
    dense = picture(4, 1).numpy()
    backwards = tuple(slice(None, None, step) for step in steps)
    image = np.zeros([size * abs(step) for size, step in zip(dense.shape, steps, strict=True)], np.float32)
    image = image.transpose(order).copy().transpose(np.argsort(order))
    if byte:  # begins at an address that is no multiple of an element
        image = np.frombuffer(bytearray(image.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(image.shape)
    view = image[backwards][tuple(slice(size) for size in dense.shape)]
    view[...] = dense
    before = view.copy()
    assert equal(network(view), model(torch.from_numpy(dense)))
    assert np.array_equal(view, before)


def test_tensors_and_lists_are_read_too_if_their_element_type_fits(network):
    image = picture(1)
    assert equal(network(image), compiled(nets.ConvBnRelu)[0](image))
    with pytest.raises(TypeError, match="input must have the element type float32, got float64"):
        network(image.tolist())


@pytest.mark.slow(reason="exports and builds a network that takes bytes")
def test_images_of_bytes_are_read_in_place(tmp_path):
    image, floats = intaglio.Image(0.5, 0.5), picture(3)
    model = intaglio.quantize(nets.randomize(nets.ConvBnRelu()), [floats], input=image, progress=False)
    model.export_c(tmp_path)
    build(tmp_path)
    network, q_values = loaded(tmp_path, "convbnrelu").Network(), (floats * 64 + 128).clamp(0, 255).to(torch.uint8)
    for x in (floats, q_values):
        for layout in (torch.contiguous_format, torch.channels_last):
            assert equal(network(x.contiguous(memory_format=layout).numpy()), model(x))


# ---- structure ------------------------------------------------------------------------------------------------------


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, scale: Tensor) -> dict:
        x = self.table(ids)
        y = self.last(x) * scale
        return {"pair": Pair(x, y), "nested": [(y.sum(-1),), None, "text"], "count": 3}


@pytest.mark.slow(reason="exports and builds a second network; one result is read above")
def test_results_have_the_structure_of_the_model_and_inputs_have_names(tmp_path):
    model = nets.randomize(Structured().eval())
    inputs = torch.randint(20, (2, 5)), torch.rand(2, 5, 1)
    lowered = intaglio.quantize(model, [inputs], progress=False)
    lowered.export_c(tmp_path)
    build(tmp_path)
    network = loaded(tmp_path, "structured").Network()
    expected = lowered(*inputs)
    arrays = [tensor.numpy() for tensor in inputs]
    for found in (network(*arrays), network(arrays[0], scale=arrays[1]), network(scale=arrays[1], ids=arrays[0])):
        assert list(found) == list(expected)
        assert found["count"] == 3
        for one, other in zip(found["pair"], expected["pair"], strict=True):
            assert equal(one, other)
        ((total,), nothing, text) = found["nested"]
        assert equal(total, expected["nested"][0][0])
        assert nothing is None
        assert text == "text"
    assert repr(network) == "Network(ids: int64[n, n1], scale: float32[n, n1, 1])"
    for wrong, said in (
        ((arrays[:1], {}), "expected the inputs ids, scale, got 1 in order"),
        ((arrays, {"scale": 1}), "expected the inputs ids, scale, got 2 in order"),
        ((arrays[:1], {"size": 1}), "'size' is not one of them"),
    ):
        with pytest.raises(TypeError, match=said):
            network(*wrong[0], **wrong[1])
    with pytest.raises(ValueError, match="an id among the inputs"):
        network(arrays[0] + 20, arrays[1])
    assert equal(network(*arrays)["pair"][1], expected["pair"][1])


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict:
        return {"@COMMANDS@": self.last(x), "a'": float("inf"), "@TITLE@": '"""\nimport broken', "numbers": [3, 0.5]}


def test_names_and_constants_of_any_text_are_no_code(tmp_path):
    model = intaglio.quantize(nets.randomize(Constants().eval()), [torch.randn(8, 4)], progress=False)
    model.export_c(tmp_path)
    expected = model(torch.randn(1, 4)) | {"@COMMANDS@": "the first output"}
    assert loaded(tmp_path, "constants").result_of(["the first output"]) == expected


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_errors_say_what_was_given_and_what_is_expected(network):
    image = picture(1).numpy()
    for wrong in (image[0], image[:, :2]):
        with pytest.raises(ValueError, match=re.escape(f"got {list(wrong.shape)} for input: [n, 3,")):
            network(wrong)
    assert network(image).shape[0] == 1
    network.close()
    with pytest.raises(ValueError, match="the network is closed"):
        network(image)
    network.close()


def test_a_number_of_threads_that_cannot_be_is_an_error_and_changes_nothing(exported, network):
    network.threads = np.int64(2)
    for wrong in (-1, 1 << 31):
        with pytest.raises(ValueError, match=f"threads must be from 0, .* to 2147483647, got {wrong}"):
            network.threads = wrong
        with pytest.raises(ValueError, match="threads must be from 0"):
            exported.Network(threads=wrong)
    for wrong in (1.5, "2", None):
        with pytest.raises(TypeError, match="integer"):
            network.threads = wrong
    assert network.threads == 2
    assert equal(network(picture(1).numpy()), compiled(nets.ConvBnRelu)[0](picture(1)))


def test_missing_and_foreign_files_are_errors(exported, tmp_path):
    with pytest.raises(OSError, match=re.escape(f"the file of weights cannot be read: {tmp_path / 'none'}")):
        exported.Network(tmp_path / "none")
    (tmp_path / "other").write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="not the weights of this network"):
        exported.Network(tmp_path / "other")
    damaged = bytearray((exported.HERE / "weights.bin").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        exported.Network(tmp_path / "damaged")


def test_a_library_that_was_not_built_is_named(tmp_path):
    compiled(nets.ConvBnRelu)[0].export_c(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"libconvbnrelu\.so is neither in .* nor in its folder build: build"):
        loaded(tmp_path, "convbnrelu").Network()


# ---- processes and threads ------------------------------------------------------------------------------------------


def test_neither_torch_nor_intaglio_is_imported(exported, tmp_path):
    np.save(tmp_path / "x.npy", picture(2).numpy())
    program = (
        "import sys, numpy\n"
        "from convbnrelu import Network\n"
        "numpy.save('y.npy', Network()(numpy.load('x.npy')))\n"
        "print(sorted({'torch', 'intaglio'} & set(sys.modules)))\n"
    )
    environment = {"PYTHONPATH": str(exported.HERE)}
    run = [sys.executable, "-c", program]
    found = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert equal(np.load(tmp_path / "y.npy"), compiled(nets.ConvBnRelu)[0](picture(2)))


def test_threads_may_share_a_network(network):
    model, wrong = compiled(nets.ConvBnRelu)[0], []

    def work(batch: int) -> None:
        image = picture(batch, batch)
        expected = model(image)
        wrong.extend(1 for _ in range(20) if not equal(network(image.numpy()), expected))

    workers = [threading.Thread(target=work, args=(batch,)) for batch in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
