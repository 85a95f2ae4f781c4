"""One batch of a model's answers beside the truth.

    kl(t) = sum over v of p(x_t = v | known) log (p(x_t = v | known) / q(x_t = v | known))

p is the source's own conditional of the kind that the mode claims: p(x_t | x_C, x_<t) under `car`, p(x_t | x_C) under `ac`, p(x_t | x_<t)
under `ar`. The whole distribution is compared at each target, so that the figure is zero for the truth and little is left to chance.
A bound has no distribution at a target: there the figure is the excess of its nats over those of log p(x_R | x_C).
"""

import numpy as np
import torch
from torch import Tensor

from tracformer.evaluation.answers import SHARED_NOISE
from tracformer.evaluation.exact.sources import SMALLEST, Floats, Known, Source, Tokens, log_joint, picked
from tracformer.evaluation.tasks import Subject
from tracformer.generation.randomness import derived_seed
from tracformer.model.base import BOUND

FIGURES = ("kl", "prior", "nll", "truth", "targets")
BOUND_FIGURES = ("excess", "nll", "truth", "targets", "error")


def figures_of(subject: Subject) -> tuple[str, ...]:
    """What `compare` finds out.

    kl: from the truth. prior: KL from the truth to what is known of the position without any context. nll, truth: of the tokens that stand
    there, in the model's answer and in the truth's. excess: their difference. error: the standard error of nll, where it is an estimate.
    kl_full: from the truth that sees what follows, where the model does not.
    """
    if subject.kind == BOUND:
        return BOUND_FIGURES
    return (*FIGURES, "kl_full") if subject.mode == "ar" else FIGURES


def compare(subject: Subject, source: Source, tokens: Tokens, context: Known, numbers: range, draws: int, seed: int) -> dict[str, Floats]:
    """(B,) each: sums over the targets of each sequence, by figure. `numbers` are the sequences', for the noise of a bound."""
    targets = ~context
    counts = targets.sum(1).astype(np.float64)
    if subject.kind == BOUND:
        nll, error = bound(subject, source, tokens, context, numbers, draws, seed)
        truth = -log_joint(source, tokens, context)
        return {"excess": nll - truth, "nll": nll, "truth": truth, "targets": counts, "error": error}
    row, position = targets.nonzero()  # (N,) each

    def summed(values: Floats) -> Floats:
        return np.asarray(np.bincount(row, values, minlength=len(tokens)), np.float64)

    asked = answers(subject, source, tokens, context)  # (N, V) or (N, V + 1)
    true = truth_of(source, tokens, context, subject.mode)  # (B, T, V)
    prior = source.log_marginal(tokens[:1], np.zeros_like(context[:1]))[0]  # (T, V), whatever the tokens are
    figures = {
        "kl": summed(kl(true[targets], asked)),
        "prior": summed(kl(true[targets], prior[position])),
        "nll": -summed(np.take_along_axis(asked, tokens[targets][:, None], axis=1)[:, 0]),
        "truth": -summed(picked(true, tokens)[targets]),
        "targets": counts,
    }
    if subject.mode == "ar":
        figures["kl_full"] = summed(kl(source.log_next(tokens, context)[targets], asked))
    return figures


def kl(true: Floats, asked: Floats) -> Floats:
    """(N,) from log-probabilities (N, V); what `asked` gives to an end of text behind the symbols is lost to it."""
    p, q = np.exp(true), asked[:, : true.shape[1]]
    possible = p > 10 * SMALLEST
    return np.where(possible, p * (true - np.where(possible, q, 0.0)), 0.0).sum(1)


def truth_of(source: Source, tokens: Tokens, context: Known, mode: str) -> Floats:
    """(B, T, V): what the mode should say."""
    if mode == "ac":
        return source.log_marginal(tokens, context)
    return source.log_left(tokens) if mode == "ar" else source.log_next(tokens, context)


@torch.no_grad()
def answers(subject: Subject, source: Source, tokens: Tokens, context: Known) -> Floats:
    """(N, vocab_size): the model's log-probabilities at the targets, sequence by sequence."""
    read, given = _batch(subject, source, tokens, context)
    logits = subject.model.logits_at(read, given, subject.mode, None, ~given)
    found: Floats = logits.double().log_softmax(1).cpu().numpy()
    return found


@torch.no_grad()
def bound(subject: Subject, source: Source, tokens: Tokens, context: Known, numbers: range, draws: int, seed: int) -> tuple[Floats, Floats]:
    """(B,) each: a bound on -log p(x_R | x_C), from above, and its standard error. Every SHARED_NOISE sequences have noise of their own, in
    whichever batch they come.
    """
    groups = np.array(numbers) // SHARED_NOISE
    parts, errors = [], []
    for group in np.unique(groups).tolist():
        asked = _batch(subject, source, tokens[groups == group], context[groups == group])
        found = subject.model.estimate(*asked, subject.mode, draws=draws, seed=derived_seed(seed, group + 1))
        parts.append(-found.values.double().sum(1).cpu().numpy())
        errors.append(np.zeros(len(parts[-1])) if found.standard_error is None else found.standard_error.double().cpu().numpy())
    return np.concatenate(parts), np.concatenate(errors)


def _batch(subject: Subject, source: Source, tokens: Tokens, context: Known) -> tuple[Tensor, Tensor]:
    """A model with one token more than there are symbols has seen an end of text behind each sequence: it stands there, given."""
    if subject.model.config.vocab_size > source.symbols:
        tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=source.symbols)
        context = np.pad(context, ((0, 0), (0, 1)), constant_values=True)
    return torch.from_numpy(tokens).to(subject.device), torch.from_numpy(context).to(subject.device)
