"""Union-find: which names belong together."""

from __future__ import annotations


class DisjointSets:
    """Union-find over names, without recursion."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        root = name
        while (parent := self._parent.setdefault(root, root)) != root:
            root = parent
        while self._parent[name] != root:
            self._parent[name], name = root, self._parent[name]
        return root

    def join(self, a: str, b: str) -> None:
        self._parent[self.find(a)] = self.find(b)
