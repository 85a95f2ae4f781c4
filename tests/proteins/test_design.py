"""Designs: constraints hold, the law of the samples is the model's, a seed repeats."""

from collections import Counter

import pytest
import torch

from tests.proteins.test_mutants import WILD
from tracformer import Tracformer, TracformerConfig
from tracformer.data import Tokenizer, build_tokenizer
from tracformer.model.batch import Batch
from tracformer.proteins.design import (
    Constraints,
    design,
    mean_identity,
    parse_region,
    parse_residues,
    to_fasta,
)
from tracformer.proteins.wild_type import RESIDUES, WildType


def test_designs_are_distinct_and_sorted(model: Tracformer, tokenizer: Tokenizer) -> None:
    constraints = Constraints(((11, 13),))
    found = design(model, tokenizer, WILD, constraints, n=20, seed=3)
    assert len({each.sequence for each in found}) == len(found) == 20
    assert [each.log_prob for each in found] == sorted((x.log_prob for x in found), reverse=True)
    assert found == design(model, tokenizer, WILD, constraints, n=20, seed=3)
    assert found != design(model, tokenizer, WILD, constraints, n=20, seed=4)
    for each in found:
        assert (each.sequence[0], each.sequence[4]) == ("A", "F")
        context = torch.tensor([[True, False, False, False, True]])
        batch = Batch(torch.tensor([tokenizer.encode(each.sequence)]), context)
        assert each.log_prob == pytest.approx(float(model.log_prob(batch).sum().detach()), abs=1e-9)
        assert each.changes == sum(a != b for a, b in zip(each.sequence, "ACDEF", strict=True))


def test_constraints_hold(model: Tracformer, tokenizer: Tokenizer) -> None:
    constraints = Constraints(
        ((10, 14),), allowed={11: "KR"}, forbidden={12: "DE"}, keep=frozenset({14}), max_changes=3
    )
    found = design(model, tokenizer, WILD, constraints, n=30, seed=0)
    assert len(found) == 30
    for each in found:
        assert each.sequence[1] in "KR"
        assert each.sequence[2] not in "DE"
        assert each.sequence[4] == "F"
        assert 2 <= each.changes <= 3  # positions 11 and 12 must change


def test_few_possibilities_give_few_designs(model: Tracformer, tokenizer: Tokenizer) -> None:
    found = design(model, tokenizer, WILD, Constraints(((11, 11),), allowed={11: "KR"}), n=9)
    assert sorted(each.sequence for each in found) == ["AKDEF", "ARDEF"]


def test_samples_follow_the_conditional(model: Tracformer, tokenizer: Tokenizer) -> None:
    """The first draw of many seeds has the model's own frequencies."""
    drawn = Counter(
        design(
            model, tokenizer, WILD, Constraints(((12, 12),), allowed={12: "KRW"}), n=1, seed=seed
        )[0].sequence[2]
        for seed in range(200)
    )
    context = torch.tensor([[True, True, False, True, True]])
    batch = Batch(torch.tensor([tokenizer.encode("ACDEF")]), context)
    logits = model.logits_at(batch, "car", ~context)[0].detach()
    law = logits[[tokenizer.encode(x)[0] for x in "KRW"]].softmax(0).tolist()
    for letter, share in zip("KRW", law, strict=True):
        assert abs(drawn[letter] / 200 - share) < 4 * (share * (1 - share) / 200) ** 0.5 + 0.005


def test_aligned_families_may_change_their_length() -> None:
    tokenizer = build_tokenizer("protein-aligned")
    torch.manual_seed(1)
    config = TracformerConfig(
        vocab_size=tokenizer.vocab_size, max_length=16, n_layer=4, n_head=2, d_model=16, n_max=4
    )
    model = Tracformer(config).eval()
    wild = WildType("ACgDE".upper(), "A-CDE", (0, 2, -1, 3, 4))
    fixed = design(model, tokenizer, wild, Constraints(((2, 2), (4, 4))), n=10)
    assert {len(each.sequence) for each in fixed} == {5}
    assert all(each.sequence[2] == "G" for each in fixed)  # belongs to no column
    free = design(model, tokenizer, wild, Constraints(((1, 2),), any_length=True), n=40)
    assert len({len(each.sequence) for each in free}) > 1
    with pytest.raises(ValueError, match=r"position 3 \(G\) belongs to no column"):
        design(model, tokenizer, wild, Constraints(((2, 4),)))


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (Constraints(()), "no region is named"),
        (Constraints(((9, 11),)), "position 9 is outside of the wild type"),
        (
            Constraints(((11, 12),), allowed={14: "A"}),
            "position 14 is constrained but is in no region",
        ),
        (Constraints(((11, 12),), {11: "A"}, {11: "A"}), "no residue is left at position 11"),
        (
            Constraints(((11, 12),), {11: "A", 12: "A"}, max_changes=1),
            "but 2 positions do not allow",
        ),
        (
            Constraints(((11, 12),), any_length=True),
            "any_length needs a model of an aligned family",
        ),
    ],
)
def test_contradictions_are_refused(
    model: Tracformer,
    tokenizer: Tokenizer,
    constraints: Constraints,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        design(model, tokenizer, WILD, constraints)


def test_words_of_the_command_line() -> None:
    assert parse_region("24-31") == (24, 31)
    assert parse_region("24") == (24, 24)
    assert parse_residues(["24=avil", "30=C", "24=F"]) == {24: "AVILF", 30: "C"}
    for wrong in ("31-24", "a-b", ""):
        with pytest.raises(ValueError, match="write FIRST-LAST"):
            parse_region(wrong)
    for wrong in ("24", "x=A", "24=Z", "24="):
        with pytest.raises(ValueError, match="must be POSITION=RESIDUES"):
            parse_residues([wrong])


def test_fasta_and_diversity(model: Tracformer, tokenizer: Tokenizer) -> None:
    found = design(model, tokenizer, WILD, Constraints(((11, 13),)), n=3)
    lines = to_fasta(found).splitlines()
    assert lines[0] == f">design_1 log_prob={found[0].log_prob:.4f} changes={found[0].changes}"
    assert lines[1::2] == [each.sequence for each in found]
    assert mean_identity(["AAAA", "AAAC", "AACC"]) == pytest.approx((0.75 + 0.5 + 0.75) / 3)
    assert set(lines[1]) <= set(RESIDUES)
