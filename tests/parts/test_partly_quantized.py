"""Models that cannot be captured as a whole: parts of them are found, quantized and put back."""

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio.errors import ArtifactError, CaptureError, InputError, NotFiniteError, SelectorError
from support.partial_models import Detector, Routed
from support.recipes import UNCORRECTED
from support.slow_params import slow_params


def images(count: int, height: int = 30, width: int = 40) -> list[Tensor]:
    return list(torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count)))


def batches(*sizes: tuple[int, int]) -> list[tuple[list[Tensor]]]:
    return [(images(4, *size),) for size in sizes or ((30, 40), (40, 30))]


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    return Detector().eval()


@pytest.fixture(scope="module")
def int8(detector):
    return intaglio.quantize(detector, batches(), progress=False)


@pytest.fixture(scope="module")
def routed():
    torch.manual_seed(0)
    return Routed().eval()


@pytest.fixture(scope="module")
def routed_data():
    return [torch.randn(4, 3, 12, 12) + shift for shift in (0.2, -0.2, 0.3, -0.3)]


@pytest.fixture(scope="module")
def routed_int8(routed, routed_data):
    return intaglio.quantize(routed, routed_data, progress=False)


def test_the_largest_parts_of_a_detector_are_found(int8):
    assert isinstance(int8, intaglio.PartlyQuantizedModel)
    assert list(int8.parts) == ["backbone", "head", "refine"]
    int8.assert_int8(macs=1.0)
    assert int8.coverage.islands == 0


def test_a_call_stays_as_it_was(detector, int8):
    for given in (images(2), images(1, 64, 24)):
        exact, found = detector(given), int8(given)
        assert [list(one) for one in found] == [["boxes", "scores", "labels"]] * len(given)
        for a, b in zip(exact, found, strict=True):
            assert (a["scores"].mean() - b["scores"].mean()).abs() < 0.02


def test_the_float_model_is_not_changed(detector, int8):
    assert not any(isinstance(module, intaglio.QuantizedModel) for module in detector.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in detector.modules())


@pytest.mark.parametrize("form", [*slow_params("list", reason="a pair holds a list, too"), "pair"])
def test_batches_may_be_lists_of_images_or_pairs_with_labels(detector, int8, form):
    data = [images for (images,) in batches()]
    data = data if form == "list" else [(one, [{"boxes": 0}] * 4) for one in data]
    found = intaglio.quantize(detector, iter(data), progress=False)
    torch.testing.assert_close(found(images(2))[0], int8(images(2))[0], rtol=0, atol=0)


def test_both_sides_of_a_branch_are_quantized(routed, routed_int8, routed_data):
    assert list(routed_int8.parts) == ["backbone", "bright", "dark"]
    for x in routed_data:
        assert (routed_int8(x) - routed(x)).abs().max() < 0.05 * routed(x).abs().max()


@pytest.mark.slow(reason="quantizes the model with branches again, with fewer batches")
def test_a_part_that_no_batch_calls_stays_in_float_with_the_reason(routed, routed_data):
    int8 = intaglio.quantize(routed, routed_data[::2], recipe=UNCORRECTED, progress=False)
    assert list(int8.parts) == ["backbone", "bright"]
    (left,) = int8.coverage.floats
    assert (left.path, left.reason) == ("dark", "no batch calls it with tensors")
    assert torch.equal(int8.dark.weight, routed.dark.weight)


def test_the_report_says_why_the_whole_model_is_not_int8(routed_int8):
    (note,) = [note for note in routed_int8.coverage.notes if note.startswith("the whole model is not one program: ")]
    assert "data-dependent" in note


def test_strict_refuses_parts(routed, routed_data):
    with pytest.raises(CaptureError, match="data-dependent"):
        intaglio.quantize(routed, routed_data, strict=True)


@pytest.mark.slow(reason="quantizes the model with branches again; a selector without a part is refused below")
def test_selectors_name_modules_of_the_whole_model(routed, routed_data):
    int8 = intaglio.quantize(routed, routed_data, recipe=UNCORRECTED, skip=["backbone.2"], progress=False)
    assert [part.path for part in int8.coverage.floats] == ["backbone.2"]
    assert 0.2 < int8.coverage.macs < 0.4


def test_a_selector_that_matches_no_part_is_refused(routed, routed_data):
    with pytest.raises(SelectorError, match="nothing"):
        intaglio.quantize(routed, routed_data, skip=["nothing"], progress=False)


