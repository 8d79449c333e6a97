"""JSON encoding of signatures and of the nested structure of arguments and results. Decoding creates only the types
listed here."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from intaglio.ir import Input, Output, QParams, Signature, SizeCondition, State
from intaglio.ir.dims import RELATIONS
from intaglio.runtime.saved.json_codec import (
    NUMPY_DTYPES,
    NotStorableError,
    ParameterTable,
    checked_identifier,
    checked_integer,
    checked_value_name,
    decode,
    decode_dim,
    decode_line,
    decode_type,
    encode,
    encode_dim,
    encode_line,
    encode_type,
)
from intaglio.torch_private import pytree

STATE = "state "
"""Prefix of the keys of mutable buffers' initial values. Its space keeps them distinct from the names of values."""


def encode_signature(signature: Signature, parameters: ParameterTable, arrays: dict[str, np.ndarray]) -> Any:
    """Return the signature as JSON.

    Args:
        signature: the signature.
        parameters: collects parameters per channel.
        arrays: gets the initial values of mutable buffers.

    Raises:
        NotStorableError: a leaf or a container has no form in a file; the error names it.
    """
    arrays.update({STATE + entry.name: entry.initial for entry in signature.state})
    return {
        "inputs": [[entry.name, entry.leaf, encode_type(entry.type, parameters)] for entry in signature.inputs],
        "outputs": [
            {"value": output.value, **_encode_output_parameters(output.qparams)}
            if output.value is not None
            else {"constant": _leaf(f"leaf {index} of the result", output.constant)}
            for index, output in enumerate(signature.outputs)
        ],
        "in_tree": encode_tree(signature.in_tree, "the arguments"),
        "out_tree": encode_tree(signature.out_tree, "the result"),
        "fixed": [[leaf, _leaf(f"argument leaf {leaf}", value)] for leaf, value in signature.fixed.items()],
        "written": [[leaf, name] for leaf, name in signature.updated_inputs.items()],
        "names": list(signature.names),
        "state": [
            [entry.name, entry.value, encode_line(entry.path), encode_type(entry.type, parameters)]
            for entry in signature.state
        ],
        "ranges": [[name, low, high] for name, (low, high) in signature.ranges.items()],
        "conditions": [
            [encode_dim(one.left), one.relation, encode_dim(one.right), encode_line(one.where)]
            for one in signature.conditions
        ],
    }


def decode_signature(entry: Any, parameters: ParameterTable, arrays: Mapping[str, np.ndarray]) -> Signature:
    """Return the signature that `encode_signature` wrote."""
    inputs = [
        Input(str(name), checked_integer(leaf), decode_type(kind, parameters)) for name, leaf, kind in entry["inputs"]
    ]
    outputs = [
        Output(checked_value_name(o["value"]), None, _decode_output_parameters(o))
        if "value" in o
        else Output(None, decode(o["constant"]))
        for o in entry["outputs"]
    ]
    fixed = {checked_integer(leaf): decode(value) for leaf, value in entry["fixed"]}
    written = {checked_integer(leaf): checked_value_name(name) for leaf, name in entry["written"]}
    in_tree, out_tree = decode_tree(entry["in_tree"]), decode_tree(entry["out_tree"])
    ranges = {
        checked_identifier(n): (checked_integer(low), high and checked_integer(high))
        for n, low, high in entry.get("ranges", ())
    }
    names = tuple(map(str, entry["names"]))
    state = tuple(_decode_state(kept, parameters, arrays) for kept in entry.get("state", ()))
    conditions = tuple(_decode_condition(*parts) for parts in entry.get("conditions", ()))
    found = Signature(
        tuple(inputs), tuple(outputs), in_tree, out_tree, fixed, written, names, ranges, state, conditions
    )
    _check_trees(found)
    return found


def _check_trees(signature: Signature) -> None:
    """Raise `ValueError` unless the structures of arguments and results have the leaves that the signature says."""
    call = pytree.tree_unflatten([0] * signature.in_tree.num_leaves, signature.in_tree)
    match call:
        case (tuple(), dict() as keywords) if all(type(name) is str for name in keywords):
            pass
        case _:
            raise ValueError(f"{call!r:.60} is not the structure of arguments")
    leaves = [*(entry.leaf for entry in signature.inputs), *signature.fixed]
    if sorted(leaves) != list(range(signature.in_tree.num_leaves)):
        raise ValueError(f"the inputs are the leaves {leaves}, but there are {signature.in_tree.num_leaves}")
    if len(signature.outputs) != signature.out_tree.num_leaves:
        raise ValueError(f"{len(signature.outputs)} results do not fill {signature.out_tree.num_leaves} leaves")
    if odd := set(signature.updated_inputs).difference(entry.leaf for entry in signature.inputs):
        raise ValueError(f"the leaves {sorted(odd)} are updated in place, but they are not inputs")


