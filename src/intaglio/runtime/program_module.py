"""Calls of a compiled program from PyTorch: tensors in, memory, segments and islands in order, tensors out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from intaglio import config
from intaglio.errors import InputError
from intaglio.ir import About, Dim, Graph, HostCall, Program, Schedule, Signature
from intaglio.runtime.artifact import Artifact
from intaglio.runtime.call_plans import FRAMES, Frame, NewShapePolicy, Read, Shapes, Sizes
from intaglio.runtime.coverage import Coverage
from intaglio.runtime.custom_op import came_channels_last, register
from intaglio.runtime.float_islands import Host, run_host
from intaglio.runtime.profile import Clock
from intaglio.runtime.saved.model_file import Example, Library, leaves_of
from intaglio.signature import TORCH_DTYPES, bind, check_kinds, dims_of, initial_state, kept_state, rebuild

logger = logging.getLogger("intaglio")


class ProgramModule(nn.Module):
    """Runs a compiled program, its islands and its host operators; `QuantizedModel` is what users see of it."""

    def __init__(
        self,
        artifact: Artifact,
        signature: Signature,
        graph: Graph,
        islands: Mapping[str, tuple[nn.Module, tuple[Dim, ...]]],
        coverage: Coverage,
        about: About,
        example: Example | None = None,
        libraries: Mapping[str, Library] | None = None,
        remake: Callable[[Any, Graph], Any] | None = None,
        schedules: Mapping[str, Mapping[str, Schedule]] | None = None,
        hosts: Mapping[str, Host] | None = None,
        emit: Callable[[Any, str], Program] | None = None,
    ) -> None:
        """``graph`` is what the program was made of: files hold it. ``libraries``: for other instruction sets.
        ``remake``: makes a model like this one around a graph with other numbers. ``schedules``: those a search chose,
        by instruction set and output value. ``hosts``: records of a user's own operators, by name. ``emit``: prints the
        program of a model for another instruction set."""
        super().__init__()
        self._emit, self._remake = emit, remake
        self.schedules, self.hosts = dict(schedules or {}), dict(hosts or {})
        self.graph, self.example, self.libraries = graph, example, dict(libraries or {})
        self.artifact, self.signature, self.coverage, self.about = artifact, signature, coverage, about
        self.islands = nn.ModuleDict({key: module for key, (module, _) in islands.items()})
        self.island_dims = {key: dims for key, (_, dims) in islands.items()}
        self._inputs, self._outputs = graph.inputs, graph.outputs
        self._byte_inputs = graph.byte_inputs()
        self._results = sum(output.value is not None for output in signature.outputs)
        self._overwritten = [[entry.leaf for entry in signature.inputs].index(leaf) for leaf in signature.written]
        program, in_bytes = artifact.program, {graph.inputs[index] for index in self._byte_inputs}
        self._index = {external.value: i for i, external in enumerate(program.externals)}
        self._written = {e.value: TORCH_DTYPES[e.dtype] for e in program.externals if e.written}
        self._reads = [Read(self._index[e.value], e, e.value in in_bytes) for e in program.externals if not e.written]
        self._calls = {s: [call for call in program.calls if call.after_segment == s] for s in range(program.segments)}
        self.plans = config.plans()
        self._shapes: OrderedDict[Any, Shapes] = OrderedDict()
        self._frames: list[Frame] = []
        self._sizes: Sizes | None = None
        self._float: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no part of this module
        self._warm: set[Any] = set()
        self._fell_back = False
        self._plain = _plain_tensors(signature)
        self._number = register(self)
        alone = signature.out_tree is not None and signature.out_tree.is_leaf()
        self._returns_tensor = alone and self._results == 1 and signature.outputs[0].levels is None
        for index, tensor in enumerate(initial_state(signature)):
            self.register_buffer(f"state{index}", tensor)
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self._opaque:
            return self._traced(args, kwargs)
        leaves = args if self._is_plain(args, kwargs) else bind(self.signature, args, kwargs)
        if self._float and not self._takes(leaves):
            with torch.no_grad():
                return self._float[0](*args, **kwargs)
        shapes = self._shapes_of(leaves)
        with torch.no_grad():
            values = self._run([*leaves, *self._state()], shapes, torch.get_num_threads())
            results = [self._returned(values[name], leaves) for name in self._outputs]
            for index, value in enumerate(kept_state(self.signature, results)):
                setattr(self, f"state{index}", value)
            for position, result in zip(self._overwritten, results[self._results :], strict=False):
                leaves[position].copy_(result)
        if self._plain and self._returns_tensor:
            return results[0]
        return rebuild(self.signature, tuple(results[: self._results]), shapes.symbols)

    def _traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The call as one operator of the graph that a compiler makes."""
        if torch.compiler.is_exporting():
            raise InputError("call", None, "this part is quantized already; native code cannot be traced")
        leaves = args if self._is_plain(args, kwargs) else bind(self.signature, args, kwargs)
        results = torch.ops.intaglio.call([leaf.detach() for leaf in leaves], self._number)
        if self._plain and self._results == 1 and self.signature.out_tree.is_leaf():
            return results[0]
        return rebuild(self.signature, tuple(results), dims_of(self.signature, leaves, self._byte_inputs))

    def results(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors a call gives for its tensors, by position."""
        with torch.no_grad():
            values = self._run(leaves, self._shapes_of(leaves), torch.get_num_threads())
            return [self._returned(values[name], leaves) for name in self._outputs]

    @property
    def _opaque(self) -> bool:
        """Whether a call does more than its operator would say: changes something, or runs another model."""
        return bool(self._float or self.signature.state or self.signature.written)

    def _state(self) -> list[torch.Tensor]:
        return [getattr(self, f"state{index}") for index in range(len(self.signature.state))]

    def _is_plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return 0 < len(args) == self._plain and not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)

    def _shapes_of(self, leaves: Sequence[torch.Tensor]) -> Shapes:
        """Plan for these shapes; checks the tensors when it has not seen them before."""
        key = tuple([(leaf.shape, leaf.dtype, leaf.device, leaf.layout) for leaf in leaves if hasattr(leaf, "layout")])
        found = self._shapes.get(key)
        if found is None:
            found = self._planned(dims_of(self.signature, list(leaves), self._byte_inputs))
        # Without a lock, which a forked child could inherit held: each of these steps is atomic.
        self._shapes[key] = found
        if len(self._shapes) > 1:
            with contextlib.suppress(KeyError):
                self._shapes.move_to_end(key)
                while len(self._shapes) > self.plans:
                    self._shapes.popitem(last=False)
        return found

    @property
    def on_new_shape(self) -> str:
        """What a call of a shape that was not seen does: "plan" its memory and run in int8, or "fallback" to float."""
        return (NewShapePolicy.FALLBACK if self._float else NewShapePolicy.PLAN).value

    def fall_back_to(self, float_model: nn.Module) -> Self:
        """From now on calls whose shapes were not planned run this float model, as it is, without gradients.

        Planned are those given to `warm`, or else those of the first call: shape, strides, element type and device of
        every tensor. Inputs of another element type or device are refused as ever. The model is kept by reference, and
        is not part of files.
        """
        self._float = (float_model,)
        return self

    def warm(self, *calls: Any) -> None:
        """Plan these shapes, and have memory for the largest. Each is the arguments of a call (a tuple, a dictionary by
        name, the only one), or a shape in place of every tensor: ``(1, 128)``, or ``((1, 128), (1, 128))``."""
        frame = Frame(self.artifact)
        for call in calls:
            leaves = self._made_up(call)
            shapes = self._shapes_of(leaves)
            shapes.shares(torch.get_num_threads())
            frame.fit(shapes.layout)
            self._warm.add(_guard(leaves))
        self._frames.append(frame)

    def _made_up(self, call: Any) -> Sequence[torch.Tensor]:
        """The tensors of a call, of which only shapes may be given."""
        inputs = self.signature.inputs
        sizes = [call] if _is_shape(call) else list(call) if isinstance(call, (tuple, list)) else []
        if sizes and all(map(_is_shape, sizes)) and len(sizes) == len(inputs):
            kinds = [TORCH_DTYPES[entry.type.dtype] for entry in inputs]
            return [torch.empty(size, dtype=kind, device="cpu") for size, kind in zip(sizes, kinds, strict=True)]
        return leaves_of(self.signature, call, self._byte_inputs)

    def _takes(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a call was planned; the first one of all is, if nothing was, and the program takes its shapes."""
        check_kinds(self.signature, leaves, self._byte_inputs)
        guard = _guard(leaves)
        if not self._warm:
            with contextlib.suppress(InputError):
                self._shapes_of(leaves)
                self._warm.add(guard)
        if guard not in self._warm and not self._fell_back:
            self._fell_back = True
            logger.warning("%s: shapes that were not planned run in float (on_new_shape)", self.about.name)
        return guard in self._warm

    def _planned(self, symbols: dict[str, int]) -> Shapes:
        """The plan for these free sizes."""
        if self._sizes is None:
            self._sizes = Sizes(self.artifact, self.graph, self.island_dims)
        return Shapes(self._sizes, symbols)

    def _run(
        self, leaves: Sequence[torch.Tensor], shapes: Shapes, allowed: int, clock: Clock | None = None
    ) -> dict[str, torch.Tensor]:
        values = dict(zip(self._inputs, leaves, strict=True))
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(shapes.artifact)
        if frame.layout is not shapes.layout:
            frame.fit(shapes.layout)
        frame.run.times = clock.steps if clock else None
        kept, shares = [], shapes.shares(allowed)
        for segment, calls in self._calls.items():
            if calls:
                for call in calls:
                    if isinstance(call, HostCall):
                        self._host(call, frame, shapes, clock)
                        continue
                    dims = shapes.island_dims[call.key]
                    with torch.autocast("cpu", enabled=False):  # what follows reads float32
                        begin = time.perf_counter_ns()
                        results = self.islands[call.key](*[values[name] for name in call.inputs], *dims)
                        if clock:
                            clock.islands[call.key] += time.perf_counter_ns() - begin
                    for name, result in zip(call.outputs, results, strict=True):
                        if name in shapes.read and (result.shape != shapes.read[name] or result.device.type != "cpu"):
                            problem = f"{result.device} {list(result.shape)}; the program reads {shapes.read[name]}"
                            raise InputError(f"%{name}", None, problem, remedy="leave its float parts as they are")
                    values.update(zip(call.outputs, results, strict=True))
                continue
            for name, sizes, strides in shapes.written:
                if name not in values:
                    made = torch.empty_strided(sizes, strides, dtype=self._written[name], device="cpu")
                    frame.external[self._index[name]] = made.data_ptr()
                    values[name] = made
            for entry in self._reads:
                if entry.value in values:
                    tensor = entry.readable(values[entry.value])
                    frame.read(entry.index, tensor)
                    kept.append(tensor)
            shapes.artifact.run(frame.run, segment, shares[segment])
            if frame.outside.value:  # the frame is not used again
                raise IndexError("index out of range in self")
        if len(self._frames) < FRAMES:
            self._frames.append(frame)
        return values

    def _host(self, call: HostCall, frame: Frame, shapes: Shapes, clock: Clock | None) -> None:
        begin, host = time.perf_counter_ns(), self.hosts[call.op.attrs["operator"]]
        run_host(call, host, self.graph, frame.levels(), shapes.layout.offsets, shapes.symbols)
        if clock:
            clock.islands[call.key] += time.perf_counter_ns() - begin

    def _returned(self, value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Contiguous, unless an input came with channels last."""
        if value.dim() == 4 and not value.is_contiguous() and not any(map(came_channels_last, leaves)):
            return value.contiguous()
        return value

    def program_for(self, isa: str) -> Program:
        """The program's text and constants for an instruction set; nothing is compiled."""
        if isa == self.artifact.program.isa:
            return self.artifact.program
        assert self._emit is not None
        return self._emit(self, isa)

    def _clocked(self, leaves: Sequence[torch.Tensor], shapes: Shapes, allowed: int) -> Clock:
        """What every step of one call took."""
        program = self.artifact.program
        clock = Clock(len(program.steps), [step.island for step in program.steps if step.island])
        with torch.no_grad():
            self._run([*leaves, *self._state()], shapes, allowed, clock)
        return clock


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(type(size) is int for size in value)


def _guard(leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a planned call is known by."""
    return tuple([(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves])


def _plain_tensors(signature: Signature) -> int:
    """How many positional tensors make a call, if that is all a call is; else 0."""
    tree, count = signature.in_tree, len(signature.inputs)
    if tree is None or signature.fixed or tree.num_leaves != count:
        return 0
    from intaglio.torch_private import pytree

    args = tuple(range(count))
    return count if pytree.tree_structure((args, {})) == tree else 0
