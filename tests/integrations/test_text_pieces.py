"""Long texts are computed in pieces, which give the same logits and the same cache as one step."""

import pytest
import torch

from support.generators import END, library, quantized
from support.slow_params import slow_params

NAMES = [
    ("llama", "float"),
    *slow_params(("gemma3", "int8"), reason="a larger model is captured and compiled"),
    *slow_params(("gpt2", "float"), reason="a third model; the positions of a piece are given to all of them alike"),
]


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, END, (2, count), generator=torch.Generator().manual_seed(seed))


def call(model, ids: torch.Tensor, **settings):
    found = model(ids, **settings)
    return found.logits, found.get("cache", found.get("past_key_values"))


def set_length(patched: pytest.MonkeyPatch, length: int) -> None:
    library()
    from intaglio.integrations.transformers.steps import text_pieces

    patched.setattr(text_pieces, "PIECE", length)


@pytest.fixture
def short_pieces(monkeypatch):
    set_length(monkeypatch, 7)


def whole(monkeypatch, *arguments, **settings):
    with monkeypatch.context() as context:
        set_length(context, 1000)
        return call(*arguments, **settings)


@pytest.mark.parametrize("kept", [0, 1, 9, torch.tensor([3, 19, 0, 19, 8]), torch.tensor([], dtype=torch.long)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_logits_and_cache_are_those_of_one_step(name, kind, past, padded, kept, short_pieces, monkeypatch):
    model, ids = quantized(name, kind)[1], tokens(past + 20)
    mask = torch.ones_like(ids)
    mask[0, : 3 if padded else 0] = 0
    results = []
    for run in (call, lambda *given, **more: whole(monkeypatch, *given, **more)):
        _, cache = run(model, ids[:, :past], attention_mask=mask[:, :past]) if past else (None, None)
        text = {"attention_mask": mask, "past_key_values": cache, "logits_to_keep": kept}
        logits, cache = run(model, ids[:, past:], **text)
        held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        results.append([logits[1], logits[0, 0 if past or not padded or not isinstance(kept, int) else -15 :], *held])
    (first, second, *held), (expected, other, *expected_held) = results
    assert torch.equal(first, expected)
    if not padded or past:
        assert torch.equal(second, other)
    for one, two in zip(held, expected_held, strict=True):
        assert torch.equal(one[1], two[1])
    assert cache.get_seq_length() == past + 20


def test_texts_are_divided_evenly(short_pieces, monkeypatch):
    model, sizes = quantized("llama")[1], []
    from intaglio.integrations.transformers.steps import decoder_runs

    original = decoder_runs._run

    def run(*given):
        sizes.append(given[-1]["tokens"].shape[1])
        return original(*given)

    monkeypatch.setattr(decoder_runs, "_run", run)
    model(tokens(15))
    model(tokens(7))
    assert sizes == [5, 5, 5, 7]


@pytest.mark.slow(reason="a larger model is captured and compiled")
@pytest.mark.parametrize("past", [0, 9])
def test_an_error_leaves_the_cache_as_it_was(past, short_pieces):
    model, ids, end = quantized("gemma3", "int8")[1], tokens(past + 24), tokens(1, 1)
    cache = library().DynamicCache(config=model.config)
    for step in range(past):
        call(model, ids[:, step : step + 1], past_key_values=cache)
    text = ids[:, past:].clone()
    text[0, -1] = 1000
    with pytest.raises(IndexError):
        call(model, text, past_key_values=cache)
    assert cache.get_seq_length() == past
    logits, _ = call(model, end, past_key_values=cache)
    assert torch.equal(logits, call(model, torch.cat([ids[:, :past], end], 1))[0][:, -1:])
