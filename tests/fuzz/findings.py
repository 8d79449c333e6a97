"""Finds the network of a module that fails, makes it smaller, and stores it."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fuzz.checking import MismatchError, Seen, check
from fuzz.drawing import Options
from fuzz.network import Input, Network
from intaglio.errors import IntaglioError

FAILURES = Path(__file__).parent / "failures"
MOST_TRIALS = 40
"""Networks that are tried to make a failing one smaller."""


@dataclass(frozen=True)
class Finding:
    """A network that fails. ``kind``: the stage and the problem without numbers and names, equal for equal causes."""

    network: Network
    options: Options
    kind: str
    text: str

    def to_json(self, note: str = "") -> str:
        """Return the text of a file in `FAILURES`."""
        held = {"note": note or self.kind, "options": asdict(self.options)}
        return json.dumps({**held, "network": json.loads(self.network.to_json())}, indent=1) + "\n"


def stored(path: Path) -> tuple[Network, Options]:
    """Read a file of `FAILURES`."""
    held = json.loads(path.read_text(encoding="utf-8"))
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in held["options"].items()}
    return Network.from_json(json.dumps(held["network"])), Options(**lists)


def examine(networks: Sequence[Network], options: Options, seed: int, seen: Seen) -> Iterator[Finding]:
    """Yield what fails; a module that fails as a whole is divided until the network is found."""
    try:
        wrong = check(networks, options, seed, seen)
    except Exception as error:
        if len(networks) > 1:
            half = len(networks) // 2
            yield from examine(networks[:half], options, seed, seen)
            yield from examine(networks[half:], options, seed, seen)
        elif isinstance(error, IntaglioError):
            seen.refused[kind_of(error)] += 1
        else:
            yield Finding(networks[0], options, kind_of(error), "".join(traceback.format_exception(error)[-4:]))
        return
    known = set()
    for one in wrong:
        places = one.networks if len(networks) > 1 else (0,)
        for place in places:
            if place not in known:
                known.add(place)
                yield Finding(networks[place], options, kind_of(one), str(one))


def kind_of(error: Exception) -> str:
    """Return stage or class and problem of an error, without what differs between networks."""
    if isinstance(error, MismatchError):
        return f"{error.stage}: {_plain(error.problem)}".partition(" is #")[0]
    text = error.problem if isinstance(error, IntaglioError) else str(error)
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if "intaglio" in frame.filename]
    where = "" if isinstance(error, IntaglioError) or not places else f" in {places[-1].name}"
    return f"{type(error).__name__}{where}: {_plain(text)}"


def _plain(text: str) -> str:
    line = text.partition("\n")[0]
    return re.sub(r"\d[\d.e+-]*", "#", re.sub(r"'[^']*'|\[[^]]*\]|\{.*\}|%\w+", "_", line))[:160]


def fails_alike(network: Network, finding: Finding, seed: int) -> bool:
    """Return whether a network alone fails for the same cause."""
    return any(one.kind == finding.kind for one in examine([network], finding.options, seed, Seen()))


def shrunk(finding: Finding, seed: int) -> Finding:
    """Return the finding with the smallest network that fails alike; options are dropped first."""
    if not fails_alike(finding.network, finding, seed):
        return finding  # only beside others
    trials = 0
    plain = Options(isa=finding.options.isa)
    if fails_alike(finding.network, replace(finding, options=plain), seed):
        finding = replace(finding, options=plain)
    smaller = True
    while smaller and trials < MOST_TRIALS:
        smaller = False
        for candidate in candidates(finding.network):
            trials += 1
            if trials > MOST_TRIALS:
                break
            if runs(candidate) and fails_alike(candidate, finding, seed):
                finding, smaller = replace(finding, network=candidate), True
                break
    return finding


def runs(network: Network) -> bool:
    """Return whether the float model runs."""
    try:
        return bool(network.lines) and all(x.isfinite().all() for x in network.run(network.example()))
    except Exception:
        return False


def candidates(network: Network) -> Iterator[Network]:
    """Yield smaller networks: one result, no settings, one line less, smaller inputs."""
    if network.settings:
        yield replace(network, settings={})
        for key in network.settings:
            yield replace(network, settings={k: v for k, v in network.settings.items() if k != key})
    if len(network.results) > 1:
        for name in network.results:
            yield pruned(replace(network, results=(name,)))
    for place in reversed(range(len(network.lines))):
        if (found := without(network, place)) is not None:
            yield found
    for place, entry in enumerate(network.inputs):
        for axis, size in enumerate(entry.shape):
            if axis and size > 1:
                shape = (*entry.shape[:axis], size // 2, *entry.shape[axis + 1 :])
                inputs = (*network.inputs[:place], replace(entry, shape=shape), *network.inputs[place + 1 :])
                yield replace(network, inputs=inputs)


def without(network: Network, place: int) -> Network | None:
    """Return the network without a line, whose value becomes the first value that it reads, or an input."""
    name, _, text = network.lines[place].partition(" = ")
    operands = [word for word in re.findall(r"\b[vx]\d+\b", text) if word != name]
    lines = network.lines[:place] + network.lines[place + 1 :]
    results = tuple(r for r in network.results if r != name)
    if any(re.search(rf"\b{name}\b", line) for line in lines):
        if not operands:
            return None
        lines = tuple(re.sub(rf"\b{name}\b", operands[0], line) for line in lines)
    elif not results:
        results = tuple(word for word in operands[:1] if word.startswith("v"))
    if not results:
        return None
    makers = network.makers[:place] + network.makers[place + 1 :]
    return pruned(replace(network, lines=lines, makers=makers, results=results))


def pruned(network: Network) -> Network:
    """Return the network without lines, parts and inputs that no result needs."""
    needed, kept = set(network.results), []
    for place in reversed(range(len(network.lines))):
        line = network.lines[place]
        name, _, text = line.partition(" = ")
        writes = re.search(r"_\(|inplace=True", text) is not None
        if name in needed or (writes and needed & set(re.findall(r"\w+", text))):
            needed |= set(re.findall(r"\w+", text)) | {name}
            kept.append(place)
    kept.reverse()
    inputs: tuple[Input, ...] = tuple(entry for entry in network.inputs if entry.name in needed)
    parts = {name: text for name, text in network.parts.items() if name in needed}
    lines, makers = (tuple(values[place] for place in kept) for values in (network.lines, network.makers))
    return replace(network, inputs=inputs, parts=parts, lines=lines, makers=makers)
