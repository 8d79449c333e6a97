"""Write the pictures of reports in `images`: ``python docs/screenshots.py --data FOLDER``.

They show a trained CIFAR ResNet-20, whose weights and images are in the folder (benchmarks/README.md), without times.
Chromium draws them. A report that was saved before can be used again: ``--report report.json``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests", "benchmarks")]

import networks

import intaglio
from support.chromium import find_chromium, open_browser

WIDTH, HEIGHT = 1280, 900
DETAILS = "[...document.querySelectorAll('#ops .open')].find(b => b.textContent.startsWith('{}')).click()"
SAMPLES = 256


def report(data: Path) -> intaglio.Report:
    """Measure the network on test images, calibrated on training images."""
    model = networks.cifar_resnet(20, data)
    training, test, _ = networks.cifar10(data, "lossless")
    int8 = intaglio.quantize(model, list(training[:SAMPLES].split(32)), progress=False)
    batches = list(test[:SAMPLES].split(32))
    return intaglio.report(model, int8, batches, samples=SAMPLES, calls=0)


def without_folder(found: intaglio.Report) -> intaglio.Report:
    """Return a report whose source lines begin in the repository."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "report.json")
        file.write_text(found.to_json().replace(f"{ROOT}/", ""), encoding="utf-8")
        return intaglio.Report.load(file)


def draw(found: intaglio.Report, folder: Path) -> None:
    """Write the pictures to a folder: the page in light colours, and the details of an operator in dark ones."""
    program = find_chromium()
    if program is None:
        raise SystemExit(
            "needs Chromium or Chrome (Debian, Ubuntu: apt install chromium)"
        )
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary, "report.html")
        found.save(page)
        with open_browser(program, Path(temporary, "profile")) as browser:
            browser.prefer("light")
            browser.visit(
                page.as_uri(), WIDTH, "document.querySelector('.tools').remove()"
            )
            (folder / "report.png").write_bytes(browser.picture(WIDTH, HEIGHT))
            browser.prefer("dark")
            opened = DETAILS.format("layer2.0.conv1")
            browser.visit(
                page.as_uri(),
                WIDTH,
                f"{opened}; scrollTo(0, document.querySelector('#operators').offsetTop)",
            )
            (folder / "report_details.png").write_bytes(browser.picture(WIDTH, 760))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with the trained network and images"
    )
    parser.add_argument(
        "--report", type=Path, help="JSON of a report to draw instead of measuring"
    )
    parser.add_argument("--save", type=Path, help="JSON file to write the report to")
    arguments = parser.parse_args()
    if (arguments.data is None) == (arguments.report is None):
        parser.error("pass either --data or --report")
    made = (
        report(arguments.data)
        if arguments.report is None
        else intaglio.Report.load(arguments.report)
    )
    if arguments.save is not None:
        made.save_json(arguments.save)
    draw(without_folder(made), IMAGES)
