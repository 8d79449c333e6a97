"""Disjoint sets (union-find) of names."""

from __future__ import annotations


class DisjointSets:
    """Disjoint sets of names with path compression, without recursion."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        """Return the representative of the set that contains ``name``."""
        root = name
        while (parent := self._parent.setdefault(root, root)) != root:
            root = parent
        while self._parent[name] != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def join(self, a: str, b: str) -> None:
        """Merge the sets that contain ``a`` and ``b``."""
        self._parent[self.find(a)] = self.find(b)
