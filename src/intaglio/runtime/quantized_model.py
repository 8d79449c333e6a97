"""`QuantizedModel`: the int8 program as an nn.Module with the float model's signature."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio import config
from intaglio.errors import ArtifactError, BuildError, InputError
from intaglio.ir import About, Dim, Graph, HostCall, Program, Schedule, Signature
from intaglio.native.cpu import ISA_FLAGS
from intaglio.native.peak_throughput import int8_rates
from intaglio.output_paths import check_file
from intaglio.runtime.artifact import Artifact
from intaglio.runtime.call_plans import FRAMES, Frame, NewShapePolicy, Read, Shapes, Sizes
from intaglio.runtime.coverage import Coverage
from intaglio.runtime.custom_op import came_channels_last, register
from intaglio.runtime.export_c import export_c
from intaglio.runtime.float_islands import Host, HostLoop, loops_in, run_host
from intaglio.runtime.profile import Clock, Profile, profile_of
from intaglio.runtime.saved import state_dict_io
from intaglio.runtime.saved.model_file import (
    Example,
    Library,
    Saved,
    digest_of,
    exact_values,
    example_of,
    leaves_of,
    library_of,
    save,
)
from intaglio.signature import TORCH_DTYPES, bind, check_kinds, dims_of, initial_state, kept_state, rebuild

LIMIT_SECONDS = 0.002
"""Of one of the repeats that measure the arithmetic limit."""

logger = logging.getLogger("intaglio")
STAYS = "leave the int8 model as it is, and convert what goes in and what comes out"


class QuantizedModel(nn.Module):
    """Runs an int8 program; takes and returns what the float model did.

    It uses at most as many threads as ``torch.set_num_threads`` says, and fewer where more would gain nothing. Any
    number of Python threads may call it at once; they divide the cores. It has no gradients and no training mode.

    Buffers that the float model changes while it runs are buffers of this model (``state0``, ...), with what they held
    when it was captured; each call leaves new values there, so calls of such a model must come one after the other.
    Those that its `Quantizer` was asked to keep as levels (``int8_buffers``) are uint8.
    """

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
        remake: Callable[[QuantizedModel, Graph], QuantizedModel] | None = None,
        schedules: Mapping[str, Mapping[str, Schedule]] | None = None,
        hosts: Mapping[str, Host] | None = None,
        emit: Callable[[QuantizedModel, str], Program] | None = None,
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

    def fall_back_to(self, float_model: nn.Module) -> QuantizedModel:
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

    # -- what a user asks ----------------------------------------------------------------------------------------

    def text(self, stage: str) -> str:
        """What a stage made: captured, sites, reference, integer, plan or program; what it was made by, the
        quantizer (a recipe) and the parameters of activations; and what corrections gained."""
        texts = self.about.texts
        if stage not in texts:
            raise InputError("text", None, f"no stage {stage!r}; there are {', '.join(texts)}")
        return texts[stage]

    def profile(self, *args: Any, calls: int = 20, **kwargs: Any) -> Profile:
        """Where the time of a call goes: every step of the program and every float part, the slowest first, with the
        kernel that runs it and its share of the arithmetic limit; and what a call takes besides.

        Medians of ``calls`` timed calls and of as many without a clock inside, by turns, after a first one. Between
        timed steps all threads wait for each other, so their sum is a little more than they take of an ordinary call.
        The limit is measured before and after.
        """
        if self.signature.written:  # a call writes into its inputs; this one must not
            args, kwargs = copy.deepcopy((args, kwargs))
        leaves = args if self._is_plain(args, kwargs) else bind(self.signature, args, kwargs)
        self(*args, **kwargs)
        shapes, allowed, program = self._shapes_of(leaves), torch.get_num_threads(), self.artifact.program
        used = max(shapes.shares(allowed), default=1)
        before = _int8_rates(program.isa, used)
        clocks, whole = [], []
        for _ in range(calls):
            begin = time.perf_counter_ns()
            self(*args, **kwargs)
            whole.append(time.perf_counter_ns() - begin)
            clocks.append(self._clocked(leaves, shapes, allowed))
        rates = max(before, _int8_rates(program.isa, used), key=sum)
        return profile_of(program, shapes.symbols, clocks, whole, used, rates)

    def step_times(self, *args: Any, **kwargs: Any) -> list[int]:
        """Nanoseconds of every step of one call, in execution order; the calls of a timed search."""
        if self.signature.written:  # as above
            args, kwargs = copy.deepcopy((args, kwargs))
        leaves = args if self._is_plain(args, kwargs) else bind(self.signature, args, kwargs)
        return self._clocked(leaves, self._shapes_of(leaves), torch.get_num_threads()).spent(self.artifact.program)

    def _clocked(self, leaves: Sequence[torch.Tensor], shapes: Shapes, allowed: int) -> Clock:
        """What every step of one call took."""
        program = self.artifact.program
        clock = Clock(len(program.steps), [step.island for step in program.steps if step.island])
        with torch.no_grad():
            self._run([*leaves, *self._state()], shapes, allowed, clock)
        return clock

    def reset(self) -> None:
        """The buffers that calls change hold again what they did when the float model was captured."""
        for index, tensor in enumerate(initial_state(self.signature)):
            setattr(self, f"state{index}", tensor)

    def assert_int8(self, macs: float = 1.0) -> None:
        """AssertionError, with the reasons, when a smaller share of the multiply-accumulates runs in int8."""
        if self.coverage.macs < macs:
            shares = f"{100 * self.coverage.macs:.2f} % of MACs in int8, asked for {100 * macs:.2f} %"
            raise AssertionError(f"{shares}\n{self.coverage}")

    def save(self, path: str | Path, *, example: Any = None, library: bool = True) -> None:
        """Write the model to one file, for `intaglio.load`; a file of that name is replaced once the new one is whole.

        ``example``: arguments of a call (a tuple, a dictionary by name, or the only one); they and the digest of what
        comes of them go into the file, for `verify`. ``library``: put the compiled programs in too, one for every
        instruction set, for those who load with ``trust=True``. Raises `ArtifactError`, and leaves an existing file
        as it is.
        """
        check_file(path)
        stored = self.example
        if example is not None:
            tensors = example_of(self.signature, example, self._byte_inputs)
            stored = Example(tensors, self._exact_digest(tensors))
        save(self._saved(stored, library), path, config.VERSION)

    def _saved(self, example: Example | None, library: bool) -> Saved:
        """What a file holds of it."""
        program, libraries = self.artifact.program, {}
        if library:
            built = {**self.libraries, program.isa: library_of(program, self.artifact.library_bytes())}
            libraries = {isa: built[isa] for isa in ISA_FLAGS if isa in built}
        islands = {key: (module, self.island_dims[key]) for key, module in self.islands.items()}
        bodies = {name: loop.body._saved(None, library) for name, loop in self.loops.items()}
        return Saved(
            self.graph,
            self.signature,
            islands,
            self.coverage,
            self.about,
            libraries,
            example,
            self.schedules,
            self.on_new_shape,
            bodies,
        )

    @property
    def loops(self) -> dict[str, HostLoop]:
        """What runs in Python as long as the data says, by name; the body of each is a `QuantizedModel`."""
        return {name: loop for module in self.islands.values() for name, loop in loops_in(module).items()}

    def export_c(self, folder: str | Path, *, isa: str | Sequence[str] | None = None) -> None:
        """Write the program as C: sources, a header, weights, a CMake file, a small main and a README, to be built and
        run without Python, with the same bits (docs/deploying.md, "Without Python").

        ``isa``: one instruction set or several, of which the export runs the best that a processor has; default: the
        one of this model. Files of these names in the folder are replaced. Raises `UnsupportedError` when parts of the
        model run in Python.
        """
        export_c(self, folder, (isa,) if isinstance(isa, str) else isa)

    def program_for(self, isa: str) -> Program:
        """The program's text and constants for an instruction set; nothing is compiled."""
        if isa == self.artifact.program.isa:
            return self.artifact.program
        assert self._emit is not None
        return self._emit(self, isa)

    def verify(self) -> None:
        """Run the example stored with the model and compare every integer result, bit for bit.

        Results behind a float part are left out: PyTorch's float operators differ from CPU to CPU. Raises
        `ArtifactError` when a bit differs, `InputError` when the model has no example.
        """
        if self.example is None:
            remedy = "model.save(path, example=x) stores one; intaglio.load(path).verify() runs it"
            raise InputError("verify", None, "this model has no stored example", remedy=remedy)
        found = self._exact_digest(self.example.tensors)
        if found != self.example.digest:
            raise ArtifactError(
                "verify",
                None,
                f"the stored example gives other bits: {found[:16]}, saved with "
                f"{self.example.digest[:16]} ({self.artifact.program.isa})",
                remedy="do not use this model here; results must not depend on the machine, please report it",
            )

    def _exact_digest(self, tensors: Sequence[torch.Tensor]) -> str:
        leaves = [tensor.clone() for tensor in tensors]
        with torch.no_grad():
            tensors = [*leaves, *initial_state(self.signature)]
            values = self._run(tensors, self._shapes_of(leaves), torch.get_num_threads())
        exact = exact_values(self.graph)
        names = [*self._written, *self._outputs]
        return digest_of(values, [name for name in dict.fromkeys(names) if name in exact])

    # -- what every nn.Module has --------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The integer graph with its weights and scales, whatever instruction set they are packed for."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: tensor for key, tensor in state_dict_io.tensors_of(self.graph).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Weights and scales of a model of the same operators; its program is built, unless the cache has it.

        Raises `ArtifactError`, before anything is changed, when they are another model's. No other thread may be
        calling the model.
        """
        start = prefix + state_dict_io.GRAPH
        own = {key.removeprefix(prefix): state_dict[key] for key in state_dict if f"{key}.".startswith(f"{start}.")}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in own}
        if own:
            self._take_numbers(own)
        else:
            missing_keys.append(start)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _take_numbers(self, tensors: Mapping[str, Any]) -> None:
        graph = state_dict_io.graph_of(tensors, self.graph)
        here, there = state_dict_io.tensors_of(self.graph), state_dict_io.tensors_of(graph)
        if all(torch.equal(here[key], there[key]) for key in here):
            return
        assert self._remake is not None
        made = self._remake(self, graph)
        self.graph, self.artifact, self.libraries, self.signature = graph, made.artifact, made.libraries, made.signature
        self.about, self.coverage, self.example, self._shapes = made.about, made.coverage, None, OrderedDict()
        self._frames, self._sizes = [], None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedModel:
        """`to`, `cuda`, `half` and their like; `InputError` if tensors would leave the CPU or float32."""
        try:
            moved = fn(torch.zeros(1, device="cpu"))
        except (RuntimeError, AssertionError) as error:
            raise InputError("to", None, str(error), remedy=STAYS) from error
        if moved.device.type != "cpu":
            raise InputError("to", None, f"device {moved.device}; an int8 model runs on the CPU", remedy=STAYS)
        if moved.dtype is not torch.float32:
            raise InputError("to", None, f"element type {moved.dtype}; its float parts are float32", remedy=STAYS)
        super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> QuantizedModel:
        """An int8 program cannot be trained; asking for it warns and changes nothing."""
        if mode:
            warnings.warn("an int8 model has no training mode; it stays as it is", stacklevel=2)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without plans and arenas."""
        return {**self.__dict__, "_shapes": OrderedDict(), "_frames": [], "_sizes": None, "_warm": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = register(self)

    def __repr__(self) -> str:
        share, count, hosts = self.coverage, self.coverage.islands, len(self.coverage.hosts)
        callbacks = f"{hosts} host operator{'s' * (hosts != 1)}, " if hosts else ""
        others = f" (compiled for {', '.join(self.libraries)} too)" if self.libraries else ""
        return (
            f"QuantizedModel({self.about.name}: {100 * share.macs:.1f} % of MACs in int8, "
            f"{count} float island{'s' * (count != 1)}, {callbacks}{share.bytes_before / 1e6:.2f} MB -> "
            f"{share.bytes_after / 1e6:.2f} MB, {self.artifact.program.isa}{others})"
        )


def _int8_rates(isa: str, threads: int) -> list[float]:
    """What each of these threads can do at most; nothing on a machine where that cannot be built."""
    try:
        return int8_rates(isa, threads, LIMIT_SECONDS)
    except BuildError:
        return []


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
