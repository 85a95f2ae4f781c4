"""The task `domains`: hidden stretches of protein domains, beside a profile and a profile HMM.

    tracformer prepare PF00014.fasta PF00595.fasta --identity 0.6 --tokenizer protein --out data
    tracformer eval RUN domains:alignments=pfam --data data/domains --split test --mode car

In every held-out domain, 8 to 16 residues are hidden, the same for every system. These baselines
are made from the distinct training sequences of the family:

- `profile`: p(residue | column), counts with pseudocounts. Unlike the other systems it knows in
  which column each hidden residue stands.
- `hmm`: HMMER's profile HMM, given the residues around the hidden stretch (`ProfileHMM`).
- `hmm-counts`: the same without HMMER's entropy weighting, which flattens the emissions to find
  distant relatives and costs likelihood.

In mode `car` the perplexity is that of the whole stretch, for the HMMs by two runs of the forward
algorithm; in mode `ac` it is that of each residue given those around the stretch. Accuracy is that
of a greedy fill in mode `car`, and of the likeliest residue at each position otherwise.

The profile HMM (`ProfileHMM`, Plan 7) answers exactly about hidden residues. Node k has a match
state M_k, an insert state I_k and a silent delete state D_k. Node 0 begins, and what leaves node n
ends: a sequence is one domain, from the first node to the last. The forward algorithm sums over all
paths, F = p(sequence). An unknown residue is emitted with probability 1 by every state, which sums
over it as well:

    log p(hidden | rest) = log F(whole sequence) - log F(hidden residues unknown)
    p(x_i = a | rest)    = sum over states s of d log F / d e_s(i) * e_s(a)

where e_s(i) = 1 is the emission of an unknown x_i by s. The parameters come from HMMER's builder
(`pyhmmer`, extra `proteins`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.data import PreparedData, Tokenizer, open_source
from tracformer.data.alignment import INSERTED, Alignment, read_alignment
from tracformer.evaluation import bootstrap
from tracformer.evaluation.questions import Floats, by_sequence
from tracformer.evaluation.result_files import Result, ResultRow, array_hash
from tracformer.evaluation.task import Progress, Subject, Task
from tracformer.generation.decode import fill
from tracformer.generation.samplers import Sampler
from tracformer.model.batch import Batch
from tracformer.options import option
from tracformer.proteins.wild_type import RESIDUES, build_hmm

PSEUDOCOUNT = 5.0  # for each column, spread over the residues by their frequency in the family
AT_ONCE = 64  # sequences in one run of the forward algorithm
# systems, and options of HMMER's builder
HMMS: dict[str, dict[str, Any]] = {"hmm": {}, "hmm-counts": {"effective_number": "none"}}
SHOWN = 10  # fills that a result shows of each family


@dataclass(frozen=True)
class ProfileHMM:
    """Probabilities in float64. Entry k of a transition leaves node k, 0..n; (n+1,) each."""

    match: Tensor  # (n, 20): emissions of M_1..M_n
    insert: Tensor  # (n+1, 20): emissions of I_0..I_n
    mm: Tensor
    mi: Tensor
    md: Tensor
    im: Tensor
    ii: Tensor
    dm: Tensor
    dd: Tensor
    end: Tensor  # (n+1, 3): from M_k, I_k, D_k to the end

    @property
    def nodes(self) -> int:
        """The number n of match states."""
        return len(self.match)

    def log_forward(self, match: Tensor, insert: Tensor, lengths: Tensor) -> Tensor:
        """Return log F, (B,).

        Args:
            match: (B, T, n) probability that each match state emits what stands at each position.
            insert: (B, T, n+1) the same for the insert states.
            lengths: (B,) lengths of the sequences.
        """
        B, T, n = match.shape
        deletions = self._deletions()
        # probabilities of the states after t residues, divided by exp(scale)
        matched, inserted = match.new_zeros(B, n + 1), match.new_zeros(B, n + 1)
        matched[:, 0] = 1.0  # the beginning
        deleted = matched @ deletions
        scale, ends = match.new_zeros(B), []
        for t in range(T):
            into_match = matched * self.mm + inserted * self.im + deleted * self.dm  # (B, n+1)
            inserted = insert[:, t] * (matched * self.mi + inserted * self.ii)
            matched = torch.cat((match.new_zeros(B, 1), match[:, t] * into_match[:, :-1]), 1)
            deleted = matched @ deletions
            ended = torch.stack((matched, inserted, deleted), 2).flatten(1) @ self.end.flatten()
            ends.append(scale + ended.log())
            size = (matched.sum(1) + inserted.sum(1) + deleted.sum(1)).detach()
            matched, inserted, deleted = (
                each / size[:, None] for each in (matched, inserted, deleted)
            )
            scale = scale + size.log()
        return torch.stack(ends, 1).gather(1, lengths[:, None] - 1)[:, 0]

    def _deletions(self) -> Tensor:
        """Return p(M_j -> D_k through deletions alone), md[j] dd[j+1] ... dd[k-1], (n+1, n+1)."""
        n = self.nodes
        table = torch.zeros(n + 1, n + 1, dtype=self.md.dtype)
        for k in range(1, n + 1):
            table[:, k] = table[:, k - 1] * self.dd[k - 1]
            table[k - 1, k] = self.md[k - 1]
        return table

    def emissions(self, residues: Tensor) -> tuple[Tensor, Tensor]:
        """Return match and insert emissions for `log_forward`.

        `residues` (B, T) are indices into RESIDUES, or UNKNOWN.
        """
        known = (residues != UNKNOWN)[..., None]
        index = residues.clamp(min=0)
        return self.match.T[index].where(known, 1.0), self.insert.T[index].where(known, 1.0)

    def log_prob(self, residues: Tensor, lengths: Tensor) -> Tensor:
        """Return log-probabilities of sequences, (B,), summed over unknown residues."""
        return self.log_forward(*self.emissions(residues), lengths)

    def marginals(self, residues: Tensor, lengths: Tensor) -> Tensor:
        """Return p(x_i | known residues) at the unknown positions, (B, T, 20).

        The entries at known positions have no meaning.
        """
        match, insert = self.emissions(residues)
        match.requires_grad_(), insert.requires_grad_()
        with torch.enable_grad():
            total = self.log_forward(match, insert, lengths).sum()
            by_match, by_insert = torch.autograd.grad(total, (match, insert))
        return by_match @ self.match + by_insert @ self.insert


def as_indices(sequences: Sequence[str], length: int) -> Tensor:
    """Return indices into RESIDUES, (B, length); other letters and padding are UNKNOWN."""
    table = {letter: number for number, letter in enumerate(RESIDUES)}
    rows = [
        [table.get(letter, UNKNOWN) for letter in sequence.ljust(length)] for sequence in sequences
    ]
    return torch.tensor(rows)


def core_profile(hmm: Any) -> ProfileHMM:
    """Return the core of HMMER's model, in which a sequence is one whole domain."""
    match, insert = (
        torch.tensor([list(row) for row in getattr(hmm, name)]).double()[:, :20]
        for name in ("match_emissions", "insert_emissions")
    )
    # (7, n+1)
    t = torch.tensor([list(row) for row in hmm.transition_probabilities]).double().T
    mm, mi, md, im, ii, dm, dd = (column.clone() for column in t)
    end = torch.zeros(t.shape[1], 3, dtype=torch.float64)
    # the last node's transitions to a match state lead to the end
    end[-1] = torch.stack((mm[-1], im[-1], dm[-1]))
    mm[-1] = im[-1] = dm[-1] = 0.0
    return ProfileHMM(match[1:], insert, mm, mi, md, im, ii, dm, dd, end)


