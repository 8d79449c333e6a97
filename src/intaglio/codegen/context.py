"""`Context`: images, strides, constants and kernels of the program that emitters print."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import prod
from typing import SupportsFloat, TypeVar

import numpy as np

from intaglio import numerics
from intaglio.codegen.packed_constants import PackedConstants
from intaglio.codegen.writer import Code
from intaglio.ir import SIGN_OFFSET, ArenaLocation, Dim, DType, Graph, Op, RangeCheck, c_expression, numel
from intaglio.ir.names import sanitized
from intaglio.kernels import DepthwiseSpec, Isa, KernelFamily, TileSpec, depthwise_tiles
from intaglio.ops import op_def
from intaglio.ops.movement.data_movement import Strides
from intaglio.plan.buffers import caller_strides, nhwc_sizes, strides
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import Partition
from intaglio.plan.scheduling.value_bounds import result_bounds

RESERVED_BYTES = 1 << 16
"""Bytes from which a constant is stored once per name; smaller ones are compared with all others."""
NUMPY_TYPES = {"int32_t": np.int32, "float": np.float32, "double": np.float64}
"""NumPy types of C types."""


K = TypeVar("K")
Spec = TypeVar("Spec", TileSpec, DepthwiseSpec)


class Context:
    """State of the program that is being printed.

    Attributes:
        plan: Plan to print.
        isa: Instruction set with the kernels of the program.
        index: Position of each buffer in the table of offsets.
        blob: Constants of the program.
        families: Kernel tables that the program uses, by name.
        headers: Headers that the program includes.
        kernels: Kernels of the current step.
        functions: Helper functions to print before the current step.
        constants: Offsets of the current step's constants, by name.
        range_checks: Values whose clipped elements the program counts.
        step: Prefix of names of the current step.
        symbol: Name of the function of the current step.
    """

    def __init__(self, plan: Plan, isa: Isa, index: Mapping[str, int]) -> None:
        self.plan, self.isa = plan, isa
        self.blob = PackedConstants()
        self.families: dict[str, KernelFamily] = {}
        self.headers = {"base/run.h"}
        self.kernels: list[TileSpec | DepthwiseSpec] = []
        self.functions: list[str] = []
        self.constants: dict[str, int] = {}
        self.range_checks: list[RangeCheck] = []
        self.step = self.symbol = ""
        self.index = index
        self.symbols = plan.graph.symbols()
        self._declared = self._declarations()

    def for_step(self, number: int, name: str) -> Context:
        """Return the context of one step with this name.

        It has its own `kernels`, `constants` and `functions`; kernel tables, headers, range checks and the blob are
        shared with the program.
        """
        own = copy.copy(self)
        own.kernels, own.functions, own.constants, own.step = [], [], {}, f"p{number:02d}"
        own.symbol = step_symbol(number, name)
        return own

    def include(self, *headers: str) -> None:
        """Add headers whose functions the program calls."""
        self.headers.update(headers)

    def tiles(self, spec: TileSpec) -> str:
        """Return the name of the table of kernels up to the height of this one, indexed by height."""
        return self._table(spec, self.isa.tiles)

    def depthwise_tiles(self, spec: DepthwiseSpec) -> str:
        """Return the name of the table of depthwise kernels up to this size, indexed by rows and columns."""
        return self._table(spec, depthwise_tiles)

    def _table(self, spec: Spec, family_of: Callable[[Spec], KernelFamily]) -> str:
        """Return the name of the table of a kernel's family, which is made once."""
        self.kernels.append(spec)
        if spec.family not in self.families:
            self.families[spec.family] = family_of(spec)
        return spec.family

    @property
    def largest_kernel(self) -> TileSpec | DepthwiseSpec | None:
        """Return the kernel of the step that computes most results per call, or None if the step calls no kernel."""
        return max(self.kernels, key=lambda kernel: prod(kernel.tile), default=None)

    @property
    def graph(self) -> Graph:
        """Return the integer graph that the plan executes."""
        return self.plan.graph

    def constant(self, array: np.ndarray, kind: str, label: str) -> str:
        """Store an array and return a C expression for a pointer to it, such as `constant<float>(r, p01_factor)`."""
        return self._pointer(self.blob.add(array), kind, label)

    def packed(self, size: int, key: Hashable, pack: Callable[[], np.ndarray], kind: str, label: str) -> str:
        """Return a C expression as `constant` does, for an array that is packed when all code is printed.

        Args:
            size: Bytes of the array.
            key: Equal for equal arrays: the names of the constants that it is packed from, and how.
            pack: Returns the array.
            kind: C type of its elements.
            label: Name of the array in the step.
        """
        return self._pointer(self.blob.reserve(size, key, pack), kind, label)

    def stored_constant(self, value: str, label: str) -> str:
        """Return a C pointer to the bytes of a constant of the graph as it is; a large one is not read yet."""
        constants = self.graph.constants
        if constants.nbytes(value) < RESERVED_BYTES:
            return self.constant(constants[value], "uint8_t", label)
        return self.packed(constants.nbytes(value), value, lambda: constants[value], "uint8_t", label)

    def _pointer(self, offset: int, kind: str, label: str) -> str:
        """Return a C pointer to the constant at an offset, and give the offset a name."""
        name, count = f"{self.step}_{label}", 2
        while name == self.symbol or self.constants.setdefault(name, offset) != offset:
            name, count = f"{self.step}_{label}_{count}", count + 1
        return f"constant<{kind}>(r, {name})"

    def number(self, value: SupportsFloat, kind: str, label: str) -> str:
        """Store a scalar and return a C expression for its value.

        The source text then does not depend on the value, so that a compiled program can be reused.
        """
        return "*" + self.constant(np.array([value], NUMPY_TYPES[kind]), kind, label)

    def clip_count(self, source: str, result: str, ends: tuple[float, float] | None = None) -> int:
        """Return the index of the count of clipped elements of the float value `source`, quantized as `result`.

        The range has these ends, or those of the parameters of `result`.
        """
        kind = self.graph.types[result]
        if ends is None:
            q = kind.qparams
            ends = float(q.step * (q.qmin - q.zero)), float(q.step * (q.qmax - q.zero))
        self.range_checks.append(RangeCheck(source, self._reader(result), *ends, numel(kind.shape)))
        return len(self.range_checks)

    def _reader(self, value: str) -> str:
        """Return the path of the first module that reads a value, also after data movement without a module."""
        reached = {value}
        for op in self.graph.ops:
            if not reached.isdisjoint(op.inputs):
                if op.origin.path:
                    return op.origin.path
                reached.update(op.outputs)
        return ""

    def kernel(self, partition: Partition, kind: type[K]) -> K:
        """Return the kernel that the plan chose for a partition with one piece."""
        (found,) = self.plan.kernels[partition.ops[-1].outputs[0]]
        if not isinstance(found, kind):
            raise TypeError(
                f"{partition.name}: the plan has a {type(found).__name__}, but the emitter expects a {kind.__name__}"
            )
        return found

    def dim(self, dim: Dim) -> str:
        """Return a C expression for a dimension."""
        return c_expression(dim)

    def image(self, value: str) -> str:
        """Return a C expression for the `Image` of a buffer, or of a dense float tensor of the caller."""
        buffer = self.plan.buffers.get(value)
        if buffer is None:
            kind = self.graph.types[value]
            n, h, w, c = nhwc_sizes(kind.shape, value in self.plan.row_major)
            sizes = f"{self.dim(n)}, {self.dim(h)}, {self.dim(w)}, {self.dim(c * kind.dtype.bytes)}"
            return f"image({self.external(value)}, {sizes}, 0, 0)"
        if buffer.alias is not None and buffer.first_channel is not None:
            return f"channels_from({self.image(buffer.alias)}, {buffer.first_channel})"
        *sides, pixel = buffer.nhwc_sizes()
        sizes = ", ".join(map(self.dim, (*sides, pixel * buffer.dtype.bytes)))
        start = f"r->arena + r->offsets[{self.index[buffer.alias or value]}]"
        return f"image({start}, {sizes}, {buffer.halo[0]}, {buffer.halo[1]})"

    def arena_location(self, value: str) -> ArenaLocation:
        """Return the location of a quantized value in the arena, for host operators."""
        buffer = self.plan.buffers[value]
        (rows, columns), (_, _, width, pixel) = buffer.halo, buffer.nhwc_sizes()
        start = (rows * (width + 2 * columns) + columns) * pixel
        frame = buffer.size() if any(buffer.halo) else 0
        return ArenaLocation(self.index[buffer.alias or value], start, buffer.shape, strides(buffer), frame)

    def strided(self, value: str) -> tuple[str, Strides]:
        """Return a C pointer to the first element of a value, and the strides of its logical axes in elements.

        A tensor of the caller is dense (see `External.dense`) unless `Plan.strided` has it.
        """
        location = self.plan.location(value)
        buffer = self.plan.buffers.get(location.root)
        if buffer is not None:
            at = f"r->arena + r->offsets[{self.index[buffer.alias or location.root]}]"
        else:
            constant = location.root in self.graph.constants
            at = self.stored_constant(location.root, "values") if constant else self.external(location.root)
        behind = location.start * self.graph.types[value].dtype.bytes
        pointer = at if behind == 0 else f"{at} + {self.dim(behind)}"
        return f"({pointer})", location.strides

    def external(self, value: str) -> str:
        """Return a C expression for the data pointer of a tensor of the caller."""
        return f"r->external[{self.plan.external.index(value)}]"

    def strides(self, value: str) -> str:
        """Return a C pointer to the strides of a tensor of the caller."""
        return f"r->strides + {5 * self.plan.external.index(value)}"

    def grows(self, value: str) -> str:
        """Return a C condition: this call has memory for new values behind the tensor that a concatenation extends."""
        return f"grows(r, {self.plan.external.index(self.plan.growing[value])})"

    def is_program_input(self, value: str) -> bool:
        """Return whether the program only reads a tensor of the caller: a graph input or a result of an island."""
        producers = [op for op in self.graph.ops if value in op.outputs]
        return not producers or producers[0].is_island

    def halo(self, value: str) -> bool:
        """Return whether a value has a halo that must be filled."""
        return value in self.plan.buffers and any(self.plan.buffers[value].halo)

    def result_table(self, entries: np.ndarray) -> str:
        """Return the `struct ResultTable` of u8[256] `entries`, which results are looked up in."""
        self.include("elementwise/lookup.h")
        return f"{{look_up_in_place, {self.constant(entries, 'uint8_t', 'table')}}}"

    def limits(self, op: Op) -> str:
        """Return a pointer to the `struct Limits` of an operator's results, which have 8 or 16 bits."""
        kind, (low, high), rest = self.graph.types[op.output], result_bounds(op, self.graph), len(op.outputs) > 1
        q = kind.qparams
        if kind.dtype is DType.S8:  # copies for the caller have no halo, which alone would be filled with these
            q, low, high = q.with_offset(SIGN_OFFSET), low + SIGN_OFFSET, high + SIGN_OFFSET
        other = self.graph.types[op.inputs[1]].qparams.zero if op_def(op).pairwise else 0
        if op_def(op).residual is not None and op.inputs[4:]:
            other = numerics.join_16bit(other, self.graph.types[op.inputs[4]].qparams.zero).item()
        zero = numerics.widen_to_16bit(1, q.zero).zero_point if rest else q.zero
        return self.constant(limits(zero, low, high, other, rest), "struct Limits", "limits")

    def dims_used(self, text: str) -> list[str]:
        """Return declarations of the dynamic dimensions and of the strides of callers' tensors that a function body
        uses."""
        words = set(re.findall(r"\b[a-z]\w*\b", text))
        return [f"const int64_t {name} = {source};" for name, source in self._declared.items() if name in words]

    def _declarations(self) -> dict[str, str]:
        """Return where each free dimension, and each stride of callers' tensors, is read. The order is the same in
        every process, because the text of a program is the key of its library in the cache."""
        found = {name: f"r->dims[{index}]" for index, name in enumerate(self.symbols)}
        for value in sorted(self.plan.strided):
            steps = caller_strides(value, self.graph.types[value].shape)
            found |= {str(step): f"({self.strides(value)})[{axis}]" for axis, step in enumerate(steps)}
        return found


