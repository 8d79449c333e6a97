"""The scripts in examples/ run as they stand and say what they promise."""

import contextlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from urllib import request

import pytest
import torch

from support import torchvision_stub
from support.processor import needs_vnni
from support.project_files import ROOT


def run(*arguments: str, paths: tuple[str, ...] = ()) -> str:
    """What a script prints in a process of its own."""
    found = [*paths, str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(monkeypatch) -> Iterator[Callable[[str], str]]:
    """Run a script of examples/ as ``python`` would, without starting one: what it prints."""
    threads = torch.get_num_threads()

    def printed(name: str) -> str:
        path, text = str(ROOT / "examples" / name), io.StringIO()
        monkeypatch.setattr(sys, "argv", [path])
        with contextlib.redirect_stdout(text):
            runpy.run_path(path, run_name="__main__")
        return text.getvalue()

    yield printed
    torch.set_num_threads(threads)


@pytest.mark.slow(reason="calibrates a model six ways; the pages on both run always")
@pytest.mark.case("document 003")
@pytest.mark.skipif(find_spec("sklearn") is None, reason="examples/patterns_and_calibration.py needs scikit-learn")
def test_patterns_and_calibration_walks_through_one_model(script):
    printed = script("patterns_and_calibration.py")
    kinds = [line.split(" = ")[1].split("(")[0] for line in printed.splitlines() if line.startswith("%")]
    assert kinds == ["quantize", "reshape", "linear", "requantize", "linear", "dequantize", "loop"]
    rows = [line.split() for line in printed.split("held out:")[1].splitlines() if line]
    exact, *others = (float(row[-2]) for row in rows)
    assert len(others) == 4
    assert all(abs(exact - one) <= 0.3 for one in others), rows


@pytest.mark.slow(reason="starts processes and quantizes whole networks of torchvision")
@pytest.mark.skipif(find_spec("torchvision") is None, reason="examples/newcomer.py needs torchvision")
@pytest.mark.parametrize(
    "network",
    [
        "squeezenet1_1",
        pytest.param("resnet18", marks=pytest.mark.slow(reason="corrections of 4,608 inputs take a minute of CPU")),
    ],
)
def test_a_newcomer_quantizes_saves_loads_and_compares(network, tmp_path):
    first = torchvision_stub.OPERATORS.read_text(encoding="utf-8") + "\n\nLIBRARY = declare_operators()\n"
    (tmp_path / "sitecustomize.py").write_text(first, encoding="utf-8")
    script = str(ROOT / "examples/newcomer.py")
    printed = run(script, network, "--images", "8", "--size", "32", paths=(str(tmp_path),))
    assert "100.0 % of" in printed
    assert "the new process gives the same bits" in printed


@pytest.mark.case("document 002")
def test_generated_loops_prints_three_loops(script):
    printed = script("generated_loops.py")
    first, second, third = (part.split("\n}\n")[0] for part in printed.split("// ---- ")[1:])
    assert "quantize_and_write" in first
    assert "dequantize_lanes" not in first
    assert second.count("dequantize_lanes") == 1
    assert "quantize_and_write" in second
    assert "dequantize_lanes" in third
    assert "quantize_and_write" not in third
    assert "the same bits as the interpreter: True" in printed


@pytest.mark.case("document 000")
def test_define_by_run_prints_states_and_the_order_of_calls(script):
    """Frontends A5: of parent and child, before and after convert."""
    printed = script("define_by_run.py")
    parts = dict(part.split(":\n", 1) for part in printed.split("\n\n") if ":\n" in part)
    assert parts["given"].splitlines()[:3] == ["m (Parent)", "   conv (Conv2d)", "   child (Child)"]
    assert parts["prepared"].splitlines() == [
        "m (Parent)",
        "   _auto_quant_state (AutoQuantizationState)",
        "   conv (Conv2d)",
        "   child (Child)",
        "      _auto_quant_state (AutoQuantizationState)",
    ]
    assert "(seen_op_infos): {\n    0: (type): torch.Tensor.add\n" in parts["m.child, prepared"]
    assert "QTensorInfo(id=2, inf_dtype=torch.quint8)" in parts["m.child, prepared"]
    assert "(2): Observer(child#0/add.0, count=512)" in parts["m.child, prepared"]
    assert "(before): quantize 0" in parts["m, converted"]
    assert "(after): dequantize 2" in parts["m.child, converted"]
    order = [
        "m start",
        "m.conv start",
        "m.conv end",
        "m.child start",
        "m.child::add start",
        "m.child::add end",
        "m.child end",
        "m end",
    ]
    assert parts["intercepted"].splitlines() == [f"{number}. {call}" for number, call in enumerate(order, 1)]
    assert "result: torch.float32" in printed
    assert "the same bits: True" in printed


@pytest.mark.slow(reason="trains until it is as good as the page says; training loops have tests of their own")
@pytest.mark.skipif(find_spec("sklearn") is None, reason="examples/training.py needs scikit-learn")
def test_training_in_four_bits_wins_back_what_rounding_cost(script):
    lines = script("training.py").splitlines()
    exact, rounded, trained, same = (float(line.split()[-2]) for line in lines)
    assert exact > 80
    assert trained > rounded
    assert same > 99


@pytest.mark.slow(reason="Inductor compiles with the headers of PyTorch, for twenty seconds")
@needs_vnni
@pytest.mark.case("document 002")
def test_export_inductor_runs_its_listing(script):
    printed = script("export_inductor.py")
    assert "InductorModel(M: 1 int8 call)" in printed
    assert "int8 call   linear (aten.linear.default)  qlinear -> float32" in printed
    assert float(printed.split("but for ")[1]) < 1e-5


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of a server that a script runs meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *arguments, "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "no_proxy": "127.0.0.1"}
    server = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(address):
            assert server.poll() is None
            time.sleep(0.5)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _is_ready(address: str) -> bool:
    try:
        with request.urlopen(f"{address}/health") as answer:
            return answer.read() == b"ok"
    except OSError:
        return False


@pytest.mark.slow(reason="quantizes a decoder and starts the processes of a server")
@pytest.mark.skipif(find_spec("litserve") is None, reason="examples/serve_decoder.py needs litserve")
@pytest.mark.skipif(find_spec("transformers") is None, reason="examples/serve_decoder.py needs transformers")
def test_serve_decoder_answers_chats_whole_and_in_pieces():
    with served(str(ROOT / "examples" / "serve_decoder.py")) as address:

        def answer(**settings) -> bytes:
            chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, **settings}
            content = json.dumps(chat).encode()
            headers = {"Content-Type": "application/json"}
            with request.urlopen(request.Request(f"{address}/v1/chat/completions", content, headers)) as found:
                return found.read()

        whole = json.loads(answer())["choices"][0]["message"]["content"]
        pieces = [line.removeprefix(b"data: ") for line in answer(stream=True).splitlines() if line.startswith(b"data")]
        assert pieces.pop() == b"[DONE]"
        deltas = [json.loads(piece)["choices"][0]["delta"]["content"] or "" for piece in pieces]
        assert whole
        assert "".join(deltas) == whole
