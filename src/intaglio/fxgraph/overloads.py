"""Names of ATen overloads that several modules look for, as `nodes.operator` returns them."""

ADD_TARGET = "aten.add.Tensor"
DEQUANTIZE_GROUPS_TARGET = "intaglio.dequantize_groups.default"
"""Dequantizes a weight whose scales belong to groups of inputs; see `quant.imported_weights.group_operator`."""
CONV2D_TARGET = "aten.conv2d.default"
EMBEDDING_TARGET = "aten.embedding.default"
LINEAR_TARGET = "aten.linear.default"
RELU_TARGET = "aten.relu.default"
SDPA_TARGET = "aten.scaled_dot_product_attention.default"
SLICE_TARGET = "aten.slice.Tensor"
ARITHMETIC_TARGETS = (ADD_TARGET, "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
"""Elementwise arithmetic of two tensors; addition and subtraction may have a factor ``alpha``."""
