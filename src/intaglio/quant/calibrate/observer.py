"""`Observer`: the module that `prepare` inserts to collect the statistics of a value."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from intaglio.errors import CalibrationError
from intaglio.ir import QParams
from intaglio.quant.annotate.sites import Observed, Site
from intaglio.quant.calibrate.custom_observer import Edge
from intaglio.quant.calibrate.tensor_statistics import Statistics


@dataclass
class ObserverState:
    """State that all observers of a model share.

    Attributes:
        batch: index of the next batch.
        stride: increment of the index from one batch to the next.
        ignore: whether NaN and infinities are left out instead of an error, unless all values of a batch are such.
        observed_edges: edges whose values went through an observer that writes its own quantize nodes.
    """

    batch: int = 0
    stride: int = 1
    ignore: bool = False
    observed_edges: set[Edge] = field(default_factory=set)


class Observer(nn.Module):
    """Returns its input and adds it to ``statistics``.

    Attributes:
        samples: the sample axis of the input, or ``None``.
        channels: the axis with separate extrema for each channel; the site's, unless it is changed before calibration.
    """

    def __init__(self, site: Site, samples: int | None = 0, observer_state: ObserverState | None = None) -> None:
        super().__init__()
        self.site, self.samples, self.observer_state = site, samples, observer_state or ObserverState()
        self.channels = site.axis if isinstance(site.axis, int) else None
        self.statistics = Statistics()
        make = site.spec.observer if isinstance(site.spec, Observed) else None
        self.custom_observer = None if make is None else make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add a tensor to the statistics and return it.

        Raises:
            CalibrationError: the tensor contains NaN or infinities that may not be ignored.
        """
        values = x.detach().contiguous() if self.samples or self.channels is not None else _in_memory_order(x.detach())
        found = Statistics.of(
            values.numpy(),
            torch.get_num_threads(),
            samples=self.samples,
            channels=self.channels,
            batch=self.observer_state.batch,
        )
        nonfinite = found.nans + found.infinities
        if nonfinite and (nonfinite == found.count or not self.observer_state.ignore):
            raise CalibrationError(
                self.site.name,
                self.site.origin.operator or None,
                f"{found.nans} NaN and {found.infinities} infinite values among {x.numel()}",
                source=self.site.origin.source or None,
                remedy="remove them from the data, or leave the operators that compute them in float: skip=...; "
                "calibrate(..., nonfinite='ignore') ignores them wherever a tensor has finite values too",
            )
        self.statistics = self.statistics.merge(found)
        if self.custom_observer is not None:
            self.custom_observer(x.detach())
        return x

    def custom_qparams(self) -> QParams | None:
        """Return the parameters from the user's own observer; ``None`` without such an observer or without values."""
        if self.custom_observer is None or not self.statistics.count:
            return None
        scale, zero_point = (np.asarray(value).reshape(-1) for value in self.custom_observer.calculate_qparams())
        shift = 128 if getattr(self.custom_observer, "dtype", None) is torch.int8 else 0
        if len(scale) != 1:
            problem = f"its observer returned {len(scale)} scales, but an activation has one"
            where, remedy = self.site.origin.operator or None, "use an observer with a single scale"
            raise CalibrationError(self.site.name, where, problem, remedy=remedy)
        return QParams((float(np.float32(scale[0])),), (int(zero_point[0]) + shift,), self.site.qmin, self.site.qmax)

    def extra_repr(self) -> str:
        """Return the site and the number of observed values."""
        return f"{self.site.name}, count={self.statistics.count}"


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return the values without a copy if they are channels-last; statistics do not depend on the order."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1)
    return x.contiguous()
