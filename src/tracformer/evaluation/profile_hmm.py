"""A profile hidden Markov model of a family (Plan 7), and what it says about residues that are not known.

Node k has a match state M_k, an insert state I_k and a silent delete state D_k; node 0 begins, and what leaves node n ends. The forward
algorithm sums over all paths; a residue that is not known is emitted with probability 1 by every state, which sums over it as well:

    log p(hole | rest) = log F(whole sequence) - log F(hole unknown)
    p(x_i = a | rest)  = sum over states s of d log F / d e_s(i) * e_s(a)          where e_s(i) = 1 is what s emits an unknown x_i with

The parameters come from HMMER's own builder (`pyhmmer`, extra `proteins`). `search_profile` is HMMER's way of scoring, local and with
several hits, by which the tests compare this forward algorithm with HMMER's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tracformer.files import optional_package

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
        """(B,): log F. What each state emits at each position: match (B, T, n), insert (B, T, n+1), flank (B, T)."""
        B, T, n = match.shape
        deletions = self._deletions()
        outside = match.new_ones(B)  # N, the residues before the first hit
        between, behind = match.new_zeros(B), match.new_zeros(B)  # J and C
        matched, inserted = match.new_zeros(B, n + 1), match.new_zeros(B, n + 1)
        matched[:, 0] = 1.0 - self.flank
        deleted = matched @ deletions
        scale, ends = match.new_zeros(B), []
        for t in range(T):
            into_match = (matched * self.mm + inserted * self.im + deleted * self.dm)[:, :-1] + matched[:, :1] * self.entry  # (B, n)
            inserted = insert[:, t] * (matched * self.mi + inserted * self.ii)
            matched = torch.cat((match.new_zeros(B, 1), match[:, t] * into_match), 1)
            deleted = matched @ deletions
            ended = torch.stack((matched, inserted, deleted), 2).flatten(1) @ self.end.flatten()
            outside, between, behind = (
                self.flank * flank[:, t] * outside,
                self.flank * flank[:, t] * between + self.again * ended,
                self.flank * flank[:, t] * behind + (1.0 - self.again) * ended,
            )
            matched = torch.cat((((1.0 - self.flank) * (outside + between))[:, None], matched[:, 1:]), 1)
            ends.append(scale + (behind * (1.0 - self.flank)).log())
            size = (matched.sum(1) + inserted.sum(1) + deleted.sum(1) + outside + between + behind).detach()
            matched, inserted, deleted = matched / size[:, None], inserted / size[:, None], deleted / size[:, None]
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
        return match.where(known, 1.0), insert.where(known, 1.0), background[index].where(known[..., 0], 1.0)

    def log_prob(self, residues: Tensor, lengths: Tensor) -> Tensor:
        """(B,): of whole sequences; unknown residues are summed over."""
        return self.log_forward(*self.emissions(residues), lengths)

    def marginals(self, residues: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, 20): of every residue given the known ones; right where it is unknown."""
        match, insert, flank = self.emissions(residues)
        match.requires_grad_(), insert.requires_grad_(), flank.requires_grad_()
        with torch.enable_grad():
            total = self.log_forward(match, insert, flank, lengths).sum()
            by_match, by_insert, by_flank = torch.autograd.grad(total, (match, insert, flank), allow_unused=True)
        return by_match @ self.match + by_insert @ self.insert + by_flank[..., None] * self.insert[0]


def as_indices(sequences: Sequence[str], length: int) -> Tensor:
    """(B, length): other letters than the twenty, and what lies behind the end, as UNKNOWN."""
    table = {letter: number for number, letter in enumerate(RESIDUES)}
    rows = [[table.get(letter, UNKNOWN) for letter in sequence.ljust(length)] for sequence in sequences]
    return torch.tensor(rows)


def build_hmm(columns: Sequence[str], name: str = "family", **options: Any) -> Any:
    """HMMER's model (`pyhmmer.plan7.HMM`) of an alignment's rows. `options` go to `pyhmmer.plan7.Builder`."""
    pyhmmer = optional_package("pyhmmer", "building a profile HMM", "proteins")
    alphabet = pyhmmer.easel.Alphabet.amino()
    rows = [pyhmmer.easel.TextSequence(name=str(number).encode(), sequence=row) for number, row in enumerate(columns)]
    msa = pyhmmer.easel.TextMSA(name=name.encode(), sequences=rows).digitize(alphabet)
    builder = pyhmmer.plan7.Builder(alphabet, **{"seed": SEED, **options})
    return builder.build_msa(msa, pyhmmer.plan7.Background(alphabet))[0]


def core_profile(hmm: Any) -> ProfileHMM:
    """The model itself: a sequence is one domain, from the first node to the last, and nothing else."""
    tables = {name: torch.tensor([list(row) for row in getattr(hmm, name)]).double() for name in ("match_emissions", "insert_emissions")}
    t = torch.tensor([list(row) for row in hmm.transition_probabilities]).double()  # (n+1, 7): mm mi md im ii dm dd
    end = torch.zeros(len(t), 3, dtype=torch.float64)
    end[-1] = torch.stack((t[-1, 0], t[-1, 3], t[-1, 5]))
    mm, im, dm = (t[:, column].clone() for column in (0, 3, 5))
    mm[-1] = im[-1] = dm[-1] = 0.0  # from the last node these lead to the end
    entry = torch.zeros(len(t) - 1, dtype=torch.float64)
    return ProfileHMM(
        tables["match_emissions"][1:, :20], tables["insert_emissions"][:, :20], mm, t[:, 1], t[:, 2], im, t[:, 4], dm, t[:, 6], entry, end
    )


def search_profile(core: ProfileHMM, background: Tensor, length: int) -> ProfileHMM:
    """How HMMER scores a target of so many residues: any stretch of the model, any number of hits, flanks of background residues.

    Entries are weighted by how often a match state is used, and leaving costs nothing: HMMER's "implicit" local model.
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
    return replace(core, insert=insert, mm=mm, mi=mi, md=md, entry=entry, end=end, flank=length / (length + 3.0), again=0.5)
