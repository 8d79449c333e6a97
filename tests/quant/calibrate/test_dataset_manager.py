"""`DatasetManager`: what it reads, how batches are cut and counted, and the end of what can be read once."""

from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import intaglio
from intaglio import stages
from intaglio.calibration import DatasetManager
from intaglio.errors import CalibrationError

X = np.arange(14 * 3, dtype=np.float32).reshape(14, 3)


class Rows:
    """As a data set of Hugging Face shows itself."""

    column_names = ("pixels", "text", "label")

    def __len__(self):
        return 14

    def iter(self, batch_size):
        for start in range(0, 14, batch_size):
            part = X[start : start + batch_size]
            yield {"pixels": part.tolist(), "text": ["a"] * len(part), "label": list(range(len(part)))}


class Encoding(UserDict):
    """As a tokenizer's result: no Mapping by inheritance in every version, but keys and items."""


def sizes(manager):
    return [intaglio.quant.calibrate.dataset_manager.samples_of(batch) for batch in manager]


def pairs(count=14):
    return TensorDataset(torch.from_numpy(X[:count]), torch.arange(count))


@pytest.mark.parametrize("data", [X, torch.from_numpy(X), {"x": X}, Encoding(x=X, mask=X > 3)])
def test_one_array_is_one_batch_or_is_split(data):
    assert sizes(DatasetManager(data)) == [14]
    assert sizes(DatasetManager(data, batch_size=4)) == [4, 4, 4, 2]
    assert len(DatasetManager(data, batch_size=4)) == DatasetManager(data, batch_size=4).num_batches() == 4


def test_batches_become_tensors():
    (batch,) = DatasetManager(Encoding(x=X, mask=X > 3))
    assert type(batch) is dict
    assert {key: value.dtype for key, value in batch.items()} == {"x": torch.float32, "mask": torch.bool}
    (pair,) = DatasetManager([(X, np.arange(14))])
    assert [part.dtype for part in pair] == [torch.float32, torch.int64]


def test_columns_of_a_table_are_read_as_batches():
    manager = DatasetManager(Rows(), batch_size=5, columns=["pixels"])
    assert sizes(manager) == [5, 5, 4]
    assert manager.num_batches() == 3
    assert next(iter(manager))["pixels"].shape == (5, 3)
    with pytest.raises(CalibrationError, match=r"column text is not an array of numbers(.|\n)*columns="):
        next(iter(DatasetManager(Rows())))
    with pytest.raises(CalibrationError, match="no column image\n  remedy: choose columns from pixels, text, label"):
        next(iter(DatasetManager(Rows(), columns=["image"])))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(pairs(), batch_size=4),
        lambda: [X[:4], X[4:8], X[8:12], X[12:]],
        lambda: lambda: iter([X[:4], X[4:8], X[8:12], X[12:]]),
        lambda: DatasetManager(X, batch_size=4),
    ],
)
def test_batches_may_come_from_anything_as_often_as_asked(make):
    manager = DatasetManager(make())
    assert sizes(manager) == sizes(manager) == [4, 4, 4, 2]


@pytest.mark.case("calibration 11")
@pytest.mark.parametrize(("samples", "expected"), [(6, [4, 2]), (4, [4]), (1, [1]), (100, [4, 4, 4, 2])])
def test_num_samples_counts_samples(samples, expected):
    manager = DatasetManager(DataLoader(pairs(), batch_size=4), num_samples=samples)
    assert sizes(manager) == expected
    assert manager.samples == min(samples, 14)


def test_methods_in_the_documents_read_the_data_once():
    manager = DatasetManager(X, batch_size=8)
    assert not manager.is_empty()
    assert [len(manager.get_next_batch()), manager.is_empty(), len(manager.get_next_batch())] == [8, False, 6]
    assert manager.is_empty()
    with pytest.raises(IndexError, match=r"call reset\(\) to start again"):
        manager.get_next_batch()
    manager.reset()
    assert len(manager.get_next_batch()) == 8


