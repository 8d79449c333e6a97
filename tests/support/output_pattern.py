"""The pattern of an output that a page of the documentation shows."""

import re


def output_pattern(output: str) -> re.Pattern[str]:
    """``…`` stands for anything, alone on a line for any lines."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else r".*?".join(map(re.escape, line.split("…"))) + r"\n"
        for line in output.splitlines()
    ]
    return re.compile("".join(lines))
