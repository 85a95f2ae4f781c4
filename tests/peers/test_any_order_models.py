"""Models of any order: one pass along an order is the chain of the marginals along it."""

import pytest
import torch
from torch import Tensor

from tests.peers.small import random_question, small_peer
from tracformer.evaluation.order_consistency import order_log_prob
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.likelihood import token_log_probs
from tracformer.training.train_config import from_dict


def along(
    model: ConditionalModel, tokens: Tensor, context: Tensor, lengths: Tensor, ranks: Tensor
) -> Tensor:
    """(B, T) log-probabilities of one pass along the order."""
    targets = Batch(tokens, context, lengths).targets()
    states = model.in_order(tokens, context, lengths, targets, ranks)
    values = token_log_probs(states, model.head, tokens[targets])
    return torch.zeros(tokens.shape, dtype=values.dtype).masked_scatter(targets, values)


@pytest.mark.parametrize("family", ["as-arm", "as-arm neighbours=1"])
def test_marginals_along_an_order_are_its_chain(family: str) -> None:
    """With two streams the answer does not depend on how the known tokens became known: a given set
    is read two-sided, so a first target agrees, and so does every target when the model has one
    layer, where content rows do not depend on what they read.
    """
    model = small_peer(f"{family} n_layer=1")
    tokens, context, lengths = random_question(3, 9, seed=4)
    ranks = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)).argsort(1)
    with torch.no_grad():
        whole = along(model, tokens, context, lengths, ranks)
        chain = order_log_prob(model, Batch(tokens, context, lengths), ranks.argsort(1))
    torch.testing.assert_close(whole, chain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["as-arm", "sigma-gpt"])
@pytest.mark.parametrize("mode", ["car", "ac"])
def test_every_order_sums_to_one(family: str, mode: str) -> None:
    model = small_peer(family, vocab_size=3, max_length=6)
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
            total = along(model, tokens, contexts, lengths, ranks).sum(1).exp().sum()
        assert abs(float(total) - 1) < 1e-9


@pytest.mark.parametrize("family", ["as-arm", "sigma-gpt"])
def test_training_in_a_random_order_draws_one_and_answers_in_text_order(family: str) -> None:
    model = small_peer(family, order="random")
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
    kind = small_peer("as-arm").config_class
    for order, modes in (("text", ("car",)), ("random", ("car", "ac"))):
        config = from_dict(
            {"model": {"family": "as-arm", "preset": "tiny", "order": order}, "objective": "car"}
        )
        assert config.modes(kind) == modes
    with pytest.raises(ValueError, match="order is 'any'; allowed: text, random"):
        small_peer("as-arm", order="any")
