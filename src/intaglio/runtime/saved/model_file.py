"""Conversion between a `QuantizedModel` and the members of a file. docs/deploying.md, "Saving and loading", describes
the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from torch import nn

from intaglio.errors import MALFORMED, ArtifactError
from intaglio.ir import Dim, Graph, ModelInfo, Schedule, Signature, VerifyError, symbols_of
from intaglio.ir.graph import StageTexts
from intaglio.native.native_library import RuntimeLibrary
from intaglio.ops import verify
from intaglio.runtime.calls.call_plans import NewShapePolicy
from intaglio.runtime.float_islands import FloatIsland, HostLoop, IslandProgram, island_program, loops_in
from intaglio.runtime.kept_attributes import KeptAttributes
from intaglio.runtime.reports.coverage import Coverage, FloatPart
from intaglio.runtime.saved.archive import GENERATOR_ENTRY, SAVE_AGAIN, Contents, from_json, to_json, write
from intaglio.runtime.saved.attribute_codec import as_text, decode_attributes, encode_attributes
from intaglio.runtime.saved.json_codec import (
    NotStorableError,
    ParameterTable,
    checked_identifier,
    checked_integer,
    decode_dim,
    decode_graph,
    encode_dim,
    encode_graph,
)
from intaglio.runtime.saved.members import Member
from intaglio.runtime.saved.saved_libraries import (
    Library,
    library_entries,
    library_members,
    schedule_entries,
    schedules_of,
    take_libraries,
    take_member,
)
from intaglio.runtime.saved.signature_codec import decode_signature, encode_signature
from intaglio.runtime.saved.stored_arrays import stored_arrays
from intaglio.signature import bind, dims_of

REBUILT_STAGES = ("integer", "plan", "program")
"""Stages whose text is not stored because it follows from the graph."""

SCALES_MEMBER = "scales of channels"
"""Key of the tensor of scales among the constants. Its spaces keep it distinct from the names of values."""

Element = TypeVar("Element")


@dataclass(frozen=True)
class Example:
    """Tensors of a call in the order of the signature's inputs, and the digest of their expected results."""

    tensors: tuple[torch.Tensor, ...]
    digest: str


@dataclass(frozen=True)
class SavedModel:
    """Contents of a file.

    Attributes:
        graph: the integer graph.
        signature: arguments and results of a call.
        islands: module and size arguments of every float island, by key.
        coverage: the coverage, without ``bytes_after``, which depends on the instruction set.
        model_info: name, notes and stage texts.
        libraries: compiled programs by instruction set.
        example: a call and the digest of its results.
        schedules: schedules that a search chose, by instruction set and output value.
        on_new_shape: policy of the saved model; the float model itself is not stored.
        bodies: bodies of loops in float islands, by name.
        attributes: plain attributes of the float model.
        runtime: thread pool for the libraries, with which they run without a compiler.
        graph_digest: SHA-256 of the graph without its constants as the file has it; empty if the graph was not loaded.
    """

    graph: Graph
    signature: Signature
    islands: Mapping[str, tuple[nn.Module, tuple[Dim, ...]]]
    coverage: Coverage
    model_info: ModelInfo
    libraries: Mapping[str, Library] = field(default_factory=dict)
    example: Example | None = None
    schedules: Mapping[str, Mapping[str, Schedule]] = field(default_factory=dict)
    on_new_shape: str = NewShapePolicy.PLAN.value
    bodies: Mapping[str, SavedModel] = field(default_factory=dict)
    attributes: KeptAttributes = field(default_factory=KeptAttributes)
    runtime: RuntimeLibrary | None = None
    graph_digest: str = ""


# ---- writing ------------------------------------------------------------------------------------------------------


def save(saved: SavedModel, path: str | Path, version: str) -> None:
    """Write a file completely, or raise `ArtifactError` and write nothing."""
    write(Path(path), *_members(saved, path, version))


