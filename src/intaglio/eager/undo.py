"""`Undo`: what a calibrating call adds to a session, taken back where it does not end well."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intaglio.eager.session import Session


class Undo:
    """A session as it was when this was made: what was recorded and counted.

    A recording that was made for more sizes meanwhile, or retired because the model writes to its constants, stays so.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.chains = list(session.chains)
        self.index = {key: list(entries) for key, entries in session.index.items()}
        self.edges = {place: list(ends) for place, ends in session.edges.items()}
        self.lines = {key: list(lines) for key, lines in session.lines.items()}
        self.sets = [(found, set(found)) for found in (session.turns, session.outside, session.floats)]
        prepared = [(chain, chain.prepared) for chain in self.chains if chain.prepared is not None]
        self.batches = {chain: one.watch.batch for chain, one in prepared}
        self.statistics = {
            chain: {name: observer.statistics for name, observer in one.observers.items()} for chain, one in prepared
        }

    def __call__(self) -> None:
        session = self.session
        session.chains[:] = self.chains
        session.index = {
            key: [entry for entry in entries if entry[0].refused is None] for key, entries in self.index.items()
        }
        session.edges, session.lines = self.edges, self.lines
        for found, before in self.sets:
            found.intersection_update(before)
        for chain, statistics in self.statistics.items():
            assert chain.prepared is not None
            chain.prepared.watch.batch = self.batches[chain]
            for name, observer in chain.prepared.observers.items():
                observer.statistics = statistics.get(name, observer.statistics)
