"""The annotation model: sites, the specs that determine their quantization parameters, and parameter sharing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from intaglio.argument_checks import check_fields
from intaglio.errors import UnsupportedError
from intaglio.ir import Axis, DType, Origin
from intaglio.ir.disjoint_sets import DisjointSets
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import Datatype, datatype_of


@check_fields
@dataclass(frozen=True)
class Observed:
    """Parameters computed from observed statistics by a range method; a weight is its own statistics.

    Attributes:
        method: name of the range method.
        symmetric: whether the range is symmetric around zero.
        observer: factory of a module that is called with every value; its ``calculate_qparams()`` then replaces the
            method and returns scale and zero point.
    """

    method: str = "mse"
    symmetric: bool = False
    observer: Callable[[], Any] | None = None


@check_fields
@dataclass(frozen=True)
class Fixed:
    """Parameters known beforehand.

    Attributes:
        scale: distance between neighbouring quantized values.
        zero_point: quantized value of 0, or one for each channel.
    """

    scale: float
    zero_point: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            problem = f"the scale {self.scale} of Fixed is not a positive, finite number"
            raise UnsupportedError("annotation", None, problem)


@dataclass(frozen=True)
class Shared:
    """The parameters of another site.

    Attributes:
        site: name of the other site.
        observed: whether the values here count in the other site's statistics, as those of the second operand of a
            concatenation do. Values that are selected from the other site's add nothing.
    """

    site: str
    observed: bool = False


@dataclass(frozen=True)
class Derived:
    """Parameters computed from those of other sites.

    A bias has ``scale_x * scale_w`` of its ``sources`` (activation, weight). A shortcut has the parameters of its 8-bit
    value with finer steps (`numerics.widen_to_16bit`).
    """

    sources: tuple[str, ...]


@check_fields
@dataclass(frozen=True)
class Dynamic:
    """Parameters computed at run time.

    Attributes:
        mode: "token" for one scale for each vector along the last axis, "tensor" for one for each entry of the batch.
    """

    mode: str


Spec = Observed | Fixed | Shared | Derived | Dynamic


NOWHERE = Origin()


@dataclass(frozen=True)
class Site:
    """A quantization point: a value that has quantization parameters.

    Attributes:
        name: ``module.path#call/operator.number``.
        value: name of the node in the prepared graph.
        role: what the value is to its readers, such as an activation or a weight.
        spec: the source of its parameters.
        dtype: storage type.
        qmin: smallest quantized value.
        qmax: largest quantized value.
        axis: channel axis, or ``None`` for one scale.
        origin: the module and line that the value comes from.
        datatype: name of the record that ``dtype``, ``qmin`` and ``qmax`` come from, if there is one.
        group: number of neighbouring weights that share a multiple of their channel's scale; 0 without groups.
    """

    name: str
    value: str
    role: Role
    spec: Spec
    dtype: DType
    qmin: int
    qmax: int
    axis: Axis = None
    origin: Origin = NOWHERE
    datatype: str = ""
    group: int = 0

    @property
    def record(self) -> Datatype:
        """Return the record of its datatype, which biases do not have."""
        return datatype_of(self.datatype, self.role)

    @property
    def native(self) -> bool:
        """Return whether kernels compute directly with its quantized values."""
        return not self.datatype or self.record.native

    def __str__(self) -> str:
        span = f"[{self.qmin}, {self.qmax}]" + ("" if self.axis is None else f" axis {self.axis}")
        groups = f" groups of {self.group}" if self.group else ""
        return f"{self.name}: {self.role} {self.datatype or self.dtype} {span}{groups} {spec_text(self.spec)}"


def spec_text(spec: Spec) -> str:
    """Return how the parameters of a site are determined."""
    if isinstance(spec, Observed):
        how = spec.method if spec.observer is None else "custom observer"
        return f"observed ({how}{', symmetric' if spec.symmetric else ''})"
    if isinstance(spec, Fixed):
        return f"fixed ({spec.scale:.6g}, {spec.zero_point})"
    if isinstance(spec, Shared):
        return f"shared with {spec.site}"
    if isinstance(spec, Dynamic):
        return f"dynamic, per {spec.mode}"
    return f"derived from {', '.join(spec.sources)}"


@dataclass(frozen=True)
class Skip:
    """An operator that stays in float, with the reason.

    Attributes:
        node: name of the operator in the graph.
        reason: why it stays in float.
        origin: its module and source line.
        macs: its multiply-accumulates.
        is_added: whether capture added it, so that it does not count as an operator of the model.
    """

    node: str
    reason: str
    origin: Origin
    macs: int = 0
    is_added: bool = False

    def __str__(self) -> str:
        where = self.origin.path or "model"
        return f"{where} ({self.origin.operator}): {self.reason}"


def groups(sites: Iterable[Site]) -> Mapping[str, str]:
    """Return site name -> the site of its sharing group whose spec determines the parameters.

    Sites connected by `Shared` specs are one group, in any order and even in cycles.

    Raises:
        UnsupportedError: if a partner is missing, if no member is observed, fixed or derived, or if members disagree on
            type, range or spec.
    """
    by_name = {site.name: site for site in sites}
    sharing = DisjointSets()
    for site in by_name.values():
        sharing.find(site.name)
        if isinstance(site.spec, Shared):
            if site.spec.site not in by_name:
                problem = f"it shares parameters with {site.spec.site!r}, but there is no site of this name"
                raise UnsupportedError(site.name, None, problem, remedy="share with the name of another site")
            sharing.join(site.name, site.spec.site)
    members: dict[str, list[Site]] = {}
    for site in by_name.values():
        members.setdefault(sharing.find(site.name), []).append(site)
    leader = {}
    for group in members.values():
        owners = [site for site in group if not isinstance(site.spec, Shared)]
        names = ", ".join(site.name for site in group)
        if not owners:
            problem = "these sites share quantization parameters, but none of them has parameters of its own"
            raise UnsupportedError(names, None, problem, remedy="give one of them the spec Observed or Fixed")
        if len({(site.dtype, site.qmin, site.qmax, site.axis) for site in group}) > 1:
            problem = "these sites share quantization parameters, but differ in type or range"
            raise UnsupportedError(names, None, problem, remedy="give all of them the same datatype and range")
        if len({site.spec for site in owners}) > 1:
            problem = "these sites share quantization parameters, but their specs differ"
            raise UnsupportedError(names, None, problem, remedy="give only one of them a spec other than Shared")
        leader.update({site.name: owners[0].name for site in group})
    return leader
