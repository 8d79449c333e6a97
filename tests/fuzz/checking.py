"""Takes networks through all stages and compares float, reference, interpreter and program."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import intaglio
from fuzz.drawing import Options
from fuzz.network import BATCH, Network
from fuzz.permitted_noise import RUNS, NoisyModel, is_compared, too_far
from intaglio import patterns, stages
from intaglio.calibration import AverageMaxCalibrationCallback
from intaglio.errors import InputError
from intaglio.fxgraph.node_info import origin
from intaglio.lower import Lowered
from intaglio.ops import OPS
from intaglio.runtime.calls import threads as thread_choice
from intaglio.runtime.saved.model_file import exact_values
from support.lowering import QuantizedDifferences, largest_differences
from support.side_by_side import SideBySide

FLOAT_TOLERANCE = 2e-3
"""Largest difference of the prepared from the float model, relative to the largest value of a result."""
REGION_FLOATS = 1e-4
ROUNDED_RUNS = 16
"""Runs of a reference with noise as large as rounding, if a difference from it may be a jump."""


class MismatchError(AssertionError):
    """Two ways of computing a network differ; ``networks``: those that do, by place."""

    def __init__(self, stage: str, problem: str, networks: Sequence[int] = ()) -> None:
        super().__init__(f"{stage}: {problem}")
        self.stage, self.problem, self.networks = stage, problem, tuple(networks)


@dataclass
class Seen:
    """Operators, kinds, refusals and values that a run has covered, as counts."""

    targets: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    values: int = 0
    differing: int = 0


@dataclass
class Case:
    """Networks side by side, and what came of them at each stage."""

    networks: Sequence[Network]
    options: Options
    model: SideBySide
    captured: Any = None
    prepared: Any = None
    reference: Any = None
    lowered: Any = None


def side_by_side(networks: Sequence[Network]) -> SideBySide:
    rows = {f"n{place}": (network.module(), network.example()) for place, network in enumerate(networks)}
    return SideBySide(rows).eval()


def inputs_of(networks: Sequence[Network], **how: Any) -> list[Tensor]:
    return [x for network in networks for x in network.example(**how)]


def captured(networks: Sequence[Network], model: nn.Module, options: Options) -> Any:
    if options.shapes == "default":
        return stages.capture(model, tuple(model.inputs))
    entries = [entry for network in networks for entry in network.inputs]
    free = {"fixed": lambda axis: False, "batch": lambda axis: axis == 0, "sizes": lambda axis: True}[options.shapes]
    shapes = [dict.fromkeys(filter(free, entry.free), Dim.AUTO) or None for entry in entries]
    return stages.capture(model, tuple(model.inputs), dynamic_shapes={"inputs": tuple(shapes)})


def quantizer(networks: Sequence[Network], captured: Any, options: Options) -> stages.Quantizer:
    entries = {f"models.{place}": network.settings for place, network in enumerate(networks) if network.settings}
    recipe = intaglio.Recipe.of(entries).with_selection(options.skip, options.only)
    origins = [origin(node) for node in captured.module.graph.nodes if node.op == "call_function"]
    average = AverageMaxCalibrationCallback() if options.average else None
    return stages.Quantizer(
        recipe.for_part(origins, captured.classes),
        patterns=patterns.builtin(*dict.fromkeys(options.patterns), calibration=average) if options.patterns else (),
        skip_first=options.ends[0],
        skip_last=options.ends[1],
        outputs=options.outputs,
    )


def leaves(found: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def clones(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies with the same strides, so that updates of inputs do not reach the next call."""
    found = []
    for x in inputs:
        index = tuple(slice(0, 1) if not stride else slice(None) for stride in x.stride())
        single = x[index]  # one of the elements that share memory
        span = 1 + sum((size - 1) * stride for size, stride in zip(single.shape, single.stride(), strict=True))
        copy = torch.zeros(max(span, 0), dtype=x.dtype).as_strided(single.shape, single.stride())
        found.append(copy.copy_(single).expand(x.shape))
    return found


