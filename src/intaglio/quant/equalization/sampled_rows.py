"""Sampled positions of a value, and the folds of cross-validation that the samples they are from belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from intaglio.quant.correct.spread_places import spread_places

FOLDS = 8
"""Number of folds; a sample belongs to the fold of its number modulo this."""
ROW_COUNT = 1024
"""Number of positions of all samples together that suffice, if there is one of each sample."""


class SampledRows(NamedTuple):
    """Sampled positions of a value, such as the tokens of texts and the pixels of images.

    Attributes:
        values: the channels of each position, f32[r, c].
        samples: the sample that each position is from, numbered over all batches.
    """

    values: torch.Tensor
    samples: torch.Tensor

    @property
    def sample_count(self) -> int:
        """Return the number of samples that they are from."""
        return len(self.samples.unique())

    @staticmethod
    def of(value: torch.Tensor, first: int, axis: int, count: int) -> SampledRows:
        """Return positions of a batch [n, ...] that are spread over each sample.

        Args:
            value: the batch; a vector is one sample.
            first: number of its first sample.
            axis: axis of the channels.
            count: number of positions of each sample, if it has so many.
        """
        rows = torch.atleast_2d(value).movedim(axis, -1)
        rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        samples, positions = torch.arange(first, first + len(rows)), rows.shape[1]
        if positions <= count:
            return SampledRows(rows.reshape(-1, rows.shape[-1]).float(), samples.repeat_interleave(positions))
        places = samples[:, None] * count + torch.arange(count)
        chosen = spread_places(places, positions)
        found = rows[torch.arange(len(rows))[:, None], chosen]
        return SampledRows(found.reshape(-1, rows.shape[-1]).float(), samples.repeat_interleave(count))

    @staticmethod
    def joined(parts: Sequence[SampledRows], channels: int) -> SampledRows:
        """Return the positions of all parts, in the order of samples."""
        ordered = sorted(parts, key=lambda part: int(part.samples[0]))
        values = [torch.zeros(0, channels), *(part.values for part in ordered)]
        return SampledRows(torch.cat(values), torch.cat([torch.zeros(0).long(), *(part.samples for part in ordered)]))
