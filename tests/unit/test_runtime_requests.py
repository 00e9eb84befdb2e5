"""Requests: limits, sampling, stop strings, cancellation, log-probabilities and the errors a caller can cause."""

from __future__ import annotations

import pytest
import torch

from nibble.errors import NibbleError
from nibble.runtime import Engine, EngineLimits, FinishReason, QueueFullError, SamplingParams
from nibble.runtime.sampler import Choices, Sampled, pick_as_asked, pick_likeliest, read_rows
from nibble.runtime.sequence import Sequence
from nibble.runtime.text import TextStream
from tests.unit.runtime_cases import VOCABULARY, LetterTokenizer, make_engine, make_model, make_spec, random_prompt


def test_seeds_make_sampling_repeatable() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.5, top_k=50, top_p=0.9, seed=7)
    first, again = (make_engine().generate([random_prompt(70)], params)[0].token_ids for _ in range(2))
    batched = make_engine().generate([random_prompt(70), random_prompt(9)], params)[0].token_ids
    other = make_engine().generate([random_prompt(70)], SamplingParams(max_tokens=30, temperature=1.5, seed=8))[0]
    assert first == again == batched != other.token_ids


def test_logprobs_are_the_models() -> None:
    completion = make_engine("fp16").generate([random_prompt(20)], SamplingParams(max_tokens=3, logprobs=5))[0]
    logits = make_model()(torch.tensor([random_prompt(20)])).logits[0, -1].log_softmax(-1)
    assert completion.logprobs[0] == pytest.approx(logits.max().item(), abs=1e-2)
    assert list(completion.top_logprobs[0]) == logits.topk(5).indices.tolist()


def test_a_stop_string_ends_the_answer_before_it() -> None:
    engine = make_engine()
    free = engine.generate([random_prompt(40)], SamplingParams(max_tokens=30))[0].text
    stopped = engine.generate([random_prompt(40)], SamplingParams(max_tokens=30, stop=("!", free[10:13])))[0]
    assert stopped.text == free[: free.index(free[10:13])]
    assert stopped.finish_reason is FinishReason.STOP


def test_the_context_limit_ends_the_answer() -> None:
    completion = make_engine(max_context=100).generate([random_prompt(90)], SamplingParams(max_tokens=50))[0]
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 11  # the last token is never put into the cache


def test_an_end_token_ends_the_answer_unless_ignored() -> None:
    model = make_model()
    model.generation_config.eos_token_id = list(range(VOCABULARY))
    engine = Engine(model, LetterTokenizer(), make_spec(model, "int4"), EngineLimits(max_context=256))  # type: ignore[arg-type]
    ended, ignored = engine.generate(
        [random_prompt(10)] * 2, [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, ignore_eos=True)]
    )
    assert (ended.finish_reason, ended.text, len(ended.token_ids)) == (FinishReason.STOP, "", 1)
    assert (ignored.finish_reason, len(ignored.token_ids)) == (FinishReason.LENGTH, 5)


def test_cancelling_frees_the_pages_and_leaves_the_others_alone() -> None:
    engine = make_engine()
    alone = make_engine().generate([random_prompt(100, seed=1)], SamplingParams(max_tokens=20))[0].token_ids
    gone = engine.submit(random_prompt(300), SamplingParams(max_tokens=200))
    kept = engine.submit(random_prompt(100, seed=1), SamplingParams(max_tokens=20))
    tokens, reasons = [], {}
    for count in range(100):
        if count == 5:
            engine.cancel(gone)
        for event in engine.step():
            if event.request_id == kept and event.token_id is not None:
                tokens.append(event.token_id)
            if event.finish_reason:
                reasons[event.request_id] = event.finish_reason
        engine.check_integrity()
    assert tokens == alone
    assert reasons == {gone: FinishReason.CANCELLED, kept: FinishReason.LENGTH}
    assert engine.stats().pages_used == 0 and not engine.has_work
    engine.cancel("long gone")  # not an error


