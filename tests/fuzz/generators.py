"""The table of generators by operator record, and the records that need none."""

from __future__ import annotations

from collections.abc import Callable

from fuzz import calls_images as images
from fuzz import calls_movement as movement
from fuzz import calls_rows as rows
from fuzz.builder import Builder
from fuzz.calls_elementwise import (
    ONE,
    POSITIVE,
    REDUCTIONS,
    TRUTHS,
    TWO,
    WRITTEN,
    cast,
    channels,
    comparison,
    division,
    in_place,
    masked_fill,
    of_one,
    of_positive,
    of_truths,
    of_two,
    prelu,
    reduction,
    residual,
    where,
)

Generator = Callable[[Builder], str]

GENERATORS: dict[str, Generator] = {
    **{f"conv{axes}d": images.conv(axes) for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": images.conv_transpose(axes) for axes in (1, 2, 3)},
    **{f"max_pool{axes}d": images.max_pool(axes) for axes in (1, 2, 3)},
    **{f"avg_pool{axes}d": images.avg_pool(axes) for axes in (1, 2, 3)},
    **{f"adaptive_avg_pool{axes}d": images.adaptive_avg_pool(axes) for axes in (1, 2, 3)},
    **{f"upsample_nearest{axes}d": images.resize("nearest", axes) for axes in (1, 2, 3)},
    "upsample_linear1d": images.resize("linear", 1),
    "upsample_bilinear2d": images.resize("bilinear", 2),
    "batch_norm": images.batch_norm,
    "shuffle": images.shuffle,
    "pixel_shuffle": images.pixel_shuffle,
    "pixel_unshuffle": images.pixel_unshuffle,
    "grid_sampler": images.grid_sample,
    "upsample_bicubic2d": images.resize("bicubic", 2),
    "upsample_trilinear3d": images.resize("trilinear", 3),
    "linear": rows.linear,
    "grouped_linear": rows.experts,
    "layer_norm": rows.layer_norm,
    "rms_norm": rows.rms_norm,
    "bmm": rows.matmul,
    "attention": rows.attention,
    **{kind: rows.recurrent(kind) for kind in rows.RECURRENT_MODULES},
    "embedding": rows.embedding,
    "embedding_bag": rows.embedding_bag,
    "mm": rows.float_product("mm"),
    "batched_mm": rows.float_product("bmm"),
    "vecdot": rows.vector_product,
    "distances": rows.distances,
    "conv_tbc": rows.conv_tbc,
    **{name: rows.float_product(name) for name in ("addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "inner")},
    "einsum": rows.float_product("einsum"),
    "bilinear": rows.float_product("bilinear"),
    "convolution": rows.convolution,
    "reshape": movement.reshape,
    "slice": movement.slice_,
    "pad": movement.pad,
    "cat": movement.cat,
    "permute": movement.permute,
    "expand": movement.expand,
    "index": movement.index,
    "gather_elements": movement.gather,
    "scatter": movement.scatter,
    "cumsum": movement.cumsum,
    "integer_sum": movement.integer_sum,
    "extremum": movement.extremum,
    "argsort": movement.argsort,
    **dict.fromkeys(("shift_left", "shift_right"), movement.integers),
    **{name: of_one(*templates) for name, templates in ONE.items()},
    **{name: of_positive(*templates) for name, templates in POSITIVE.items()},
    **{name: of_two(*templates) for name, templates in TWO.items()},
    **{name: of_truths(*templates) for name, templates in TRUTHS.items()},
    **{name: reduction(*templates) for name, templates in REDUCTIONS.items()},
    **{name: comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "div": division,
    "where": where,
    "masked_fill": masked_fill,
    "cast": cast,
    "affine": channels,
    "scaled_add": channels,
    "prelu": prelu,
}
"""Record -> what adds a call of it to a network."""

COMPOSITIONS: dict[str, Generator] = {
    "residual": residual,
    "squeeze_excite": images.squeeze_excite,
    "separable": images.separable,
    "head": images.global_pool_head,
    "transformer_block": rows.transformer_block,
    **{f"{kind}_cell": rows.recurrent_cell(kind) for kind in rows.RECURRENT_MODULES},
    "in_place": in_place(*WRITTEN),
    "other_movement": movement.other_movement,
    "int_values": rows.int_values,
}
"""Blocks of several operators that fusions look for, and calls without a record of their own."""

WITHOUT_GENERATOR: dict[str, str] = {
    "hadamard": "only rotations at run time insert it; tests/ops/test_hadamard_blocks.py runs it",
    **dict.fromkeys(
        (
            *("requantize", "dequantize", "quantize", "table", "activate", "loop", "unfold_depth"),
            *("pool_f32", "resize_f32", "grid_sample", "dequantize_groups"),
        ),
        "exists in the integer graph only, where conversion writes it",
    ),
    **dict.fromkeys(
        ("quantize_rows", "dequantize_rows", "linear_f32", "grouped_linear_f32", "linear_groups_f32"),
        "exists in the integer graph only, for recipes of dynamic or weight-only quantization",
    ),
    "flip": "exists in the integer graph only, for the halves of rotary position embedding",
    "pixels": "exists in the integer graph only, for inputs that are declared as images",
    "arange": "exists in the integer graph only, for ranges of free sizes",
    "grouped_mm": "an operator of mixtures of experts without a kernel in PyTorch for float32 on every processor",
    "grouped_mm_fallback": "an operator of the package transformers",
}
"""Records that no call is drawn for, and why."""

LAYERS = (
    "conv2d",
    "conv2d",
    "linear",
    "linear",
    "conv1d",
    "residual",
    "separable",
    "squeeze_excite",
    "conv_transpose2d",
)
"""Drawn more often: without them most operators would have no quantized neighbour."""
