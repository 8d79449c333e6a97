"""Float loops under test: samples of every type, strange numbers among them, and their comparison."""

import numpy as np
import torch
from torch.utils import _pytree as pytree

from intaglio.ir import DType, Graph, Input, Op, Output, QParams, Signature, TensorType, symbol
from intaglio.lower import Lowered
from intaglio.ops import check_graph, verify
from intaglio.ops.loop_ops.loop_builder import Body as Inside
from intaglio.plan.graph_passes.loop_merging import merge_loops

N, C = symbol("n"), symbol("c")


F32, BOOL, I64, U8, BF16 = DType.F32, DType.BOOL, DType.I64, DType.U8, DType.BF16


SPECIAL_VALUES = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    3.4e38,
    -3.4e38,
    88.7,
    88.73,
    -87.0,
    -88.0,
    2.5,
    -3.5,
    0.5,
]


class LoopGraph:
    """A graph of loops over inputs; ``add`` writes one loop whose body ``write`` fills. Results that are quantized
    values leave the graph dequantized."""

    def __init__(self, **inputs: TensorType) -> None:
        self.inputs, self.types, self.ops, self.outputs = tuple(inputs), dict(inputs), list[Op](), list[str]()
        self.constants: dict[str, np.ndarray] = {}

    def constant(self, array: np.ndarray, dtype: DType = F32) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name], self.types[name] = array, TensorType(array.shape, dtype)
        return name

    def quantize(self, x: str, scale: float, zero: int) -> str:
        name = f"{x}_u8"
        self.types[name] = TensorType(self.types[x].shape, U8, QParams((scale,), (zero,), 0, 255))
        self.ops.append(Op("quantize", (x,), (name,)))
        return name

    def add(self, write) -> tuple[str, ...]:
        """``write(inside)`` names the values that are results."""
        body = Inside(f"y{len(self.ops)}", self.types)
        found = write(body)
        found = (found,) if isinstance(found, str) else tuple(found)
        made = {op.output for op in body.ops} | set(body.constants)
        inputs = tuple(dict.fromkeys(n for op in body.ops for n in op.inputs if n not in made))
        inner = Graph(inputs, found, {n: body.types[n] for n in (*inputs, *made)}, tuple(body.ops), body.constants)
        self.types |= {name: body.types[name] for name in found}
        self.ops.append(Op("loop", inputs, found, {}, inner))
        for name in found:
            real = name
            if self.types[name].dtype is U8:
                real = f"{name}_f32"
                self.types[real] = TensorType(self.types[name].shape, F32)
                self.ops.append(Op("dequantize", (name,), (real,)))
            self.outputs.append(real)
        return found

    def lowered(self, merge: bool = False) -> Lowered:
        graph = verify(Graph(self.inputs, tuple(self.outputs), self.types, tuple(self.ops), self.constants))
        graph = verify(merge_loops(graph)[0]) if merge else graph
        check_graph(graph)
        inputs = tuple(Input(name, leaf, graph.types[name]) for leaf, name in enumerate(graph.inputs))
        trees = pytree.tree_structure((self.inputs, {})), pytree.tree_structure(tuple(self.outputs))
        return Lowered(graph, {}, Signature(inputs, tuple(map(Output, self.outputs)), *trees))


def write_quantize(body: Inside, x: str, scale: float, zero: int, low: int = 0, high: int = 255) -> str:
    name = body("quantize", x)
    body.types[name] = TensorType(body.types[x].shape, U8, QParams((scale,), (zero,), low, high))
    return name


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, all NaN alike."""
    if not found.dtype.is_floating_point:
        return torch.equal(found, expected)
    both = found.isnan() & expected.isnan()
    words = torch.int16 if found.dtype is torch.bfloat16 else torch.int32
    bits = [torch.where(both, torch.zeros_like(x), x).contiguous().view(words) for x in (found, expected)]
    return found.shape == expected.shape and torch.equal(*bits)


def random_rows(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers of several sizes, strange ones among them; some rows of -inf."""
    draw = np.random.default_rng(seed)
    x = (draw.standard_normal(shape) * np.exp(draw.uniform(-3, 3, shape))).astype(np.float32)
    odd = draw.random(shape) < 0.02 * (seed % 3)
    x[odd] = draw.choice(SPECIAL_VALUES, int(odd.sum()))
    if seed % 4 == 0 and x.size:
        x[..., : shape[-1]][0] = -np.inf
    return torch.from_numpy(x)
