"""Diffusion models fill texts by their reverse process, also through an engine."""

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.baselines.literal import (
    GIVEN,
    ROW,
    SAMPLES,
    SEQUENCES,
    chi_square,
    conditional,
    toy,
)
from tests.generation.engines import PATIENCE, Slow, eventually, question
from tests.toys import TEXT, TRACFORMER, WORDS, random_question, small_diffusion, small_plaid
from tracformer import LanguageModel, loading
from tracformer.attention import build_attention
from tracformer.baselines.sedd import SEDD
from tracformer.cli import main
from tracformer.data import Tokenizer, train_bpe
from tracformer.generation.decode import Filled, fill
from tracformer.generation.engine import Cancelled, DeadlineExceeded, Engine, Request
from tracformer.generation.orders import Ancestral, RandomOrder
from tracformer.generation.results import Token
from tracformer.generation.samplers import NOTHING_LEFT, Sampler
from tracformer.model.base import ConditionalModel, at_once, finish
from tracformer.model.batch import Batch

SYSTEMS = ("mdlm", "sedd", "d3pm", "plaid")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(WORDS, 290)


def model_of(system: str, tokenizer: Tokenizer) -> ConditionalModel:
    changes = {"vocab_size": tokenizer.vocab_size, "max_length": 24}
    return small_plaid(**changes) if system == "plaid" else small_diffusion(system, **changes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_blanks_are_filled_by_the_reverse_process_under_the_rules_of_text(
    system: str, tokenizer: Tokenizer
) -> None:
    lm = LanguageModel(model_of(system, tokenizer), tokenizer)
    results = lm.infill(TEXT, 6, mode="diffusion", order=Ancestral(5), batch=4)
    for result in results:
        first, second = result.spans
        assert result.text == "the cat" + first.text + " the" + second.text + " mat"
        assert all(span.text[0] == " " and not span.text[1].isspace() for span in result.spans)
        assert tokenizer.eot_id not in (*first.token_ids, *second.token_ids)
        assert "not that of the whole fill" in result.note
    assert [
        r.token_ids for r in lm.infill(TEXT, 6, mode="diffusion", order=Ancestral(5), batch=1)
    ] == [r.token_ids for r in results]
    banned = results[0].spans[0].token_ids[1]
    others = lm.infill(
        TEXT, 6, mode="diffusion", order=Ancestral(5), sampler=Sampler(banned=(banned,))
    )
    assert all(banned not in span.token_ids for result in others for span in result.spans)
    likeliest = [
        lm.infill(TEXT, mode="diffusion", order=Ancestral(5), sampler=rules)
        for rules in (Sampler(top_k=1), Sampler(temperature=0))
    ]
    assert likeliest[0] == likeliest[1]
    engine = Engine(lm.model, rows=4)
    with engine.request() as request:
        shared = lm.on(request).infill(TEXT, 6, mode="diffusion", order=Ancestral(5))
    engine.close()
    assert [r.token_ids for r in shared] == [r.token_ids for r in results]


def test_a_system_that_has_no_other_mode_needs_none_named(tokenizer: Tokenizer) -> None:
    lm = LanguageModel(model_of("plaid", tokenizer), tokenizer)
    assert lm.infill(TEXT, order=Ancestral(4))[0].mode == "diffusion"
    assert (
        lm.infill(TEXT, order=Ancestral(4), seed=2**64 + 7)[0].token_ids
        == lm.infill(TEXT, order=Ancestral(4), seed=7)[0].token_ids
    )
    assert "middle of their ranges" in lm.infill("the [[2-4]] mat")[0].note
    [sample] = lm.sample(prompt="the cat", max_tokens=6)
    assert sample.text.startswith("the cat")
    assert "length fixed beforehand" in sample.note
    assert lm.infill(TEXT)[0].note.split("; ")[0] in sample.note
    assert "when it was filled in" in sample.note
    end = tokenizer.eot_id
    ended = [each for each in lm.sample(40, prompt="the cat", max_tokens=12) if each.ended]
    assert ended
    assert all(
        each.token_ids.index(end) == len(each.token_ids) - 1 == len(each.log_probs) - 1
        for each in ended
    )
    letter = sample.text[len("the cat") + 1]
    [cut] = lm.sample(prompt="the cat", max_tokens=6, stop=[letter])
    assert cut.stopped == letter
    assert sample.text.startswith(cut.text)


@pytest.mark.parametrize("system", SYSTEMS)
def test_candidates_are_the_models_own_when_a_token_is_revealed(
    system: str, tokenizer: Tokenizer
) -> None:
    lm = LanguageModel(model_of(system, tokenizer), tokenizer)
    received: list[Token] = []
    requested = {
        "mode": "diffusion",
        "order": Ancestral(5),
        "sampler": Sampler(temperature=0.7, top_p=0.9),
        "seed": 3,
    }
    [plain] = lm.infill(TEXT, **requested)
    [reported] = lm.infill(TEXT, **requested, top=tokenizer.vocab_size, callback=received.extend)
    assert reported.token_ids == plain.token_ids
    for span in reported.spans:
        for token, log_prob, candidates in zip(
            span.token_ids, span.log_probs, span.candidates, strict=True
        ):
            odds = [each.log_prob for each in candidates]
            assert odds == sorted(odds, reverse=True)
            # of all tokens, with those that may not stand there
            assert math.fsum(map(math.exp, odds)) == pytest.approx(1.0)
            assert next(
                each.log_prob for each in candidates if each.token_id == token
            ) == pytest.approx(log_prob, abs=1e-12)
    assert sorted((each.blank, each.index, each.candidates) for each in received) == [
        (blank, index, candidates)
        for blank, span in enumerate(reported.spans)
        for index, candidates in enumerate(span.candidates)
    ]
    few = lm.infill(TEXT, **requested, top=2)[0].spans
    assert [span.candidates for span in few] == [
        tuple(each[:2] for each in span.candidates) for span in reported.spans
    ]


def test_candidates_of_a_single_step_are_the_marginals_and_end_with_the_text() -> None:
    model, (tokens, context, lengths) = small_diffusion("mdlm"), random_question(3, 10)
    found = fill(model, Batch(tokens, context, lengths), "diffusion", order=Ancestral(1), top=3).top
    assert found is not None
    expected = model.candidates(Batch(tokens, context, lengths), "ac", 3)
    open_ = found.tokens[..., 0] >= 0
    assert torch.equal(open_, Batch(tokens, context, lengths).targets())
    assert torch.equal(found.tokens[open_], expected[0][open_])
    torch.testing.assert_close(found.log_probs[open_], expected[1][open_].double())
    ended = fill(
        model,
        Batch(tokens, context, lengths),
        "diffusion",
        top=3,
        stop=lambda row, position, token: True,
    )
    assert ended.top is not None
    # the first target of each alone
    assert torch.equal((ended.top.tokens >= 0).sum((1, 2)), torch.tensor([3, 3, 3]))
    assert not ended.top.log_probs[ended.top.tokens < 0].any()


def test_advice_names_only_what_the_model_has(tokenizer: Tokenizer) -> None:
    for system in SYSTEMS:
        lm = LanguageModel(model_of(system, tokenizer), tokenizer)
        with pytest.raises(ValueError, match=r"only the order Ancestral\(steps\)") as refused:
            lm.infill(TEXT, mode="diffusion", order=RandomOrder())
        assert ("'ac'" in str(refused.value)) == (system != "plaid")


def test_the_command_line_fills_by_the_reverse_process(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("sedd", tokenizer).float()
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    assert (
        main(["infill", TEXT, "-m", str(tmp_path), "--mode", "diffusion", "--steps", "4", "--json"])
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["mode"] == "diffusion"
    [expected] = LanguageModel(model, tokenizer).infill(TEXT, mode="diffusion", order=Ancestral(4))
    assert tuple(answer["token_ids"]) == expected.token_ids
    assert (
        main(["infill", TEXT, "-m", str(tmp_path), "--mode", "diffusion", "--order", "random"]) == 2
    )
    assert "takes only the order Ancestral(steps)" in capsys.readouterr().err


def test_a_question_compiles_nothing_for_a_tracformer_inside_either(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**TRACFORMER, "vocab_size": tokenizer.vocab_size}
    small_diffusion("mdlm", **changes).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    for ready, expected in ((False, "blocked"), (True, "native")):
        monkeypatch.setattr(loading.native, "ready", lambda ready=ready: ready)
        model = loading.read(tmp_path, "cpu", torch.float32)[0]
        assert type(model.backbone.attention) is type(build_attention(expected))  # type: ignore[union-attr]


def test_restricted_tokens_keep_their_shares_among_each_other() -> None:
    rows = (ROW.expand(SAMPLES, -1), GIVEN.expand(SAMPLES, -1))
    alike = fill(
        toy("mdlm"),
        Batch(*rows),
        "diffusion",
        seed=list(range(10**6, 10**6 + SAMPLES)),
        only=lambda row, position: [0, 1, 2],
    )
    assert abs(chi_square(alike.tokens, conditional())) < 3.5
    some = fill(
        toy("mdlm"),
        Batch(*rows),
        "diffusion",
        seed=list(range(SAMPLES)),
        sampler=Sampler(banned=(1,)),
        order=Ancestral(1),
    )
    share = torch.stack([(some.tokens[:, 0] == v).double().mean() for v in range(3)])
    marginal = torch.stack(
        [conditional()[SEQUENCES[:, 0] == v].sum() for v in range(3)]
    ) * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(share, marginal / marginal.sum(), atol=0.05, rtol=0)
    with pytest.raises(ValueError, match=NOTHING_LEFT[:30]):
        fill(toy("mdlm"), Batch(*(x[:1] for x in rows)), "diffusion", only=lambda row, position: [])


# ---- passes

MANY = 1000  # steps: far more than the tests let it take


class Paced(SEDD):
    """Each pass of its reverse process waits for a permit."""

    slow: Slow
    passes = 0

    def _leave(self, *question: Any) -> tuple[Tensor, Tensor]:
        self.passes += 1
        self.slow(0, 0, 0)
        logits, _ = super()._leave(*question)
        # nothing is revealed before the last step
        return logits, torch.zeros(len(logits), dtype=torch.float64)


@pytest.fixture
def paced(pool: ThreadPoolExecutor) -> Iterator[Engine]:
    """Closed before the pool, whose threads wait for it."""
    model = small_diffusion("sedd")
    model.__class__ = Paced
    model.slow = Slow()
    engine = Engine(model, rows=4)
    yield engine
    model.slow.free()
    engine.close(drain=False)
    assert not engine._thread.is_alive()


def diffuse(
    engine: Engine, pool: ThreadPoolExecutor, request: Request | None = None, steps: int = MANY
) -> Future[Filled]:
    """On its way, and waiting for its first permit."""
    request = request or engine.request()
    future = pool.submit(
        lambda: request.fill(**question(6, mode="diffusion", order=Ancestral(steps)))
    )
    assert eventually(lambda: engine.model.passes == 1)  # type: ignore[attr-defined]
    return future


def permit(engine: Engine, passes: int) -> None:
    engine.model.slow.go.release(passes)  # type: ignore[union-attr]


def test_other_requests_run_between_passes(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool)
    filled = pool.submit(lambda: paced.request().fill(**question(3, mode="ac")))
    called = pool.submit(lambda: paced.request().call(lambda: 7))
    assert eventually(lambda: len(paced._submitted) == 2)
    permit(paced, 5)  # a pass and three steps; and one pass more, should the call's turn come later
    assert called.result(PATIENCE) == 7
    assert torch.equal(
        filled.result(PATIENCE).tokens, fill(paced.model, **question(3, mode="ac")).tokens
    )
    assert not long.done()


def test_requests_that_arrive_during_a_pass_run_before_the_next(
    paced: Engine, pool: ThreadPoolExecutor
) -> None:
    diffuse(paced, pool)
    called = pool.submit(lambda: paced.request().call(lambda: paced.model.passes))
    assert eventually(lambda: bool(paced._submitted))
    permit(paced, 1)
    assert called.result(PATIENCE) == 1


def test_a_request_that_is_given_up_takes_no_further_pass(
    paced: Engine, pool: ThreadPoolExecutor
) -> None:
    request = paced.request()
    long = diffuse(paced, pool, request)
    request.cancel()
    with pytest.raises(Cancelled):
        long.result(PATIENCE)
    permit(paced, MANY)
    assert paced.request().call(lambda: 7) == 7
    assert paced.request().call(lambda: paced.model.passes) == 1
    assert not paced._submitted


def test_a_deadline_passes_between_two_passes(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool, paced.request(deadline=time.monotonic() + 0.2))
    with pytest.raises(DeadlineExceeded):
        long.result(PATIENCE)
    permit(paced, MANY)
    assert paced.request().call(lambda: 7) == 7
    assert paced.request().call(lambda: paced.model.passes) == 1


def test_closing_waits_for_one_pass_alone(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool)
    closing = pool.submit(lambda: paced.close(drain=False))
    assert eventually(lambda: paced._stopping)
    permit(paced, 1)
    closing.result(PATIENCE)
    with pytest.raises(Cancelled, match="closed"):
        long.result(PATIENCE)
    assert paced.model.passes == 1


def test_draining_waits_for_all_of_them(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool, steps=5)
    closing = pool.submit(paced.close)
    assert eventually(lambda: paced._closing)
    permit(paced, MANY)
    assert bool((long.result(PATIENCE).steps == 0).all())
    closing.result(PATIENCE)
    assert paced.model.passes == 5


@pytest.mark.parametrize("system", ["mdlm", "sedd", "d3pm", "plaid"])
def test_interleaved_processes_give_what_each_gives_alone(
    system: str, pool: ThreadPoolExecutor
) -> None:
    model: ConditionalModel = (
        small_plaid()
        if system == "plaid"
        else small_diffusion(system, **({"n_step": 30} if system == "d3pm" else {}))
    )
    engine = Engine(model, rows=2)
    requested = []
    for number in range(8):
        tokens, context, lengths = random_question(3, 10, seed=number)
        order = Ancestral(3 + number) if number % 2 else None
        requested.append(
            {
                "batch": Batch(tokens, context, lengths),
                "mode": "diffusion",
                "seed": number,
                "order": order,
            }
        )
    threads = set()

    def stop(row: int, position: int, token: int) -> bool:
        threads.add(threading.current_thread())
        return position > 6 and token == 3

    futures = [
        pool.submit(lambda each: engine.request().fill(**each, top=2, stop=stop), each)
        for each in requested
    ]
    for each, future in zip(requested, futures, strict=True):
        mine, expected = future.result(PATIENCE), fill(model, **each, top=2, stop=stop)  # type: ignore[arg-type]
        assert torch.equal(mine.tokens, expected.tokens)
        assert torch.equal(mine.log_probs, expected.log_probs)
        assert torch.equal(mine.lengths, expected.lengths)
        assert mine.top is not None
        assert expected.top is not None
        assert torch.equal(mine.top.tokens, expected.top.tokens)
    engine.close()
    assert threads == {engine._thread, threading.current_thread()}


def test_finishing() -> None:
    assert finish(at_once(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        finish(at_once(lambda: 1 // 0))
