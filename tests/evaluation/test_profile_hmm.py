import itertools
import math
from functools import cache

import pytest
import torch

from tests.data.test_split import family
from tracformer.evaluation.domains import (
    RESIDUES,
    UNKNOWN,
    ProfileHMM,
    as_indices,
    build_hmm,
    core_profile,
    search_profile,
)


def small_hmm(nodes: int = 3, seed: int = 0) -> ProfileHMM:
    """A core model with random probabilities, from one node to the next and out of the last."""
    generator = torch.Generator().manual_seed(seed)

    def shares(*shape: int) -> torch.Tensor:
        drawn = torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1
        return drawn / drawn.sum(-1, keepdim=True)

    m, i, d = shares(nodes + 1, 3), shares(nodes + 1, 2), shares(nodes + 1, 2)
    m[-1, :2] += m[-1, 2] / 2
    end = torch.zeros(nodes + 1, 3, dtype=torch.float64)
    end[-1] = torch.stack((m[-1, 0], i[-1, 0], torch.ones_like(d[-1, 0])))
    leave = [column.clone() for column in (m[:, 0], i[:, 0], d[:, 0])]
    for column in leave:
        column[-1] = 0.0
    return ProfileHMM(
        shares(nodes, 20),
        shares(nodes + 1, 20),
        leave[0],
        m[:, 1],
        m[:, 2],
        leave[1],
        i[:, 1],
        leave[2],
        d[:, 1],
        torch.zeros(nodes),
        end,
    )


def literal(hmm: ProfileHMM, sequence: str) -> float:
    """The sum over paths, one state after another."""
    letters = [RESIDUES.index(letter) for letter in sequence]

    @cache
    def rest(state: str, node: int, at: int) -> float:
        """Of everything behind this state, with `at` residues emitted."""
        column = "MID".index(state)
        total = float(hmm.end[node, column]) if at == len(letters) else 0.0
        to_match, to_insert = {"M": (hmm.mm, hmm.mi), "I": (hmm.im, hmm.ii), "D": (hmm.dm, None)}[
            state
        ]
        to_delete = {"M": hmm.md, "I": None, "D": hmm.dd}[state]
        if at < len(letters):
            if node < hmm.nodes:
                total += float(to_match[node] * hmm.match[node, letters[at]]) * rest(
                    "M", node + 1, at + 1
                )
            if to_insert is not None:
                total += float(to_insert[node] * hmm.insert[node, letters[at]]) * rest(
                    "I", node, at + 1
                )
        if to_delete is not None and node < hmm.nodes:
            total += float(to_delete[node]) * rest("D", node + 1, at)
        return total

    return math.log(rest("M", 0, 0))


def test_forward_is_the_sum_over_paths() -> None:
    hmm, sequences = small_hmm(), ["ACD", "A", "WYWYWW", "GGHIKL"]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    found = hmm.log_prob(as_indices(sequences, 6), lengths)
    torch.testing.assert_close(
        found, torch.tensor([literal(hmm, sequence) for sequence in sequences], dtype=torch.float64)
    )


def test_unknown_residues_are_summed_over() -> None:
    hmm = small_hmm(seed=1)
    pairs = ["A" + one + "C" + other for one, other in itertools.product(RESIDUES, RESIDUES)]
    joint = hmm.log_prob(as_indices(pairs, 4), torch.full((400,), 4)).exp().reshape(20, 20)
    masked, length = torch.tensor([[0, UNKNOWN, 1, UNKNOWN]]), torch.tensor([4])
    torch.testing.assert_close(hmm.log_prob(masked, length).exp()[0], joint.sum())
    marginals = hmm.marginals(masked, length)[0]
    torch.testing.assert_close(marginals[1], joint.sum(1) / joint.sum())
    torch.testing.assert_close(marginals[3], joint.sum(0) / joint.sum())


def test_the_same_score_as_hmmer() -> None:
    pyhmmer = pytest.importorskip("pyhmmer")
    rows = family(3, 20, width=30)
    hmm = build_hmm(rows[:40])
    alphabet = pyhmmer.easel.Alphabet.amino()
    background = pyhmmer.plan7.Background(alphabet)
    sequences = [row.replace("-", "") for row in rows[40:]]
    sequences[0] += "AAGGWW" + sequences[1]  # two domains
    block = pyhmmer.easel.DigitalSequenceBlock(
        alphabet,
        [
            pyhmmer.easel.TextSequence(name=str(i).encode(), sequence=s).digitize(alphabet)
            for i, s in enumerate(sequences)
        ],
    )
    pipeline = pyhmmer.plan7.Pipeline(
        alphabet,
        background=background,
        bias_filter=False,
        null2=False,
        F1=1.0,
        F2=1.0,
        F3=1.0,
        E=1e9,
        domE=1e9,
    )
    hits = pipeline.search_hmm(hmm, block)
    # A sum over domains stands in for the forward score where it is the higher of the two.
    scores = {int(hit.name): hit.pre_score for hit in hits if hit.pre_score > hit.sum_score}
    assert len(scores) > 10
    core, frequencies = (
        core_profile(hmm),
        torch.tensor(list(background.residue_frequencies)).double()[:20],
    )
    for number, score in scores.items():
        length = len(sequences[number])
        residues = as_indices([sequences[number]], length)
        forward = (
            search_profile(core, frequencies, length)
            .log_prob(residues, torch.tensor([length]))
            .item()
        )
        null = (
            length * math.log(length / (length + 1))
            - math.log(length + 1)
            + frequencies[residues].log().sum().item()
        )
        assert (forward - null) / math.log(2) == pytest.approx(score, abs=1e-3)


def test_core_model_is_a_distribution() -> None:
    pytest.importorskip("pyhmmer")
    core = core_profile(build_hmm(family(2, 20, width=12)))
    lengths = torch.arange(1, 40)
    # over all sequences of all lengths
    total = core.log_prob(torch.full((39, 39), UNKNOWN), lengths).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-3)
