"""Annotate a graph node by node with the quantization of its values.

Any object with a method ``annotate(module)`` is a quantizer that `intaglio.stages.prepare` accepts. It calls
`annotate_node` to put an `Annotation` on nodes: `QuantizedAs` quantizes the value on an input edge or a result,
`SameAs` shares the parameters of another edge, and `CustomObserver` installs a custom observer. `Observed`, `Fixed` and
`Dynamic` say how the parameters of a value are determined. `Composed` applies several quantizers, and `X86Quantizer` is
a ready-made one.
"""

from intaglio.quant.annotate.node_annotations import (
    Annotation,
    Annotator,
    CustomObserver,
    QuantizedAs,
    SameAs,
    annotate_node,
    annotation_of,
)
from intaglio.quant.annotate.sites import Dynamic, Fixed, Observed, Site
from intaglio.quant.frontends.composed_annotators import Composed
from intaglio.quant.frontends.x86_quantizer import (
    X86Quantizer,
    get_default_x86_inductor_quantization_config,
    get_linear_dynamic_fp16_config,
    get_symmetric_quantization_config,
)

__all__ = [
    "Annotation",
    "Annotator",
    "Composed",
    "CustomObserver",
    "Dynamic",
    "Fixed",
    "Observed",
    "QuantizedAs",
    "SameAs",
    "Site",
    "X86Quantizer",
    "annotate_node",
    "annotation_of",
    "get_default_x86_inductor_quantization_config",
    "get_linear_dynamic_fp16_config",
    "get_symmetric_quantization_config",
]
