"""Defines the record that holds everything about one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from intaglio.ir import Attrs, Dim, DType, Graph, Op, Shape, TensorType
from intaglio.ir.verify import TypeRule
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.movement.aliasing import Alias
from intaglio.ops.movement.data_movement import Box, Copies, Side, Strides, merged_copies

Result = np.ndarray | tuple[np.ndarray, ...]
"""One array, or as many as an operator has results."""


Given = Sequence[np.ndarray | None]
"""Operands of a call that are constants of the model, in float64; ``None`` for one left out."""
Kept = tuple[Mapping[str, np.ndarray], Attrs]
"""Constants that a kernel reads behind its operand, by label in their order, and the attributes that it keeps."""


@dataclass(frozen=True)
class Roles:
    """Which operands are activations, weight and bias, by position among ``OpDef.operands``; ``outputs`` is the axis
    of the weight that holds output channels (of one group)."""

    x: tuple[int, ...] = (0,)
    weight: int | None = None
    bias: int | None = None
    outputs: int = 0


@dataclass(frozen=True)
class Call:
    """One call of an operator in a captured graph, without the graph.

    ``arguments`` holds every argument by its schema name, tensors left out; ``shapes``, ``floating`` and ``constant``
    speak of ``OpDef.operands`` in order (``None`` for one left out); ``result`` is the shape of the result.
    """

    target: str
    arguments: Attrs
    shapes: tuple[Shape | None, ...]
    floating: tuple[bool | None, ...]
    constant: tuple[bool | None, ...]
    result: Shape

    def shape(self, operand: int = 0) -> Shape:
        """Shape of an operand that must be there."""
        found = self.shapes[operand]
        if found is None:
            raise ValueError(f"{self.target}: operand {operand} is left out")
        return found

    def sizes(self, operand: int) -> tuple[int, ...]:
        """Shape of a constant operand, all of it numbers."""
        return tuple(int(size) for size in self.shape(operand) if isinstance(size, int))


class Layout(StrEnum):
    """Memory layout that the kernel of an operator asks for."""

    ANY = "any"
    """Operands and result may have any layouts, different ones too."""
    CHANNELS_LAST = "channels last"
    ROW_MAJOR = "row major"
    SAME = "same"
    """Operands and result have one layout, whichever it is."""


class Tail(StrEnum):
    """How the accumulators of a product leave its kernel."""

    REQUANTIZE = "requantize"
    ADD = "add"
    ACTIVATE = "activate"
    DEQUANTIZE = "dequantize"
    DEQUANTIZE_ROWS = "dequantize_rows"


@dataclass(frozen=True)
class OpDef:
    """Everything that is true of one operator. ``name`` is its kind in the integer graph.

    Annotation
        targets: ATen overloads it answers to. operands: their tensor arguments, by schema name. roles: see `Roles`.
        shares: the result has its input's parameters (it selects or clamps values); else it owns its range.
        anchor: quantized for its own sake; other operators only beside a quantized neighbour.
        variadic: the only operand is a list of tensors, all of them activations.
        bind: arguments -> attributes of the integer operator. check: why a call stays in float, or ``None``.
        instead: operand -> the record that answers to the same overloads where this operand is no constant.
        levels: how far the integer result may be from the Q/DQ reference, in quantized values.
    Meaning
        infer: shape rule over symbolic dims. meaning: the integer result in NumPy, in logical order.
        function: for a function of one value, its meaning on float64; lowering makes a lookup table of it.
        precise: for such a function, its attributes -> those of the `activate` that computes it on an accumulator.
        scales: it multiplies or divides by a number, which behind a product of activations scales its unit.
        loop: how a program computes it between floats; ``None``: an island does.
    Integer graph
        constants: (attributes, shape of the operand, constants of the model, scale of the operand, of the result) ->
            what the kernel reads beside the operand; ``None``: nothing.
        types: element types of operands and results, or a function of the attributes that gives them; ``None``: any.
        validate: raises ValueError for a graph from a file that breaks what the kernel relies on.
        needs: expressions over free sizes that must not be negative in a call, each with what it means.
        window: its attributes are sizes and positions, of which none is negative.
        fewest_pixels: pixels that a result has at least along every axis of an image.
        has_body: it has a body, which has the shapes of its results.
        results_differ: results beyond the first have shapes of their own, which ``validate`` checks.
    Cost and kernel
        passes_factors: a positive factor on a channel of its operand is one on that channel of its result.
        macs: (attributes, shapes of the operands, shape of the result) -> multiply-accumulates of a call.
        widens_halves: a model in bfloat16 or float16 that has one is computed in float32, as its accumulators are.
        accumulates: the result is an int32 accumulator, which one operator reads and turns into quantized values.
        layout: what its kernel asks for, or a function of the operator and the types of its values that gives it.
        batch_separable: each image of the result is made of that image alone, where the batch is the first axis.
        any_strides: the kernel reads and writes any strides along all axes but the last. reads_any_strides: it reads
            any strides, so its operand is free.
        copies: for data movement, the strided copies it is made of. alias: how it can be a view.
        changes_nothing: whether a call of it can be dropped. follows_product: it can run in the kernel of the product
            whose quantized values it alone reads. tail: how it takes the accumulators of a product, where it can.
        residual: the operand that it adds to an accumulator, its first operand.
        sums_image: threads may sum one image together where the result is one pixel.
        keeps_last_axis: (attributes, rank of the operand) -> whether data movement along other axes leaves the last one
            as it is, unless its size changes.
        keeps_order: it keeps elements in logical order, whatever shape it gives them.
        scratch: 64-byte lines that one thread needs for itself; ``shared_scratch``: that all threads share.
        kernel: family of kernels, ``None`` for a host operator. emit: the emitter, where it is not the family's.
    """

    name: str
    targets: tuple[str, ...] = ()
    operands: tuple[str, ...] = ("self",)
    roles: Roles = Roles()
    shares: bool = False
    anchor: bool = False
    commutative: bool = False
    variadic: bool = False
    bind: Callable[[Call], Attrs] = lambda call: {}
    check: Callable[[Call], str | None] = lambda call: None
    instead: Mapping[str, OpDef] = field(default_factory=dict, hash=False)
    levels: int = 1
    infer: Callable[[Attrs, Sequence[Shape]], Shape] = lambda attrs, shapes: shapes[0]
    meaning: Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], Result] | None = None
    function: Callable[[np.ndarray, Attrs], np.ndarray] | None = None
    precise: Callable[[Attrs], Attrs] | None = None
    scales: bool = False
    loop: FloatLoop | None = None
    constants: Callable[[Attrs, Shape, Given, float, float], Kept] | None = None
    types: TypeRule | Callable[[Attrs], TypeRule] | None = None
    validate: Callable[[Op, Graph], None] = lambda op, graph: None
    needs: Callable[[Op, Graph], Iterable[tuple[Dim, str]]] = lambda op, graph: ()
    window: bool = False
    fewest_pixels: int = 0
    has_body: bool = False
    results_differ: bool = False
    passes_factors: bool = False
    macs: Callable[[Attrs, Sequence[Shape], Shape], Dim] | None = None
    widens_halves: bool = False
    accumulates: bool = False
    layout: Layout | Callable[[Op, Mapping[str, TensorType]], Layout] = Layout.ANY
    batch_separable: bool = False
    any_strides: bool = False
    reads_any_strides: bool = False
    copies: Copies | None = None
    alias: Alias | None = None
    changes_nothing: Callable[[Op, Graph], bool] = lambda op, graph: False
    follows_product: bool = False
    tail: Tail | None = None
    keeps_last_axis: Callable[[Attrs, int], bool] = lambda attrs, axes: False
    keeps_order: bool = False
    residual: int | None = None
    sums_image: bool = False
    scratch: Callable[[Op, Mapping[str, TensorType]], Dim] = lambda op, types: 0
    shared_scratch: Callable[[Op, Mapping[str, TensorType]], Dim] = lambda op, types: 0
    kernel: str | None = None
    emit: str = ""

    @property
    def has_integer_form(self) -> bool:
        """Whether it is, or becomes, an operator of the integer graph; else it runs in float, in loops or islands."""
        return self.kernel is not None or self.meaning is not None or self.function is not None

    @property
    def computes_on_accumulator(self) -> bool:
        """Whether a product can go on with it on its accumulators: a precise function, or factors per channel."""
        return self.precise is not None or self.emit == "affine"

    @property
    def multiplies_weight(self) -> bool:
        """Whether it multiplies activations by a constant weight into an accumulator, as convolutions do."""
        return self.accumulates and self.roles.weight is not None

    @property
    def convolves(self) -> bool:
        """Whether it is a convolution, plain or transposed."""
        return self.multiplies_weight and self.layout is Layout.CHANNELS_LAST

    @property
    def is_linear_layer(self) -> bool:
        """Whether it multiplies the last axis by a constant weight."""
        return self.multiplies_weight and not self.convolves

    @property
    def adds(self) -> bool:
        """Whether it adds two activations; one of them may be an accumulator."""
        return self.residual is not None

    @property
    def multiplies_activations(self) -> bool:
        """Whether it multiplies activations by each other."""
        return self.macs is not None and len(self.roles.x) > 1

    @property
    def multiplies_floats(self) -> bool:
        """Whether it multiplies float activations by a stored weight."""
        return self.macs is not None and isinstance(self.types, TypeRule) and self.types.operands[0] == (DType.F32,)

    @property
    def leaves_room(self) -> bool:
        """Whether its kernel writes pixels at any distance, as those of convolutions and pools do."""
        return self.window and self.layout is Layout.CHANNELS_LAST and not self.moves_data

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution, which spreads inputs over outputs."""
        return self.roles.outputs == 1

    @property
    def moves_data(self) -> bool:
        """Whether it moves elements of any type and changes none."""
        return self.copies is not None

    @property
    def pairwise(self) -> bool:
        """Whether it combines two quantized values element by element."""
        return self.emit == "pair"

    @property
    def borders_caller(self) -> bool:
        """Whether it quantizes floats of the caller, whatever their strides are."""
        return self.kernel == "border" and not self.dequantizes

    @property
    def attends(self) -> bool:
        """Whether it is attention, which reads its mask as it is."""
        return self.kernel == "attention" and not self.accumulates

    @property
    def clamps(self) -> bool:
        """Whether it bounds values; a partition folds the bounds into its own."""
        return self.emit == "clamp"

    @property
    def normalizes(self) -> bool:
        """Whether it normalizes rows, and gives them the same scale whatever the scale of its input was."""
        return self.kernel == "norm"

    @property
    def recurrent(self) -> bool:
        """Whether it steps through time and carries states."""
        return self.kernel == "recurrent"

    @property
    def quantizes_accumulator(self) -> bool:
        """Whether it can turn an accumulator into quantized values."""
        rule = self.types
        return isinstance(rule, TypeRule) and DType.I32 in rule.operands[0] and DType.U8 in rule.results

    @property
    def quantizes(self) -> bool:
        """Whether it turns floats into quantized values, whose parameters are constants."""
        return self.converts and isinstance(self.types, TypeRule) and DType.U8 in self.types.results

    @property
    def dequantizes(self) -> bool:
        """Whether it turns quantized values into floats."""
        return self.converts and not self.quantizes

    @property
    def converts(self) -> bool:
        """Whether it converts between floats and quantized values, inside a loop as outside."""
        return self.kernel == "border" and len(self.operands) == 1

    @property
    def emitter(self) -> str:
        """The key of the function that prints its step."""
        return self.emit or self.kernel or ""

    def strided_copies(self, op: Op, sources: Sequence[Side], to: Strides, size: int = 1) -> tuple[Box, ...]:
        """Return the copies of one call between any strides, in bytes of elements that have ``size`` of them."""
        if self.copies is None:
            raise ValueError(f"{self.name} moves no data")
        return merged_copies(self.copies, op, sources, to, size)

    def layout_of(self, op: Op, types: Mapping[str, TensorType]) -> Layout:
        """Return the layout that one call of it asks for."""
        return self.layout(op, types) if callable(self.layout) else self.layout


def first_reason(*checks: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
    """The first reason any check gives."""

    def check(call: Call) -> str | None:
        return next((reason for one in checks if (reason := one(call))), None)

    return check


def rank(*allowed: int) -> Callable[[Call], str | None]:
    """The first operand has one of these ranks."""

    def check(call: Call) -> str | None:
        shape = call.shapes[0]
        if shape is None or len(shape) in allowed:
            return None
        return f"input of rank {len(shape)}; the kernel takes {' or '.join(map(str, allowed))}"

    return check


def fixed_channels(call: Call) -> str | None:
    """The channels of an image or a line, its second axis, are a number."""
    channels = call.shape()[1]
    return None if isinstance(channels, int) else f"a free number of channels, {channels}"


def float_activations(call: Call) -> str | None:
    """Integer and boolean tensors are left alone."""
    return "an operand that is not floating point" if False in call.floating else None


def numbers(value: Any, axes: int) -> tuple[int, ...]:
    """One number per axis: ``3`` or ``[3]`` -> (3, 3); ``[3, 2]`` -> (3, 2)."""
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    return values * axes if len(values) == 1 else values
