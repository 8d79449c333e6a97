"""Log of intercepted calls, in order, for a prepared or converted model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from intaglio.eager.intercepted_run import InterceptedRun, current
from intaglio.eager.recording.torch_functions import METADATA_FUNCTIONS, plain_name
from intaglio.eager.session import Session


@dataclass(frozen=True)
class Intercepted:
    """One event of the log.

    Attributes:
        path: Path of the module that is called, or whose code calls the function.
        operator: Name of the function, or None for a call of the module itself.
        moment: "start" or "end".
    """

    path: str
    operator: str | None
    moment: str

    def __str__(self) -> str:
        where = self.path or "model"
        return f"{where if self.operator is None else f'{where}::{self.operator}'} {self.moment}"


@contextlib.contextmanager
def calls() -> Iterator[list[Intercepted]]:
    """Yield a list that receives every call intercepted in this thread inside the `with` block, in order.

    Calls that only query metadata, such as `Tensor.shape`, are not logged.
    """
    log: list[Intercepted] = []
    with current.runs_made_by(lambda session, path: LoggedRun(session, path, log)):
        yield log


class LoggedRun(InterceptedRun):
    """An intercepted run that logs the start and the end of every call."""

    def __init__(self, session: Session, path: str, log: list[Intercepted]) -> None:
        super().__init__(session, path)
        self.tracks_modules, self.log = True, log
        self.leaves_alone = getattr(session.model.get_submodule(path), "_auto_quant_state", None) is None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Log the start of the call unless the called module logs it itself."""
        if not self.leaves_alone:
            self._log(self.entry, None, "start")
        super().begin(args, kwargs)

    def end(self, result: Any) -> Any:
        """Finish the run, and log the end of the call unless the called module logs it itself."""
        found = super().end(result)
        if not self.leaves_alone:
            self._log(self.entry, None, "end")
        return found

    def enter(self, path: str) -> None:
        """Log the start of a module's call, then enter the module."""
        self._log(path, None, "start")
        super().enter(path)

    def leave(self, path: str) -> None:
        """Leave the module, then log the end of its call."""
        super().leave(path)
        self._log(path, None, "end")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        path, name = self.path, plain_name(func)
        self._log(path, name, "start")
        result = super().__torch_function__(func, types, args, kwargs)
        self._log(path, name, "end")
        return result

    def run_leaf(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Log the start and the end of a leaf module's call."""
        self._log(path, None, "start")
        result = super().run_leaf(module, path, args, kwargs)
        self._log(path, None, "end")
        return result

    def _log(self, path: str, operator: str | None, moment: str) -> None:
        self.log.append(Intercepted(path, operator, moment))
