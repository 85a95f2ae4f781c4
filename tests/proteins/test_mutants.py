"""Mutants: scores equal enumeration, tables are read in ProteinGym's convention, clear errors."""

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tracformer import Tracformer
from tracformer.data import Tokenizer
from tracformer.data.alignment import read_alignment
from tracformer.model.batch import Batch
from tracformer.proteins.mutants import (
    Mutant,
    agreement,
    all_singles,
    parse_mutant,
    read_mutants,
    score_mutants,
    whole_ratios,
    write_scores,
)
from tracformer.proteins.rivals import LETTERS, family_rows, fit_ardca, numbered, rival_scores
from tracformer.proteins.wild_type import (
    RESIDUES,
    WildType,
    align,
    family_hmm,
    from_family,
    unaligned,
)

WILD = unaligned("ACDEF", first=10)


def test_a_double_mutant_equals_enumeration(model: Tracformer, tokenizer: Tokenizer) -> None:
    """log p(C, E | rest) from the sum over all 2-letter fillings of whole-sequence probabilities."""
    name = "C11W:E13K"
    mutant = Mutant(name, parse_mutant(name, WILD))
    [score] = score_mutants(model, tokenizer, WILD, [mutant])
    V = tokenizer.vocab_size
    row = tokenizer.encode(WILD.row)
    pairs = list(itertools.product(range(V), repeat=2))
    tokens = torch.tensor([row] * len(pairs))
    tokens[:, 1], tokens[:, 3] = torch.tensor(pairs).T
    context = torch.tensor([[True, False, True, False, True]]).expand(len(pairs), -1)
    joint = model.log_prob(Batch(tokens, context), "car").sum(1)
    assert torch.logsumexp(joint, 0).item() == pytest.approx(0.0, abs=1e-9)
    at = dict(zip(pairs, joint.tolist(), strict=True))
    ids = {letter: tokenizer.encode(letter)[0] for letter in RESIDUES}
    expected = at[ids["W"], ids["K"]] - at[ids["C"], ids["E"]]
    assert score.log_ratio == pytest.approx(expected, abs=1e-9)
    assert abs(score.sum_of_singles - expected) > 1e-3  # mutations interact


def test_whole_sequences_differ_by_the_chain_rule(model: Tracformer, tokenizer: Tokenizer) -> None:
    mutant = Mutant("C11W:E13K", parse_mutant("C11W:E13K", WILD))
    [ratio] = whole_ratios(model, tokenizer, WILD, [mutant])
    rows = torch.tensor([tokenizer.encode(row) for row in ("AWDKF", "ACDEF")])
    both = model.log_prob(Batch(rows, torch.zeros_like(rows).bool()), "car").sum(1)
    assert ratio == pytest.approx(float((both[0] - both[1]).detach()), abs=1e-9)


@pytest.mark.parametrize("mode", ["car", "ac"])
def test_a_single_mutant_is_the_difference_of_two_scores(
    model: Tracformer, tokenizer: Tokenizer, mode: str
) -> None:
    mutants = all_singles(WILD)
    assert len(mutants) == 5 * 19
    scores = score_mutants(model, tokenizer, WILD, mutants, mode=mode, batch=7)
    score = next(score for score in scores if score.mutant.name == "D12Y")
    context = torch.tensor([[True, True, False, True, True]])

    def log_prob(sequence: str) -> float:
        batch = Batch(torch.tensor([tokenizer.encode(sequence)]), context)
        return float(model.log_prob(batch, mode).sum().detach())

    assert score.log_ratio == pytest.approx(log_prob("ACYEF") - log_prob("ACDEF"), abs=1e-9)
    assert score.sum_of_singles == score.log_ratio


def test_positions_without_a_column_have_no_score(model: Tracformer, tokenizer: Tokenizer) -> None:
    wild = WildType("ACD", "AD", (0, -1, 1))
    assert wild.outside == (2,)
    scores = score_mutants(model, tokenizer, wild, all_singles(wild))
    assert [math.isnan(score.log_ratio) for score in scores] == [False] * 19 + [True] * 19 + [
        False
    ] * 19


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A10C:C11W:A10D", "names position 10 twice"),
        ("C10A", "the wild type has A at position 10, not C"),
        (
            "F15A",
            "position 15 is outside of the wild type, whose residues have the numbers 10 to 14",
        ),
        ("A10Z", "'Z' is not one of the residues"),
        ("10A", "'10A' is not a mutant; write A24G"),
        ("", "'' is not a mutant"),
    ],
)
def test_wrong_mutants_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "dms.csv"
    path.write_text(f"mutant,DMS_score\nA10C,1\n{text},2\n")
    with pytest.raises(ValueError, match=f"line 3: .*{message}"):
        read_mutants(path, WILD)


def test_tables_without_the_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dms.csv"
    path.write_text("variant,score\nA10C,1\n")
    with pytest.raises(ValueError, match="has no column 'mutant'; its columns are: variant, score"):
        read_mutants(path, WILD)
    path.write_text("mutant,score\nA10C,1\n")
    with pytest.raises(ValueError, match="has no column 'CRIPT'"):
        read_mutants(path, WILD, "CRIPT")
    assert math.isnan(read_mutants(path, WILD)[0].measured)
    path.write_text("mutant,score\n")
    with pytest.raises(ValueError, match="has no mutants"):
        read_mutants(path, WILD)