@pytest.mark.slow(reason="quantizes a model with tied weights; parts that stay in float are reported above")
def test_a_part_whose_weights_are_read_outside_stays_in_float():
    class Tied(Routed):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found @ self.bright.weight

    torch.manual_seed(0)
    model = Tied().eval()
    x = torch.rand(4, 3, 12, 12)
    int8 = intaglio.quantize(model, [x], progress=False)
    assert list(int8.parts) == ["backbone"]
    assert "other modules read its attribute 'weight'" in {part.reason for part in int8.coverage.floats}
    assert int8(x).shape == model(x).shape


@pytest.mark.slow(reason="a further reader of a weight; one that reads its values is refused above")
def test_code_outside_of_a_part_may_ask_for_the_form_of_its_weight():
    class Converting(Routed):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.bright.weight
            assert weight.shape == (len(weight), weight.size(1))
            return super().forward(x.to(weight.device)).to(weight.dtype)

    torch.manual_seed(0)
    model = Converting().eval()
    x = torch.rand(4, 3, 12, 12)
    int8 = intaglio.quantize(model, [x], recipe=UNCORRECTED, progress=False)
    assert list(int8.parts) == ["backbone", "bright"]
    assert int8(x).shape == model(x).shape
    assert repr(int8.bright.weight) == f"DescribedTensor(weight, {list(model.bright.weight.shape)}, torch.float32)"
    with pytest.raises(InputError, match=r"(?s)bright does not have the attribute .weight.*skip="):
        int8.bright.weight + 1
    skipped = intaglio.quantize(model, [x], recipe=UNCORRECTED, skip=["bright"], progress=False)
    assert torch.equal(skipped.bright.weight + 1, model.bright.weight + 1)


class State:
    """An object with tensors, which a model passes to its parts."""

    def __init__(self) -> None:
        self.seen = list[Tensor]()


class Stateful(nn.Module):
    """A part that writes to an object, beside one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, state: State) -> Tensor:
        state.seen.append(x)
        return self.inner(x) + len(state.seen)


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Stateful(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = State()
        for _ in range(int(x.sum() > 0) + 1):
            x = self.part(x, state)
        return self.last(x)


def test_a_part_that_gets_an_object_with_tensors_is_divided():
    torch.manual_seed(0)
    model, data = WithState().eval(), [torch.randn(4, 8) + shift for shift in (1.0, -1.0)]
    int8 = intaglio.quantize(model, data, recipe=UNCORRECTED, progress=False)
    assert list(int8.parts) == ["part.inner", "last"]
    for x in data:
        assert (int8(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()


class Sized(nn.Module):
    """A backbone that also tells the size of its result and its data type."""

    def __init__(self):
        super().__init__()
        self.steps = 2
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1))

    def size_of(self, size: int) -> int:
        return -(-size // 2**self.steps)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Asking(nn.Module):
    """Asks its backbone for what it needs to know, and reads a weight inside of it if ``reads`` is set."""

    def __init__(self, reads: bool):
        super().__init__()
        self.backbone, self.reads = Sized(), reads

    def forward(self, x: Tensor) -> Tensor:
        found = self.backbone(x.to(self.backbone.dtype))
        scale = self.backbone.layers[2].bias.mean() if self.reads else 1.0
        return found * scale if found.sum().item() > 0 else found[..., : self.backbone.size_of(x.shape[-1])]


@pytest.mark.slow(reason="quantizes a model with methods of its own")
def test_methods_and_the_data_type_of_a_part_can_be_asked_for():
    torch.manual_seed(0)
    model, x = Asking(reads=False).eval(), torch.rand(4, 3, 12, 12)
    int8 = intaglio.quantize(model, [x], progress=False)
    assert list(int8.parts) == ["backbone"]
    torch.testing.assert_close(int8(x), model(x), rtol=0, atol=0.05)


@pytest.mark.slow(reason="another model with methods of its own; one is quantized above")
def test_parts_inside_of_one_that_cannot_take_its_place_are_quantized():
    torch.manual_seed(0)
    model, x = Asking(reads=True).eval(), torch.rand(4, 3, 12, 12)
    int8 = intaglio.quantize(model, [x], progress=False)
    assert list(int8.parts) == ["backbone.layers.0"]
    assert next(int8.parameters()).dtype == torch.float32
    assert "other modules read its attribute 'bias'" in {part.reason for part in int8.coverage.floats}
    torch.testing.assert_close(int8(x), model(x), rtol=0, atol=0.05)


class Holding(Sized):
    """Has a method that turns a missing attribute into an error of its own."""

    def first_layer(self) -> nn.Module:
        if not hasattr(self, "layers"):
            raise NotImplementedError("override first_layer")
        return self.layers[0]


class Wondering(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Holding()

    def forward(self, x: Tensor) -> Tensor:
        found = self.backbone(x) * len(self.backbone.first_layer().stride)
        return found if found.sum().item() > 0 else -found


def test_errors_of_methods_that_miss_attributes_divide_a_part():
    torch.manual_seed(0)
    model, x = Wondering().eval(), torch.rand(4, 3, 12, 12)
    int8 = intaglio.quantize(model, [x], progress=False, recipe=UNCORRECTED)
    assert "backbone" not in int8.parts
    assert "backbone.layers.2" in int8.parts
    torch.testing.assert_close(int8(x), model(x), rtol=0, atol=0.05)


class AskingTwice(nn.Module):
    """Asks one part for an attribute with a default, and needs one of the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Sized(), nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found = self.second(self.first(x) * getattr(self.first, "factor", 1)) * self.second[0].groups
        return found if found.sum().item() > 0 else -found


