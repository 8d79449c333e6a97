"""What `prepare` does to a captured graph before it looks for sites: literal lists of passes, in order."""

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
from intaglio.fxgraph.passes.fuse_attention import join_attention
from intaglio.fxgraph.passes.gated_activations import join_gates
from intaglio.fxgraph.passes.lift_slices import lift_slices
from intaglio.quant.qdq.qdq_constants import count_biases, store_levels
from intaglio.quant.qdq.qdq_normalize import pair_levels, separate_levels, spell_levels, write_factors
from intaglio.quant.qdq.qdq_propagation import carry_levels

LEVEL_PASSES: tuple[Pass, ...] = (
    spell_levels,  # first: all others read only the form that it writes
    separate_levels,  # the next three change a dequantize for its one reader
    store_levels,  # constants before activations: what is left has no constant behind it
    pair_levels,
    carry_levels,  # after pairing: only values that kernels can hold are carried
    separate_levels,  # carrying makes quantizes that are equal
    write_factors,  # last, with biases: operators read their final operands
    count_biases,
)
"""For models that others quantized; they find nothing in a float model."""

CONSTANT_PASSES: tuple[Pass, ...] = (
    fold_constants,  # first: a weight that is computed counts as a constant for all that follow
    products_as_linear,  # needs constant matrices
    lift_slices,  # after folding, which takes what is constant as a whole
)
LAYER_PASSES: tuple[Pass, ...] = (
    products_as_matmul,  # after attention, which knows products in every form
    fold_batch_norm_after,  # into the layer in front where both sides could take it: it needs no condition on padding
)
OPERATOR_PASSES: tuple[Pass, ...] = (
    norm_as_affine,  # after folding: only norms that no layer absorbed
    group_norms_as_layer_norms,  # before factors per channel, which it leaves
    constants_as_affine,
    splits_as_slices,  # the next two follow slices
    selects_as_slices,
    batch_first,
    parts_as_layers,  # after `batch_first`: parts of a layer must lie side by side
    stacks_as_concatenations,  # after selects: elements that are stacked again are slices by now
    repeats_as_concatenations,
    rolls_as_concatenations,
    shuffles,
    mean_as_pool,
    constants_as_numbers,  # after `constants_as_affine`, which takes constants of several elements
    numbers_as_functions,  # last: other passes look for the overloads of tensors
    *LEVEL_PASSES,  # operators have their final form: levels are carried past their records
)


@dataclass(frozen=True)
class PassLists:
    """The passes of a mode of `prepare`, by who says what is quantized.

    Attributes:
        recipe: with nothing but a recipe.
        patterns: with patterns of a user's own, which see gates as the model has them.
        annotator: with a quantizer of the export flow, which sees attention as the model has it, too.
    """

    recipe: tuple[Pass, ...]
    patterns: tuple[Pass, ...]
    annotator: tuple[Pass, ...]


PTQ_PASSES = PassLists(
    recipe=(
        *CONSTANT_PASSES,
        join_attention,  # before `products_as_matmul`: a product that is no part of attention is one by itself
        *LAYER_PASSES,
        fold_batch_norm_before,
        *OPERATOR_PASSES,
        join_gates,  # last: the function has a row in the table of fusions
    ),
    patterns=(*CONSTANT_PASSES, join_attention, *LAYER_PASSES, fold_batch_norm_before, *OPERATOR_PASSES),
    annotator=(*CONSTANT_PASSES, *LAYER_PASSES, fold_batch_norm_before, *OPERATOR_PASSES),
)
QAT_PASSES = PassLists(
    recipe=(*CONSTANT_PASSES, join_attention, *LAYER_PASSES, *OPERATOR_PASSES, join_gates),
    patterns=(*CONSTANT_PASSES, join_attention, *LAYER_PASSES, *OPERATOR_PASSES),
    annotator=(*CONSTANT_PASSES, *LAYER_PASSES, *OPERATOR_PASSES),
)
"""For training. A norm in front of a layer stays an operator: the weights behind it would have to follow its
statistics."""