def _decode_condition(left: Any, relation: Any, right: Any, where: Any) -> SizeCondition:
    """Return a condition on sizes. Raise `ValueError` for a relation that there is not."""
    if relation not in RELATIONS:
        raise ValueError(f"{relation!r:.60} is not a relation of sizes")
    return SizeCondition(decode_dim(left), relation, decode_dim(right), decode_line(where))


def _decode_state(entry: Any, parameters: ParameterTable, arrays: Mapping[str, np.ndarray]) -> State:
    """Return a mutable buffer. Raise `ValueError` if its initial value does not have its declared type."""
    name, value, path, kind = entry
    found = State(
        checked_value_name(name),
        checked_value_name(value),
        decode_line(path),
        decode_type(kind, parameters),
        arrays[STATE + name],
    )
    if found.initial.shape != found.type.shape or found.initial.dtype != NUMPY_DTYPES.get(found.type.dtype):
        raise ValueError(f"state %{name} is {found.initial.dtype}{list(found.initial.shape)}, but must be {found.type}")
    return found


def _encode_output_parameters(q: QParams | None) -> dict[str, Any]:
    return {} if q is None else {"levels": [q.step.hex(), q.zero, q.qmin, q.qmax]}


def _decode_output_parameters(entry: Mapping[str, Any]) -> QParams | None:
    if "levels" not in entry:
        return None
    scale, zero_point, low, high = entry["levels"]
    return QParams((float.fromhex(scale),), (checked_integer(zero_point),), checked_integer(low), checked_integer(high))


def _leaf(where: str, value: Any) -> Any:
    try:
        return encode(value)
    except NotStorableError as error:
        raise NotStorableError(f"{where} is the {error}") from None


def encode_tree(tree: pytree.TreeSpec | None, where: str) -> Any:
    """Return the structure of nested tuples, lists and dictionaries as JSON, with ``0`` for each leaf."""
    if tree is None:
        return None
    numbered = pytree.tree_unflatten([0] * tree.num_leaves, tree)
    return _encode_structure(numbered, where)


def _encode_structure(value: Any, where: str) -> Any:
    kind = type(value)
    if kind is int:
        return 0
    if kind in (tuple, list):
        return [kind.__name__, [_encode_structure(item, where) for item in value]]
    if kind in (dict, OrderedDict):
        odd = [key for key in value if type(key) not in (str, int, bool)]
        if not odd:
            return [kind.__name__, list(value), [_encode_structure(item, where) for item in value.values()]]
        raise NotStorableError(
            f"{where} contain a dictionary with the key {odd[0]!r}, which is not a string or an integer"
        )
    if _is_record(kind) and all(type(key) is str for key in value):
        name = f"{kind.__module__}:{kind.__qualname__}"
        return ["record", name, list(value), [_encode_structure(item, where) for item in value.values()]]
    raise NotStorableError(f"{where} contain a {kind.__module__}.{kind.__qualname__}")


def _is_record(kind: type) -> bool:
    """Return whether a class is a dictionary with fields that pytree knows as a container, like the outputs of
    transformers."""
    return issubclass(kind, OrderedDict) and kind in pytree.SUPPORTED_NODES


def decode_tree(entry: Any) -> pytree.TreeSpec:
    """Return the structure that `encode_tree` wrote. A record gets its class if the module of that class is already
    imported, and otherwise becomes an OrderedDict, because loading imports nothing."""
    return pytree.tree_structure(_decode_structure(entry))


def _decode_structure(entry: Any) -> Any:
    match entry:
        case 0:
            return 0
        case ["tuple", items]:
            return tuple(map(_decode_structure, items))
        case ["list", items]:
            return list(map(_decode_structure, items))
        case ["dict", keys, items]:
            return dict(zip(keys, map(_decode_structure, items), strict=True))
        case ["OrderedDict", keys, items]:
            return OrderedDict(zip(keys, map(_decode_structure, items), strict=True))
        case ["record", name, keys, items]:
            fields = OrderedDict(zip(map(checked_identifier, keys), map(_decode_structure, items), strict=True))
            kind = _imported(name)
            return fields if kind is None else kind(**fields)
    raise ValueError(f"{entry!r:.60} is not a known structure")


def _imported(name: str) -> type | None:
    """Return the class ``module:name`` if its module is imported and pytree knows it as a container, else ``None``."""
    module, _, path = name.partition(":")
    kind = getattr(sys.modules.get(module), path, None)
    return kind if isinstance(kind, type) and _is_record(kind) else None
