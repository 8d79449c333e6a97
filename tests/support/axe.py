"""axe-core, the checker of accessibility, where it is installed outside of the repository."""

import os
from pathlib import Path

PLACES = (
    os.environ.get("AXE_CORE", ""),
    "/usr/share/javascript/axe-core/axe.min.js",
    "/usr/lib/node_modules/axe-core/axe.min.js",
    "/usr/local/lib/node_modules/axe-core/axe.min.js",
)
NEEDED = "needs axe-core: npm install -g axe-core, or set AXE_CORE to the path of axe.min.js"


def find_axe() -> str | None:
    """Return the source of axe-core, or ``None``."""
    found = next((Path(place) for place in PLACES if place and Path(place).is_file()), None)
    return found.read_text(encoding="utf-8") if found else None


def check(source: str) -> str:
    """Return a script that gives the violations on a page: the rule, what is wrong, and the first elements."""
    shown = "v => ({id: v.id, nodes: v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + ' ' + n.failureSummary)})"
    run = f"axe.run({{resultTypes: ['violations']}}).then(found => found.violations.map({shown}))"
    return f"(() => {{ if (!window.axe) {{ {source} }}\nreturn {run}; }})()"
