"""The operator record, which holds all properties of one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from intaglio.argument_checks import check_arguments, check_fields
from intaglio.ir import Attrs, Dim, DType, Graph, Op, Shape, TensorType
from intaglio.ir.verify import TypeRule
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.movement.aliasing import Alias
from intaglio.ops.movement.data_movement import Box, Copies, Side, Strides, merged_copies

Result = np.ndarray | tuple[np.ndarray, ...]
"""One array, or a tuple with one array per result of the operator."""


ModelConstants = Sequence[np.ndarray | None]
"""Constant operands of a call in float64; ``None`` for an operand that is left out."""
KernelConstants = tuple[Mapping[str, np.ndarray], Attrs]
"""Constants that a kernel reads after its operand, by label in order, and the attributes of the integer operator."""


@check_fields
@dataclass(frozen=True)
class Roles:
    """Roles of operands, as positions in ``OpDef.operands``.

    Attributes:
        x: Positions of the activations.
        weight: Position of the weight, if there is one.
        bias: Position of the bias, if there is one.
        outputs: Axis of the weight for the output channels (of one group).
    """

    x: tuple[int, ...] = (0,)
    weight: int | None = None
    bias: int | None = None
    outputs: int = 0


@dataclass(frozen=True)
class Call:
    """One call of an operator in a captured graph, without the graph.

    Attributes:
        target: ATen overload.
        arguments: All arguments by schema name, except for tensors.
        shapes: Shapes of ``OpDef.operands`` in order; ``None`` for an operand that is left out.
        floating: Operands that are floating point, in the same order.
        constant: Operands that are constants of the model, in the same order.
        result: Shape of the result.
    """

    target: str
    arguments: Attrs
    shapes: tuple[Shape | None, ...]
    floating: tuple[bool | None, ...]
    constant: tuple[bool | None, ...]
    result: Shape

    @check_arguments
    def shape(self, operand: int = 0) -> Shape:
        """Return the shape of an operand; raise `ValueError` if it is left out."""
        found = self.shapes[operand]
        if found is None:
            raise ValueError(f"{self.target}: the optional operand {operand} is missing")
        return found

    @check_arguments
    def sizes(self, operand: int) -> tuple[int, ...]:
        """Return the integer sizes of a constant operand."""
        return tuple(int(size) for size in self.shape(operand) if isinstance(size, int))


class Layout(StrEnum):
    """Memory layout that the kernel of an operator requires."""

    ANY = "any"
    """Operands and result may have any layouts, also different ones."""
    CHANNELS_LAST = "channels last"
    ROW_MAJOR = "row major"
    SAME = "same"
    """Operands and result share a layout, which may be any."""


class Tail(StrEnum):
    """Kinds of operators that read the accumulators of a product in its kernel."""

    REQUANTIZE = "requantize"
    ADD = "add"
    ACTIVATE = "activate"
    DEQUANTIZE = "dequantize"
    DEQUANTIZE_ROWS = "dequantize_rows"


@check_fields
@dataclass(frozen=True)
class OpDef:
    """All properties of one operator.

    Attributes:
        name: Kind in the integer graph.
        targets: ATen overloads that the record describes.
        operands: Tensor arguments by schema name.
        roles: See `Roles`.
        shares_qparams: The result has the parameters of the input, of which it selects or clamps values.
        anchor: Always quantized; other operators only next to a quantized neighbour.
        commutative: The first two operands may be swapped.
        variadic: The only operand is a list of tensors, all of them activations.
        bind: Converts the arguments to the attributes of the integer operator.
        check: Returns why a call stays in float, or ``None``.
        if_not_constant: Record with the same overloads that applies if this operand is not a constant.
        tolerance: Maximum difference of the integer result from the Q/DQ reference, in quantization steps.
        infer: Shape rule over symbolic dimensions.
        reference: Reference implementation of the integer result in NumPy, in logical order.
        function: Elementwise function in float64, from which lowering computes a lookup table.
        precise: Converts attributes to those of the `activate` that computes the function on an accumulator.
        multiplies_by_scalar: It multiplies or divides by a number, which is folded into the scale of a preceding
            product of activations.
        loop: Loop that computes the operator between float tensors; ``None`` for those without a loop.
        in_float: Called with the attributes of a call; returns name and attributes of the record whose kernel computes
            the operator between float tensors.
        constants: Called with (attributes, shape of the operand, constants of the model, scale of the operand, of the
            result); returns what the kernel reads besides the operand.
        types: Element types of operands and results, or a function of the attributes; ``None`` accepts any.
        validate: Raises ValueError if a deserialized graph breaks a precondition of the kernel.
        needs: Yields expressions over free sizes that must not be negative in a call, each with the problem if it is.
        window: The attributes are sizes and positions that must not be negative.
        min_pixels: Minimum size of the result along every axis of an image.
        has_body: The operator has a body, which determines the shapes of its results.
        results_differ: Results beyond the first have other shapes, which ``validate`` checks.
        steep: Called with the attributes of a call; returns the position of an operand that it divides by, or takes the
            root or logarithm of. Such operands are not rounded to 256 values, because small ones would become zero.
        passes_factors: Scaling a channel of the operand by a positive factor scales the same channel of the result.
        macs: Called with (attributes, shapes of the operands, shape of the result); returns multiply-accumulates.
        computed_in_float32: A bfloat16 or float16 model with this operator is computed in float32, as its accumulators
            are.
        row_groups: Rows of the operand are in groups, each with a weight of its own; the last operand has their ends.
        accumulates: The result is an int32 accumulator, which exactly one operator requantizes or dequantizes.
        layout: Layout that the kernel requires, or a function of the operator and the types of its values.
        batch_separable: Each image of the result depends only on the same image; the batch is the first axis.
        any_strides: The kernel reads and writes any strides along all axes but the last.
        reads_any_strides: The kernel reads any strides, so that its operand's layout is free.
        copies: Strided copies of a data movement operator.
        alias: View rules of a data movement operator.
        changes_nothing: Returns whether a call is an identity and can be dropped.
        follows_product: It can run in the kernel of a product if it is the only reader of the product's quantized
            values.
        tail: Kind of tail, if it can read the accumulators of a product.
        keeps_last_axis: Called with (attributes, rank of the operand); returns whether data movement along other axes
            leaves the last one as it is, unless its size changes.
        keeps_order: Elements keep their logical order, whatever the shape of the result.
        residual: Position of the operand that is added to an accumulator, the first operand.
        sums_image: Threads may sum one image together if the result is one pixel.
        scratch: 64-byte lines of scratch memory that each thread needs.
        shared_scratch: 64-byte lines of scratch memory that all threads share.
        why_not_int4: Return why a call's weight is not read in 4 bits, or ``None``.
        direct: The kernel reads and writes tensors as the model has them; no recipe quantizes them.
        kernel: Kernel family; ``None`` for a host operator.
        emit: Key of the emitter if it is not that of the family.
    """

    name: str
    targets: tuple[str, ...] = ()
    operands: tuple[str, ...] = ("self",)
    roles: Roles = Roles()
    shares_qparams: bool = False
    anchor: bool = False
    commutative: bool = False
    variadic: bool = False
    bind: Callable[[Call], Attrs] = lambda call: {}
    check: Callable[[Call], str | None] = lambda call: None
    if_not_constant: Mapping[str, OpDef] = field(default_factory=dict, hash=False)
    tolerance: int = 1
    infer: Callable[[Attrs, Sequence[Shape]], Shape] = lambda attrs, shapes: shapes[0]
    reference: Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], Result] | None = None
    function: Callable[[np.ndarray, Attrs], np.ndarray] | None = None
    precise: Callable[[Attrs], Attrs] | None = None
    multiplies_by_scalar: bool = False
    loop: FloatLoop | None = None
    in_float: Callable[[Attrs], tuple[str, Attrs]] | None = None
    constants: Callable[[Attrs, Shape, ModelConstants, float, float], KernelConstants] | None = None
    types: TypeRule | Callable[[Attrs], TypeRule] | None = None
    validate: Callable[[Op, Graph], None] = lambda op, graph: None
    needs: Callable[[Op, Graph], Iterable[tuple[Dim, str]]] = lambda op, graph: ()
    window: bool = False
    min_pixels: int = 0
    has_body: bool = False
    results_differ: bool = False
    steep: Callable[[Attrs], int | None] = lambda attrs: None
    passes_factors: bool = False
    macs: Callable[[Attrs, Sequence[Shape], Shape], Dim] | None = None
    computed_in_float32: bool = False
    row_groups: bool = False
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
    why_not_int4: Callable[[Op, Mapping[str, TensorType]], str | None] = lambda op, types: "it has no such kernel"
    direct: bool = False
    kernel: str | None = None
    emit: str = ""

    @property
    def has_integer_form(self) -> bool:
        """Return whether the operator exists in the integer graph in some form; else it runs in loops or islands."""
        return self.kernel is not None or self.reference is not None or self.function is not None

    @property
    def computes_on_accumulator(self) -> bool:
        """Return whether a product can apply it to its accumulators: a precise function, or factors per channel."""
        return self.precise is not None or self.emit == "affine"

    @property
    def multiplies_weight(self) -> bool:
        """Return whether it multiplies activations by a constant weight into an accumulator, like a convolution."""
        return self.accumulates and self.roles.weight is not None

    @property
    def convolves(self) -> bool:
        """Return whether it is a convolution, plain or transposed."""
        return self.multiplies_weight and self.layout is Layout.CHANNELS_LAST

    @property
    def is_linear_layer(self) -> bool:
        """Return whether it multiplies the last axis by a constant weight."""
        return self.multiplies_weight and not self.convolves

    @property
    def adds(self) -> bool:
        """Return whether it adds two activations, one of which may be an accumulator."""
        return self.residual is not None

    @property
    def multiplies_activations(self) -> bool:
        """Return whether it multiplies activations by each other."""
        return self.macs is not None and len(self.roles.x) > 1

    @property
    def multiplies_floats(self) -> bool:
        """Return whether it multiplies float activations by a stored weight."""
        return self.macs is not None and isinstance(self.types, TypeRule) and self.types.operands[0] == (DType.F32,)

    @property
    def writes_any_pixel_stride(self) -> bool:
        """Return whether its kernel can write pixels at any distance, as those of convolutions and pools do."""
        return self.window and self.layout is Layout.CHANNELS_LAST and not self.moves_data

    @property
    def transposed(self) -> bool:
        """Return whether it is a transposed convolution."""
        return self.roles.outputs == 1

    @property
    def moves_data(self) -> bool:
        """Return whether it moves elements of any type without changing them."""
        return self.copies is not None

    @property
    def pairwise(self) -> bool:
        """Return whether it combines two quantized tensors elementwise."""
        return self.emit == "pair"

    @property
    def borders_caller(self) -> bool:
        """Return whether it quantizes floats of the caller, which may have any strides."""
        return self.kernel == "border" and not self.dequantizes

    @property
    def is_attention(self) -> bool:
        """Return whether it is attention, whose mask stays float or bool."""
        return self.kernel == "attention" and not self.accumulates

    @property
    def clamps(self) -> bool:
        """Return whether it clamps values; a partition folds the bounds into its own."""
        return self.emit == "clamp"

    @property
    def normalizes(self) -> bool:
        """Return whether it normalizes rows, so that the result does not depend on the scale of the input."""
        return self.kernel == "norm"

    @property
    def recurrent(self) -> bool:
        """Return whether it is recurrent: an LSTM, GRU or plain RNN."""
        return self.kernel == "recurrent"

    @property
    def quantizes_accumulator(self) -> bool:
        """Return whether it can requantize an accumulator."""
        rule = self.types
        return isinstance(rule, TypeRule) and DType.I32 in rule.operands[0] and DType.U8 in rule.results

    @property
    def quantizes(self) -> bool:
        """Return whether it quantizes floats with constant parameters."""
        return self.converts and isinstance(self.types, TypeRule) and DType.U8 in self.types.results

    @property
    def dequantizes(self) -> bool:
        """Return whether it dequantizes to floats."""
        return self.converts and not self.quantizes

    @property
    def converts(self) -> bool:
        """Return whether it quantizes or dequantizes, inside or outside of a loop."""
        return self.kernel == "border" and len(self.operands) == 1

    @property
    def emitter(self) -> str:
        """Return the key of the function that prints its step."""
        return self.emit or self.kernel or ""

    def strided_copies(self, op: Op, sources: Sequence[Side], to: Strides, size: int = 1) -> tuple[Box, ...]:
        """Return the copies of one call for these strides; see `merged_copies`."""
        if self.copies is None:
            raise ValueError(f"{self.name} is not a data movement operator")
        return merged_copies(self.copies, op, sources, to, size)

    def layout_of(self, op: Op, types: Mapping[str, TensorType]) -> Layout:
        """Return the layout that one call requires."""
        return self.layout(op, types) if callable(self.layout) else self.layout


def first_reason(*checks: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
    """Return a check that returns the first reason of any of the given checks."""

    def check(call: Call) -> str | None:
        return next((reason for one in checks if (reason := one(call))), None)

    return check


def rank(*allowed: int) -> Callable[[Call], str | None]:
    """Return a check that the first operand has one of these ranks."""

    def check(call: Call) -> str | None:
        shape = call.shapes[0]
        if shape is None or len(shape) in allowed:
            return None
        return f"the input has {len(shape)} axes; the kernel supports {' or '.join(map(str, allowed))}"

    return check


def require_fixed_channels(call: Call) -> str | None:
    """Return why a call is refused: the number of channels (the second axis) must not be free."""
    channels = call.shape()[1]
    return None if isinstance(channels, int) else f"the number of channels, {channels}, is dynamic"


def require_float_operands(call: Call) -> str | None:
    """Return why a call is refused: its operands must be floating point."""
    return "an operand is not floating point" if False in call.floating else None


def numbers(value: Any, axes: int) -> tuple[int, ...]:
    """Return one number per axis: ``3`` or ``[3]`` gives (3, 3), ``[3, 2]`` gives (3, 2)."""
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    return values * axes if len(values) == 1 else values
