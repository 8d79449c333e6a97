"""Vision encoders of models for images and text as parts: images and videos of any sizes are patches of one sequence,
with a grid of time, height and width for each.

Their forward computes positions, and the boundaries within which patches attend to each other, from the values of the
grids, which `torch.export` would fix. Programs have them as inputs instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from intaglio.errors import InputError, UnsupportedError
from intaglio.integrations import AdaptedPart, ExportExample
from intaglio.integrations.transformers.steps.cached_steps import with_forward
from intaglio.integrations.transformers.steps.float_programs import CLOSE
from intaglio.integrations.transformers.steps.program_arguments import check_ignorable
from intaglio.integrations.transformers.vision.attention_segments import Segments, attend_in_segments, known_segments
from intaglio.integrations.transformers.vision.forward_outline import outline_of, run_forward
from intaglio.torch_private import pytree

GRIDS = "grid_thw"
"""Argument of encoders and programs for the number of frames, rows and columns of patches of each image or video
[images, 3]."""
PATCHES = "patches"
"""Argument of programs for the patches. Encoders have different names for it."""
BOUNDARIES, LONGEST = "get_vision_attention_seqlens", "get_max_seqlen"
"""Functions of the library for the boundaries between images, and for the length of the longest segment."""
COMPUTED = {
    BOUNDARIES: ("cu_seqlens",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_position_ids": ("position_ids",),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
}
"""Functions of the library that compute tensors from grids -> entries of a program for these tensors."""
OF_SEGMENTS = ("cu_seqlens", "cu_window_seqlens")
"""Entries that are boundaries of segments, beside which programs have `Segments`."""
OF_MERGED = ("window_index",)
"""Entries with one element for the patches that are merged into one. Others have one for each patch."""
OF_EXAMPLE, OF_ONE_IMAGE = ((1, 2, 6), (1, 4, 6)), ((1, 2, 2),)
"""Grids of the example that is exported, and of a call that is checked, in units of patches that are merged into one.
`torch.export` fixes sizes of 1."""


def vision_encoders(model: nn.Module) -> dict[str, AdaptedPart]:
    """Return the vision encoders inside of a model, by path, whose forward calls functions of `COMPUTED`."""
    return {path: VisionEncoder(module) for path, module in model.named_modules() if path and _is_encoder(module)}


def _is_encoder(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and BOUNDARIES in code.co_names and GRIDS in inspect.signature(forward).parameters


class VisionEncoder:
    """A vision encoder that takes patches and grids.

    Attributes:
        outside: the code around it calls none of its submodules.
        names: names of its arguments; the first is that of the patches.
        merged: number of rows, and of columns, of patches that are merged into one.
        has_batch: whether patches have an axis of size 1 in front, as far as calls have shown it.
        outline: the encoder without its submodules and tensors.
    """

    outside: Sequence[str] = ()

    def __init__(self, encoder: nn.Module) -> None:
        self.names = tuple(inspect.signature(inspect.unwrap(type(encoder).forward)).parameters)[1:]
        configured = getattr(getattr(encoder, "config", None), "spatial_merge_size", 1)
        self.merged, self.has_batch = int(getattr(encoder, "spatial_merge_size", configured)), False
        self.outline = outline_of(encoder)

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the program for a call of forward.

        Raises:
            InputError: an argument is missing, or would change the result in a way that the program cannot.
        """
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        patches, grids = given.pop(self.names[0], None), given.pop(GRIDS, None)
        given.pop("return_dict", None)
        check_ignorable(given, range(0))
        for name, value in ((self.names[0], patches), (GRIDS, grids)):
            if not isinstance(value, Tensor):
                raise InputError("call", None, f"it has no {name}", remedy=f"call the model with {name}")
        return self._inputs(patches, grids)

    def _inputs(self, patches: Tensor, grids: Tensor) -> dict[str, Any]:
        """Return the arguments of the program.

        The axis of patches is divided into the number of merged ones and the patches that are merged into one, so that
        the number of all patches is a multiple of the latter in the graph too.
        """
        computed = self._computed(patches, grids)
        count, unit = int(grids.prod(1).sum()), self.merged**2
        self.has_batch = patches.shape[0] == 1 != count
        found = {GRIDS: grids.long()}
        for name, value in {PATCHES: patches[0] if self.has_batch else patches, **computed}.items():
            if name in OF_SEGMENTS:
                segments = Segments.of(value)
                found[name] = torch.cat([value, value[-1:]]).long()  # an empty segment: graphs take two and more
                entries = segments._replace(places=segments.places.unflatten(0, (-1, unit)))._asdict()
                found |= {f"{name}_{field}": entry for field, entry in entries.items()}
            elif value.shape[0] * (unit if name in OF_MERGED else 1) != count or count % unit:
                problem = f"{name} has the shape {list(value.shape)}, and the grids have {count} patches"
                remedy = "pass grid_thw of the same images, as the processor of the model makes them"
                raise InputError(f"argument '{self.names[0]}'", None, problem, remedy=remedy)
            else:
                found[name] = value if name in OF_MERGED else value.unflatten(0, (-1, unit))
        return found

    def _computed(self, patches: Tensor, grids: Tensor) -> dict[str, Tensor]:
        """Return the tensors that forward computes from grids, by the names of `COMPUTED`. Its submodules do not run.

        Raises:
            InputError: the grids have no such tensors.
        """
        found, errors = dict[str, Tensor](), list[Exception]()

        def kept(function: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    result = original(*args, **kwargs)
                except Exception as error:  # grids may have any values
                    errors.append(error)
                    raise
                results = result if isinstance(result, tuple) else (result,)
                found.update(zip(COMPUTED[function], results, strict=False))
                return result

            return call

        known = inspect.unwrap(type(self.outline).forward).__globals__
        replaced = {function: kept(function, known[function]) for function in COMPUTED if function in known}
        try:
            run_forward(self.outline, replaced, {self.names[0]: patches, GRIDS: grids})
        except Exception:  # code between submodules may not take an `Unknown`
            if errors:
                problem = f"no positions of patches follow from it: {errors[0]}"
                remedy = "pass integers of shape [images, 3], as the processor of the model makes them"
                raise InputError(f"argument '{GRIDS}'", None, problem, remedy=remedy) from errors[0]
        return found

    def float_step(
        self, encoder: nn.Module, calls: Sequence[dict[str, Any]]
    ) -> tuple[nn.Module, Callable[[dict[str, Any]], tuple[Any, ...]], ExportExample]:
        """Return the module that is captured, what makes its arguments of a recorded call, and the call from which it
        is captured.

        Raises:
            UnsupportedError: the encoder computes other things from grids.
        """
        step, first = self._step(encoder), calls[0]
        patches = first[PATCHES].flatten(0, 1)[None] if self.has_batch else first[PATCHES].flatten(0, 1)
        with torch.no_grad():
            expected = encoder(**{self.names[0]: patches, GRIDS: first[GRIDS]})
            results = [pytree.tree_leaves(result) for result in (expected, step(first))]
        if len(results[0]) != len(results[1]) or not all(map(_are_close, *results)):
            problem = "it has other results with positions and segments of patches as arguments"
            name = type(encoder).__name__
            remedy = f"leave the part in float: quantize(..., skip=[{f'type:{name}'!r}])"
            raise UnsupportedError(name, None, problem, remedy=remedy)
        example, one = (self._example(patches, torch.tensor(units)) for units in (OF_EXAMPLE, OF_ONE_IMAGE))
        return step, lambda call: (call,), ExportExample((example,), (_free_sizes(example),), ((first,), (one,)))

    def _example(self, patches: Tensor, units: Tensor) -> dict[str, Any]:
        """Return the arguments of the program for grids of these numbers of merged patches."""
        grids, axis = units * torch.tensor([1, self.merged, self.merged]), int(self.has_batch)
        index = torch.arange(int(grids.prod(1).sum())) % patches.shape[axis]
        return self._inputs(patches.index_select(axis, index), grids)

    def _step(self, encoder: nn.Module) -> nn.Module:
        """Return a module that computes the result of an encoder from the arguments of the program."""
        has_batch, own = self.has_batch, self.names[0]

        def forward(self: Any, inputs: Mapping[str, Tensor]) -> Any:
            given = {name: value if _is_flat(name) else value.flatten(0, 1) for name, value in inputs.items()}
            boundaries = [name for name in OF_SEGMENTS if name in given]
            segments = [Segments(*(given[f"{name}_{field}"] for field in Segments._fields)) for name in boundaries]
            replaced: dict[str, Any] = {LONGEST: lambda *args, **kwargs: 1}  # attention in segments does not read it
            for function, names in COMPUTED.items():
                if names[0] in given:
                    result = [given[name] for name in names] + ([1] if function == BOUNDARIES else [])
                    replaced[function] = functools.partial(_result, result if len(result) > 1 else result[0])
            patches = given[PATCHES][None] if has_batch else given[PATCHES]
            with known_segments([given[name] for name in boundaries], segments):
                return run_forward(self, replaced, {own: patches, GRIDS: given[GRIDS]})

        step = with_forward(encoder, forward)
        attend_in_segments(step)
        return step

    def run(self, program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of forward, computed by the program.

        Raises:
            InputError: an argument is missing, or would change the result in a way that the program cannot.
        """
        result = program(self.recorded(args, kwargs))
        return result.to_tuple() if kwargs.get("return_dict") is False else result


def _result(result: Any, *args: Any, **kwargs: Any) -> Any:
    return result


def _is_flat(name: str) -> bool:
    """Return whether an entry of a program has no axis of patches that is divided."""
    return (name.startswith(OF_SEGMENTS) and not name.endswith("places")) or name in (GRIDS, *OF_MERGED)


def _are_close(expected: Any, found: Any) -> bool:
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())


def _free_sizes(inputs: Iterable[str]) -> dict[str, Any]:
    """Return the dynamic dimensions of the arguments of a program."""
    merged, found = Dim("merged", min=1), dict[str, Any]()
    for name in inputs:
        if name == GRIDS or name in OF_SEGMENTS:
            found[name] = {0: Dim.AUTO}
        elif _is_flat(name) and name not in OF_MERGED:
            found[name] = {0: Dim.AUTO, 1: Dim.AUTO}
        else:
            found[name] = {0: merged}
    return found