def test_attributes_that_code_asks_for_with_a_default_do_not_divide_a_part():
    torch.manual_seed(0)
    model, x = AskingTwice().eval(), torch.rand(4, 3, 12, 12)
    int8 = intaglio.quantize(model, [x], progress=False, recipe=UNCORRECTED)
    assert list(int8.parts) == ["first", "second.0"]


class Chosen(nn.Module):
    """Computes the rows of its input that begin with a positive number."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x[x[:, 0] > 0]).sum(0)


def test_models_with_sizes_that_depend_on_data_are_quantized_in_parts():
    torch.manual_seed(0)
    model, data = Chosen().eval(), [torch.randn(16, 8) for _ in range(4)]
    int8 = intaglio.quantize(model, data, recipe="transformer", progress=False)
    assert list(int8.parts) == ["inside"]
    assert "depends on the values" in str(int8.coverage)
    torch.testing.assert_close(int8(data[1]), model(data[1]), rtol=0.05, atol=0.2)


def test_multiply_accumulates_outside_of_parts_count_as_float(routed, routed_data):
    class Outside(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ torch.ones(4, 1000)

    torch.manual_seed(0)
    int8 = intaglio.quantize(Outside().eval(), routed_data, progress=False)
    assert sum(part.macs for part in int8.coverage.floats) == 4 * 4 * 1000
    with pytest.raises(AssertionError, match="outside of the quantized parts"):
        int8.assert_int8(macs=1.0)


def test_a_shared_module_is_one_part(routed_data):
    model = Routed().eval()
    model.dark = model.bright
    int8 = intaglio.quantize(model, routed_data, progress=False)
    assert int8.model.bright is int8.model.dark


def test_a_model_without_parts_raises_the_error_of_its_capture():
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="data-dependent"):
        intaglio.quantize(Alone().eval(), [torch.rand(2, 2)])


def test_a_saved_model_gives_the_same_bits_in_a_model_with_other_weights(int8, tmp_path):
    int8.save(tmp_path / "detector.intaglio")
    again = intaglio.load_into(tmp_path / "detector.intaglio", Detector())
    for one, other in zip(int8(images(3)), again(images(3)), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert again.coverage == int8.coverage


def test_the_fingerprint_is_of_the_parts_and_of_the_float_tensors_around_them(int8, tmp_path):
    int8.save(tmp_path / "detector.intaglio")
    again = intaglio.load_into(tmp_path / "detector.intaglio", Detector())
    assert again.fingerprint() == int8.fingerprint()
    assert len(int8.fingerprint()) == 64
    found = {again.fingerprint()}
    for value in (1.0, 2.0):
        again.model.register_buffer("offset", torch.tensor(value))
        found.add(again.fingerprint())
    assert len(found) == 3


@pytest.mark.slow(reason="quantizes twice; what the fingerprint is of is tested above")
def test_another_weight_of_a_part_gives_another_fingerprint(routed, routed_data):
    found = set()
    for change in (0, 1e-2):
        with torch.no_grad():
            model = copy.deepcopy(routed)
            next(iter(model.parameters())).add_(change)
        found.add(intaglio.quantize(model, routed_data, recipe=UNCORRECTED, progress=False).fingerprint())
    assert len(found) == 2


@pytest.mark.parametrize("other", [Routed, lambda: nn.Linear(2, 2)])
def test_a_saved_model_is_refused_by_another_architecture(int8, tmp_path, other):
    int8.save(tmp_path / "detector.intaglio")
    with pytest.raises(ArtifactError, match=r"does not have|not those of the model"):
        intaglio.load_into(tmp_path / "detector.intaglio", other())


def test_load_names_the_function_for_files_of_parts(int8, tmp_path):
    int8.save(tmp_path / "detector.intaglio")
    with pytest.raises(ArtifactError, match="load_into"):
        intaglio.load(tmp_path / "detector.intaglio")


def test_load_into_names_the_function_for_files_of_whole_models(tmp_path):
    model = nn.Linear(4, 4).eval()
    intaglio.quantize(model, [torch.rand(4, 4)]).save(tmp_path / "model.intaglio")
    with pytest.raises(ArtifactError, match=r"intaglio\.load\(path\)"):
        intaglio.load_into(tmp_path / "model.intaglio", model)
    assert intaglio.load(tmp_path / "model.intaglio").coverage.macs == 1.0


def test_parts_are_compared_with_their_float_modules(detector, int8):
    found = int8.compare(detector, batches())
    assert list(found) == ["backbone", "head", "refine"]
    assert min(min(part.results) for part in found.values()) > 25


@pytest.mark.parametrize(
    "form", [*slow_params("tuple", "list", reason="a pair holds one of these"), "pair with labels"]
)
def test_parts_are_compared_on_batches_of_any_form(detector, int8, form):
    forms = {"tuple": (images(4),), "list": images(4), "pair with labels": (images(4), [{}] * 4)}
    assert set(int8.compare(detector, [forms[form]])) == set(int8.parts)


class Counting(nn.Module):
    """Counts its calls, and branches on data, so that it is quantized in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.body(x)
        return (y / 2 if y.max().item() > 1e9 else y) + self.calls