def test_letters_outside_the_alphabet_are_refused() -> None:
    with pytest.raises(ValueError, match="residue 2 of the wild type is 'X'"):
        unaligned("AXC")


def test_scores_are_written_with_empty_cells(
    tmp_path: Path, model: Tracformer, tokenizer: Tokenizer
) -> None:
    wild = WildType("ACD", "AD", (0, -1, 1))
    mutants = [Mutant(name, parse_mutant(name, wild), 0.5) for name in ("A1C", "C2A", "A1C:D3E")]
    write_scores(tmp_path / "out.csv", score_mutants(model, tokenizer, wild, mutants))
    with open(tmp_path / "out.csv", newline="") as file:
        first, second, third = csv.DictReader(file)
    assert float(first["log_ratio"]) == pytest.approx(float(first["sum_of_singles"]))
    assert second["log_ratio"] == ""
    assert (third["positions"], third["residues"], third["DMS_score"]) == ("1:3", "C:E", "0.5")


def test_agreement_with_measured_values() -> None:
    measured = [*range(20), math.nan]
    perfect = agreement([*range(0, 40, 2), 7.0], measured)
    assert (perfect.mutants, perfect.spearman, perfect.auc, perfect.ndcg) == (20, 1.0, 1.0, 1.0)
    inverse = agreement([-value for value in range(20)], range(20))
    assert (inverse.spearman, inverse.auc) == (-1.0, 0.0)
    assert inverse.ndcg < 0.1
    noisy = agreement([value + 9 * (value % 3) for value in range(20)], range(20))
    assert noisy.low < noisy.spearman < noisy.high < 1.0
    with pytest.raises(ValueError, match="at least 3 are needed"):
        agreement([1.0, 2.0], [1.0, 2.0])


def family_file(folder: Path, sequences: int = 60) -> Path:
    """Write a family whose columns 2 and 5 agree, with insertions in some records."""
    generator = np.random.default_rng(0)
    records = []
    for number in range(sequences):
        pair = "AW"[number % 2]
        middle = "".join(generator.choice(list("DEKR"), 2))
        inserted = "gg" if number % 5 == 0 else ""
        gap = "-" if number % 7 == 0 else "F"
        records.append(f">s{number}/5-12\nM{pair}{middle}{inserted}{pair}HC{gap}\n")
    path = folder / "family.a3m"
    path.write_text("".join(records) + ">odd/1-8\nMABDAHCF\n")
    return path


def test_a_wild_type_is_aligned_to_the_columns(tmp_path: Path) -> None:
    pytest.importorskip("pyhmmer")
    path = family_file(tmp_path)
    named = from_family("s5", path)
    assert len(named.row) == 8
    assert named.sequence == (named.row[:4] + "GG" + named.row[4:]).replace("-", "")
    assert (named.first, named.outside) == (5, (9, 10))
    rows = [record.columns for record in read_alignment(path).records]
    aligned = align(named.sequence, family_hmm(rows), first=5)
    assert aligned == named
    with pytest.raises(ValueError, match="no record named 'other'"):
        from_family("other", path)
    with pytest.raises(ValueError, match="7 residues in the alignment and 8 by its name"):
        from_family("s7", path)


def test_ardca_is_a_distribution_and_finds_the_coupling(tmp_path: Path) -> None:
    rows = np.array([[0, 0, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]] * 25)
    model = fit_ardca(rows, np.ones(len(rows)), 2, couplings_penalty=1e-3, steps=20)
    everything = np.array(list(itertools.product(range(2), repeat=3)))
    log_probs = model.log_prob(everything)
    assert np.exp(log_probs).sum() == pytest.approx(1.0, abs=1e-5)
    found = {tuple(row): p for row, p in zip(everything.tolist(), np.exp(log_probs), strict=True)}
    assert found[0, 0, 1] > 0.2 > 0.05 > found[0, 0, 0]


def test_rivals_score_the_same_mutants(tmp_path: Path) -> None:
    pytest.importorskip("pyhmmer")
    path = family_file(tmp_path)
    family = family_rows(path)
    assert family.dropped["letters other than the 20 amino acids"] == 1
    assert len(family.columns) + sum(family.dropped.values()) == 61
    assert numbered(["A-"]).tolist() == [[LETTERS.index("A"), LETTERS.index("-")]]
    wild = from_family("s1", path)
    names = ["W6A", "W6A:W9A", "W6C"]
    mutants = [Mutant(name, parse_mutant(name, wild)) for name in names]
    scores = rival_scores(family, wild, mutants)
    assert set(scores) == {"profile", "hmm", "ardca"}
    both, single = scores["ardca"][1], scores["ardca"][0]
    assert both > single  # only arDCA knows that the two columns change together
    assert scores["profile"][1] < scores["profile"][0] + 0.2
    assert all(values[2] < values[0] for values in scores.values())
