"""Kernels with AMX on machines without it: its instructions call functions that have the tile registers in memory."""

import re
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
ARGUMENTS = ("rdi", "rsi", "rdx")
"""Registers of arguments, which are saved around a call."""
MEMORY = r"(?P<offset>\d*)\((?P<base>%\w+)(,(?P<stride>%\w+),1)?\)"
FORMS = {
    "ldtilecfg": MEMORY,
    "tileloadd": rf"{MEMORY},%tmm(?P<tile>\d)",
    "tileloaddt1": rf"{MEMORY},%tmm(?P<tile>\d)",
    "tilestored": rf"%tmm(?P<tile>\d),{MEMORY}",
    "tdpbusd": r"%tmm(?P<weights>\d),%tmm(?P<activations>\d),%tmm(?P<tile>\d)",
    "tilerelease": "",
}


def in_software(text: str) -> str:
    """Return the text of a family of kernels with calls of software_tiles.cpp in place of all instructions of AMX."""
    for name, form in FORMS.items():
        text = re.sub(rf"^ *{name}\b ?{form}$", _call(name), text, flags=re.MULTILINE)
    left = re.search(r"^.*(%tmm|tile(cfg|release|load|store)).*$", re.sub("call.*", "", text), re.MULTILINE)
    assert left is None, left
    return text


def _call(name: str):
    """Return the function that replaces a match of one instruction by a call."""

    def lines(found: re.Match) -> str:
        given = {key: value for key, value in found.groupdict().items() if value is not None}
        moves = []
        if "base" in given:
            pushed = 8 * len(ARGUMENTS) if given["base"] == "%rsp" else 0
            moves = [f"lea {int(given['offset'] or 0) + pushed}({given['base']})"]
        if "stride" in given:
            moves.append(f"mov {given['stride']}")
        moves += [f"mov ${given[key]}" for key in ("tile", "activations", "weights") if key in given]
        moved = [f"{move},%{register}" for move, register in zip(moves, ARGUMENTS, strict=False)]
        saved = [f"push %{register}" for register in ARGUMENTS]
        restored = [f"pop %{register}" for register in reversed(ARGUMENTS)]
        return "\n".join([*saved, *moved, f"call software_{name.removesuffix('t1')}", *restored])

    return lines
