"""Redesign regions of a protein: sample residues from the model, under constraints.

The region is sampled from left to right in mode `car`: each residue given everything outside of the
region, on both sides, and the residues sampled before it. Constraints remove residues from each
conditional. The log-probability of a design is the model's own, log p(region | rest), without
temperature or constraints, so designs can be compared with each other and with the wild type.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tracformer.data.alignment import GAP, INSERTED
from tracformer.data.tokenizer import Tokenizer
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.proteins.mutants import log_probs
from tracformer.proteins.wild_type import RESIDUES, WildType
from tracformer.rng import derived_seed, uniforms

REGION = re.compile(r"(\d+)(?:-(\d+))?")
TRIES = 50  # samples drawn per design wanted, before duplicates are accepted as the limit
CHUNK = 64  # samples drawn together


@dataclass(frozen=True)
class Constraints:
    """What a design may be.

    Args:
        regions: First and last position of each region.
        allowed: Residues allowed at a position; others may be anything.
        forbidden: Residues forbidden at a position.
        keep: Positions inside the regions that keep the residue of the wild type.
        max_changes: Largest number of residues that differ from the wild type.
        any_length: For models of aligned families: columns of the region may become residues or
            gaps. Otherwise residues stay residues and gaps stay gaps.
    """

    regions: tuple[tuple[int, int], ...]
    allowed: Mapping[int, str] = field(default_factory=dict)
    forbidden: Mapping[int, str] = field(default_factory=dict)
    keep: frozenset[int] = frozenset()
    max_changes: int | None = None
    any_length: bool = False


@dataclass(frozen=True)
class Design:
    """A designed sequence.

    Args:
        sequence: All residues.
        log_prob: log p(region | rest), in nats.
        changes: Number of letters of the row that differ from the wild type.
    """

    sequence: str
    log_prob: float
    changes: int


def parse_region(text: str) -> tuple[int, int]:
    """Return the first and last position of a text such as "24-31" or "24"."""
    match = REGION.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ValueError(f"region is {text!r}; write FIRST-LAST, such as 24-31")
    return first, last


def parse_residues(texts: Iterable[str]) -> dict[int, str]:
    """Return residues by position from texts such as "24=AVIL"."""
    found: dict[int, str] = {}
    for text in texts:
        position, equals, letters = text.partition("=")
        letters = letters.strip().upper()
        if (
            not equals
            or not position.strip().isdigit()
            or not letters
            or set(letters) - {*RESIDUES}
        ):
            raise ValueError(f"{text!r} must be POSITION=RESIDUES, such as 24=AVIL")
        found[int(position)] = found.get(int(position), "") + letters
    return found


@torch.no_grad()
def design(
    model: ConditionalModel,
    tokenizer: Tokenizer,
    wild: WildType,
    constraints: Constraints,
    *,
    n: int = 10,
    seed: int = 0,
    temperature: float = 1.0,
) -> list[Design]:
    """Return distinct designs, the most probable first.

    The same seed gives the same designs. Fewer than `n` are returned if the samples repeat
    themselves, as they do where the constraints leave few possibilities.

    Args:
        model: A model with mode `car`.
        tokenizer: Its tokenizer, with one token per residue.
        wild: The wild type.
        constraints: Regions, and what they may become.
        n: Number of designs.
        seed: Random seed.
        temperature: Sampling temperature; lower is more conservative.

    Raises:
        ValueError: A position is out of range or has no column, or the constraints contradict.
    """
    if n < 1 or temperature <= 0:
        raise ValueError(f"n is {n} and temperature {temperature}; both must be positive")
    if model.config.max_length < len(wild.row):
        raise ValueError(
            f"the wild type's row has {len(wild.row)} letters; this model takes at most "
            f"{model.config.max_length}"
        )
    choices = _choices(wild, constraints, gaps=tokenizer.has_gaps)
    row = tokenizer.encode(wild.row)
    letters = RESIDUES + (GAP if tokenizer.has_gaps else "")
    ids = torch.tensor([tokenizer.encode(letter)[0] for letter in letters])
    open_ = torch.zeros(len(letters), len(wild.row), dtype=torch.bool)
    for place, some in choices.items():
        open_[[letters.index(letter) for letter in some], place] = True
    limit = len(choices) if constraints.max_changes is None else constraints.max_changes
    found: dict[tuple[int, ...], None] = {}
    for start in range(0, n * TRIES, CHUNK):
        seeds = [derived_seed(seed, start + i) for i in range(CHUNK)]
        for drawn in _sample(model, row, list(choices), ids, open_, limit, seeds, temperature):
            found.setdefault(drawn)
        if len(found) >= n:
            break
    rows = [list(drawn) for drawn in found][:n]
    sums = log_probs(model, rows, [tuple(choices)] * len(rows), "car", CHUNK)
    designs = [
        _design(tokenizer, wild, tokens, total) for tokens, total in zip(rows, sums, strict=True)
    ]
    return sorted(designs, key=lambda each: -each.log_prob)


def _choices(wild: WildType, constraints: Constraints, gaps: bool) -> dict[int, str]:
    """Return the letters allowed at each place of the row that is designed, in order."""
    positions: dict[int, int] = {}  # of each place
    if not constraints.regions:
        raise ValueError("no region is named; name one, such as 24-31")
    for first, last in constraints.regions:
        for position in range(first, last + 1):
            place = wild.place(position)
            if place == INSERTED:
                raise ValueError(
                    f"position {position} ({wild.residue(position)}) belongs to no column of the "
                    "model's family, so it cannot be designed; choose other positions"
                )
            positions[place] = position
    named = {*constraints.allowed, *constraints.forbidden, *constraints.keep}
    if outside := named - set(positions.values()):
        raise ValueError(f"position {min(outside)} is constrained but is in no region")
    places = set(positions)
    if constraints.any_length:
        if not gaps:
            raise ValueError(
                "any_length needs a model of an aligned family; for others fill a blank of unknown "
                "length, as in: tracformer infill 'ACD[[3-8]]EFG'"
            )
        for first, last in constraints.regions:
            places |= set(range(wild.place(first), wild.place(last) + 1))
    choices: dict[int, str] = {}
    for place in sorted(places):
        if place not in positions:  # a column between residues, a gap so far
            choices[place] = RESIDUES + GAP
            continue
        position = positions[place]
        letters = constraints.allowed.get(position, RESIDUES)
        if position in constraints.keep:
            letters = wild.residue(position)
        elif constraints.any_length and position not in constraints.allowed:
            letters += GAP
        letters = "".join(x for x in letters if x not in constraints.forbidden.get(position, ""))
        if not letters:
            raise ValueError(f"no residue is left at position {position}; relax its constraints")
        choices[place] = letters
    must = sum(wild.row[place] not in letters for place, letters in choices.items())
    if constraints.max_changes is not None and not must <= constraints.max_changes:
        raise ValueError(
            f"max_changes is {constraints.max_changes}, but {must} positions do not allow the "
            "residue of the wild type"
        )
    return choices


def _sample(
    model: ConditionalModel,
    row: Sequence[int],
    places: Sequence[int],
    ids: torch.Tensor,
    open_: torch.Tensor,
    limit: int,
    seeds: Sequence[int],
    temperature: float,
) -> list[tuple[int, ...]]:
    """Return one sampled row per seed. open_: (letters, columns) what each place may become."""
    device = model.head.device
    tokens = torch.tensor([list(row)] * len(seeds), device=device)
    context = torch.ones_like(tokens, dtype=torch.bool)
    context[:, list(places)] = False
    wild = torch.tensor(row)
    kept = ids[:, None] == wild[None, places]  # (letters, places)
    changes = torch.zeros(len(seeds), dtype=torch.long)
    # changes that later places need at least
    forced = [not bool((open_[:, place] & (ids == wild[place])).any()) for place in places]
    for number, place in enumerate(places):
        wanted = torch.zeros_like(context)
        wanted[:, place] = True
        logits = model.logits_at(Batch(tokens, context), "car", wanted)[:, ids.to(device)]
        logits = logits.double().cpu() / temperature
        logits = logits.masked_fill(~open_[:, place], -torch.inf)
        spent = changes + sum(forced[number + 1 :]) >= limit  # keep the wild type's from here on
        if not forced[number]:
            logits[spent] = logits[spent].masked_fill(~kept[:, number], -torch.inf)
        drawn = uniforms(list(seeds), [place] * len(seeds))[:, None]
        chosen = (logits.softmax(1).cumsum(1) <= drawn).sum(1).clamp(max=len(ids) - 1)
        # rounding at the upper end must not choose a forbidden letter
        allowed = logits.gather(1, chosen[:, None])[:, 0] > -torch.inf
        chosen = torch.where(allowed, chosen, logits.argmax(1))
        tokens[:, place] = ids[chosen].to(device)
        changes += ids[chosen] != wild[place]
    return [tuple(each) for each in tokens.tolist()]


def _design(tokenizer: Tokenizer, wild: WildType, tokens: Sequence[int], log_prob: float) -> Design:
    """Return the design of a row; residues of the wild type outside of the columns stay."""
    letters = tokenizer.decode(tokens)
    sequence: list[str] = []
    at = 0
    for residue, place in zip(wild.sequence, wild.places, strict=True):
        if place == INSERTED:
            sequence.append(residue)
            continue
        sequence.extend(letters[at : place + 1])
        at = place + 1
    sequence.extend(letters[at:])
    changes = sum(a != b for a, b in zip(letters, wild.row, strict=True))
    return Design("".join(sequence).replace(GAP, ""), log_prob, changes)


def mean_identity(sequences: Sequence[str]) -> float:
    """Return the mean share of equal residues over all pairs, aligned by place from the left.

    NaN for fewer than two sequences.
    """
    shares = [
        sum(x == y for x, y in zip(a, b, strict=False)) / max(len(a), len(b))
        for i, a in enumerate(sequences)
        for b in sequences[:i]
    ]
    return sum(shares) / len(shares) if shares else float("nan")


def to_fasta(designs: Sequence[Design], name: str = "design") -> str:
    """Return FASTA text; the header of each design has its log-probability and changes."""
    return "".join(
        f">{name}_{number} log_prob={each.log_prob:.4f} changes={each.changes}\n{each.sequence}\n"
        for number, each in enumerate(designs, 1)
    )