def step_symbol(number: int, name: str) -> str:
    """Return the name of the C++ function of a step."""
    return f"p{number:02d}_{sanitized(name)}"


def limits(zero_point: int, low: int, high: int, other_zero_point: int, has_remainder: bool = False) -> np.ndarray:
    """Return the bytes of `struct Limits` (native/products/tile.h).

    Args:
        zero_point: Zero point of the result.
        low: Smallest quantized value.
        high: Largest quantized value.
        other_zero_point: Zero point of the second operand, if there is one.
        has_remainder: Whether zero point and bounds are those of 16-bit values.
    """
    parts = (
        np.full(32, zero_point, np.uint16),
        np.full(64, 0 if has_remainder else low, np.uint8),
        np.full(64, 255 if has_remainder else high, np.uint8),
        np.full(32, low, np.uint16),
        np.full(32, high, np.uint16),
        np.array([zero_point, low, high, other_zero_point], np.int32),
        np.array([-(2.0**30), 2.0**30], np.float32),
        np.zeros(10, np.int32),
    )
    return np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)


def describe(partition: Partition, graph: Graph) -> str:
    """Return the types of a partition's activations, such as `u8[n, 64, 56, 56] -> u8[n, 64, 56, 56]`."""

    def kinds(names: Iterable[str]) -> str:
        types = [graph.types[name] for name in names]
        return ", ".join(f"{kind.dtype}[{', '.join(map(str, kind.shape))}]" for kind in types)

    read = [name for name in partition.reads() if name not in graph.constants]
    return f"{kinds(read)} -> {kinds(partition.ops[-1].outputs)}"


def fill_result_halo(code: Code, context: Context, value: str, limits: str) -> None:
    """Print code that fills the halo of a result, which every run does again."""
    if context.halo(value):
        context.include("base/image.h")
        code(f"const struct Image frame = {context.image(value)};")
        code(f"fill_halo(&frame, (uint8_t)({limits})->zero_point, thread, threads);")