@dataclass(frozen=True)
class HiddenDomains:
    """The held-out domains of one family; of domain i, residues start[i]..stop[i]-1 are hidden."""

    family: str
    training: Alignment  # distinct sequences
    held: Alignment
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    @property
    def targets(self) -> NDArray[np.int64]:
        """The number of hidden residues of each domain, (N,)."""
        return self.stop - self.start

    def hidden(self, number: int) -> str:
        """Return the hidden residues of a domain."""
        return self.held.records[number].sequence[self.start[number] : self.stop[number]]


@dataclass(frozen=True)
class DomainAnswers:
    """What a system answers, (N,) each: -log p of the hidden residues, and how many are right."""

    nll: Floats
    right: Floats


@dataclass(frozen=True)
class Domains(Task):
    """Perplexity and accuracy of hidden residues, and the difference to each baseline."""

    name = "domains"
    modes = ("car", "ac")

    data: str = option("", "folder of `tracformer prepare`, with gaps removed", raw=True)
    split: str = option("test", "split that is held out")
    alignments: str = option(
        "", "the aligned FASTA file that was prepared, or a folder of them, one for each family"
    )
    hole: tuple[int, ...] = option((8, 16), "fewest and most hidden residues of a sequence")
    sequences: int = option(0, "sequences of each family; 0 takes all", low=0)
    seed: int = option(0, "random seed of the hidden stretches")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.hole) != 2 or not 1 <= self.hole[0] <= self.hole[1]:
            raise ValueError(
                f"hole is {self.hole!r}; it must be two numbers of residues, the smaller first, as "
                "in hole=8/16"
            )

    def families(self) -> tuple[HiddenDomains, ...]:
        """Return the families that have held-out domains."""
        return _families(self)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of the aligned sequences and of the hidden stretches."""
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
        """Return figures of the model and of the baselines, family by family."""
        self.check(subject)
        rows: list[ResultRow] = []
        details: dict[str, Any] = {}
        for family in self.families():
            count = len(family.held.records)
            progress.start(f"{subject.name} {subject.mode}: {family.family}", count)
            model = _of_model(subject, family, progress)
            answers = {"model": model, "profile": _of_profile(family)}
            columns = [record.columns for record in family.training.records]
            for system, options in HMMS.items():
                hmm = core_profile(build_hmm(columns, family.family, **options))
                answers[system] = _of_hmm(hmm, family, subject.mode)
            for system, each in answers.items():
                rows += _rows(subject, family, system, each)
            for system, each in answers.items():
                if system != "model":
                    rows.append(_difference(subject, family, model, each, system))
            fills = [
                {
                    "sequence": family.held.records[number].sequence,
                    "start": int(family.start[number]),
                    "was": family.hidden(number),
                    "filled": filled,
                }
                for number, filled in enumerate(_fills(subject, family, min(SHOWN, count)))
            ]
            details[family.family] = {
                "targets": family.targets.tolist(),
                **{
                    system: {"nll": each.nll.tolist(), "right": each.right.tolist()}
                    for system, each in answers.items()
                },
                "fills": fills,
            }
        return self.result(subject, rows, details)


@lru_cache(maxsize=4)
def _families(task: Domains) -> tuple[HiddenDomains, ...]:
    if not task.data or not task.alignments:
        raise ValueError(
            "domains needs data=FOLDER, a folder of `tracformer prepare`, and alignments=FILES, "
            "the FASTA files that it was prepared from"
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
            f"two alignments are called {again!r} up to the first dot, the name of their figures; "
            "rename one"
        )
    found = [
        _hidden(task, read_alignment(path), name, training, held)
        for path, name in zip(files, names, strict=True)
    ]
    families = tuple(each for each in found if each.held.records)
    if not families:
        raise ValueError(
            f"no sequence of split {task.split!r} of {task.data} is in {task.alignments}; give the "
            "files that it was prepared from"
        )
    return families


def _hidden(
    task: Domains, alignment: Alignment, family: str, training: set[str], held: set[str]
) -> HiddenDomains:
    """Return the held-out domains of an alignment, with a random stretch of each hidden."""
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
    return HiddenDomains(family, known, chosen, np.array(start, np.int64), np.array(stop, np.int64))


def _of_model(subject: Subject, family: HiddenDomains, progress: Progress) -> DomainAnswers:
    """Return the model's answers."""

    @torch.no_grad()
    def compute(numbers: range) -> dict[str, Floats]:
        batch = _rows_of(subject, family, numbers)
        log_probs = subject.model.log_prob(batch, subject.mode).double()
        right = ((_guessed(subject, batch) == batch.tokens) & batch.targets()).sum(1).double()
        return {"nll": -log_probs.sum(1).cpu().numpy(), "right": right.cpu().numpy()}

    found = by_sequence(
        subject,
        compute,
        ("nll", "right"),
        len(family.held.records),
        progress,
        f"domains-{family.family}",
    )
    return DomainAnswers(found["nll"], found["right"])


