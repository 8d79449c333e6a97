"""The fx passes that `prepare` runs on a captured graph before annotation, as literal tuples in execution order."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.fxgraph.graph_passes import Pass
from intaglio.fxgraph.passes.batch_first import keep_batch_first
from intaglio.fxgraph.passes.batch_norm_folding import (
    batch_norm_to_affine,
    fold_batch_norm_after,
    fold_batch_norm_before,
    fold_constants_after,
)
from intaglio.fxgraph.passes.canonicalize_matmul import (
    bmm_to_matmul,
    constant_bmm_to_convolution,
    constant_first_to_linear,
    constant_matmul_to_linear,
    merge_batch_axes,
    split_linear_by_slices,
)
from intaglio.fxgraph.passes.constant_arithmetic import channel_constants_to_affine, scalar_constants_to_numbers
from intaglio.fxgraph.passes.constant_folding import fold_constants
from intaglio.fxgraph.passes.decompositions.movement import (
    decompose_copy,
    decompose_expand,
    decompose_flip,
    decompose_padding,
    decompose_repeat,
    decompose_repeat_interleave,
    decompose_roll,
    decompose_slice_scatter,
    expand_filled,
)
from intaglio.fxgraph.passes.decompositions.reductions import (
    decompose_adaptive_max_pool,
    decompose_group_norm,
    decompose_logsumexp,
    decompose_variance,
    join_axes_of_layer_norm,
    mean_to_adaptive_avg_pool,
    split_extrema,
)
from intaglio.fxgraph.passes.decompositions.single_operators import (
    channels_to_images,
    clamp_by_tensors,
    decompose_fold,
    decompose_glu,
    decompose_lerp,
    decompose_meshgrid,
    decompose_select,
    decompose_split,
    decompose_stack,
    exact_neighbours_to_nearest,
    fuse_channel_shuffle,
    norms_to_vector_norms,
    powers_and_logarithms_of_other_bases,
    triangles_to_masks,
    use_scalar_overloads,
)
from intaglio.fxgraph.passes.decompositions.windows import decompose_unfold, decompose_windows
from intaglio.fxgraph.passes.element_types.complex_numbers import decompose_complex
from intaglio.fxgraph.passes.element_types.widen_integers import (
    cast_before_cumsum,
    sizes_to_tensors,
    type_as_to_cast,
    widen_integers,
)
from intaglio.fxgraph.passes.fuse_attention import attention_to_four_axes, fuse_attention
from intaglio.fxgraph.passes.gated_activations import fuse_gated_activations, fuse_gelu
from intaglio.fxgraph.passes.identities import drop_identity, pads_of_max_pools
from intaglio.fxgraph.passes.indices.grouped_products import constant_grouped_mm_to_linear, split_products_to_grouped
from intaglio.fxgraph.passes.indices.lookups import lookups_to_embeddings
from intaglio.fxgraph.passes.indices.selected_rows import keep_unselected_rows
from intaglio.fxgraph.passes.indices.sorting import (
    canonicalize_sorts,
    counts_of_integers,
    index_put_to_scatter,
    scatter_value_to_tensor,
    scatter_without_self,
    sums_of_integers,
)
from intaglio.fxgraph.passes.lift_slices import lift_slices
from intaglio.fxgraph.passes.many_axes import merge_pointwise_axes
from intaglio.quant.qdq.imported.qdq_constants import convert_biases_to_i32, legalize_constants
from intaglio.quant.qdq.imported.qdq_propagation import propagate_qdq
from intaglio.quant.qdq.imported.qdq_to_u8 import convert_qdq_to_u8, decompose_unsupported_rhs
from intaglio.quant.qdq.qdq_normalize import (
    canonicalize_qdq,
    split_shared_qdq,
)

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
    keep_unselected_rows,  # before folding, which creates tensors of sizes that are known by then
    scatter_without_self,
    fold_constants,  # the passes below must see a computed weight as a constant
    lookups_to_embeddings,
    fuse_gelu,  # before numbers and overloads change
    constant_matmul_to_linear,  # needs constant matrices
    constant_first_to_linear,
    constant_bmm_to_convolution,  # after products with one matrix have become layers
    constant_grouped_mm_to_linear,
    split_products_to_grouped,
    expand_filled,  # after folding: only tensors of a free size are left
    lift_slices,  # after folding, which already replaces operators on whole constants
    merge_batch_axes,  # before attention, whose matcher takes four axes
)
ATTENTION_PASSES: tuple[Pass, ...] = (
    fuse_attention,  # before `bmm_to_matmul`, which takes all products that are not part of attention
    attention_to_four_axes,
)
LAYER_PASSES: tuple[Pass, ...] = (
    bmm_to_matmul,  # after attention, whose matcher accepts every form of product
    fold_batch_norm_after,  # before folding forward: folding backward needs no condition on padding
)
OPERATOR_PASSES: tuple[Pass, ...] = (
    decompose_complex,
    canonicalize_sorts,
    counts_of_integers,  # before sums of counts, which read integers after it
    index_put_to_scatter,  # after sorts, whose places are the indices of an inverse permutation
    scatter_value_to_tensor,
    sums_of_integers,
    type_as_to_cast,
    cast_before_cumsum,
    widen_integers,  # after casts are explicit
    drop_identity,  # casts between integers are identities now
    sizes_to_tensors,
    batch_norm_to_affine,  # after folding: only batch norms that no layer absorbed
    split_extrema,
    decompose_adaptive_max_pool,
    decompose_logsumexp,
    decompose_variance,
    clamp_by_tensors,
    norms_to_vector_norms,
    decompose_lerp,
    powers_and_logarithms_of_other_bases,
    triangles_to_masks,
    exact_neighbours_to_nearest,
    channels_to_images,
    pads_of_max_pools,  # before anything looks for values to quantize
    decompose_padding,
    decompose_fold,
    join_axes_of_layer_norm,
    decompose_group_norm,  # before `channel_constants_to_affine`, which takes the per-channel factors it leaves
    channel_constants_to_affine,
    decompose_meshgrid,  # before expansions
    decompose_glu,  # before layers whose output is only read in slices are split
    decompose_split,  # the next two look at slices
    decompose_select,
    merge_pointwise_axes,
    keep_batch_first,  # after axes are merged: it shortens the data movement that this leaves
    split_linear_by_slices,  # after `keep_batch_first`: slices of a layer must run along its output channels
    decompose_stack,  # after selects: stacked elements are slices by now
    decompose_expand,
    decompose_repeat,
    decompose_repeat_interleave,
    decompose_roll,
    decompose_flip,
    decompose_copy,  # before writes into slices, whose values are copies
    decompose_slice_scatter,
    decompose_unfold,
    decompose_windows,
    fuse_channel_shuffle,
    mean_to_adaptive_avg_pool,
    scalar_constants_to_numbers,  # after `channel_constants_to_affine`, which handles constants with several elements
    use_scalar_overloads,  # last: other passes look for the tensor overloads
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
        *ATTENTION_PASSES,
        *LAYER_PASSES,
        fold_constants_after,  # in training they stay, and patterns and annotators may name these operators
        fold_batch_norm_before,
        *OPERATOR_PASSES,
        fuse_gated_activations,  # last: the fusion table has a row for the fused function
    ),
    patterns=(
        *CONSTANT_PASSES,
        *ATTENTION_PASSES,
        *LAYER_PASSES,
        fold_batch_norm_before,
        *OPERATOR_PASSES,
    ),
    annotator=(*CONSTANT_PASSES, attention_to_four_axes, *LAYER_PASSES, fold_batch_norm_before, *OPERATOR_PASSES),
)
QAT_PASSES = PassLists(
    recipe=(
        *CONSTANT_PASSES,
        *ATTENTION_PASSES,
        *LAYER_PASSES,
        *OPERATOR_PASSES,
        fuse_gated_activations,
    ),
    patterns=(*CONSTANT_PASSES, *ATTENTION_PASSES, *LAYER_PASSES, *OPERATOR_PASSES),
    annotator=(*CONSTANT_PASSES, attention_to_four_axes, *LAYER_PASSES, *OPERATOR_PASSES),
)
"""Pass lists for training. A batch norm in front of a layer stays an operator: the weights behind it would otherwise
have to follow its statistics."""
