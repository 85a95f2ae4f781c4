"""The task `domains`, and the profile HMMs that it compares models with."""

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_split import family, write_family
from tracformer import Tracformer, TracformerConfig
from tracformer.data import char_tokenizer
from tracformer.data.alignment import read_alignment
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.data.prepare import prepare
from tracformer.evaluation.domains import (
    UNKNOWN,
    Domains,
    HiddenDomains,
    ProfileHMM,
    _of_profile,
    as_indices,
    core_profile,
)
from tracformer.evaluation.task import Progress, Subject, parse_task
from tracformer.proteins.wild_type import RESIDUES, build_hmm


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Domains:
    pytest.importorskip("pyhmmer")
    folder = tmp_path_factory.mktemp("domains")
    (folder / "pfam").mkdir()
    for name, width, seed in (("one", 30, 1), ("two", 24, 2)):
        write_family(
            folder / "pfam" / f"{name}.fasta", family(20, 8, width=width, seed=seed, conserved=0.7)
        )
    prepare(folder / "data", folder / "pfam", "protein", validation=0.1, identity=0.6)
    found = parse_task(f"domains:data={folder / 'data'},alignments={folder / 'pfam'},hole=3/6")
    assert isinstance(found, Domains)
    return found


def subject(mode: str) -> Subject:
    tokenizer = char_tokenizer(ALPHABETS["protein"])
    torch.manual_seed(0)
    shape = TracformerConfig(
        vocab_size=tokenizer.vocab_size,
        max_length=32,
        n_layer=5,
        n_head=2,
        d_model=16,
        n_max=4,
        modes=("car", "ac"),
    )
    return Subject(Tracformer(shape, "blocked").eval(), tokenizer, "untrained", mode)


@pytest.mark.parametrize("mode", ["car", "ac"])
def test_every_system_predicts_the_same_residues(task: Domains, mode: str) -> None:
    result = task.run(subject(mode), Progress())
    for name in ("one", "two"):
        hidden = next(each for each in task.families() if each.family == name)
        targets = int((hidden.stop - hidden.start).sum())
        perplexity = {}
        for system in ("model", "profile", "hmm", "hmm-counts"):
            row = result.find("perplexity", family=name, system=system)
            assert (row.kind, row.targets) == ("exact" if mode == "car" else "marginal", targets)
            perplexity[system] = row.value
            assert 0.0 <= result.find("accuracy", family=name, system=system).value <= 1.0
        assert 20 < perplexity["model"] < 34  # of 26 tokens, untrained
        assert max(perplexity["profile"], perplexity["hmm"], perplexity["hmm-counts"]) < 20
        gap = result.find("nll_difference", family=name, system="model - hmm").value
        assert gap == pytest.approx(np.log(perplexity["model"] / perplexity["hmm"]))
        first = result.details[name]["fills"][0]
        assert first["sequence"][first["start"] :].startswith(first["was"])
        assert len(first["filled"]) == len(first["was"])
    assert str(task.data) not in str(result.to_dict()["options"])


def test_fills_are_shown_after_a_resume_too(task: Domains, tmp_path: Path) -> None:
    resuming = replace(subject("car"), scratch=tmp_path)
    first, again = (task.run(resuming, Progress()).details["one"]["fills"] for _ in range(2))
    assert len(first) > 0
    assert again == first


def test_hidden_stretches_lie_inside_of_held_out_domains(task: Domains) -> None:
    for hidden in task.families():
        widths = hidden.stop - hidden.start
        lengths = np.array([len(record.sequence) for record in hidden.held.records])
        assert widths.min() >= 3
        assert widths.max() <= 6
        assert (hidden.stop <= lengths).all()
        trained = {record.sequence for record in hidden.training.records}
        assert not trained & {record.sequence for record in hidden.held.records}


def test_profile_by_hand(tmp_path: Path) -> None:
    training = read_alignment(write_family(tmp_path / "t.fasta", ["AC", "AD", "A-"]))
    held = read_alignment(write_family(tmp_path / "h.fasta", ["-C", "AW"]))
    found = _of_profile(HiddenDomains("x", training, held, np.array([0, 0]), np.array([1, 2])))
    # 3, 1 and 0 of 5, one more of each of the twenty
    background = {"A": 4 / 25, "C": 2 / 25, "W": 1 / 25}
    assert found.nll[0] == pytest.approx(-np.log((1 + 5 * background["C"]) / (2 + 5)))
    assert found.nll[1] == pytest.approx(
        -np.log((3 + 5 * background["A"]) / (3 + 5)) - np.log(5 * background["W"] / (2 + 5))
    )
    assert found.right.tolist() == [1.0, 1.0]


