"""Generated loops against a plain copy of as many bytes, interleaved: what share of memory's speed they reach.

    python benchmarks/loops.py                  one JSON line a case
    python benchmarks/loops.py --rounds 3       fewer rounds, to see that it runs
    python benchmarks/loops.py --record         one line more in results/

Small sizes lie in the second-level cache. Of large ones, what is read to its end has long left the caches when the
next call begins, of loop and copy alike. The copy reads half of the loop's bytes and writes half, in a loop of C whose
stores the caches take; of large ones there is another that goes past them, as large results of floats do. ``ratio`` is
the median over rounds of the copy's time by the loop's, ``of_streamed`` that of the other copy's. ``ns_64`` is the
loop's time for 64 elements, that of all threads added up: of the small sizes, what the arithmetic takes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable

import numpy as np
import record
import torch
from torch.utils import _pytree as pytree

import intaglio
from intaglio import stages
from intaglio.ir import DType, Graph, Input, Op, Output, QParams, Signature, TensorType
from intaglio.lower import Lowered
from intaglio.native import cpu as machine
from intaglio.native.compile import build, load
from intaglio.native.native_library import parallel_address
from intaglio.ops import verify
from intaglio.ops.loop_ops.loop_builder import Body
from intaglio.plan.graph_passes.lut_passes import approximate_functions

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Of mallopt: results keep their pages from call to call, as the copy's do."""
LARGE_BYTES = 1 << 26
"""Bytes, twice what the third-level cache of the recorded machine holds."""
U8_QPARAMS = QParams((0.03,), (128,), 0, 255)
COPY = """
#include "elementwise/loops.h"
#include "base/run.h"
struct Call { const float* from; float* to; int64_t count; };
static void streamed_body(void* context, int thread, int threads) {
    const struct Call* c = (const struct Call*)context;
    const int64_t lines = c->count / 64;
    const int64_t first = shard_begin(lines, thread, threads) * 64, last = shard_begin(lines, thread + 1, threads) * 64;
    for_each_block(first, last, [&](int64_t e, int64_t count, int, auto vectors) __attribute__((always_inline)) {
        enum { COUNT = decltype(vectors)::COUNT };
        Reals x[COUNT];
        EACH x[i] = read_f32(c->from + e + i * FLOATS, 1, count);
        stream_f32<COUNT>(c->to + e, count, x, is_streamed(c->to, STREAMED));
    });
    end_streams();
}
static void body(void* context, int thread, int threads) {
    const struct Call* c = (const struct Call*)context;
    const int64_t first = shard_begin(c->count, thread, threads), last = shard_begin(c->count, thread + 1, threads);
    for (int64_t i = first; i < last; ++i) c->to[i] = c->from[i];
}
extern "C" __attribute__((visibility("default")))
void copy(const float* from, float* to, int64_t count, int streamed, int threads, IntaglioParallel parallel) {
    struct Call call = {from, to, count};
    parallel(streamed ? streamed_body : body, &call, threads);
}
extern "C" __attribute__((visibility("default"))) int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}
"""


def dequantize(body: Body) -> tuple[str, ...]:
    """dequantize -> operator."""
    return (body("relu", body("dequantize", "a")),)


def quantize(body: Body) -> tuple[str, ...]:
    """operator -> quantize."""
    return (_levels(body, body("relu", "x")),)


def both(body: Body) -> tuple[str, ...]:
    """dequantize -> operator -> quantize."""
    return (_levels(body, body("add", body("dequantize", "a"), body("dequantize", "b"))),)


def floats(body: Body) -> tuple[str, ...]:
    return (body("add", "x", body("mul", "y", 0.5)),)


def gelu(body: Body) -> tuple[str, ...]:
    return (_levels(body, body("gelu", "x")),)


def residual_norm(body: Body) -> tuple[str, ...]:
    """What ends a block of a transformer: the sum as floats, its layer norm as floats and as levels."""
    total = body("add", "x", "y")
    axis = len(body.types[total].shape) - 1
    centred = body("sub", total, body("mean", total, axis=axis))
    spread = body("add", body("mean", body("mul", centred, centred), axis=axis), 1e-5)
    normal = body("add", body("mul", body("mul", centred, body("reciprocal", body("sqrt", spread))), "w"), "w")
    return normal, _levels(body, normal)


def softmax(body: Body) -> tuple[str, ...]:
    powers = body("exp", body("sub", "x", body("max", "x", axis=1)))
    return (body("mul", powers, body("reciprocal", body("sum", powers, axis=1))),)


CASES: dict[str, tuple[Callable[[Body], tuple[str, ...]], tuple[int, int]]] = {
    f"{case.__name__} {rows}x{columns}": (case, (rows, columns))
    for case, shapes in (
        (dequantize, ((128, 768), (65536, 1024))),
        (quantize, ((128, 768), (65536, 1024))),
        (both, ((128, 768), (65536, 1024))),
        (floats, ((128, 768), (65536, 1024))),
        (gelu, ((128, 3072), (65536, 1024))),
        (residual_norm, ((128, 768), (65536, 768))),
        (softmax, ((1536, 128), (65536, 384))),
    )
    for rows, columns in shapes
}


