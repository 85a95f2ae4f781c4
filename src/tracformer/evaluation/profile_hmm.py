"""Profile hidden Markov models of protein families (Plan 7), with exact answers about hidden parts.

Node k has a match state M_k, an insert state I_k and a silent delete state D_k. Node 0 begins, and
what leaves node n ends: a sequence is one domain, from the first node to the last. The forward
algorithm sums over all paths, F = p(sequence). An unknown residue is emitted with probability 1 by
every state, which sums over it as well:

    log p(hidden | rest) = log F(whole sequence) - log F(hidden residues unknown)
    p(x_i = a | rest)    = sum over states s of d log F / d e_s(i) * e_s(a)

where e_s(i) = 1 is the emission of an unknown x_i by s.

The parameters come from HMMER's builder (`pyhmmer`, extra `proteins`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracformer.proteins.wild_type import RESIDUES

UNKNOWN = -1


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
