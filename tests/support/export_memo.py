"""What torch.export gave for a model, kept in this process: a model of the same structure is traced once.

Models are the same when their classes, functions, attributes, shapes and the sizes of the example are; values of
parameters and buffers may differ. Capture still compares the graph with the model it was asked for, on its values.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
import sysconfig
import types
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import intaglio
from intaglio.tracing import torch_export

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
BY_TEXT = (
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, slice, range, types.ModuleType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, pytree.TreeSpec),
)
BY_NAME = (types.BuiltinFunctionType, OpOverload, OpOverloadPacket)
TENSORS = (Tensor, nn.Parameter, nn.Buffer)
INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib")}, str(Path(intaglio.__file__).parent))
"""Folders whose code does not change while tests run."""
MOST = 300
"""Programs that are kept: the latest."""


class _UnknownError(Exception):
    """A model holds something whose content no key says."""


class ExportMemo:
    """Takes the place of ``intaglio.tracing.torch_export.export``."""

    def __init__(self) -> None:
        self.programs: dict[str, ExportedProgram] = {}

    def __call__(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any], shapes: Any) -> ExportedProgram:
        try:
            key = structure_key(model, args, kwargs, shapes)
        except _UnknownError:
            return torch_export.export(model, args, kwargs, shapes)
        program = self.programs.pop(key, None) or torch_export.export(model, args, kwargs, shapes)
        if any(isinstance(node.target, HigherOrderOperator) for node in program.graph.nodes):
            return program  # capture unrolls loops in the program itself
        self.programs[key] = program
        if len(self.programs) > MOST:
            del self.programs[next(iter(self.programs))]
        return with_values_of(model, program)


def with_values_of(model: nn.Module, program: ExportedProgram) -> ExportedProgram:
    """Return a program of the same graph around the parameters and buffers of a model."""
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = copy.copy(program)
    found._state_dict = {name: values[name] for name in program.state_dict}
    found._constants = {name: values.get(name, value) for name, value in program.constants.items()}
    return found


def structure_key(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], shapes: Any) -> str:
    """Return a digest of all that decides how a model is traced; raise `_UnknownError` where that cannot be said."""
    digest = _Digest()
    digest.valueless = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    digest.valueless |= {id(leaf) for leaf in pytree.tree_leaves((args, dict(kwargs)))}
    digest.add([torch.get_default_dtype(), model, args, dict(kwargs), shapes])
    return digest.hash.hexdigest()


class _Digest:
    """Adds values to a hash: code of test models by its content, what is installed by its name."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.valueless: set[int] = set()
        self.seen: dict[int, int] = {}
        self.held: list[Any] = []

    def say(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def add(self, value: Any) -> None:
        if type(value) in PLAIN:
            self.say(type(value).__name__, value)
        elif id(value) in self.seen:
            self.say("again", self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            self.held.append(value)
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, BY_TEXT):
            self.say(str(value))
        elif isinstance(value, BY_NAME):
            self.say(str(getattr(value, "__module__", None)), value.__name__)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            self.say(str(value.dtype), value.shape, value.tobytes())
        elif isinstance(value, (list, tuple)):
            self._add_all(type(value), *value)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._add_all(type(value), *[part for item in value.items() for part in item])
        elif isinstance(value, (set, frozenset)):
            self.say(sorted(map(repr, value)))
        elif isinstance(value, weakref.ReferenceType):
            self.add(value())
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, types.MethodType):
            self._add_all(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._add_all(value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add(value.fget)
        else:
            self._add_object(value)

    def _add_all(self, *values: Any) -> None:
        self.say(len(values))
        for value in values:
            self.add(value)

    def _add_tensor(self, value: Tensor) -> None:
        if type(value) not in TENSORS or value.layout != torch.strided or value.device.type != "cpu":
            raise _UnknownError
        self.say(type(value).__name__, str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset())
        self.say(value.requires_grad, value.is_inference(), value.is_conj(), value.is_neg())
        storage = value.untyped_storage()._cdata
        self.say(self.seen.setdefault(-storage, len(self.seen)))
        if id(value) not in self.valueless:
            self.hash.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def _add_class(self, value: type) -> None:
        self.say(value.__module__, value.__qualname__)
        source = getattr(sys.modules.get(value.__module__), "__file__", None)
        if value.__module__ != "builtins" and not str(source).startswith(INSTALLED):
            fields = {name: field for name, field in vars(value).items() if not _is_bookkeeping(name)}
            self._add_all(fields, *value.__bases__)

    def _add_function(self, value: types.FunctionType) -> None:
        self.say(value.__module__, value.__qualname__)
        if not value.__code__.co_filename.startswith(INSTALLED):
            self._add_all(value.__code__, value.__defaults__, value.__kwdefaults__, _closure(value))
            self._add_all(*[value.__globals__.get(name) for name in _names(value.__code__)])

    def _add_code(self, value: types.CodeType) -> None:
        self.say(value.co_filename, value.co_firstlineno, value.co_names, value.co_freevars, value.co_code)
        self._add_all(*value.co_consts)

    def _add_object(self, value: Any) -> None:
        if isinstance(value, (torch.fx.GraphModule, torch.jit.ScriptModule)) or not hasattr(value, "__dict__"):
            raise _UnknownError
        self._add_all(type(value), *[part for item in vars(value).items() for part in item])


def _is_bookkeeping(name: str) -> bool:
    return name.startswith("__") and name not in ("__init__", "__call__", "__getattr__")


def _closure(function: types.FunctionType) -> list[Any]:
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError as error:  # a cell that nothing was assigned to yet
        raise _UnknownError from error


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a function and those inside it look up."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return sorted({*code.co_names, *inner})