def _levels(body: Body, value: str) -> str:
    name = body("quantize", value)
    body.types[name] = TensorType(body.types[value].shape, DType.U8, U8_QPARAMS)
    return name


def model_of(write: Callable[[Body], tuple[str, ...]], shape: tuple[int, int]) -> intaglio.QuantizedModel:
    """A program that quantizes what the loop reads as levels and dequantizes what it gives so."""
    real, levels = TensorType(shape, DType.F32), TensorType(shape, DType.U8, U8_QPARAMS)
    row = TensorType(shape[1:], DType.F32)
    types = {"x": real, "y": real, "a": levels, "b": levels, "w": row}
    body = Body("loop", types)
    results = write(body)
    made = {op.output for op in body.ops} | set(body.constants)
    read = tuple(dict.fromkeys(name for op in body.ops for name in op.inputs if name not in made))
    inner = Graph(read, results, {n: body.types[n] for n in (*read, *made)}, tuple(body.ops), body.constants)
    types |= {name: body.types[name] for name in results}
    ops = [Op("quantize", (source,), (name,)) for source, name in (("x", "a"), ("y", "b")) if name in read]
    ops.append(Op("loop", read, results, {}, inner))
    outputs = []
    for name in results:
        outputs.append(name)
        if types[name].dtype is DType.U8:
            outputs[-1] = f"{name}_real"
            types[outputs[-1]] = real
            ops.append(Op("dequantize", (name,), (outputs[-1],)))
    constants = {"w": np.ones(shape[1], np.float32)} if "w" in read else {}
    inputs = tuple(name for name in "xy" if name in read or {"x": "a", "y": "b"}[name] in read)
    used = {*inputs, *constants, *(n for op in ops for n in (*op.inputs, *op.outputs))}
    graph = Graph(inputs, tuple(outputs), {n: types[n] for n in used}, tuple(ops), constants)
    entries = tuple(Input(name, leaf, real) for leaf, name in enumerate(inputs))
    trees = pytree.tree_structure((inputs, {})), pytree.tree_structure(tuple(outputs))
    signature = Signature(entries, tuple(map(Output, outputs)), *trees)
    return stages.compile(Lowered(verify(approximate_functions(graph)[0]), {}, signature))


def measure(name: str, rounds: int, calls: int) -> dict[str, object]:
    """Microseconds of the loop and of the copy, and their ratio."""
    write, shape = CASES[name]
    model, library = model_of(write, shape), load(build(COPY, name="copy", isa=machine.isas()[0]))
    library.nanoseconds.restype = ctypes.c_int64
    given = [torch.randn(shape) for _ in model.signature.inputs]
    step = next(i for i, note in enumerate(model.artifact.program.steps) if note.kinds == "loop")
    total = int(model.artifact.program.steps[step].cost.bytes)
    half = total // 2 & -4096
    source, result = torch.ones(half // 4), torch.ones(half // 4)
    loops, copies = list[float](), ([], [])

    def copy(streamed: int) -> float:
        ends = (ctypes.c_void_p(array.data_ptr()) for array in (source, result))
        count, parallel = ctypes.c_int64(half // 4), ctypes.c_void_p(parallel_address())
        begin = library.nanoseconds()
        library.copy(*ends, count, streamed, torch.get_num_threads(), parallel)
        return (library.nanoseconds() - begin) / 1e3

    for _ in range(rounds):
        found = model.profile(*given, calls=calls)
        loops.append(next(one.microseconds for one in found.parts if one.kinds == "loop"))
        for streamed, times in enumerate(copies):
            times.append(statistics.median(copy(streamed) for _ in range(calls)))
    plain, streamed = (
        statistics.median(copy / loop for copy, loop in zip(times, loops, strict=True)) for times in copies
    )
    loop, threads = statistics.median(loops), torch.get_num_threads()
    return {
        "case": name,
        "bytes": total,
        "loop_us": round(loop, 2),
        "copy_us": round(statistics.median(copies[0]), 2),
        "ratio": round(plain, 3),
        "of_streamed": round(streamed, 3) if total >= LARGE_BYTES else None,
        "ns_64": round(1e3 * loop * threads * 64 / (shape[0] * shape[1]), 2),
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--record", action="store_true", help="add the figures to benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 1 << 30), libc.mallopt(TRIM_THRESHOLD, 1 << 30)
    results = []
    for name in CASES:
        if given.only in name:
            results.append(measure(name, given.rounds, given.calls))
            print(json.dumps(results[-1]), flush=True)
    if given.record:
        record.append("loops", given, {"idle": record.idle(), "rows": results})


if __name__ == "__main__":
    main()