@torch.no_grad()
def _fills(subject: Subject, family: HiddenDomains, count: int) -> list[str]:
    """Return the model's fills of the first hidden stretches."""
    batch = _rows_of(subject, family, range(count))
    tokenizer = _tokenizer_of(subject)
    rows = zip(_guessed(subject, batch), batch.targets(), strict=True)
    return [tokenizer.decode(row[hidden].tolist()) for row, hidden in rows]


def _rows_of(subject: Subject, family: HiddenDomains, numbers: range) -> Batch:
    """Return domains as a batch, in which the hidden residues are the targets."""
    tokenizer = _tokenizer_of(subject)
    sequences = [family.held.records[i].sequence for i in numbers]
    # each ends with an end of text, which is given
    ids = [[*tokenizer.encode(sequence), tokenizer.eot_id] for sequence in sequences]
    if any(len(row) != len(sequence) + 1 for row, sequence in zip(ids, sequences, strict=True)):
        raise ValueError(
            f"{subject.name} has other tokens than single residues; train it with --tokenizer "
            "protein"
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
    """Return tokens with the likeliest residues as targets: each alone (`ac`), else greedily."""
    if subject.mode == "ac":
        targets = batch.targets()
        likeliest = subject.model.logits_at(batch, "ac", targets).argmax(1)
        return batch.tokens.masked_scatter(targets, likeliest)
    return fill(subject.model, batch, subject.mode, sampler=Sampler(temperature=0.0)).tokens


def _tokenizer_of(subject: Subject) -> Tokenizer:
    if subject.tokenizer is None:
        raise ValueError(f"task 'domains' reads sequences, but {subject.name} has no tokenizer")
    return subject.tokenizer


def _of_profile(family: HiddenDomains) -> DomainAnswers:
    """Return the answers of column frequencies."""
    letters = np.frombuffer(RESIDUES.encode(), np.uint8)
    # (columns, 20)
    counts = (family.training.rows[:, :, None] == letters).sum(0).astype(np.float64)
    background = (counts.sum(0) + 1.0) / (counts.sum() + len(letters))
    shares = (counts + PSEUDOCOUNT * background) / (counts.sum(1, keepdims=True) + PSEUDOCOUNT)
    nll, right = [], []
    for record, start, stop in zip(family.held.records, family.start, family.stop, strict=True):
        places = np.array(record.places[start:stop])
        # (hidden residues, 20)
        predicted = np.where((places == INSERTED)[:, None], background, shares[places])
        log_probs, hits = _scored(predicted, record.sequence[start:stop])
        nll.append(-log_probs)
        right.append(hits)
    return DomainAnswers(np.array(nll), np.array(right))


def _of_hmm(hmm: ProfileHMM, family: HiddenDomains, mode: str) -> DomainAnswers:
    """Return the answers of a profile HMM."""
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
    """Return the log-probability of residues under predictions (n, 20), and how many are right."""
    index = [RESIDUES.find(letter) for letter in hidden]
    if -1 in index:
        raise ValueError(
            f"{hidden!r} has a letter that is none of the twenty residues; remove such sequences "
            "from the held-out split"
        )
    chosen = predicted[np.arange(len(index)), index]
    return float(np.log(chosen).sum()), float((predicted.argmax(1) == index).sum())


def _rows(
    subject: Subject, family: HiddenDomains, system: str, answers: DomainAnswers
) -> list[ResultRow]:
    """Return perplexity and accuracy of a system."""
    targets = family.targets.astype(np.float64)
    setting = {"family": family.family, "system": system}
    about = _about(subject, family)
    nll, interval = (
        bootstrap.ratio(answers.nll, targets),
        bootstrap.ratio_interval(answers.nll, targets),
    )
    low, high = (None, None) if interval is None else map(bootstrap.perplexity_of, interval)
    least, most = bootstrap.share_interval(answers.right, targets) or (None, None)
    accuracy = bootstrap.ratio(answers.right, targets)
    return [
        ResultRow("perplexity", setting, bootstrap.perplexity_of(nll), low, high, **about),
        ResultRow("accuracy", setting, accuracy, least, most, **about),
    ]


def _difference(
    subject: Subject,
    family: HiddenDomains,
    model: DomainAnswers,
    other: DomainAnswers,
    system: str,
) -> ResultRow:
    """Return nll per residue of the model less that of a baseline, paired by sequence."""
    targets = family.targets.astype(np.float64)
    gap = model.nll - other.nll
    low, high = bootstrap.ratio_interval(gap, targets) or (None, None)
    setting = {"family": family.family, "system": f"model - {system}"}
    value = bootstrap.ratio(gap, targets)
    return ResultRow("nll_difference", setting, value, low, high, **_about(subject, family))


def _about(subject: Subject, family: HiddenDomains) -> dict[str, Any]:
    targets = family.targets
    return {"kind": subject.kind, "sequences": len(targets), "targets": int(targets.sum())}


UNKNOWN = -1
