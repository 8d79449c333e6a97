"""A submodule of a model, alone for capture, and its quantized form inside of the model."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from intaglio.errors import InputError
from intaglio.integrations import AdaptedPart
from intaglio.parts.packed_sequences import PackedCall
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import call_hooks, make_wrapper_subclass, pytree, submodules_of
from intaglio.tracing.during_export.earlier_results import plain_attributes


def alone(module: nn.Module, path: str) -> nn.Module:
    """Return a model that consists of one submodule, with the signature of its forward and its path in the whole model.

    Selectors and reports therefore name its modules as those of the whole model.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(path)(*args, **kwargs)

    given = inspect.signature(module.forward)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = given.replace(parameters=[own, *given.parameters.values()])  # type: ignore[attr-defined]  # typeshed has no __signature__
    whole: nn.Module = type(type(module).__name__, (nn.Module,), {"forward": forward})()
    add_submodule(whole, path, module)
    return whole.eval()


def add_submodule(outer: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a path, with empty modules above it."""
    *names, last = path.split(".")
    for name in names:
        if name not in submodules_of(outer):
            outer.add_module(name, nn.Module())
        outer = outer.get_submodule(name)
    outer.add_module(last, module)


AnyError = TypeVar("AnyError", bound=BaseException)
PART = "quantized_part"
"""Attribute of an error for the path of the part that raised it."""


class QuantizedPart(nn.Module):
    """The int8 model of a submodule in the place of that submodule.

    Code around it may read the float module's attributes that are neither tensors nor modules, call methods that use no
    others, ask for ``dtype`` and ``device`` if models of its library have them, and for the shape, the data type and
    the device of its tensors.

    Attributes:
        int8: the int8 model.
        path: where the part is in the model.
        adapted: how its program is run, if it takes other arguments than its forward.
        empty: no values, of the data type of the float module; code may ask for that of the first parameter.
    """

    def __init__(
        self, path: str, int8: QuantizedModel, float_module: nn.Module, adapted: AdaptedPart | None = None
    ) -> None:
        super().__init__()
        self.eval()
        self.int8, self.adapted = int8, adapted
        call_hooks(self)[1].update(call_hooks(float_module)[1])  # models read results of layers with them
        for outside in () if adapted is None else adapted.outside:
            add_submodule(self, outside, float_module.get_submodule(outside))
        first = next(float_module.parameters(), torch.empty(0))
        self.empty = nn.Parameter(torch.empty(0, dtype=first.dtype), requires_grad=False)
        self.path, self._unfit = path, ""
        self._kind = type(float_module)
        self._plain = {name: value for name, value in plain_attributes(float_module).items() if _has_no_tensor(value)}
        own = (*float_module.named_parameters(recurse=False), *float_module.named_buffers(recurse=False))
        self._tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in own}
        self._plain |= {name: getattr(first, name) for name in PROPERTIES if hasattr(self._kind, name)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the int8 model, for sequences of each length together if they are packed."""
        packed = PackedCall.of(args, kwargs, self._plain.get("batch_first"))
        try:
            if self.adapted is not None:
                return self.adapted.run(self.int8, args, kwargs)
            return self.int8(*args, **kwargs) if packed is None else packed.run(self.int8)
        except InputError as error:
            self.__dict__["_unfit"] = error.problem
            where = f"{self.path}, {error.where}"
            found = InputError(where, error.operator, error.problem, remedy=error.remedy, source=error.source)
            raise self.marked(found) from error

    def outside_modules(self) -> list[nn.Module]:
        """Return the modules inside of the part that code around it calls, which do not belong to it."""
        return [] if self.adapted is None else [self.get_submodule(path) for path in self.adapted.outside]

    @property
    def unfit(self) -> str:
        """Return why the part could not take its place in a call, or ""."""
        return self._unfit

    def __getattr__(self, name: str) -> Any:
        plain = self.__dict__.get("_plain", {})
        if name in plain:
            return plain[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_kind" not in self.__dict__ or name.startswith("__"):
                raise
            if name in self._tensors:
                return DescribedTensor.of(self, name, *self._tensors[name])
            if inspect.isfunction(method := inspect.getattr_static(self._kind, name, None)):
                return MethodType(method, self)
            raise self.marked(AttributeError(self.refused(f"attribute {name!r}"))) from None

    def __getitem__(self, key: Any) -> Any:
        raise self.marked(TypeError(self.refused(f"item {key!r}")))

    def marked(self, error: AnyError) -> AnyError:
        """Return an error with the path of the part that raises it, for `parts_behind`."""
        vars(error)[PART] = self.path
        return error

    def refused(self, what: str) -> str:
        """Keep in mind that other modules read something that the part does not have, and return the error's text."""
        self.__dict__["_unfit"] = f"other modules read its {what}"
        return f"the quantized {self._kind.__name__} at {self.path} does not have the {what}"

    def train(self, mode: bool = True) -> QuantizedPart:
        """Stay in evaluation mode."""
        return self


def parts_behind(error: BaseException | None) -> set[str]:
    """Return the paths of the parts that raised an error, or errors in whose handling it was raised."""
    found, seen = set[str](), set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        found |= {vars(error)[PART]} if PART in vars(error) else set()
        error = error.__cause__ or error.__context__
    return found


class DescribedTensor(torch.Tensor):
    """A tensor of a float module without its values, for code that asks for its shape, data type or device."""

    part: QuantizedPart
    attribute: str

    @staticmethod
    def of(part: QuantizedPart, attribute: str, shape: torch.Size, dtype: torch.dtype) -> DescribedTensor:
        """Return the tensor that is this attribute of the float module in the place of a part."""
        found: DescribedTensor = make_wrapper_subclass(DescribedTensor, shape, dtype=dtype)
        found.part, found.attribute = part, attribute
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's annotation misses the class
        """Raise `InputError`, because it has nothing to compute with."""
        own = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DescribedTensor))
        problem = own.part.refused(f"attribute {own.attribute!r}")
        remedy = f"leave the part in float: quantize(..., skip=[{own.part.path!r}])"
        raise own.part.marked(InputError("call", None, problem, remedy=remedy))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no annotation
        return f"DescribedTensor({self.attribute}, {list(self.shape)}, {self.dtype})"


PROPERTIES = ("dtype", "device")
"""Properties of models of transformers and diffusers, of their first parameter."""


def _has_no_tensor(value: Any) -> bool:
    """Return whether an attribute contains neither tensors nor modules."""
    return not any(isinstance(leaf, (torch.Tensor, nn.Module)) for leaf in pytree.tree_leaves(value))
