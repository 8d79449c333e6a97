"""The annotation model: sites, the specs that give them parameters, sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from intaglio.errors import UnsupportedError
from intaglio.ir import Axis, DType, Origin
from intaglio.ir.disjoint_sets import DisjointSets
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import DATATYPES, Datatype


@dataclass(frozen=True)
class Observed:
    """Parameters come from statistics through a range method (weights: from the weight itself). ``observer``: makes a
    module that is shown every value and whose ``calculate_qparams()`` is asked instead: scale and zero point."""

    method: str = "mse"
    symmetric: bool = False
    observer: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Fixed:
    """Parameters known beforehand; zero points may be one per channel."""

    scale: float
    zero_point: int | tuple[int, ...]


@dataclass(frozen=True)
class Shared:
    """The parameters of another site. ``observed``: the values here count in its statistics too, as those of the
    second operand of a concatenation do; a value selected from the other site's adds nothing."""

    site: str
    observed: bool = False


@dataclass(frozen=True)
class Derived:
    """Computed from other sites: a bias takes ``scale_x * scale_w`` of its ``sources`` (activation, weight), a shortcut
    the parameters of its value in 8 bits, finer (`numerics.widen`)."""

    sources: tuple[str, ...]


@dataclass(frozen=True)
class Dynamic:
    """Parameters computed at run time: per row of the last axis ("token") or per entry of the batch ("tensor")."""

    mode: str


Spec = Observed | Fixed | Shared | Derived | Dynamic


NOWHERE = Origin()


@dataclass(frozen=True)
class Site:
    """A value that carries quantization parameters.

    ``name`` is ``module.path#call/operator.number``; ``value`` the node of the prepared graph. ``datatype``: name of
    the record behind dtype, qmin and qmax, if there is one; ``group``: neighbours of a weight that share a multiple of
    their channel's scale.
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
        """What is known of its datatype; a bias has none."""
        return DATATYPES[self.datatype]

    @property
    def native(self) -> bool:
        """Whether kernels compute with its levels."""
        return not self.datatype or self.record.native

    def __str__(self) -> str:
        span = f"[{self.qmin}, {self.qmax}]" + ("" if self.axis is None else f" axis {self.axis}")
        groups = f" groups of {self.group}" if self.group else ""
        return f"{self.name}: {self.role} {self.datatype or self.dtype} {span}{groups} {_spec(self.spec)}"


def _spec(spec: Spec) -> str:
    if isinstance(spec, Observed):
        how = spec.method if spec.observer is None else "an observer of its own"
        return f"observed ({how}{', symmetric' if spec.symmetric else ''})"
    if isinstance(spec, Fixed):
        return f"fixed ({spec.scale:.6g}, {spec.zero_point})"
    if isinstance(spec, Shared):
        return f"shared with {spec.site}"
    if isinstance(spec, Dynamic):
        return f"while the model runs, by {spec.mode}"
    return f"derived from {', '.join(spec.sources)}"


@dataclass(frozen=True)
class Skip:
    """An operator that stays in float, and why."""

    node: str
    reason: str
    origin: Origin
    macs: int = 0

    def __str__(self) -> str:
        where = self.origin.path or "model"
        return f"{where} ({self.origin.operator}): {self.reason}"


def groups(sites: Iterable[Site]) -> Mapping[str, str]:
    """Site name -> the site whose spec gives its parameters.

    Chains and cycles of `Shared`, in any order, are one group. A missing partner, a group in which nothing is observed
    or fixed, or one whose members disagree on type and range, is an `UnsupportedError`.
    """
    by_name = {site.name: site for site in sites}
    sharing = DisjointSets()
    for site in by_name.values():
        sharing.find(site.name)
        if isinstance(site.spec, Shared):
            if site.spec.site not in by_name:
                raise UnsupportedError(site.name, None, f"shares parameters with {site.spec.site!r}, which is no site")
            sharing.join(site.name, site.spec.site)
    members: dict[str, list[Site]] = {}
    for site in by_name.values():
        members.setdefault(sharing.find(site.name), []).append(site)
    leader = {}
    for group in members.values():
        owners = [site for site in group if not isinstance(site.spec, Shared)]
        names = ", ".join(site.name for site in group)
        if not owners:
            raise UnsupportedError(names, None, "these sites share parameters that none of them has")
        if len({(site.dtype, site.qmin, site.qmax, site.axis) for site in group}) > 1:
            raise UnsupportedError(names, None, "these sites share parameters but differ in type or range")
        if len({site.spec for site in owners}) > 1:
            raise UnsupportedError(names, None, "these sites share parameters but state different ones")
        leader.update({site.name: owners[0].name for site in group})
    return leader