@pytest.mark.case("calibration 10")
def test_a_second_pass_over_an_iterator_is_an_error():
    manager = DatasetManager(iter([X[:4], X[4:]]))
    assert sizes(manager) == [4, 10]
    with pytest.raises(CalibrationError, match=r"this is a second pass(.|\n)*DatasetManager\(lambda"):
        list(manager)
    with pytest.raises(CalibrationError, match="second pass"):
        manager.reset()


def test_an_iterator_may_be_reset_before_it_is_read():
    manager = DatasetManager(iter([X]))
    manager.reset()
    assert sizes(manager) == [14]
    assert manager.num_batches() is None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: DatasetManager(3), "a int cannot be read as batches"),
        (lambda: DatasetManager([X], batch_size=2), "batch_size = 2 is given, but the data already comes in batches"),
        (lambda: DatasetManager(X, num_samples=0), "num_samples = 0; it must be at least 1"),
        (lambda: list(DatasetManager([["a", "b"], object()])), "is not an array of numbers"),
    ],
)
def test_unreadable_data_sets_are_named(make, problem):
    with pytest.raises(CalibrationError, match=problem):
        make()


def test_a_dataset_manager_is_accepted_wherever_data_is_expected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    manager = DatasetManager(DataLoader(pairs(), batch_size=4), num_samples=9)
    quantized = intaglio.quantize(model, manager)
    prepared = stages.prepare(stages.capture(model, torch.from_numpy(X[:4])))
    ranges = stages.calibrate(prepared, manager)
    assert (ranges.batches, ranges.samples) == (3, 9)
    again, x = intaglio.quantize(model, list(manager)), torch.from_numpy(X)
    assert torch.equal(quantized(x), again(x))


class OfAnotherLibrary(DatasetManager):
    """A subclass with all methods, which does not call the constructor of its base."""

    def __init__(self, pairs, batch_size, total_batches):
        self.index, self.total_batches, self.batch_size = 0, total_batches, batch_size
        self.pairs, self.iterator = pairs, iter(pairs)

    def get_next_batch(self):
        if self.is_empty():
            raise IndexError
        self.index += 1
        data, label = next(self.iterator)
        return [data], label

    def num_batches(self):
        return self.total_batches

    def is_empty(self):
        return self.index >= self.total_batches

    def reset(self):
        self.iterator, self.index = iter(self.pairs), 0


PAIRS = [(X[:4], np.arange(4)), (X[4:8], np.arange(4)), (X[8:], np.arange(6))]


def test_a_subclass_with_its_own_methods_can_be_read_any_number_of_times():
    manager = OfAnotherLibrary(PAIRS, 4, 2)
    for _ in range(2):
        batches = list(manager)
        assert [batch[0][0].shape for batch in batches] == [(4, 3), (4, 3)]
        assert torch.equal(batches[1][0][0], torch.from_numpy(X[4:8]))
    assert len(manager) == 2


def test_a_subclass_calibrates_a_model_as_its_batches_do():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    captured = stages.capture(model, torch.from_numpy(X[:4]))
    plain = stages.calibrate(stages.prepare(captured), [torch.from_numpy(data) for data, _ in PAIRS])
    found = stages.calibrate(stages.prepare(captured), OfAnotherLibrary(PAIRS, 4, 3))
    assert found.to_json() == plain.to_json()
    assert intaglio.quantize(model, OfAnotherLibrary(PAIRS, 4, 3))(torch.from_numpy(X)).shape == (14, 4)


def test_a_subclass_that_ends_early_ends_the_pass():
    assert len(list(OfAnotherLibrary(PAIRS, 4, 10))) == 3


def test_a_subclass_that_calls_the_constructor_may_change_batches_only():
    class Doubled(DatasetManager):
        def get_next_batch(self):
            return 2 * super().get_next_batch()

    doubled = Doubled(X, batch_size=7)
    assert [batch[0, 1] for batch in doubled] == [2.0, 44.0]


def test_a_class_and_a_number_are_no_data():
    for data in (DatasetManager, 5):
        with pytest.raises(CalibrationError, match="cannot be read as batches"):
            DatasetManager(data)
