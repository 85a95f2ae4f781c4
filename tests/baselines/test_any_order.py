"""Probabilities along an order of the targets, neighbours layers, and cached generation."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toys import (
    SYSTEM_MODES,
    SYSTEMS,
    TRACFORMER,
    random_question,
    small_baseline,
    small_diffusion,
    small_model,
)
from tracformer.evaluation.consistency import order_log_prob
from tracformer.generation.decode import fill
from tracformer.generation.scheduler import empty_session, open_session
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.likelihood import token_log_probs
from tracformer.training.train_config import from_dict

MODELS = ["tracformer", "bert", *SYSTEMS, "mdlm-tracformer"]


def build(name: str, **changes: Any) -> ConditionalModel:
    if name == "tracformer":
        return small_model(**changes)
    if name == "bert":
        pytest.importorskip("transformers")
        return small_baseline("bert", **changes)
    if name == "mdlm-tracformer":
        return small_diffusion("mdlm", **TRACFORMER, **changes)
    return small_diffusion(name, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_order_log_prob_equals_a_loop(name: str) -> None:
    model = build(name)
    tokens, context, lengths = random_question(3, 7)
    order = torch.stack(
        [torch.randperm(7, generator=torch.Generator().manual_seed(b)) for b in range(3)]
    )
    values = order_log_prob(model, Batch(tokens, context, lengths), order, rows_at_once=4)
    for b, n in enumerate(lengths.tolist()):
        known = context[b, :n].clone()
        for t in order[b].tolist():
            if t >= n or known[t]:
                continue
            wanted = torch.zeros(1, n, dtype=torch.bool)
            wanted[0, t] = True
            logits = model.logits_at(Batch(tokens[b : b + 1, :n], known[None]), "ac", wanted)[0]
            assert (
                abs(float((logits.log_softmax(-1)[tokens[b, t]] - values[b, t]).detach())) < 1e-10
            )
            known[t] = True
        assert not values[b, :n][context[b, :n]].any()
        assert not values[b, n:].any()


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_sum_to_one_along_an_order(name: str) -> None:
    model = build(name, vocab_size=3)
    tokens = torch.tensor(list(itertools.product(range(3), repeat=3)))
    total = (
        order_log_prob(
            model,
            Batch(tokens, torch.zeros_like(tokens).bool()),
            torch.tensor([1, 2, 0]),
        )
        .sum(1)
        .exp()
        .sum()
    )
    assert abs(float(total) - 1) < 1e-10
    context = torch.tensor([False, True, False]).expand(9, -1)
    total = (
        order_log_prob(model, Batch(tokens[tokens[:, 1] == 2], context), torch.tensor([2, 1, 0]))
        .sum(1)
        .exp()
        .sum()
    )
    assert abs(float(total) - 1) < 1e-10


def test_invalid_orders_are_refused() -> None:
    model, tokens = build("mdlm"), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"each of the positions 0\.\.2 once"):
        order_log_prob(
            model,
            Batch(tokens, torch.zeros_like(tokens).bool()),
            torch.tensor([0, 1, 1]),
        )
    with pytest.raises(ValueError, match="order has shape"):
        order_log_prob(model, Batch(tokens, torch.zeros_like(tokens).bool()), torch.tensor([0, 1]))


def one_pass_log_prob(model: ConditionalModel, batch: Batch, ranks: Tensor) -> Tensor:
    """Return (B, T) log-probabilities of one pass along the order."""
    targets = batch.targets()
    values = token_log_probs(
        model.in_order(batch, targets, ranks), model.head, batch.tokens[targets]
    )
    return torch.zeros(targets.shape, dtype=values.dtype).masked_scatter(targets, values)


@pytest.mark.parametrize("family", ["as-arm", "as-arm neighbours=1"])
def test_marginals_along_an_order_are_its_chain(family: str) -> None:
    """One pass along an order equals the chain of marginals, in a model of one layer.

    With two streams the prediction does not depend on how the known tokens became known. With one
    layer this holds for every target, since content rows do not depend on what they read.
    """
    model = small_baseline(f"{family} n_layer=1")
    tokens, context, lengths = random_question(3, 9, seed=4)
    ranks = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)).argsort(1)
    with torch.no_grad():
        whole = one_pass_log_prob(model, Batch(tokens, context, lengths), ranks)
        chain = order_log_prob(model, Batch(tokens, context, lengths), ranks.argsort(1))
    torch.testing.assert_close(whole, chain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["as-arm", "sigma-gpt"])
@pytest.mark.parametrize("mode", ["car", "ac"])
def test_every_order_sums_to_one(family: str, mode: str) -> None:
    model = small_baseline(family, vocab_size=3, max_length=6)
    context = torch.tensor([[False, True, False, False, True, True]])
    free = (~context[0]).nonzero()[:, 0]
    fillings = torch.cartesian_prod(*(torch.arange(3),) * len(free))
    tokens = torch.ones(len(fillings), 6, dtype=torch.int64)
    tokens[:, free] = fillings
    contexts, lengths = context.expand(len(tokens), -1), torch.full((len(tokens),), 6)
    for seed in range(3):
        ranks = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).expand(
            len(tokens), -1
        )
        with torch.no_grad():
            total = (
                one_pass_log_prob(model, Batch(tokens, contexts, lengths), ranks).sum(1).exp().sum()
            )
        assert abs(float(total) - 1) < 1e-9


@pytest.mark.parametrize("family", ["as-arm", "sigma-gpt"])
def test_random_orders_are_drawn_in_training_only(family: str) -> None:
    model = small_baseline(family, order="random")
    tokens, context, lengths = random_question(4, 12, seed=2)
    calm = [float(model.loss(Batch(tokens, context, lengths), "car").detach()) for _ in range(2)]
    model.train()
    drawn = {
        round(float(model.loss(Batch(tokens, context, lengths), "car").detach()), 9)
        for _ in range(4)
    }
    assert calm[0] == calm[1]
    assert len(drawn) == 4


def test_a_random_order_trains_the_marginals_too() -> None:
    kind = small_baseline("as-arm").config_class
    for order, modes in (("text", ("car",)), ("random", ("car", "ac"))):
        config = from_dict(
            {"model": {"family": "as-arm", "preset": "tiny", "order": order}, "objective": "car"}
        )
        assert config.modes(kind) == modes


LENGTH = 9

CONTEXT = [True, False, False, True, True, False, True, False, True]


def positions_read(family: str, mode: str, t: int) -> set[int]:
    """Return the positions whose tokens change the logits at target t."""
    model = small_baseline(f"{family} n_layer=1")
    tokens, context = random_question(1, LENGTH)[0], torch.tensor([CONTEXT])
    before = model(Batch(tokens, context), mode)[0, t]
    moved = set()
    for changed in range(LENGTH):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 3) % 7
        if bool((model(Batch(other, context), mode)[0, t] != before).any()):
            moved.add(changed)
    return moved


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("ac-gpt neighbours=1", "car"),
        ("compact neighbours=1", "car"),
        ("as-arm neighbours=1", "car"),
        ("bert-modern neighbours=1", "ac"),
        ("as-arm neighbours=1", "ac"),
        ("compact neighbours=1", "ac"),
    ],
)
def test_a_neighbours_layer_reads_the_known_neighbours(family: str, mode: str) -> None:
    for t in (t for t, given in enumerate(CONTEXT) if not given):
        left = {t - 1} if t and (CONTEXT[t - 1] or mode == "car") else set()
        right = {t + 1} if t + 1 < LENGTH and CONTEXT[t + 1] else set()
        assert positions_read(family, mode, t) == left | right, t


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_wider_window(window: int) -> None:
    for t in (t for t, given in enumerate(CONTEXT) if not given):
        near = range(max(0, t - window), min(LENGTH, t + window + 1))
        known = {
            position for position in near if position < t or (position > t and CONTEXT[position])
        }
        assert positions_read(f"compact neighbours=1 window={window}", "car", t) == known, t


def test_bart_reads_encoder_features_of_neighbours() -> None:
    """The decoder reads the encoder at t-1 and t+1, whose one layer reads one position further.

    The decoder's row holds x_{t-1}.
    """
    for t in (t for t, given in enumerate(CONTEXT) if not given):
        near = range(max(0, t - 2), min(LENGTH, t + 3))
        known = {position for position in near if CONTEXT[position] and position != t}
        assert positions_read("bart-modern neighbours=1", "car", t) == known | (
            {t - 1} if t else set()
        ), t


@pytest.mark.parametrize(
    "family", ["ac-gpt neighbours=0", "as-arm neighbours=0", "bert-modern neighbours=0"]
)
def test_an_ordinary_layer_reads_everything_known(family: str) -> None:
    mode = "ac" if family.startswith("bert") else "car"
    known = {
        position
        for position in range(LENGTH)
        if CONTEXT[position] or (mode == "car" and position < 5)
    }
    assert positions_read(family, mode, 5) == known


# ---- every step of cached generation equals a whole pass

CACHED = [
    (family, mode)
    for family, mode in SYSTEM_MODES
    if mode != "ac" and small_baseline(family).empty_cache(mode, 1, 4) is not None
]


def stepwise(session: object, tokens: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Return (targets, V) logits: predict each sequence's next target, then reveal its token."""
    turns = [row.nonzero()[:, 0].tolist() for row in targets]
    logits: dict[tuple[int, int], Tensor] = {}
    for turn in range(max(map(len, turns))):
        active = [number for number, mine in enumerate(turns) if turn < len(mine)]
        places = torch.tensor([turns[number][turn] for number in active])
        answer = session.logits(rows[active], places)
        logits.update(zip(zip(active, places.tolist(), strict=True), answer, strict=True))
        session.reveal(rows[active], places, tokens[active, places])
    return torch.stack([logits[key] for key in sorted(logits)])


