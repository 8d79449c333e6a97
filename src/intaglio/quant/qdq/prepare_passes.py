"""The fx passes that `prepare` runs on a captured graph before annotation, as literal tuples in execution order."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.fxgraph.graph_passes import Pass
from intaglio.fxgraph.passes.batch_first import batch_first
from intaglio.fxgraph.passes.batch_norm_folding import fold_batch_norm_after, fold_batch_norm_before, norm_as_affine
from intaglio.fxgraph.passes.canonicalize_matmul import parts_as_layers, products_as_linear, products_as_matmul
from intaglio.fxgraph.passes.constant_arithmetic import constants_as_affine, constants_as_numbers
from intaglio.fxgraph.passes.constant_folding import fold_constants
from intaglio.fxgraph.passes.decompositions import (
    group_norms_as_layer_norms,
    mean_as_pool,
    numbers_as_functions,
    repeats_as_concatenations,
    rolls_as_concatenations,
    selects_as_slices,
    shuffles,
    splits_as_slices,
    stacks_as_concatenations,
)
from intaglio.fxgraph.passes.fuse_attention import fuse_attention
from intaglio.fxgraph.passes.gated_activations import fuse_gated_activations
from intaglio.fxgraph.passes.lift_slices import lift_slices
from intaglio.quant.qdq.qdq_constants import convert_biases_to_i32, legalize_constants
from intaglio.quant.qdq.qdq_normalize import (
    canonicalize_qdq,
    convert_qdq_to_u8,
    decompose_unsupported_rhs,
    split_shared_qdq,
)
from intaglio.quant.qdq.qdq_propagation import propagate_qdq

QDQ_PASSES: tuple[Pass, ...] = (
    canonicalize_qdq,  # first: all others read only the canonical form that it writes
    split_shared_qdq,  # the next three rewrite a dequantize, which must have a single reader
    legalize_constants,  # constants before activations: every dequantize left reads a computed value
    convert_qdq_to_u8,
    propagate_qdq,  # after the conversion to u8: only parameters that kernels support are propagated
    split_shared_qdq,  # propagation creates duplicate quantizes
    decompose_unsupported_rhs,  # last, together with biases: operators now have their final operands
    convert_biases_to_i32,
)
"""Passes for models that already contain quantize and dequantize operators; they change nothing in a float model."""

CONSTANT_PASSES: tuple[Pass, ...] = (
    fold_constants,  # first: the passes below must see a computed weight as a constant
    products_as_linear,  # needs constant matrices
    lift_slices,  # after folding, which already replaces operators on whole constants
)
LAYER_PASSES: tuple[Pass, ...] = (
    products_as_matmul,  # after attention, whose matcher accepts every form of product
    fold_batch_norm_after,  # before folding forward: folding backward needs no condition on padding
)
OPERATOR_PASSES: tuple[Pass, ...] = (
    norm_as_affine,  # after folding: only batch norms that no layer absorbed
    group_norms_as_layer_norms,  # before `constants_as_affine`, which takes the per-channel factors it leaves
    constants_as_affine,
    splits_as_slices,  # the next two look at slices
    selects_as_slices,
    batch_first,
    parts_as_layers,  # after `batch_first`: slices of a layer must run along its output channels
    stacks_as_concatenations,  # after selects: stacked elements are slices by now
    repeats_as_concatenations,
    rolls_as_concatenations,
    shuffles,
    mean_as_pool,
    constants_as_numbers,  # after `constants_as_affine`, which handles constants with several elements
    numbers_as_functions,  # last: other passes look for the tensor overloads
    *QDQ_PASSES,  # operators have their final form: propagation goes by their records
)


@dataclass(frozen=True)
class PassLists:
    """Pass lists of one mode of `prepare`, one for each way to say what is quantized.

    Attributes:
        recipe: for a recipe alone.
        patterns: for user patterns, which match gated activations as the model has them.
        annotator: for a pt2e quantizer, which also annotates attention as the model has it.
    """

    recipe: tuple[Pass, ...]
    patterns: tuple[Pass, ...]
    annotator: tuple[Pass, ...]


PTQ_PASSES = PassLists(
    recipe=(
        *CONSTANT_PASSES,
        fuse_attention,  # before `products_as_matmul`, which takes all products that are not part of attention
        *LAYER_PASSES,
        fold_batch_norm_before,
        *OPERATOR_PASSES,
        fuse_gated_activations,  # last: the fusion table has a row for the fused function
    ),
    patterns=(*CONSTANT_PASSES, fuse_attention, *LAYER_PASSES, fold_batch_norm_before, *OPERATOR_PASSES),
    annotator=(*CONSTANT_PASSES, *LAYER_PASSES, fold_batch_norm_before, *OPERATOR_PASSES),
)
QAT_PASSES = PassLists(
    recipe=(*CONSTANT_PASSES, fuse_attention, *LAYER_PASSES, *OPERATOR_PASSES, fuse_gated_activations),
    patterns=(*CONSTANT_PASSES, fuse_attention, *LAYER_PASSES, *OPERATOR_PASSES),
    annotator=(*CONSTANT_PASSES, *LAYER_PASSES, *OPERATOR_PASSES),
)
"""Pass lists for training. A batch norm in front of a layer stays an operator: the weights behind it would otherwise
have to follow its statistics."""