def call(run: Any, inputs: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the results of each network, and the inputs after the call, some of which are updated."""
    given = clones(inputs)
    with torch.no_grad():
        found = run(*given)
    return [leaves(found[name]) for name in found], given


@contextmanager
def all_threads(count: int) -> Iterator[None]:
    """Let programs use ``count`` threads, however small they are."""
    before, chosen = torch.get_num_threads(), thread_choice.thread_counts
    torch.set_num_threads(count)
    thread_choice.thread_counts = lambda program, symbols, allowed, delay=0.0: (allowed,) * program.segments
    try:
        yield
    finally:
        torch.set_num_threads(before)
        thread_choice.thread_counts = chosen


# -- comparisons ------------------------------------------------------------------------------------------------------


def compare_prepared(case: Case) -> None:
    """The prepared model, equalized or not, computes what the float model computes, but for rounding."""
    inputs = inputs_of(case.networks, seed=2)
    found, written = call(case.prepared, inputs)
    expected, updated = call(case.model, inputs)
    wrong = [
        place
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        if any(not near(a, b) for a, b in zip(ours, theirs, strict=True))
    ]
    if wrong:
        raise MismatchError("float", "the prepared model differs from the float model", wrong)
    starts = owners(case.networks)
    wrong = [place for place, a, b in zip(starts, written, updated, strict=True) if not near(a, b)]
    if wrong:
        raise MismatchError("float", "the prepared model updates inputs differently", wrong)


def compare_reference(case: Case, seed: int) -> None:
    """The reference is as far from float as noise of a step at every site permits."""
    inputs = inputs_of(case.networks, seed=0)
    found, expected = call(case.reference, inputs)[0], call(case.prepared, inputs)[0]
    runs = []
    for run in range(RUNS):
        noisy = NoisyModel(case.prepared.annotations.module, case.reference, seed + run)
        runs.append(call(replace(case.prepared, module=noisy.run), inputs)[0])
    problems = {
        place: problem
        for place, network in enumerate(case.networks)
        if is_compared(network)
        and (problem := too_far(expected[place], found[place], [run[place] for run in runs])) is not None
    }
    if problems:
        raise MismatchError("reference", next(iter(problems.values())), sorted(problems))


def owners(networks: Sequence[Network]) -> list[int]:
    """Return the network of each input."""
    return [place for place, network in enumerate(networks) for _ in network.inputs]


def near(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether float results are equal but for rounding; conditions and integers may flip in few places."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not ours.is_floating_point():
        return bool((ours != theirs).float().mean() <= 0.02) if ours.numel() else True
    if not ours.numel():
        return True
    peak = max(theirs.abs().max().item(), 1e-3)
    wrong = ((ours - theirs).abs() > FLOAT_TOLERANCE * peak) | (ours.isnan() != theirs.isnan())
    return bool(wrong.float().mean() <= 0.02)


def compare_regions(case: Case, seen: Seen) -> None:
    """From the same integers, an operator of the integer graph differs by one quantized value at most.

    Where rounding makes the reference itself jump, it differs so little from the range of the reference's results.
    """
    inputs = inputs_of(case.networks, seed=3)
    kinds = {name: op.kind for op in case.lowered.graph.ops for name in op.outputs}
    for runs in (0, ROUNDED_RUNS):  # most networks need no run with noise
        differences: QuantizedDifferences = largest_differences(
            case.reference, case.lowered, *clones(inputs), rounded_runs=runs
        )
        far = {name: worst for name, worst in differences.worst.items() if worst > OPS[kinds[name]].tolerance}
        if not far and differences.floats <= REGION_FLOATS:
            break
    seen.values += differences.total
    seen.differing += differences.wrong
    if far:
        places = {place for name in far for place in places_behind(case.lowered, name)}
        problem = f"further from the reference than the contract allows: {far}"
        raise MismatchError("interpreter", problem, sorted(places))
    if differences.floats > REGION_FLOATS:
        raise MismatchError("interpreter", f"floats differ from the reference by {differences.floats:.1e}")


def places_behind(lowered: Lowered, name: str) -> list[int]:
    """Return the networks whose module computes a value."""
    op = next((op for op in lowered.graph.ops if name in op.outputs), None)
    parts = (op.origin.path if op else "").split(".")
    return [int(parts[1])] if len(parts) > 1 and parts[0] == "models" and parts[1].isdigit() else []


def compare_bits(case: Case, expected: Any, found: Any, what: str) -> None:
    """Results, and inputs after the call, are equal bit for bit, except behind an island."""
    flat_exact = exact_leaves(case, expected[0])
    wrong = []
    for place, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same = same_bits(a, b) if flat_exact[place][index] else near(a, b)
            if not same:
                wrong.append(place)
    wrong += [p for p, a, b in zip(owners(case.networks), found[1], expected[1], strict=True) if not near(a, b)]
    if wrong:
        raise MismatchError("program", what, sorted(set(wrong)))


def exact_leaves(case: Case, results: Sequence[Sequence[Tensor]]) -> list[list[bool]]:
    """Return whether each result is computed without an island before it; those of quantized outputs are not told."""
    exact, names = exact_values(case.lowered.graph), case.lowered.graph.outputs
    if len(names) < sum(map(len, results)):
        return [[False] * len(row) for row in results]
    flags = iter([name in exact for name in names])
    return [[next(flags) for _ in row] for row in results]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan() & b.isnan()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.contiguous().view(kind) == b.contiguous().view(kind)) | nan).all())


# -- the stages -------------------------------------------------------------------------------------------------------


def to_lowered(networks: Sequence[Network], options: Options, seen: Seen) -> Case:
    """Capture, prepare, calibrate, convert and lower; compare float models."""
    case = Case(networks, options, side_by_side(networks))
    case.captured = captured(networks, case.model, options)
    seen.targets.update(str(node.target) for node in case.captured.module.graph.nodes if node.op == "call_function")
    case.prepared = stages.prepare(case.captured, quantizer(networks, case.captured, options))
    batches = [tuple(inputs_of(networks, seed=seed)) for seed in (0, 1)]
    if options.corrections:
        case.prepared = stages.equalize(case.prepared, batches)
    if case.prepared.observers:
        ranges = stages.calibrate(case.prepared, batches, progress=False)
        corrections = stages.correct(case.prepared, ranges, batches) if options.corrections else None
        case.reference = stages.convert(case.prepared, ranges, corrections)
    else:
        case.reference = stages.convert(case.prepared)
    case.lowered = stages.requantize(case.reference)
    seen.kinds.update(op.kind for op in case.lowered.graph.ops)
    return case


def other_calls(case: Case, seed: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield inputs of further calls: other strides, another batch, an empty one, other sizes of images."""
    calls = [("other strides", BATCH, 0), (f"batch {(1, 5, 2)[seed % 3]}", (1, 5, 2)[seed % 3], 0)]
    calls += [("an empty batch", 0, 0), ("other sizes", BATCH + 1, 1 + seed % 2)]
    free = iter(case.lowered.signature.inputs)
    axes = [[symbolic_axes(next(free)) for _ in network.inputs] for network in case.networks]
    seen = set()
    for number, (what, batch, more) in enumerate(calls):
        found = []
        for network, own in zip(case.networks, axes, strict=True):
            plain = resized(network, own, batch, more)
            other = strided(plain, seed + number, network.writes)
            found += other if _runs(network, other) else plain  # conv_tbc takes no other strides
        shapes = tuple(x.shape for x in found)
        if number < 1 or shapes not in seen:
            yield what, found
        seen.add(shapes)


def symbolic_axes(entry: Any) -> set[int]:
    return {axis for axis, size in enumerate(entry.type.shape) if not isinstance(size, int)}


def resized(network: Network, axes: Sequence[set[int]], batch: int, more: int) -> list[Tensor]:
    """Return inputs with another batch and larger images where all inputs allow it and the float model runs."""
    if any(0 in entry.free and 0 not in own for entry, own in zip(network.inputs, axes, strict=True)):
        batch = BATCH
    pairs = [
        (entry.shape[axis], axis in own)
        for entry, own in zip(network.inputs, axes, strict=True)
        for axis in entry.free
        if axis
    ]
    fixed = {size for size, is_free in pairs if not is_free}
    sizes = {size: size + more for size, is_free in pairs if is_free and size not in fixed}
    for given in ({"batch": batch, "sizes": sizes}, {"batch": batch}):
        found = network.example(seed=5, **given)
        if _runs(network, found):
            return found
    return network.example(seed=5)


def _runs(network: Network, inputs: Sequence[Tensor]) -> bool:
    """Return whether the float model takes these inputs, with their strides."""
    try:
        with torch.no_grad():
            network.module()(*clones(inputs))
    except (RuntimeError, IndexError, ValueError, AssertionError):
        return False
    return True


def strided(inputs: Sequence[Tensor], seed: int, writes: bool) -> list[Tensor]:
    """Return the same values with other strides: channels last, transposed, sliced; expanded unless one is written."""
    found = []
    for place, x in enumerate(inputs):
        way = (seed + place) % (4 if writes else 5)
        if x.dim() < 2 or not x.numel():
            found.append(x)
        elif way == 0 and x.dim() == 4 and x.shape[3] > 1:  # PyTorch 2.13 crashes at convolutions of narrower slices
            found.append(x.contiguous(memory_format=torch.channels_last))
        elif way in (0, 1):
            found.append(x.transpose(0, -1).contiguous().transpose(0, -1))
        elif way == 2:
            wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
            wide[..., 1::2] = x
            found.append(wide[..., 1::2])
        elif way == 3:
            wide = torch.zeros(2 * x.shape[0], *x.shape[1:], dtype=x.dtype)
            wide[::2] = x
            found.append(wide[::2])
        else:
            found.append(x[..., :1].expand(x.shape))
    return found


def run_program(case: Case, seed: int, seen: Seen) -> None:
    """The program gives the bits of the interpreter: threads, batches, strides, sizes, files."""
    model = stages.compile(case.lowered, isa=case.options.isa or None)
    inputs = inputs_of(case.networks, seed=4)
    expected = call(case.lowered, inputs)
    for count in (1, 2):
        with all_threads(count):
            compare_bits(case, expected, call(model, inputs), f"{count} threads differ from the interpreter")
    for number, (what, others) in enumerate(other_calls(case, seed)):
        try:
            wanted = call(case.lowered, others)
        except InputError as error:
            seen.refused[f"call: {error.problem}"] += 1
            continue
        with all_threads(1 + (seed + number) % 2):
            compare_bits(case, wanted, call(model, others), f"{what}: results differ from the interpreter")
    if case.options.saved:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.int8"
            model.save(path)
            loaded = intaglio.load(path, isa=case.options.isa or None)
            compare_bits(case, expected, call(loaded, inputs), "the loaded model differs from the interpreter")


def check(networks: Sequence[Network], options: Options, seed: int, seen: Seen) -> list[MismatchError]:
    """Return what differs. Errors of stages are not caught, and neither are differences that name no network."""
    case = to_lowered(networks, options, seen)
    found = []
    for compare in (
        compare_prepared,
        partial(compare_reference, seed=seed),
        partial(compare_regions, seen=seen),
        partial(run_program, seed=seed, seen=seen),
    ):
        try:
            compare(case)
        except MismatchError as wrong:
            if not wrong.networks and len(networks) > 1:
                raise
            found.append(wrong)
    return found
