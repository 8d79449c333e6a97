"""Calls that append to blocks of memory: the interpreter's bits, what is written, and what is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from intaglio import build
from intaglio.errors import InputError
from intaglio.runtime.calls import call_plans, growing_calls
from intaglio.runtime.calls.growing_calls import EarlierTokens, GrowingCalls, can_grow
from support.growing_programs import GROWN, cached_attention, one_head
from support.matmul_library import RUNNABLE_ISAS
from support.programs import assert_same_bits, built, compiled

CAPACITY = 96


def made(isa: str = RUNNABLE_ISAS[0], program=cached_attention):
    """A model with calls of its own."""
    model = build.compile(built(program)[1], isa=isa)
    return model, GrowingCalls(model, GROWN)


def drawn(images: int, new: int, seed: int, heads: int = 2) -> list[torch.Tensor]:
    """Queries, new keys and new values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(images, count, new, 8, generator=generator) for count in (4, heads, heads)]


def memory(images: int, seed: int = 0, heads: int = 2) -> torch.Tensor:
    """Memory for keys and values, with any bytes in it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (2, images, heads, CAPACITY, 8), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@pytest.mark.parametrize(("program", "heads"), [(cached_attention, 2), (one_head, 1)])
def test_steps_have_the_bits_of_the_interpreter(program, heads, isa, threads, monkeypatch):
    model, calls = made(isa, program)
    lowered = built(program)[1]
    monkeypatch.setattr(call_plans.threads, "thread_counts", lambda program, *rest: (threads,) * program.segments)
    for images in (1, 3):
        block, start = memory(images, heads=heads), 0
        for step, new in enumerate((5, 1, 1, 7, 1, 40, 1)):
            inputs = drawn(images, new, step, heads)
            before = [tensor[:, :, :start].clone() for tensor in block]
            expected, *grown = lowered(*inputs, *before)
            assert_same_bits(calls.run(model, inputs, [EarlierTokens(block, 0, start)]), expected)
            for tensor, old, added in zip(block, before, grown, strict=True):
                assert torch.equal(tensor[:, :, : start + new], torch.cat([old, added], 2))
            start += new


def test_a_call_reads_and_writes_from_the_first_token_that_it_is_told():
    model, calls = made()
    block, inputs = memory(2), drawn(2, 3, 0)
    before = block.clone()
    expected, *grown = model(*inputs, *block[:, :, :, 7:16])
    assert_same_bits(calls.run(model, inputs, [EarlierTokens(block, 7, 9)]), expected)
    before[:, :, :, 16:19] = torch.stack(grown)
    assert torch.equal(block, before)


def test_the_program_itself_writes_behind_the_earlier_values(monkeypatch):
    model, calls = made()
    monkeypatch.setattr(growing_calls, "_append", lambda *rest: None)
    block, inputs = memory(2), drawn(2, 3, 0)
    _, *grown = model(*inputs, *block[:, :, :, :9])
    calls.run(model, inputs, [EarlierTokens(block, 0, 9)])
    for tensor, added in zip(block, grown, strict=True):
        assert torch.equal(tensor[:, :, 9:12], added)


def test_a_call_without_memory_behind_its_tensors_changes_nothing():
    model, _ = made()
    block, inputs = memory(2), drawn(2, 3, 0)
    before = block.clone()
    model(*inputs, *block[:, :, :, :9])
    assert torch.equal(block, before)


def test_other_numbers_of_earlier_tokens_share_a_plan():
    model, calls = made()
    block = memory(1)
    for start in range(1, 80):
        calls.run(model, drawn(1, 1, start), [EarlierTokens(block, 0, start)])
    assert len(calls._plans) == 2


def test_concurrent_calls_have_frames_of_their_own():
    model, calls = made()
    blocks = [memory(1, seed) for seed in range(4)]

    def steps(seed: int) -> list[torch.Tensor]:
        block = blocks[seed].clone()
        return [
            calls.run(model, drawn(1, 1, 10 * seed + start), [EarlierTokens(block, 0, start)]) for start in range(30)
        ]

    expected = [steps(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(steps, range(4)), expected, strict=True):
            assert all(map(torch.equal, found, one))


@pytest.mark.parametrize("first", [0, 50])
def test_a_block_without_room_is_refused_before_anything_is_written(first):
    model, calls = made()
    block = memory(2)
    before = block.clone()
    with pytest.raises(ValueError, match="room for 96 tokens"):
        calls.run(model, drawn(2, 3, 0), [EarlierTokens(block, first, 94 - first)])
    assert torch.equal(block, before)


def test_wrong_inputs_are_refused_with_their_names():
    model, calls = made()
    block = memory(2)
    doubled = [inputs.double() if i == 1 else inputs for i, inputs in enumerate(drawn(2, 1, 0))]
    with pytest.raises(InputError, match="input 'x1'"):
        calls.run(model, doubled, [EarlierTokens(block, 0, 4)])
    with pytest.raises(InputError, match="its shape is"):
        calls.run(model, drawn(3, 1, 0), [EarlierTokens(block, 0, 4)])


def test_programs_with_other_inputs_cannot_grow():
    model = compiled(cached_attention, RUNNABLE_ISAS[0])
    assert can_grow(model, GROWN)
    assert not can_grow(model, ())
    assert not can_grow(model, GROWN[:1])  # a result would belong to no input
    assert not can_grow(model, (1, 2))  # new keys and values have as many tokens as the result