def test_calls_for_quantizing_and_comparing_leave_buffers_as_they_were():
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    model = Counting().eval()
    found = intaglio.quantize(model, data, recipe=UNCORRECTED, progress=False)
    assert found.calls == 0
    assert (found(data[0]) - model.body(data[0])).mean().item() == pytest.approx(1, abs=0.1)
    before = copy.deepcopy(model.train().state_dict())
    comparison = found.compare(model, data)["body"]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert min(comparison.results) > 25


def test_nan_in_a_batch_of_a_model_in_parts_is_an_error_that_names_the_batch():
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    data[2][1, 0, 3, 3] = float("nan")
    with pytest.raises(
        NotFiniteError, match=r"batch 2, argument leaf 0: it holds NaN, and .* part 'body': batch 2, .* NaN"
    ) as raised:
        intaglio.quantize(Counting().eval(), data, progress=False)
    assert raised.value.remedy.startswith("remove samples with such values from the data")
    found = intaglio.quantize(Counting().eval(), [data[0], data[1], data[3]], progress=False)
    assert set(found.parts) == {"body"}


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_stays_in_float_and_the_rest_is_quantized():
    torch.manual_seed(0)
    stem = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    model = nn.Sequential(stem, nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))).eval()
    data = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    found = intaglio.quantize(model, data, recipe=UNCORRECTED, progress=False)
    assert set(found.parts) == {"1"}
    assert "it is TorchScript; with the nn.Module that it was made from it can be int8" in str(found.coverage)
    torch.testing.assert_close(found(data[0]), model(data[0]), atol=0.05, rtol=0)


