"""Names in programs of the layers of a model.

A model that is quantized in parts has a program for each part. Those of equal layers differ in the path of the layer
alone, which names of functions and values begin with. Without it their texts are equal, and are compiled once.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import takewhile

from intaglio.ir.names import sanitized

_NAME = re.compile(r"\w+")


class ShortNames:
    """Removes the path of a layer from the names in a program, unless names would become equal.

    Attributes:
        path: path of the layer that all modules of the program are inside of, or "".
    """

    def __init__(self, paths: Collection[str], source: str) -> None:
        """Find the path of the layer.

        Args:
            paths: paths of the modules of the program.
            source: text of the program.
        """
        columns = zip(*(path.split(".") for path in paths if path), strict=False)
        common = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns)]
        self.path = ".".join(next((home for home in (common[:-1], common) if _is_layer(home)), []))
        names = set(_NAME.findall(source)) if self.path else set()
        if len({self.of(name) for name in names}) < len(names):
            self.path = ""

    def of(self, text: str) -> str:
        """Return a text of the program without the path. A name that is the path itself becomes "layer"."""
        if not self.path:
            return text
        for path, end in ((self.path, "."), (sanitized(self.path), "_")):
            name = rf"(?<![0-9A-Za-z]){re.escape(path)}"
            text = re.sub(rf"{name}(?![0-9A-Za-z])", "layer", re.sub(rf"{name}\{end}", "", text))
        return text


def _is_layer(names: list[str]) -> bool:
    """Return whether a path has words and a number. Joined by underscores, no name of the runtime has one."""
    numbers = sum(name.isdecimal() for name in names)
    return 0 < numbers < len(names)
