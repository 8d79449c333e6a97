"""Commands on saved files: diff, export and verify."""

import json

import pytest
import torch
from torch import nn

import intaglio
from support.command_line import runner
from support.nets import randomize

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``run(*words)`` in a folder with three files: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    model = randomize(Net())
    for name, given in {
        "plain": {},
        "skipped": {"skip": ["second"]},
        "other": {"recipe": {"*": {"rounding": "nearest"}}},
    }.items():
        intaglio.quantize(model, [X, X + 1], progress=False, **given).save(f"{name}.intaglio", example=X)
    return runner(capsys)


def test_a_file_does_not_differ_from_itself(run):
    code, out, _ = run("diff", "plain.intaglio", "plain.intaglio", "--json")
    found = json.loads(out)
    assert (code, found["changes"]) == (0, [])
    assert found["results"] == [{"same_bits": True, "sqnr_db": None}]
    text = run("diff", "plain.intaglio", "plain.intaglio", "--trace")[1]
    assert "the same operators, types, scales and constants" in text
    assert "the same bits" in text


def test_weights_that_differ_are_counted_and_values_traced(run):
    found = json.loads(run("diff", "plain.intaglio", "other.intaglio", "--json", "--trace")[1])
    weights = [change for change in found["changes"] if "elements differ" in (change["second"] or "")]
    assert {change["path"] for change in weights} >= {"first", "second"}
    assert not found["results"][0]["same_bits"]
    decibels = [value["sqnr_db"] for value in found["trace"]]
    assert found["trace"][0]["path"] == "first"
    assert 20 < min(decibels) < 80
    assert abs(found["results"][0]["sqnr_db"] - decibels[-1]) < 3
    text = run("diff", "plain.intaglio", "other.intaglio")[1]
    assert "differences" in text
    assert "dB from the first model's" in text


def test_operators_and_types_that_differ_are_named(run):
    changes = json.loads(run("diff", "plain.intaglio", "skipped.intaglio", "--json")[1])["changes"]
    assert {"operator", "data type"} & {change["what"] for change in changes}
    assert any("second" in change["path"] for change in changes)
    assert all(set(change) == {"value", "path", "what", "first", "second"} for change in changes)


def test_export_writes_sources(run, tmp_path):
    code, out, err = run("export", "plain.intaglio", "--out", "net_c", "--isa", "avx2,portable")
    assert code == 0, err
    assert "cmake -S net_c" in out
    assert {"CMakeLists.txt", "net.h", "net.cpp", "weights.bin"} <= {
        path.name for path in (tmp_path / "net_c").iterdir()
    }
    found = json.loads(run("export", "plain.intaglio", "--out", "net_c", "--json")[1])
    assert found["weights_bytes"] == (tmp_path / "net_c" / "weights.bin").stat().st_size


def test_verify_runs_the_stored_example(run):
    code, out, _ = run("verify", "plain.intaglio")
    assert (code, out.strip().startswith("Net: the stored example gives the same bits here")) == (0, True)
    assert json.loads(run("verify", "plain.intaglio", "--json")[1])["verified"]
    intaglio.quantize(randomize(Net()), [X], progress=False).save("bare.intaglio")
    code, _, err = run("verify", "bare.intaglio")
    assert code == 1
    assert "the model has no stored example" in err


def test_files_that_are_missing_are_refused(run):
    for words in (("diff", "plain.intaglio", "gone"), ("export", "gone", "--out", "x"), ("verify", "gone")):
        code, _, err = run(*words)
        assert code == 2
        assert "gone" in err


@pytest.mark.slow(reason="quantizes to store an example; a stored example is verified above")
def test_quantize_stores_an_example_to_verify_with(run, tmp_path):
    (tmp_path / "brought_example.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(4, 3))\ndata = [torch.randn(8, 4)]\n"
    )
    words = ("quantize", "brought_example:net", "--data", "brought_example:data", "--out", "linear.intaglio")
    assert run(*words, "--with-example")[0] == 0
    assert run("verify", "linear.intaglio")[0] == 0


def test_data_that_is_read_only_once_needs_an_example_before_the_work(run, tmp_path):
    (tmp_path / "brought_once.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Linear(4, 3)\nx = torch.randn(8, 4)\ndata = iter([x, x + 1])\n"
    )
    words = ("quantize", "brought_once:net", "--data", "brought_once:data", "--out", "once.intaglio", "--with-example")
    code, _, err = run(*words)
    assert code == 2
    assert "--example" in err
    assert not (tmp_path / "once.intaglio").exists()
    assert run(*words, "--example", "brought_once:x")[0] == 0
    assert run("verify", "once.intaglio")[0] == 0


class Named(nn.Module):
    """A network whose arguments are not in the order of the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        return self.first(narrow).relu() + self.second(wide)


@pytest.mark.slow(reason="quantizes two models with inputs by name; inputs by position are compared above")
def test_arguments_by_name_reach_their_inputs(run, tmp_path):
    batch = {"narrow": torch.randn(8, 4), "wide": torch.randn(8, 6)}
    model = randomize(Named())
    for name, recipe in {"default": {}, "nearest": {"*": {"rounding": "nearest"}}}.items():
        intaglio.quantize(model, [batch, batch], recipe=recipe, progress=False).save(f"{name}.intaglio")
    torch.save(batch, tmp_path / "batch.pt")
    (tmp_path / "brought_named.py").write_text("import torch\ndata = [torch.load('batch.pt')]\n")
    words = ("diff", "default.intaglio", "nearest.intaglio", "--data", "brought_named:data", "--trace", "--json")
    code, out, err = run(*words)
    assert code == 0, err
    assert isinstance(json.loads(out)["trace"], list)