class Dividing(Counting):
    """Computes NaN from finite data in front of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y / 2 if y.max().item() > 1e9 else y
        return torch.nan_to_num(self.last(y.clamp(min=-1).sqrt()))


def test_a_part_that_gets_nan_from_finite_data_stays_in_float():
    torch.manual_seed(0)
    found = intaglio.quantize(Dividing().eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)], progress=False)
    assert set(found.parts) == {"body"}
    assert "NaN" in str(found.coverage)


def test_parts_are_compared_on_dictionaries(routed, routed_data):
    int8 = intaglio.quantize(routed, [{"x": batch} for batch in routed_data], recipe=UNCORRECTED, progress=False)
    assert set(int8.compare(routed, [{"x": batch} for batch in routed_data])) == set(int8.parts)


def test_compare_names_the_method_of_models_in_parts(detector, int8):
    with pytest.raises(InputError, match="comparison of its own") as error:
        intaglio.compare(detector, int8, batches())
    assert "int8.compare(model, data)" in error.value.remedy


def test_a_part_takes_an_empty_batch(int8):
    found = int8.parts["backbone"](torch.rand(0, 3, 30, 40))
    shapes = {name: tuple(maps.shape) for name, maps in found.items()}
    assert shapes == {"fine": (0, 8, 15, 20), "coarse": (0, 8, 8, 10)}


def test_texts_of_all_parts_are_joined(int8):
    assert [line for line in int8.text("integer").splitlines() if line.startswith("----")] == [
        "---- backbone",
        "---- head",
        "---- refine",
    ]


def test_a_copy_of_the_model_runs(int8):
    again = copy.deepcopy(int8)
    torch.testing.assert_close(again(images(1))[0], int8(images(1))[0], rtol=0, atol=0)


class PackedLabels(nn.Module):
    """A recurrent layer that reads a packed sequence, and a linear layer behind it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


@pytest.mark.slow(reason="quantizes a sequence for one number; test_packed_sequences.py has such models")
def test_layers_that_read_a_packed_sequence_count():
    model, lengths = PackedLabels().eval(), torch.tensor([5, 5])
    found = intaglio.quantize(model, [(torch.rand(2, 5, 8), lengths)], progress=False).coverage
    assert found.macs_total == found.macs_int8 == 2 * 5 * (4 * 16 * (8 + 16) + 16 * 4)


def test_the_layer_and_what_is_behind_it_are_quantized():
    model = PackedLabels().eval()
    batch = torch.rand(3, 5, 8), torch.tensor([5, 4, 2])
    found = intaglio.quantize(model, [batch], progress=False)
    assert "2 parts in int8: layer" in str(found.coverage)
    exact = model(*batch)
    assert (found(*batch) - exact).square().sum() < 1e-2 * exact.square().sum()


class Strided(Detector):
    """A detector whose last map has a single pixel for images of 32 x 32 pixels."""

    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())]
        self.backbone.second = nn.Sequential(*layers)


@pytest.mark.slow(reason="another detector, with images of three sizes")
def test_maps_of_one_pixel_in_the_batches_do_not_limit_the_size_of_images():
    torch.manual_seed(0)
    model = Strided().eval()
    int8 = intaglio.quantize(model, batches((32, 32)), recipe=UNCORRECTED, progress=False)
    assert list(int8.parts) == ["backbone", "head", "refine"]
    for size in ((32, 32), (64, 40), (16, 96)):
        with torch.no_grad():
            exact, found = (m.backbone(torch.stack(images(2, *size)))["coarse"] for m in (model, int8))
        assert exact.shape == found.shape
        assert (found - exact).square().sum() < 1e-2 * exact.square().sum()


@pytest.mark.slow(reason="quantizes a detector twice to count its runs")
def test_runs_of_the_float_model_do_not_grow_with_the_number_of_parts(monkeypatch):
    class Counted(Detector):
        runs = 0

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            Counted.runs += 1
            return super().forward(images)

    def runs(limit: int) -> int:
        monkeypatch.setattr(importlib.import_module("intaglio.parts.find_parts"), "MOST_BYTES", limit)
        Counted.runs = 0
        intaglio.quantize(Counted().eval(), batches(), recipe=UNCORRECTED, progress=False)
        return Counted.runs

    assert runs(10**6) + 2 * len(batches()) == runs(1)


@pytest.mark.slow(reason="quantizes the model with branches again; clipping is counted in runtime")
def test_values_outside_of_their_ranges_are_reported_for_all_parts(routed, routed_data, caplog, tmp_path):
    model = intaglio.quantize(routed, routed_data, recipe=UNCORRECTED, progress=False)
    model(routed_data[0])
    assert not model.clipping.values
    model(20 * routed_data[0])
    assert {value.path.partition(".")[0] for value in model.clipping.values} >= {"backbone", "bright"}
    assert "calibrate with data like that of this call" in caplog.text
    model.save(tmp_path / "model.intaglio")
    for again in (intaglio.load_into(tmp_path / "model.intaglio", Routed().eval()), copy.deepcopy(model)):
        assert again.on_clipping == "warn"
        again.on_clipping = "error"
        with pytest.raises(InputError, match="are outside of the calibrated range"):
            again(20 * routed_data[0])
    assert model.on_clipping == "warn"
    with pytest.raises(InputError, match="did you mean 'ignore'"):
        model.on_clipping = "ignor"