def test_wrong_options_raise() -> None:
    with pytest.raises(ValueError, match="hole is"):
        parse_task("domains:hole=9/3")
    with pytest.raises(ValueError, match="needs data=FOLDER"):
        Domains().families()


# ---- profile HMMs


def small_hmm(nodes: int = 3, seed: int = 0) -> ProfileHMM:
    """Return a core model with random probabilities."""
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
        *(leave[0], m[:, 1], m[:, 2]),
        *(leave[1], i[:, 1]),
        *(leave[2], d[:, 1]),
        end,
    )


def literal(hmm: ProfileHMM, sequence: str) -> float:
    """Return the sum over paths, one state after another."""
    letters = [RESIDUES.index(letter) for letter in sequence]

    @cache
    def rest(state: str, node: int, at: int) -> float:
        """Return the sum over paths from this state on, with `at` residues emitted."""
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


def search_score(core: ProfileHMM, background: torch.Tensor, residues: list[int]) -> float:
    """Return HMMER's forward score in bits: local hits, any number of them, flanks between them.

    Entry into match states is proportional to their use, and leaving costs nothing.
    """
    n, L = core.nodes, len(residues)
    used = torch.zeros(n, dtype=torch.float64)
    used[0] = core.mi[0] + core.mm[0]
    for k in range(1, n):
        used[k] = used[k - 1] * (core.mm[k] + core.mi[k]) + (1.0 - used[k - 1]) * core.dm[k]
    entry = used / (used * torch.arange(n, 0, -1)).sum()
    flank, again = L / (L + 3.0), 0.5  # probability of one more flanking residue, another hit
    m, i, d = (torch.zeros(n + 1, dtype=torch.float64) for _ in "MID")
    begin, outside, between, end = 1.0 - flank, 1.0, 0.0, 0.0
    for residue in residues:
        emitted = float(background[residue])
        into = (m * core.mm + i * core.im + d * core.dm)[:-1] + begin * entry
        i = emitted * (m * core.mi + i * core.ii)
        i[0] = i[-1] = 0.0
        m = torch.cat((torch.zeros(1, dtype=torch.float64), core.match[:, residue] * into))
        d = torch.zeros(n + 1, dtype=torch.float64)
        for k in range(1, n):
            d[k + 1] = m[k] * core.md[k] + d[k] * core.dd[k]
        left = float(m.sum() + d.sum())
        outside *= flank * emitted
        between = flank * emitted * between + again * left
        end = flank * emitted * end + (1.0 - again) * left
        begin = (1.0 - flank) * (outside + between)
    null = L * math.log(L / (L + 1)) - math.log(L + 1) + float(background[residues].log().sum())
    return (math.log(end * (1.0 - flank)) - null) / math.log(2)


def test_the_core_model_gives_the_scores_of_hmmer() -> None:
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
        **dict.fromkeys(("F1", "F2", "F3"), 1.0),
        **dict.fromkeys(("E", "domE"), 1e9),
    )
    hits = pipeline.search_hmm(hmm, block)
    # A sum over domains stands in for the forward score where it is the higher of the two.
    scores = {int(hit.name): hit.pre_score for hit in hits if hit.pre_score > hit.sum_score}
    assert len(scores) > 10
    core = core_profile(hmm)
    frequencies = torch.tensor(list(background.residue_frequencies)).double()[:20]
    for number, score in scores.items():
        residues = as_indices([sequences[number]], len(sequences[number]))[0].tolist()
        assert search_score(core, frequencies, residues) == pytest.approx(score, abs=1e-3)


def test_the_core_model_is_a_distribution() -> None:
    pytest.importorskip("pyhmmer")
    core = core_profile(build_hmm(family(2, 20, width=12)))
    lengths = torch.arange(1, 40)
    # over all sequences of all lengths
    total = core.log_prob(torch.full((39, 39), UNKNOWN), lengths).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-3)
