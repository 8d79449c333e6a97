"""Commands for what leaves the machine: card, bundle-issue and completion; and --quiet and --json everywhere."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.main import get_command

import intaglio
from intaglio.cli.app import app
from intaglio.cli.commands import doctor
from support.command_line import runner
from support.nets import randomize
from support.slow_params import slow_params

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MODULE = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
data = [torch.randn(8, 3, 8, 8), torch.randn(8, 3, 8, 8)]

class Refused(nn.Module):
    def forward(self, x):
        raise RuntimeError("the layer is broken")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``run(*words)`` in a folder with a file and a module: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "run", lambda: {"cpu": "a processor", "compiler": None})
    sys.modules.pop("brought_to_share", None)
    (tmp_path / "brought_to_share.py").write_text(MODULE)
    import brought_to_share as brought

    intaglio.quantize(brought.net, brought.data, progress=False).save("net.intaglio", example=X)
    return runner(capsys)


MEASURED = ("--float", "brought_to_share:net", "--data", "brought_to_share:data")


def test_a_card_says_what_was_quantized_and_measured(run, tmp_path):
    code, _, err = run("card", "net.intaglio", *MEASURED, "--out", "CARD.md", "--calls", "2")
    assert code == 0, err
    text = (tmp_path / "CARD.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles[:6] == [
        "# Sequential, int8",
        "## What is quantized",
        "## Accuracy",
        "## Recipe",
        "## Measured with",
        "## Fingerprints",
    ]
    assert "| samples compared with the float model | 16 |" in text
    assert f"`{intaglio.load('net.intaglio').fingerprint()}`" in text
    assert "[default]" in text
    assert str(torch.__version__) in text
    assert str(tmp_path) not in text


def test_a_card_without_data_says_so(run):
    found = json.loads(run("card", "net.intaglio", "--json")[1])
    assert found["fingerprint"] == intaglio.load("net.intaglio").fingerprint()
    assert "Accuracy was not measured" in found["card"]
    assert run("card", "net.intaglio")[1].startswith("# Sequential, int8")
    assert run("card", "net.intaglio", *MEASURED[:2])[0] == 2


def test_names_in_a_card_are_no_markup():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(torch.special.zeta(self.first(x).abs() + 2, torch.full((4,), 2.0)))

    Odd.__name__ = "<b>|_x_"
    model = intaglio.quantize(randomize(Odd()), [torch.ones(2, 4)], progress=False)
    card = intaglio.report(None, model, calls=0).card()
    assert card.startswith("# \\<b\\>\\|\\_x\\_, int8")
    assert "Operators in float:" in card


def texts_of(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_bundle_holds_texts_and_no_weights(run, tmp_path):
    found = json.loads(run("bundle-issue", "net.intaglio", "--out", "issue.zip", "--json")[1])
    texts = texts_of(tmp_path / "issue.zip")
    assert set(found["files"]) == set(texts)
    assert {"README.txt", "doctor.json", "versions.json", "cpu.txt", "model/integer.txt", "model/plan.txt"} <= set(
        texts
    )
    assert json.loads(texts["versions.json"])["packages"]["torch"]
    assert found["error"] is None
    model = intaglio.load("net.intaglio")
    weights = next(array for array in model.graph.constants.values() if array.dtype == "int8" and array.size > 100)
    row = ", ".join(map(str, weights.ravel()[:6].tolist()))
    assert not [name for name, text in texts.items() if row in text or row.replace(",", "") in text]


def test_a_bundle_of_a_float_model_holds_the_stages_that_were_reached(run, tmp_path):
    code, out, _ = run("bundle-issue", "brought_to_share:net", "--example-shape", "2,3,8,8", "--out", "good.zip")
    assert code == 0
    assert "no weights" in out
    assert {"model/captured.txt", "model/sites.txt", "model/integer.txt"} <= set(texts_of(tmp_path / "good.zip"))


def test_a_bundle_keeps_the_error_of_the_model_and_the_one_that_was_seen(run, tmp_path):
    (tmp_path / "seen.txt").write_text("what I saw\n")
    words = ("bundle-issue", "brought_to_share:Refused", "--example-shape", "2,3,8,8", "--out", "bad.zip")
    code, out, _ = run(*words, "--error", "seen.txt")
    assert code == 0
    assert "the layer is broken" in out
    text = texts_of(tmp_path / "bad.zip")["error.txt"]
    assert text.startswith("what I saw")
    assert "the layer is broken" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_the_command(run, shell):
    script = run("completion", shell)[1]
    assert "_INTAGLIO_COMPLETE" in script
    assert json.loads(run("completion", shell, "--json")[1]) == {"shell": shell, "script": script.rstrip("\n")}
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script, text=True, timeout=60).returncode == 0


def test_shells_are_answered_with_commands_and_options(monkeypatch, capsys):
    for words, index, expected in (("intaglio ver", "1", "verify"), ("intaglio verify --js", "2", "--json")):
        monkeypatch.setenv("_INTAGLIO_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", index)
        assert runner(capsys)()[1].split() == [expected]


def test_every_command_has_quiet_and_json():
    for name, command in get_command(app).commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--quiet", "-q", "--json"} <= options, name


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "brought_to_share:net", "--data", "brought_to_share:data", "--out", "again.intaglio"),
        ("inspect", "net.intaglio"),
        *slow_params(
            (("diff", "net.intaglio", "net.intaglio"),),
            (("card", "net.intaglio"),),
            reason="commands that read a file as the others do",
        ),
        ("verify", "net.intaglio"),
    ],
    ids=lambda words: words[0],
)
def test_quiet_commands_print_nothing(run, words):
    assert run(*words, "--quiet") == (0, "", "")


def test_quiet_commands_print_errors_and_json(run):
    code, out, err = run("verify", "missing", "-q")
    assert (code, out) == (2, "")
    assert "missing" in err
    assert json.loads(run("verify", "net.intaglio", "-q", "--json")[1])["verified"]
