"""Decide node by node what is quantized.

Any object with a method ``annotate(module)`` is a quantizer that `intaglio.stages.prepare` takes. It writes an
`Annotation` on nodes with `annotate_node`: `Levels` on the edges they read and on their results, `SameAs` to share the
parameters of another edge, or `Own`, an observer that quantizes by itself. `Observed`, `Fixed` and `Dynamic` name the
source of parameters. `Composed` joins several quantizers; `X86Quantizer` is one.
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
