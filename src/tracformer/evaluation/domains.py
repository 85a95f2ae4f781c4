"""The task `domains`: protein families beside a profile and a profile HMM.

A profile hidden Markov model of a family (Plan 7), and what it says about residues that are not
known.

Node k has a match state M_k, an insert state I_k and a silent delete state D_k; node 0 begins, and
what leaves node n ends. The forward algorithm sums over all paths; a residue that is not known is
emitted with probability 1 by every state, which sums over it as well:

    log p(hole | rest) = log F(whole sequence) - log F(hole unknown)
    p(x_i = a | rest)  = sum over states s of d log F / d e_s(i) * e_s(a)

    where e_s(i) = 1 is what s emits an unknown x_i with

The parameters come from HMMER's own builder (`pyhmmer`, extra `proteins`). `search_profile` is
HMMER's way of scoring, local and with several hits, by which the tests compare this forward
algorithm with HMMER's.

Protein domains with a stretch of residues hidden: a model beside a position-frequency profile and a
profile HMM of the same family.

    tracformer prepare PF00014.fasta PF00595.fasta --identity 0.6 --tokenizer protein --out data
    tracformer eval RUN domains:alignments=pfam --data data/domains --split test --mode car

Every held-out domain gets one hole of 8 to 16 residues, the same for every system. All are learnt
from the distinct training sequences of the family:

- `profile`: p(residue | column), counts with pseudocounts. It is told in which column each hidden
  residue stands, which the others are not.
- `hmm`: HMMER's profile HMM, given the residues around the hole. `hmm-counts` is built without
  HMMER's entropy weighting, which flattens the emissions for the search of distant relatives and
  costs likelihood.

In mode `car` the perplexity is that of the hole as a whole, for the HMMs by two runs of the forward
algorithm; in mode `ac` that of each residue given what is around the hole. Accuracy: in mode `car`
a greedy fill; otherwise the likeliest residue at each place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.data import PreparedData, Tokenizer, open_source
from tracformer.data.alignment import INSERTED, Alignment, read_alignment
from tracformer.evaluation import bootstrap
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.questions import Floats, by_sequence
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject, Task
from tracformer.files import optional_package
from tracformer.generation.decode import fill
from tracformer.generation.samplers import Sampler
from tracformer.model.batch import Batch

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # in HMMER's order
UNKNOWN = -1
SEED = 42  # of the builder, whose calibration draws sequences


@dataclass(frozen=True)
class ProfileHMM:
    """Probabilities, float64. Index k of a transition leaves node k, 0..n; (n+1,) each."""

    match: Tensor  # (n, 20): what M_1..M_n emit
    insert: Tensor  # (n+1, 20): what I_0..I_n emit
    mm: Tensor
    mi: Tensor
    md: Tensor
    im: Tensor
    ii: Tensor
    dm: Tensor
    dd: Tensor
    entry: Tensor  # (n,): from the beginning into M_1..M_n, besides mm[0]
    end: Tensor  # (n+1, 3): from M_k, I_k, D_k to the end
    flank: float = 0.0  # chance of one more residue before, between and behind hits
    again: float = 0.0  # chance of another hit

    @property
    def nodes(self) -> int:
        return len(self.match)

    def log_forward(self, match: Tensor, insert: Tensor, flank: Tensor, lengths: Tensor) -> Tensor:
        """(B,): log F.

        What each state emits at each position: match (B, T, n), insert (B, T, n+1), flank (B, T).
        """
        B, T, n = match.shape
        deletions = self._deletions()
        outside = match.new_ones(B)  # N, the residues before the first hit
        between, behind = match.new_zeros(B), match.new_zeros(B)  # J and C
        matched, inserted = match.new_zeros(B, n + 1), match.new_zeros(B, n + 1)
        matched[:, 0] = 1.0 - self.flank
        deleted = matched @ deletions
        scale, ends = match.new_zeros(B), []
        for t in range(T):
            # (B, n)
            into_match = (matched * self.mm + inserted * self.im + deleted * self.dm)[
                :, :-1
            ] + matched[:, :1] * self.entry
            inserted = insert[:, t] * (matched * self.mi + inserted * self.ii)
            matched = torch.cat((match.new_zeros(B, 1), match[:, t] * into_match), 1)
            deleted = matched @ deletions
            ended = torch.stack((matched, inserted, deleted), 2).flatten(1) @ self.end.flatten()
            outside, between, behind = (
                self.flank * flank[:, t] * outside,
                self.flank * flank[:, t] * between + self.again * ended,
                self.flank * flank[:, t] * behind + (1.0 - self.again) * ended,
            )
            matched = torch.cat(
                (((1.0 - self.flank) * (outside + between))[:, None], matched[:, 1:]), 1
            )
            ends.append(scale + (behind * (1.0 - self.flank)).log())
            size = (
                matched.sum(1) + inserted.sum(1) + deleted.sum(1) + outside + between + behind
            ).detach()
            matched, inserted, deleted = (
                matched / size[:, None],
                inserted / size[:, None],
                deleted / size[:, None],
            )
            outside, between, behind = outside / size, between / size, behind / size
            scale = scale + size.log()
        return torch.stack(ends, 1).gather(1, lengths[:, None] - 1)[:, 0]

    def _deletions(self) -> Tensor:
        """(n+1, n+1): from M_j into D_k by way of deletions alone, md[j] dd[j+1] ... dd[k-1]."""
        n = self.nodes
        table = torch.zeros(n + 1, n + 1, dtype=self.md.dtype)
        for k in range(1, n + 1):
            table[:, k] = table[:, k - 1] * self.dd[k - 1]
            table[k - 1, k] = self.md[k - 1]
        return table

    def emissions(self, residues: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For `log_forward`, from residues (B, T) as indices into RESIDUES, or UNKNOWN."""
        known = (residues != UNKNOWN)[..., None]
        index = residues.clamp(min=0)
        background = self.insert[0]
        match, insert = self.match.T[index], self.insert.T[index]
        return (
            match.where(known, 1.0),
            insert.where(known, 1.0),
            background[index].where(known[..., 0], 1.0),
        )

    def log_prob(self, residues: Tensor, lengths: Tensor) -> Tensor:
        """(B,): of whole sequences; unknown residues are summed over."""
        return self.log_forward(*self.emissions(residues), lengths)

    def marginals(self, residues: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, 20): of every residue given the known ones; right where it is unknown."""
        match, insert, flank = self.emissions(residues)
        match.requires_grad_(), insert.requires_grad_(), flank.requires_grad_()
        with torch.enable_grad():
            total = self.log_forward(match, insert, flank, lengths).sum()
            by_match, by_insert, by_flank = torch.autograd.grad(
                total, (match, insert, flank), allow_unused=True
            )
        return (
            by_match @ self.match + by_insert @ self.insert + by_flank[..., None] * self.insert[0]
        )


def as_indices(sequences: Sequence[str], length: int) -> Tensor:
    """(B, length): other letters than the twenty, and what lies behind the end, as UNKNOWN."""
    table = {letter: number for number, letter in enumerate(RESIDUES)}
    rows = [
        [table.get(letter, UNKNOWN) for letter in sequence.ljust(length)] for sequence in sequences
    ]
    return torch.tensor(rows)


def build_hmm(columns: Sequence[str], name: str = "family", **options: Any) -> Any:
    """HMMER's model (`pyhmmer.plan7.HMM`) of an alignment's rows.

    `options` go to `pyhmmer.plan7.Builder`.
    """
    pyhmmer = optional_package("pyhmmer", "building a profile HMM", "proteins")
    alphabet = pyhmmer.easel.Alphabet.amino()
    rows = [
        pyhmmer.easel.TextSequence(name=str(number).encode(), sequence=row)
        for number, row in enumerate(columns)
    ]
    msa = pyhmmer.easel.TextMSA(name=name.encode(), sequences=rows).digitize(alphabet)
    builder = pyhmmer.plan7.Builder(alphabet, **{"seed": SEED, **options})
    return builder.build_msa(msa, pyhmmer.plan7.Background(alphabet))[0]


def core_profile(hmm: Any) -> ProfileHMM:
    """The model itself: a sequence is one domain, from the first node to the last,
    and nothing else.
    """
    tables = {
        name: torch.tensor([list(row) for row in getattr(hmm, name)]).double()
        for name in ("match_emissions", "insert_emissions")
    }
    # (n+1, 7): mm mi md im ii dm dd
    t = torch.tensor([list(row) for row in hmm.transition_probabilities]).double()
    end = torch.zeros(len(t), 3, dtype=torch.float64)
    end[-1] = torch.stack((t[-1, 0], t[-1, 3], t[-1, 5]))
    mm, im, dm = (t[:, column].clone() for column in (0, 3, 5))
    mm[-1] = im[-1] = dm[-1] = 0.0  # from the last node these lead to the end
    entry = torch.zeros(len(t) - 1, dtype=torch.float64)
    return ProfileHMM(
        tables["match_emissions"][1:, :20],
        tables["insert_emissions"][:, :20],
        mm,
        t[:, 1],
        t[:, 2],
        im,
        t[:, 4],
        dm,
        t[:, 6],
        entry,
        end,
    )


def search_profile(core: ProfileHMM, background: Tensor, length: int) -> ProfileHMM:
    """How HMMER scores a target of so many residues: any stretch of the model, any number of hits,
    flanks of background residues.

    Entries are weighted by how often a match state is used, and leaving costs nothing: HMMER's
    "implicit" local model.
    """
    n = core.nodes
    used = torch.zeros(n, dtype=torch.float64)
    used[0] = core.mi[0] + core.mm[0]
    for k in range(1, n):
        used[k] = used[k - 1] * (core.mm[k] + core.mi[k]) + (1.0 - used[k - 1]) * core.dm[k]
    entry = used / (used * torch.arange(n, 0, -1)).sum()
    mm, mi, md = core.mm.clone(), core.mi.clone(), core.md.clone()
    mm[0] = mi[0] = md[0] = mi[-1] = 0.0
    end = torch.zeros(n + 1, 3, dtype=torch.float64)
    end[1:, 0] = end[1:, 2] = 1.0
    insert = background.double().expand(n + 1, -1)
    return replace(
        core,
        insert=insert,
        mm=mm,
        mi=mi,
        md=md,
        entry=entry,
        end=end,
        flank=length / (length + 3.0),
        again=0.5,
    )


PSEUDOCOUNT = 5.0  # a column, spread over the residues by their frequency in the family
AT_ONCE = 64  # sequences of an HMM's forward algorithm
# options of HMMER's builder
HMMS: dict[str, dict[str, Any]] = {"hmm": {}, "hmm-counts": {"effective_number": "none"}}
SHOWN = 10  # fills a family, the first ones


@dataclass(frozen=True)
class Holes:
    """The held-out domains of one family: hole i hides residues start[i]..stop[i]-1."""

    family: str
    training: Alignment  # distinct sequences
    held: Alignment
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def hidden(self, number: int) -> str:
        return self.held.records[number].sequence[self.start[number] : self.stop[number]]


@dataclass(frozen=True)
class DomainAnswers:
    """(N,) each: -log p of the hole, and how many of its residues are guessed."""

    nll: Floats
    right: Floats


@dataclass(frozen=True)
class Domains(Task):
    name = "domains"
    modes = ("car", "ac")

    data: str = ""  # a folder of `tracformer prepare`, with gaps removed
    split: str = "test"
    # the aligned FASTA file that was prepared, or a folder of them: one family each
    alignments: str = ""
    hole: tuple[int, ...] = (8, 16)  # residues, from so many to so many
    sequences: int = 0  # of each family; 0: all
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.hole) != 2 or not 1 <= self.hole[0] <= self.hole[1]:
            raise ValueError(
                f"hole is {self.hole!r}; it must be two numbers of residues, the smaller first, as "
                "in hole=8/16"
            )

    def families(self) -> tuple[Holes, ...]:
        return _families(self)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        families = self.families()
        rows = [
            alignment.rows for family in families for alignment in (family.training, family.held)
        ]
        return {
            "data": array_hash(rows),
            "contexts": array_hash(
                edge for family in families for edge in (family.start, family.stop)
            ),
        }

    def run(self, subject: Subject, progress: Progress) -> Result:
        self.check(subject)
        rows: list[ResultRow] = []
        details: dict[str, Any] = {}
        for family in self.families():
            count = len(family.held.records)
            progress.start(f"{subject.name} {subject.mode}: {family.family}", count)
            answers = {
                "model": _of_model(subject, family, progress),
                "profile": _of_profile(family),
            }
            for system, options in HMMS.items():
                hmm = core_profile(
                    build_hmm(
                        [record.columns for record in family.training.records],
                        family.family,
                        **options,
                    )
                )
                answers[system] = _of_hmm(hmm, family, subject.mode)
            rows += [
                row
                for system, each in answers.items()
                for row in _rows(subject, family, system, each)
            ]
            rows += [
                _difference(subject, family, answers["model"], each, system)
                for system, each in answers.items()
                if system != "model"
            ]
            details[family.family] = {
                "targets": (family.stop - family.start).tolist(),
                **{
                    system: {"nll": each.nll.tolist(), "right": each.right.tolist()}
                    for system, each in answers.items()
                },
                "fills": [
                    {
                        "sequence": family.held.records[number].sequence,
                        "start": int(family.start[number]),
                        "was": family.hidden(number),
                        "filled": filled,
                    }
                    for number, filled in enumerate(_fills(subject, family, min(SHOWN, count)))
                ],
            }
        return self.result(subject, rows, details)


@lru_cache(maxsize=4)
def _families(task: Domains) -> tuple[Holes, ...]:
    if not task.data or not task.alignments:
        raise ValueError(
            "domains needs data=FOLDER, made by `tracformer prepare`, and alignments=, the FASTA "
            "files that it was made from"
        )
    data = PreparedData.open(task.data)
    training, held = (
        {data.tokenizer.decode(split.document(i)[:-1]) for i in range(split.counts.documents)}
        for split in (data.split("train"), data.split(task.split))
    )
    files = open_source(task.alignments, format="fasta").files
    names = [path.name.partition(".")[0] for path in files]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"two alignments are called {again!r} up to the first dot, which is what their figures "
            "go by; rename one"
        )
    found = [
        _holes(task, read_alignment(path), name, training, held)
        for path, name in zip(files, names, strict=True)
    ]
    families = tuple(each for each in found if each.held.records)
    if not families:
        raise ValueError(
            f"no sequence of split {task.split!r} of {task.data} is in {task.alignments}; name the "
            "files that it was made from"
        )
    return families


def _holes(
    task: Domains, alignment: Alignment, family: str, training: set[str], held: set[str]
) -> Holes:
    distinct = alignment.by_sequence.values()
    known = Alignment(
        alignment.name, tuple(record for record in distinct if record.sequence in training)
    )
    long = sorted(
        (
            record
            for record in distinct
            if record.sequence in held and len(record.sequence) > task.hole[0]
        ),
        key=lambda r: r.sequence,
    )
    step = max(1, len(long) // task.sequences) if task.sequences else 1
    chosen = Alignment(alignment.name, tuple(long[::step][: task.sequences or None]))
    start, stop = [], []
    for number, record in enumerate(chosen.records):
        rng = np.random.Generator(np.random.Philox(key=np.array([task.seed, number], np.uint64)))
        width = int(rng.integers(task.hole[0], min(task.hole[1], len(record.sequence) - 1) + 1))
        start.append(int(rng.integers(len(record.sequence) - width + 1)))
        stop.append(start[-1] + width)
    return Holes(family, known, chosen, np.array(start, np.int64), np.array(stop, np.int64))


def _of_model(subject: Subject, family: Holes, progress: Progress) -> DomainAnswers:
    @torch.no_grad()
    def ask(numbers: range) -> dict[str, Floats]:
        batch = _rows_of(subject, family, numbers)
        log_probs = subject.model.log_prob(batch, subject.mode).double()
        right = ((_guessed(subject, batch) == batch.tokens) & batch.targets()).sum(1).double()
        return {"nll": -log_probs.sum(1).cpu().numpy(), "right": right.cpu().numpy()}

    found = by_sequence(
        subject,
        ask,
        ("nll", "right"),
        len(family.held.records),
        progress,
        f"domains-{family.family}",
    )
    return DomainAnswers(found["nll"], found["right"])


@torch.no_grad()
def _fills(subject: Subject, family: Holes, count: int) -> list[str]:
    """What stands in the first holes after the model has filled them."""
    batch = _rows_of(subject, family, range(count))
    tokenizer = _tokenizer_of(subject)
    rows = zip(_guessed(subject, batch), batch.targets(), strict=True)
    return [tokenizer.decode(row[hole].tolist()) for row, hole in rows]


def _rows_of(subject: Subject, family: Holes, numbers: range) -> Batch:
    """Return the sequences, all given but their holes."""
    tokenizer = _tokenizer_of(subject)
    sequences = [family.held.records[i].sequence for i in numbers]
    # an end of text is given behind each
    ids = [[*tokenizer.encode(sequence), tokenizer.eot_id] for sequence in sequences]
    if any(len(row) != len(sequence) + 1 for row, sequence in zip(ids, sequences, strict=True)):
        raise ValueError(
            f"{subject.name} does not read one residue a token; train it with --tokenizer protein"
        )
    lengths = torch.tensor([len(row) for row in ids])
    places = torch.arange(int(lengths.max()))
    tokens = torch.tensor([row + [tokenizer.eot_id] * (len(places) - len(row)) for row in ids])
    start, stop = (
        torch.from_numpy(each[numbers.start : numbers.stop, None])
        for each in (family.start, family.stop)
    )
    targets = (places >= start) & (places < stop)
    return Batch(tokens, ~targets, lengths).to(subject.device)


def _guessed(subject: Subject, batch: Batch) -> Tensor:
    """The likeliest residues in the holes: each by itself, or each after those before it."""
    if subject.mode == "ac":
        targets = batch.targets()
        likeliest = subject.model.logits_at(batch, "ac", targets).argmax(1)
        return batch.tokens.masked_scatter(targets, likeliest)
    return fill(subject.model, batch, subject.mode, sampler=Sampler(temperature=0.0)).tokens


def _tokenizer_of(subject: Subject) -> Tokenizer:
    if subject.tokenizer is None:
        raise ValueError(f"task 'domains' reads sequences, and {subject.name} has no tokeniser")
    return subject.tokenizer


def _of_profile(family: Holes) -> DomainAnswers:
    letters = np.frombuffer(RESIDUES.encode(), np.uint8)
    # (columns, 20)
    counts = (family.training.rows[:, :, None] == letters).sum(0).astype(np.float64)
    background = (counts.sum(0) + 1.0) / (counts.sum() + len(letters))
    shares = (counts + PSEUDOCOUNT * background) / (counts.sum(1, keepdims=True) + PSEUDOCOUNT)
    nll, right = [], []
    for record, start, stop in zip(family.held.records, family.start, family.stop, strict=True):
        places = np.array(record.places[start:stop])
        # (hole, 20)
        predicted = np.where((places == INSERTED)[:, None], background, shares[places])
        log_probs, hits = _scored(predicted, record.sequence[start:stop])
        nll.append(-log_probs)
        right.append(hits)
    return DomainAnswers(np.array(nll), np.array(right))


def _of_hmm(hmm: ProfileHMM, family: Holes, mode: str) -> DomainAnswers:
    records = family.held.records
    nll, right = np.zeros(len(records)), np.zeros(len(records))
    for first in range(0, len(records), AT_ONCE):
        some = range(first, min(first + AT_ONCE, len(records)))
        sequences = [records[i].sequence for i in some]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        whole = as_indices(sequences, int(lengths.max()))
        start, stop = (
            torch.from_numpy(each[first : some.stop, None]) for each in (family.start, family.stop)
        )
        places = torch.arange(whole.shape[1])
        masked = whole.masked_fill((places >= start) & (places < stop), UNKNOWN)
        marginals = hmm.marginals(masked, lengths).numpy()
        joint = (hmm.log_prob(masked, lengths) - hmm.log_prob(whole, lengths)).numpy()
        for row, number in enumerate(some):
            log_probs, right[number] = _scored(
                marginals[row, family.start[number] : family.stop[number]], family.hidden(number)
            )
            nll[number] = -log_probs if mode == "ac" else joint[row]
    return DomainAnswers(nll, right)


def _scored(predicted: Floats, hidden: str) -> tuple[float, float]:
    """Log-probability of the hidden residues under (n, 20) independent ones, and how
    many are the likeliest.
    """
    index = [RESIDUES.find(letter) for letter in hidden]
    if -1 in index:
        raise ValueError(
            f"{hidden!r} holds a letter that is none of the twenty residues; leave such sequences "
            "out of the held-out split"
        )
    chosen = predicted[np.arange(len(index)), index]
    return float(np.log(chosen).sum()), float((predicted.argmax(1) == index).sum())


def _rows(subject: Subject, family: Holes, system: str, answers: DomainAnswers) -> list[ResultRow]:
    targets = (family.stop - family.start).astype(np.float64)
    setting = {"family": family.family, "system": system}
    about: dict[str, Any] = {
        "kind": subject.kind,
        "sequences": len(targets),
        "targets": int(targets.sum()),
    }
    interval = bootstrap.ratio_interval(answers.nll, targets)
    low, high = (None, None) if interval is None else map(bootstrap.perplexity_of, interval)
    least, most = bootstrap.share_interval(answers.right, targets) or (None, None)
    return [
        ResultRow(
            "perplexity",
            setting,
            bootstrap.perplexity_of(bootstrap.ratio(answers.nll, targets)),
            low,
            high,
            **about,
        ),
        ResultRow(
            "accuracy", setting, bootstrap.ratio(answers.right, targets), least, most, **about
        ),
    ]


def _difference(
    subject: Subject, family: Holes, model: DomainAnswers, other: DomainAnswers, system: str
) -> ResultRow:
    """Nats a residue by which the model is behind; below zero it is ahead. Paired by sequence."""
    targets = (family.stop - family.start).astype(np.float64)
    gap = model.nll - other.nll
    low, high = bootstrap.ratio_interval(gap, targets) or (None, None)
    setting = {"family": family.family, "system": f"model - {system}"}
    about: dict[str, Any] = {
        "kind": subject.kind,
        "sequences": len(targets),
        "targets": int(targets.sum()),
    }
    return ResultRow("nll_difference", setting, bootstrap.ratio(gap, targets), low, high, **about)