def test_which_systems_have_a_cache() -> None:
    assert {family.split()[0] for family, _ in CACHED} == {
        "ac-gpt",
        "as-arm",
        "sigma-gpt",
        "compact",
        "aligned",
    }


@pytest.mark.parametrize(("family", "mode"), CACHED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_step_equals_a_whole_pass(family: str, mode: str, seed: int) -> None:
    model = small_baseline(family, seed=seed)
    tokens, context, lengths = random_question(4, 11, seed)
    if seed == 2:
        context[1] = False  # nothing given
    targets = Batch(tokens, context, lengths).targets()
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    session = empty_session(model, mode, 6, 12)
    stale = session.admit(
        Batch(tokens[:2, :5], torch.ones_like(context[:2, :5]), torch.tensor([5, 5]))
    )
    session.release(stale)  # rows are used again, and nothing of their earlier sequences remains
    rows = session.admit(Batch(tokens.masked_fill(~context, 6), context, lengths))
    torch.testing.assert_close(stepwise(session, tokens, targets, rows), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "mode"), CACHED)
def test_a_selection_is_independent_of_its_source(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(3, 9, 5)
    targets = Batch(tokens, context, lengths).targets()
    session = open_session(model, Batch(tokens, context, lengths), mode)
    first = torch.tensor([int(row.nonzero()[0]) for row in targets])
    session.logits(torch.arange(3), first)
    chosen = session.select([2, 2, 0])
    chosen.reveal(torch.arange(3), first[[2, 2, 0]], torch.tensor([1, 2, 3]))
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    torch.testing.assert_close(
        stepwise(session, tokens, targets, torch.arange(3)), whole, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("family", "mode"), CACHED)
def test_a_position_can_be_predicted_twice(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(2, 9, 3)
    targets = Batch(tokens, context, lengths).targets()
    session = open_session(model, Batch(tokens, context, lengths), mode)
    first = torch.tensor([int(row.nonzero()[0]) for row in targets])
    once, again = (session.logits(torch.arange(2), first) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=1e-12)
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    torch.testing.assert_close(
        stepwise(session, tokens, targets, torch.arange(2)), whole, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("family", "mode"), CACHED)
def test_samples_do_not_depend_on_the_cache(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(5, 10, 7)
    cached, plain = (
        fill(model, Batch(tokens, context, lengths), mode, seed=3, cached=cached)
        for cached in (True, False)
    )
    assert torch.equal(cached.tokens, plain.tokens)
    torch.testing.assert_close(cached.log_prob, plain.log_prob, rtol=0, atol=1e-9)
