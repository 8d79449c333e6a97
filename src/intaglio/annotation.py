"""For those who decide node by node what is quantized.

What has a method ``annotate(module)`` is a quantizer that `intaglio.prepare` takes. It writes an `Annotation` on nodes
with `annotate_node`: `Levels` on the edges they read and on what they give, or `SameAs` another place, or `Own`, an
observer that writes levels itself. `Observed`, `Fixed` and `Dynamic` say where parameters come from. `Composed` joins
several; `X86Quantizer` is one.
"""

from intaglio.quant.annotate.node_annotations import (
    Annotation,
    Annotator,
    Composed,
    Levels,
    Own,
    SameAs,
    annotate_node,
    annotation_of,
)
from intaglio.quant.annotate.sites import Dynamic, Fixed, Observed, Site
from intaglio.quant.frontends.x86_quantizer import (
    X86Quantizer,
    get_linear_dynamic_fp16_config,
    get_symmetric_quantization_config,
)

__all__ = [
    "Annotation",
    "Annotator",
    "Composed",
    "Dynamic",
    "Fixed",
    "Levels",
    "Observed",
    "Own",
    "SameAs",
    "Site",
    "X86Quantizer",
    "annotate_node",
    "annotation_of",
    "get_linear_dynamic_fp16_config",
    "get_symmetric_quantization_config",
]
