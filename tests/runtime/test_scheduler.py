"""Who runs next: admission over reserved pages, chunked prefill, and an end that gives all pages back."""

from __future__ import annotations

import pytest

from mtptrain.runtime.scheduler import EngineLimits, Scheduler, Sequence
from mtptrain.types import Request, SamplingParams, UserError

EOS = 7
NONE = frozenset[int]()


def _requests(*lengths: int) -> list[Request]:
    return [
        Request(f"r{i}", "all", tuple(range(100 * i, 100 * i + n))) for i, n in enumerate(lengths)
    ]


def _scheduler(limits: EngineLimits, *lengths: int, new: int = 3, share: bool = True) -> Scheduler:
    return Scheduler(_requests(*lengths), SamplingParams(max_new_tokens=new), limits, share)


def _run_prefill(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """Chunks of every prefill step as (place, rows)."""
    steps = []
    while chunks := scheduler.prefill_chunks():
        steps.append([(s.place, n) for s, n in chunks])
        for sequence, n in chunks:
            scheduler.grow(sequence, sequence.kv_len + n)
            sequence.kv_len += n
            if sequence.prefilled:
                scheduler.publish(sequence)
    return steps


def test_prefill_fills_each_step_in_order_of_arrival() -> None:
    """Chunks of all sequences together hold at most `max_prefill_tokens` rows, first come first served."""
    scheduler = _scheduler(EngineLimits(max_prefill_tokens=8), 5, 9, 1)
    scheduler.admit()
    assert _run_prefill(scheduler) == [[(0, 5), (1, 3)], [(1, 6), (2, 1)]]


def test_the_batch_never_exceeds_its_limit() -> None:
    """Sequences wait for a place in the batch, in order."""
    scheduler = _scheduler(EngineLimits(max_batch=2), 3, 3, 3)
    scheduler.admit()
    assert [s.place for s in scheduler.running] == [0, 1] and len(scheduler.waiting) == 1
    scheduler.finish(scheduler.running[0])
    scheduler.admit()
    assert [s.place for s in scheduler.running] == [1, 2]


def test_admission_counts_pages_that_running_sequences_have_yet_to_take() -> None:
    """A sequence is let in only while every running one can still grow to its full length."""
    limits = EngineLimits(page_size=4, num_pages=9)  # each needs 8 + 3 + 1 rows: 3 pages
    scheduler = _scheduler(limits, 8, 8, 8, 8)
    scheduler.admit()
    assert len(scheduler.running) == 3  # nothing is allocated yet; reservations fill the pool
    for sequence in scheduler.running:
        scheduler.grow(sequence, 12)
        assert sequence.reserved == 0
    assert scheduler.book.available == 0
    scheduler.finish(scheduler.running[0])
    scheduler.admit()
    assert [s.place for s in scheduler.running] == [1, 2, 3]


def test_drafted_rows_are_reserved_too() -> None:
    """A verify pass at the last token writes D rows behind it."""
    scheduler = _scheduler(EngineLimits(page_size=1, num_pages=16, num_draft_tokens=4), 8, new=3)
    scheduler.admit()
    (sequence,) = scheduler.running
    assert sequence.reserved == 8 + 3 + 4 + 1


def test_shared_pages_are_not_reserved_again() -> None:
    """A prompt that begins with published pages starts behind them and needs the rest only."""
    limits = EngineLimits(page_size=4, num_pages=64)
    requests = [Request("a", "all", tuple(range(10))), Request("b", "all", (*range(9), 50, 51))]
    scheduler = Scheduler(
        requests, SamplingParams(max_new_tokens=3), EngineLimits(1, 64, 4, 64), True
    )
    scheduler.admit()
    _run_prefill(scheduler)
    scheduler.finish(scheduler.running[0])
    scheduler.admit()
    ((b, rows),) = scheduler.prefill_chunks()
    assert b.kv_len == b.draft_len == 8 and b.pages == [0, 1] and rows == 3
    assert b.reserved == -(-(11 + 3 + 1) // limits.page_size) - 2


def test_prompts_that_wait_for_prefill_share_what_those_before_them_published() -> None:
    """Both are admitted at once; the second looks for shared pages when its own turn comes."""
    prompts = [tuple(range(10)), (*range(9), 50, 51)]
    requests = [Request(str(i), "all", prompt) for i, prompt in enumerate(prompts)]
    limits = EngineLimits(2, max_prefill_tokens=10, page_size=4, num_pages=64)
    scheduler = Scheduler(requests, SamplingParams(max_new_tokens=3), limits, True)
    scheduler.admit()
    _run_prefill(scheduler)
    first, second = scheduler.running
    assert second.pages[:2] == first.pages[:2]


def test_a_prompt_that_can_never_fit_is_the_users_error_before_any_work() -> None:
    """The prompt is named with what it needs and what there is, even where it is the last of the list."""
    with pytest.raises(
        UserError, match="prompt r2 of 30 tokens needs 9 KV pages and the pool has 8"
    ):
        _scheduler(EngineLimits(page_size=4, num_pages=8), 3, 3, 30)


@pytest.mark.parametrize("share", [True, False])
def test_no_page_leaks(share: bool) -> None:
    """When all sequences are over, every page can be dealt again."""
    limits = EngineLimits(max_batch=3, max_prefill_tokens=7, page_size=4, num_pages=14)
    prompts = [tuple(range(5 + i % 9)) for i in range(20)]
    requests = [Request(str(i), "all", p) for i, p in enumerate(prompts)]
    scheduler = Scheduler(requests, SamplingParams(max_new_tokens=3), limits, share)
    while scheduler.waiting or scheduler.running:
        scheduler.admit()
        _run_prefill(scheduler)
        scheduler.finish(scheduler.running[0])
    assert scheduler.book.available == limits.num_pages


def _sequence(new: int = 4, ignore_eos: bool = False) -> Sequence:
    limits, params = EngineLimits(), SamplingParams(max_new_tokens=new, ignore_eos=ignore_eos)
    scheduler = Scheduler(_requests(5), params, limits, True)
    scheduler.admit()
    return scheduler.running[0]


def test_an_answer_ends_at_its_end_token_inside_a_pass() -> None:
    """What a verify pass emitted behind the end token is dropped."""
    sequence = _sequence()
    assert sequence.append([1, EOS, 2], frozenset({EOS})) == 2
    assert sequence.finish_reason == "eos"
    assert sequence.completion().output_ids == (1, EOS)


def test_an_answer_ends_at_its_length_inside_a_pass() -> None:
    """No answer is longer than asked for."""
    sequence = _sequence(new=2)
    assert sequence.append([1], NONE) == 1 and sequence.finish_reason is None
    assert sequence.append([2, 3], NONE) == 1
    assert sequence.finish_reason == "length" and sequence.completion().output_ids == (1, 2)


def test_end_tokens_can_be_ignored() -> None:
    """With ignore_eos an answer has exactly the asked length."""
    sequence = _sequence(new=3, ignore_eos=True)
    assert sequence.append([EOS, EOS, EOS], frozenset({EOS})) == 3
    assert sequence.finish_reason == "length"
