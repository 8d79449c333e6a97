"""The choice of one candidate for every group of operators, as an integer linear program."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from intaglio.errors import InputError

Choice = tuple[int, ...]
"""Index of the chosen candidate of every group."""
Costs = tuple[tuple[float, ...], ...]
"""Cost of every candidate of every group."""
TIE = 1e-7
"""Weight of the error relative to its range where another quantity is minimized, so that ties go to the least error."""
FRONT_POINTS = 48
"""Number of error bounds for which a front is computed."""
TIGHTER = 1e-6
"""Part of a limit by which it is lowered where the solver exceeds it within its tolerance."""


class Quantity(StrEnum):
    """Additive quantities of a choice."""

    ERROR = "error"
    """Squared error of the results, relative to their squares."""
    LATENCY = "latency"
    """Milliseconds of a call."""
    SIZE = "size"
    """Megabytes of a saved file."""


@dataclass(frozen=True)
class AssignmentProblem:
    """Costs of all candidates of all groups.

    Attributes:
        costs: costs by quantity, group and candidate.
        offsets: part of each quantity that no choice changes.
    """

    costs: Mapping[Quantity, Costs]
    offsets: Mapping[Quantity, float]

    @property
    def groups(self) -> Costs:
        """Return the errors, whose lengths are the numbers of candidates of the groups."""
        return self.costs[Quantity.ERROR]

    def total(self, quantity: Quantity, choice: Choice) -> float:
        """Return the predicted quantity of a choice."""
        costs = self.costs[quantity]
        return self.offsets.get(quantity, 0.0) + math.fsum(row[one] for row, one in zip(costs, choice, strict=True))

    def scaled(self, quantity: Quantity, factor: float) -> AssignmentProblem:
        """Return the problem with all differences from the first candidates of a quantity multiplied by a factor."""
        rows = self.costs[quantity]
        scaled = tuple(tuple(row[0] + factor * (cost - row[0]) for cost in row) for row in rows)
        return replace(self, costs={**self.costs, quantity: scaled})

    def without(self, excluded: Collection[tuple[int, int]]) -> AssignmentProblem:
        """Return the problem with some candidates worse than all others of their group in every quantity.

        Args:
            excluded: positions of groups and of their candidates, none of which is the first one.
        """

        def costs(rows: Costs) -> Costs:
            worst = [2 * max(row) - min(row) + 1.0 for row in rows]
            places = range(len(rows))
            return tuple(
                tuple(worst[place] if (place, index) in excluded else cost for index, cost in enumerate(rows[place]))
                for place in places
            )

        return replace(self, costs={name: costs(rows) for name, rows in self.costs.items()})

    def solve(self, minimized: Quantity, limits: Mapping[Quantity, float]) -> Choice | None:
        """Return the choice with the least of a quantity within all limits, or ``None`` if no choice is.

        Choices of equal cost are told apart by their error. The program is solved to optimality by HiGHS.

        Args:
            minimized: the quantity to minimize.
            limits: largest allowed values by quantity.
        """
        if not self.groups:
            return () if all(self.offsets.get(name, 0.0) <= most for name, most in limits.items()) else None
        bounds = {name: most - self.offsets.get(name, 0.0) for name, most in limits.items()}
        for _ in range(3):
            choice = self._solve_once(minimized, bounds)
            if choice is None:
                return None
            over = [name for name, most in limits.items() if self.total(name, choice) > most]
            if not over:
                return choice
            bounds |= {name: bounds[name] - TIGHTER * self._scale(name) for name in over}
        return None

    def _solve_once(self, minimized: Quantity, bounds: Mapping[Quantity, float]) -> Choice | None:
        milp, linear_constraint, variable_bounds = solver()
        sizes = [len(row) for row in self.groups]
        members = np.repeat(np.arange(len(sizes)), sizes)
        one_each = (members[None, :] == np.arange(len(sizes))[:, None]).astype(float)
        constraints = [linear_constraint(one_each, 1, 1)]
        for name, most in bounds.items():
            scale = self._scale(name)
            constraints.append(linear_constraint(self._flat(name) / scale, -np.inf, most / scale))
        objective = self._flat(minimized) / self._scale(minimized)
        if minimized != Quantity.ERROR:
            objective = objective + TIE * self._flat(Quantity.ERROR) / self._scale(Quantity.ERROR)
        with _hidden_output():
            found = milp(
                objective,
                integrality=np.ones(len(members)),
                bounds=variable_bounds(0, 1),
                constraints=constraints,
                options={"mip_rel_gap": 0.0},
            )
        if found.x is None:
            return None
        starts = np.cumsum([0, *sizes[:-1]])
        return tuple(int(np.argmax(found.x[start : start + size])) for start, size in zip(starts, sizes, strict=True))

    def front(self, minimized: Quantity, limits: Mapping[Quantity, float]) -> list[Choice]:
        """Return choices of least cost for a range of error bounds, the one with the largest error first.

        Args:
            minimized: the cost.
            limits: largest allowed values of other quantities.
        """
        cheapest, best = self.solve(minimized, limits), self.solve(Quantity.ERROR, limits)
        if cheapest is None or best is None:
            return []
        found = dict.fromkeys([cheapest])
        for bound in error_bounds(self.total(Quantity.ERROR, cheapest), self.total(Quantity.ERROR, best)):
            choice = self.solve(minimized, {**limits, Quantity.ERROR: bound})
            if choice is not None:
                found[choice] = None
        found[best] = None
        return sorted(found, key=lambda choice: -self.total(Quantity.ERROR, choice))

    def _flat(self, name: Quantity) -> np.ndarray:
        return np.array([cost for row in self.costs[name] for cost in row])

    def _scale(self, name: Quantity) -> float:
        """Return a number by which costs are divided, so that the tolerances of the solver fit them."""
        return float(np.abs(self._flat(name)).max()) or 1.0


def error_bounds(largest: float, smallest: float) -> Iterator[float]:
    """Yield bounds between two errors, each a constant factor below the one before."""
    if largest <= 0 or smallest >= largest:
        return
    last = max(smallest, largest * 1e-4)
    for step in range(1, FRONT_POINTS):
        yield largest * (last / largest) ** (step / FRONT_POINTS)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point beats, the cheapest first.

    Args:
        points: pairs of a cost, lower for better, and a gain, higher for better.
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1])):
        if not found or points[index][1] > points[found[-1]][1]:
            found.append(index)
    return found


@contextlib.contextmanager
def _hidden_output() -> Iterator[None]:
    """Drop what compiled code writes to the standard output. HiGHS prints a line where it corrects a solution, which
    would end up between lines of JSON."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    flush(None)
    try:
        kept = os.dup(1)
    except OSError:  # the process has no standard output
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def solver() -> tuple[type, type, type]:
    """Return the functions of SciPy that the integer program needs.

    Raises:
        InputError: SciPy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError as error:
        problem = "the search solves integer programs with the package scipy"
        raise InputError("search", None, problem, remedy="install it with pip install 'intaglio[search]'") from error
    return milp, LinearConstraint, Bounds