def _members(saved: SavedModel, path: str | Path, version: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the members by name. Members of a loop body have the name of the loop as a prefix."""
    parameters, arrays = ParameterTable(), dict[str, np.ndarray]()
    calls = {key: island_program(module) for key, (module, _) in saved.islands.items()}
    try:
        graph = encode_graph(saved.graph, parameters, arrays)
        signature = encode_signature(saved.signature, parameters, arrays)
    except NotStorableError as error:
        raise ArtifactError(
            str(path),
            None,
            f"this model cannot be saved: {error}; a file can store numbers, strings, None, and tuples, "
            "lists and dictionaries of them",
            remedy="quantize a module that takes and returns only these, and convert outside of it",
        ) from error
    arrays[SCALES_MEMBER], texts = parameters.array(), saved.model_info.texts
    tensors, islands = _island_members(saved.islands, calls)
    members = {
        "graph.json": to_json(graph),
        "weights.safetensors": _safetensors(path, safetensors.numpy.save, arrays),
        "islands.json": to_json(islands),
        "islands.safetensors": _safetensors(path, safetensors.torch.save, tensors),
        "texts.json": to_json({key: texts[key] for key in texts if key not in REBUILT_STAGES}),
    }
    if saved.example is not None:
        inputs = {f"input{i}": _plain_tensor(tensor) for i, tensor in enumerate(saved.example.tensors)}
        members["example.safetensors"] = _safetensors(path, safetensors.torch.save, inputs)
    members.update(library_members(saved.libraries, saved.runtime))
    coverage = {key: value for key, value in asdict(saved.coverage).items() if key not in ("bytes_after", "notes")}
    manifest = {
        "intaglio": version,
        "torch": str(torch.__version__),
        "name": saved.model_info.name,
        "bytes": saved.model_info.bytes,
        "notes": list(saved.model_info.notes),
        "on_new_shape": saved.on_new_shape,
        **library_entries(saved.libraries, saved.runtime),
        "schedules": {isa: schedule_entries(chosen) for isa, chosen in saved.schedules.items()},
        "coverage": coverage,
        "signature": signature,
        "example": saved.example and saved.example.digest,
        "attributes": encode_attributes(saved.attributes),
    }
    for name, body in saved.bodies.items():
        inner, parts = _members(body, path, version)
        manifest["bodies"] = {**manifest.get("bodies", {}), name: inner}
        members |= {f"{name}/{member}": content for member, content in parts.items()}
    return manifest, members


def _island_members(
    islands: Mapping[str, tuple[nn.Module, tuple[Dim, ...]]], calls: Mapping[str, IslandProgram]
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors of all islands by key, with shared memory stored once, and JSON of their calls, which refer to
    tensors by key."""
    tensors: dict[str, torch.Tensor] = {}
    keys: dict[Any, str] = {}
    entries = {}

    def part(key: str, module: nn.Module, calls: IslandProgram) -> dict[str, Any]:
        own = {}
        for name, tensor in module.named_buffers(recurse=False):
            same = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if same not in keys or not tensor.numel():
                keys[same] = f"{key}/{name}"
                tensors[f"{key}/{name}"] = _plain_tensor(tensor)
            own[name] = keys[same]
        return {"tensors": own, **calls.to_json()}

    for key, (module, dims) in islands.items():
        entries[key] = {"dims": [encode_dim(dim) for dim in dims], **part(key, module, calls[key])}
        found = {
            name: {"carried": loop.carried, **part(f"{key}/{name}", loop.condition, loop.condition.calls)}
            for name, loop in loops_in(module).items()
        }
        entries[key] |= {"loops": found} if found else {}
    return tensors, entries


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().clone()


def _safetensors(path: str | Path, writer: Callable[[Any], bytes], tensors: Mapping[str, Any]) -> bytes:
    try:
        return writer(dict(sorted(tensors.items())))
    except Exception as error:  # safetensors has no exception class for tensors it refuses
        raise ArtifactError(str(path), None, f"a tensor of this model cannot be saved: {error}") from error


# ---- reading ------------------------------------------------------------------------------------------------------


def decode(path: str | Path, contents: Contents) -> SavedModel:
    """Return the model of a file from its manifest and members. Raise `ArtifactError` if they are invalid."""
    manifest, members = contents
    if "parts" in manifest:
        raise ArtifactError(str(path), None, "it holds parts", remedy="call intaglio.load_into(path, float_model)")
    if GENERATOR_ENTRY in manifest:
        raise ArtifactError(str(path), None, "it holds a model that generates", remedy="call intaglio.load(path)")
    try:
        return _decoded(manifest, members)
    except ArtifactError as error:
        raise ArtifactError(
            f"{path}: {error.where}", error.operator, error.problem, remedy=error.remedy or SAVE_AGAIN
        ) from error
    except (*MALFORMED, VerifyError, safetensors.SafetensorError) as error:
        raise ArtifactError(
            str(path), None, f"its content is not a valid model: {type(error).__name__}: {error}", remedy=SAVE_AGAIN
        ) from error


def _decoded(manifest: dict[str, Any], members: dict[str, Member]) -> SavedModel:
    """Decode a manifest and its members, which are removed from ``members``."""
    arrays = stored_arrays(take_member(members, "weights.safetensors"))
    parameters = ParameterTable(arrays[SCALES_MEMBER])
    text = take_member(members, "graph.json")
    graph = verify(decode_graph(from_json(text.read()), parameters, arrays), "load")
    signature = decode_signature(manifest["signature"], parameters, arrays)
    islands = _islands(
        from_json(take_member(members, "islands.json").read()),
        safetensors.torch.load(take_member(members, "islands.safetensors").read()),
    )
    texts = _stored_texts(take_member(members, "texts.json"))
    notes = tuple(map(as_text, manifest["notes"]))
    model_info = ModelInfo(as_text(manifest["name"]), checked_integer(manifest["bytes"]), notes, texts)
    example = None
    if manifest["example"] is not None:
        inputs = safetensors.torch.load(take_member(members, "example.safetensors").read())
        tensors = tuple(inputs[f"input{i}"] for i in range(len(signature.inputs)))
        example = Example(tensors, as_text(manifest["example"]))
    bodies = {}
    for name, inner in manifest.get("bodies", {}).items():
        parts = [member for member in members if member.startswith(f"{checked_identifier(name)}/")]
        bodies[name] = _decoded(inner, {member.partition("/")[2]: members.pop(member) for member in parts})
    libraries, runtime = take_libraries(manifest, members)
    chosen = {as_text(isa): schedules_of(entry) for isa, entry in manifest.get("schedules", {}).items()}
    if members:
        raise ValueError(f"the members {', '.join(sorted(members))} are not described")
    _check_references(graph, signature, islands)
    loops = {name for module, _ in islands.values() for name in loops_in(module)}
    if loops != set(bodies):
        raise ValueError(f"the float parts have loops {sorted(loops)}, but the file has bodies of {sorted(bodies)}")
    coverage = _coverage(manifest["coverage"], model_info.notes)
    return SavedModel(
        graph,
        signature,
        islands,
        coverage,
        model_info,
        libraries,
        example,
        chosen,
        as_text(manifest.get("on_new_shape", NewShapePolicy.PLAN.value)),
        bodies,
        decode_attributes(manifest["attributes"]) if "attributes" in manifest else KeptAttributes(),
        runtime,
        text.digest,
    )


def _stored_texts(member: Member) -> StageTexts:
    """Return the texts of stages, which stay in the file until they are read: models run without them."""
    found = from_json(member.read())
    for text in found.values():
        as_text(text)  # raises an error unless it is one
    return StageTexts({as_text(stage): partial(_stored_text, member, stage) for stage in found})


def _stored_text(member: Member, stage: str) -> str:
    """Return one text of a member."""
    return as_text(from_json(member.read())[stage])


def _islands(entries: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[FloatIsland, tuple[Dim, ...]]]:
    """Return every float island and its size arguments by key. Loops inside have no bodies yet."""
    islands: dict[str, tuple[FloatIsland, tuple[Dim, ...]]] = {}
    for key, entry in entries.items():
        loops = {
            checked_identifier(name): HostLoop(checked_integer(loop["carried"]), _float_part(name, loop, tensors, {}))
            for name, loop in entry.get("loops", {}).items()
        }
        part = _float_part(key, entry, tensors, loops)
        islands[checked_identifier(key)] = part, tuple(decode_dim(dim) for dim in entry["dims"])
    return islands


def _float_part(
    key: str, entry: Any, tensors: Mapping[str, torch.Tensor], loops: Mapping[str, HostLoop]
) -> FloatIsland:
    calls = IslandProgram.from_json(entry)
    own = {checked_identifier(name): tensors[stored] for name, stored in entry["tensors"].items()}
    if missing := {target for _, target in calls.constants} - set(own):
        raise ValueError(f"{key} has no tensor {', '.join(sorted(missing))}")
    return FloatIsland(calls, own, loops)


def _check_references(graph: Graph, signature: Signature, islands: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless signature, graph and islands refer to the same values."""
    types = tuple(graph.types[name] for name in graph.inputs)
    if types != (*[entry.type for entry in signature.inputs], *[kept.type for kept in signature.state]):
        raise ValueError("the inputs of the signature differ from those of the graph")
    results = sum(output.value is not None for output in signature.outputs) + len(signature.updated_inputs)
    results += len(signature.state)
    if results != len(graph.outputs):
        raise ValueError(f"the signature has {results} results, but the graph has {len(graph.outputs)}")
    if stored := set(graph.outputs).intersection(graph.constants):
        raise ValueError(f"the results {', '.join(sorted(stored))} are constants, which no operator computes")
    calls = {op.attrs["key"]: op for op in graph.ops if op.is_island}
    if missing := set(calls) - set(islands):
        raise ValueError(f"the float parts {', '.join(sorted(missing))} are missing")
    for key, op in calls.items():
        module, dims = islands[key]
        found = len(module.calls.inputs), len(module.calls.outputs)
        if found != (expected := (len(op.inputs) + len(dims), len(op.outputs))):
            raise ValueError(f"{key} has {found} inputs and outputs, but the graph passes {expected}")
        if unknown := set().union(*map(symbols_of, dims)).difference(graph.symbols()):
            raise ValueError(f"the sizes {', '.join(sorted(unknown))} of {key} are not sizes of the graph")


def _coverage(entry: Any, notes: tuple[str, ...]) -> Coverage:
    floats, hosts, loops = (tuple(FloatPart(**_checked_part(p)) for p in entry.get(key, ())) for key in OPERATOR_LISTS)
    counts = {key: checked_integer(value) for key, value in entry.items() if key not in OPERATOR_LISTS}
    return Coverage(**counts, floats=floats, bytes_after=0, notes=notes, hosts=hosts, loops=loops)


OPERATOR_LISTS = ("floats", "hosts", "loops")
"""Fields of `Coverage` that are lists of operators, not counts."""


def _checked_part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: checked_integer(value) if key == "macs" else as_text(value) for key, value in part.items()}


# ---- examples -----------------------------------------------------------------------------------------------------


def copied_inputs(signature: Signature, example: Any, byte_inputs: Collection[int]) -> tuple[torch.Tensor, ...]:
    """Return copies of the tensors of a call, as `input_tensors` finds them."""
    return tuple(leaf.detach().clone() for leaf in input_tensors(signature, example, byte_inputs))


def input_tensors(signature: Signature, example: Any, byte_inputs: Collection[int]) -> list[torch.Tensor]:
    """Return the tensors of a call that is given as a tuple of arguments, a dictionary of keyword arguments or the only
    argument. Raise `InputError` if they do not fit the signature."""
    args, kwargs = (), {}
    if isinstance(example, Mapping) and set(example) <= set(signature.names):
        kwargs = dict(example)
    else:
        args = example if isinstance(example, tuple) else (example,)
    leaves = bind(signature, args, kwargs)
    dims_of(signature, leaves, byte_inputs)
    return leaves


def exact_values(graph: Graph) -> frozenset[str]:
    """Return the names of values that do not depend on a float island and are therefore bit-identical on every CPU."""
    exact = {*graph.inputs, *graph.constants}
    for op in graph.ops:
        if not op.is_island and exact.issuperset(op.inputs):
            exact.update(op.outputs)
    return frozenset(exact)


def digest_of(values: Mapping[str, torch.Tensor], names: Sequence[str]) -> str:
    """Return the SHA-256 digest of names, element types, shapes and contents of the named tensors."""
    total = hashlib.sha256()
    for name in names:
        tensor = values[name].contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()
