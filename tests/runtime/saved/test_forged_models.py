"""Forged files whose digests fit: every call of them is an error of intaglio, at load or when it runs."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import intaglio
from intaglio.errors import ArtifactError, InputError
from intaglio.ir import DType, QParams, TensorType
from intaglio.ops.images.pool import adaptive_counts, adaptive_windows
from intaglio.runtime.saved.island_operators import check_arguments_of, function_of
from intaglio.runtime.saved.json_codec import INTEGER_BOUNDS, ParameterTable, decode_type, encode_type
from intaglio.runtime.saved.state_dict_io import GRAPH
from support import nets
from support.int8_models import assert_same, compiled

NET = nets.ConvThenUnsupported


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> dict[str, bytes]:
    """The members of a saved model with a float part."""
    path = tmp_path_factory.mktemp("forged") / "m"
    compiled(NET)[0].save(path, library=False)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def forged(members: dict[str, bytes], path: Path, name: str, change: Callable[[Any], object]) -> Path:
    """Change a JSON member, and write the file with digests that fit."""
    texts = {key: json.loads(content) for key, content in members.items() if key.endswith(".json")}
    change(texts[name])
    found = {**members, **{key: json.dumps(text).encode() for key, text in texts.items()}}
    manifest = texts["manifest.json"]
    manifest["digests"] = {
        key: hashlib.sha256(content).hexdigest() for key, content in found.items() if key != "manifest.json"
    }
    found["manifest.json"] = json.dumps(manifest).encode()
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for key, content in found.items():
            archive.writestr(key, content)
    path.write_bytes(memory.getvalue())
    return path


def call_of(islands: Any) -> list[Any]:
    """The only call of the float part: [name, function, arguments, keywords]."""
    (call,) = islands["island0"]["calls"]
    return call


WRONG_CALLS = {
    "an argument too many": lambda call: call[2].append(3),
    "a number for a tensor": lambda call: call.__setitem__(2, [3]),
    "an unknown keyword": lambda call: call[3].update(dim=1),
    "another operator": lambda call: call.__setitem__(1, "aten.mm.default"),
    "a dimension that is not there": lambda call: (call.__setitem__(1, "aten.squeeze.dim"), call[2].append(9)),
    "several results": lambda call: (call.__setitem__(1, "aten.max.dim"), call[2].append(1)),
    "a number as result": lambda call: (call.__setitem__(1, "operator.floordiv"), call.__setitem__(2, [7, 2])),
}


@pytest.mark.parametrize("change", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_calls_that_pytorch_refuses_are_errors_of_intaglio(change, members, tmp_path):
    model = intaglio.load(forged(members, tmp_path / "m", "islands.json", lambda islands: change(call_of(islands))))
    with pytest.raises(InputError, match="remedy: ") as raised:
        model(nets.example(NET(), 1))
    assert raised.value.where.startswith("%")
    compiled(NET)[0].save(tmp_path / "m")  # the remedy
    intaglio.load(tmp_path / "m")(nets.example(NET(), 1))


WRONG_PARTS = {
    "arguments that are no list": ("islands.json", lambda i: call_of(i).__setitem__(2, 5)),
    "a data type that is a number": (
        "islands.json",
        lambda i: (call_of(i).__setitem__(1, "aten._to_copy.default"), call_of(i)[3].update(dtype=2**62)),
    ),
    "an operator without checks": (
        "islands.json",
        lambda i: (call_of(i).__setitem__(1, "aten._reshape_alias.default"), call_of(i)[2].extend([[10**8], [1]])),
    ),
    "an operand more": ("graph.json", lambda g: island(g)["inputs"].append("x")),
    "an operand less": ("graph.json", lambda g: island(g)["inputs"].clear()),
    "a constant as result": ("graph.json", lambda g: g["outputs"].__setitem__(0, g["constants"][0])),
    "no scale": ("graph.json", lambda g: first_scaled(g).update(scale=[])),
    "no zero point": ("graph.json", lambda g: first_scaled(g).update(zero_point=[])),
    "a size that is not there": ("islands.json", lambda i: i["island0"]["dims"].append([[["q"], 1]])),
    "arguments in another structure": ("manifest.json", lambda m: m["signature"].update(in_tree=["list", [0]])),
    "no structure of arguments": ("manifest.json", lambda m: m["signature"].update(in_tree=None)),
    "keywords that are numbers": (
        "manifest.json",
        lambda m: m["signature"].update(in_tree=["tuple", [["tuple", []], ["dict", [1], [0]]]]),
    ),
    "a leaf more": ("manifest.json", lambda m: m["signature"].update(out_tree=["tuple", [0, 0]])),
    "an input in another leaf": ("manifest.json", lambda m: m["signature"]["inputs"][0].__setitem__(1, 1)),
    "an updated leaf that is not an input": ("manifest.json", lambda m: m["signature"].update(written=[[7, "x"]])),
}


def first_scaled(graph: Any) -> Any:
    return next(kind["q"] for kind in graph["types"].values() if "q" in kind)


def island(graph: Any) -> Any:
    return next(op for op in graph["ops"] if op["kind"] == "island")


@pytest.mark.parametrize(("member", "change"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_parts_that_do_not_fit_are_refused(member, change, members, tmp_path):
    with pytest.raises(ArtifactError, match="remedy: "):
        intaglio.load(forged(members, tmp_path / "m", member, change))


def test_arguments_of_python_functions_have_no_schema():
    check_arguments_of(function_of("operator.add"), [1, 2], {})


def test_state_dictionaries_that_cannot_be_compiled_change_nothing():
    model, x = compiled(nets.Linears)[0], nets.example(nets.Linears(), 2)
    before, state = model(x), model.state_dict()
    graph = json.loads(bytes(state[GRAPH].numpy()))
    last = next(op for op in graph["ops"] if op["kind"] == "quantize")["outputs"][0]
    graph["types"][last]["q"]["zero_point"] = {"value": graph["inputs"][0]}
    state[GRAPH] = torch.frombuffer(bytearray(json.dumps(graph).encode()), dtype=torch.uint8)
    with pytest.raises(ArtifactError, match=r"load_state_dict: its graph cannot be compiled[\s\S]*remedy: "):
        model.load_state_dict(state)
    assert_same(model(x), before)


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("outputs", range(1, 14))
def test_adaptive_pools_have_a_factor_for_their_longest_window(size, outputs):
    longest = max(window.count for window in adaptive_windows(size, outputs))
    assert adaptive_counts({"size": (outputs, 1)}, (1, 1, size, 1)) == range(1, longest + 1)


def test_counts_of_huge_pools_are_not_listed():
    assert len(adaptive_counts({"size": (2**31, 1)}, (1, 1, 7, 1))) == 2


@pytest.mark.parametrize("dtype", [DType.U8, DType.S8, DType.U16, DType.I16, DType.I32])
def test_quantized_values_must_fit_their_data_type(dtype):
    low, high = INTEGER_BOUNDS[dtype]
    for ends, fits in (((low, high), True), ((low - 1, high), False), ((low, high + 1), False)):
        entry = encode_type(TensorType((2,), dtype, QParams((0.1,), (0,), *ends)), ParameterTable())
        if fits:
            assert decode_type(entry, ParameterTable()).qparams.qmin == low
        else:
            with pytest.raises(ValueError, match="do not fit data type"):
                decode_type(entry, ParameterTable())


def test_quantized_values_are_at_least_two():
    with pytest.raises(ValueError, match="qmin must be below qmax"):
        QParams((0.1,), (0,), 1, 1)


def test_floats_have_no_quantization_parameters():
    entry = encode_type(TensorType((2,), DType.F32, QParams((0.1,), (0,), 0, 255)), ParameterTable())
    with pytest.raises(ValueError, match="do not fit data type"):
        decode_type(entry, ParameterTable())