def test_priority_goes_first() -> None:
    engine = make_engine(max_running=1, chunk_tokens=64)
    order = [engine.submit(random_prompt(50), SamplingParams(max_tokens=2), priority=p) for p in (0, 0, 5)]
    finished = []
    while engine.has_work:
        finished += [event.request_id for event in engine.step() if event.finish_reason]
    assert finished == [order[2], order[0], order[1]]


def test_a_broken_model_is_an_error_of_the_request_not_a_token() -> None:
    model = make_model()
    model.lm_head.weight[3] = torch.nan
    engine = Engine(model, LetterTokenizer(), make_spec(model, "int4"), EngineLimits(max_context=256))  # type: ignore[arg-type]
    engine.submit(random_prompt(5), SamplingParams())
    (event,) = engine.step()
    assert event.finish_reason is FinishReason.ERROR and "not finite" in (event.error or "")
    engine.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "got no tokens"), ([1] * 1025, "allowed up to 1024"), ([VOCABULARY], "0 to 299"), ([-1], "0 to 299")],
)
def test_bad_prompts(prompt: list[int], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        make_engine().submit(prompt, SamplingParams())


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": -1},
        {"stop": ("",)},
        {"logprobs": 21},
    ],
)
def test_bad_sampling_parameters_name_themselves(bad: dict[str, object]) -> None:
    with pytest.raises(NibbleError, match=f"{next(iter(bad))}: got .*, allowed"):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_a_full_queue_and_a_used_id_are_refused() -> None:
    engine = make_engine(max_waiting=2)
    engine.submit([1], SamplingParams(), request_id="a")
    with pytest.raises(NibbleError, match="is in use"):
        engine.submit([1], SamplingParams(), request_id="a")
    engine.submit([1], SamplingParams())
    with pytest.raises(QueueFullError, match="try again later"):
        engine.submit([1], SamplingParams())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_context": 1}, "max_context: got 1"),
        ({"chunk_tokens": 16, "max_running": 17}, "chunk_tokens: got 16"),
        ({"pool_mb": 1, "max_context": 4096, "max_running": 8}, r"pool_mb: got 1, allowed \d+ or more"),
        ({"max_context": 5000}, "allowed up to 4096 for this model"),
    ],
)
def test_bad_limits_say_what_is_allowed(limits: dict[str, int], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        make_engine(**limits)


def test_top_k_and_top_p_cut_the_unlikely_whoever_is_in_the_batch() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    cases = (
        (SamplingParams(temperature=1, top_k=2, logprobs=2), {0, 1}),
        (SamplingParams(temperature=1, top_p=0.81), {0, 1, 2}),
        (SamplingParams(temperature=1, top_p=0.4), {0}),
        (SamplingParams(temperature=1), {0, 1, 2, 3}),
        (SamplingParams(), {0}),
    )
    asked = [params for params, _ in cases for _ in range(300)]
    together = _sample(logits, asked)
    for case, (params, kept) in enumerate(cases):
        mine = together[300 * case : 300 * case + 300]
        assert {each.token for each in mine} == kept
        assert mine == [_sample(logits, [params], first_seed=300 * case + row)[0] for row in range(300)]
    assert together[0].top_logprobs == {0: pytest.approx(logits[0]), 1: pytest.approx(logits[1])}
    assert all(each.logprob == pytest.approx(logits[each.token]) for each in together)
    assert abs(sum(each.token == 0 for each in together[900:1200]) - 150) < 40


def _sample(logits: torch.Tensor, asked: list[SamplingParams], first_seed: int = 0) -> list[Sampled]:
    generators = [torch.Generator().manual_seed(first_seed + row) for row in range(len(asked))]
    sequences = [Sequence("", [], p, TextStream(str), generator=g) for p, g in zip(asked, generators, strict=True)]
    rows = logits.expand(len(asked), -1)
    greedy, choices = pick_likeliest(rows), Choices.of(sequences, logits.device)
    return read_rows(greedy if choices is None else pick_as_asked(rows, greedy, choices), sequences)
