"""A probabilistic grammar in Chomsky normal form whose every conditional is known.

`GrammarSource` makes sentences of one fixed length; `bracket_grammar` is the grammar of the
benchmark.

    inside_ij(a)    p(a yields what is known at i..j-1), summed over all symbols at unknown leaves
    outside_ij(a)   p(what is known outside i..j-1, and a spans i..j-1)

    inside_ij(a)  = sum over k, b, c of rule(a, b, c) inside_ik(b) inside_kj(c)
    outside_ij(b) = sum over k > j, a, c of rule(a, b, c) outside_ik(a) inside_jk(c)  b: left child
                  + sum over h < i, a, c of rule(a, c, b) outside_hj(a) inside_hi(c)  b: right child

The sibling in the first line lies to the right of the span, and the one in the second to its left.
So one outside pass answers p(x_t | x_C, x_<t) at every t: right siblings read the inside table of
the given tokens, left siblings that of all tokens. Probabilities are not scaled: a sentence of n
symbols has about V^-n, which is far above the smallest float64 at the lengths used here.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracformer.evaluation.exact_sources import ExactSource, Floats, Known, Symbols, floored_log


@dataclass(frozen=True)
class Grammar:
    """A nonterminals (0 is the start) and V words; `rules[a].sum() + words[a].sum()` is 1."""

    rules: Floats  # (A, A, A) p(a -> b c)
    words: Floats  # (A, V) p(a -> v)

    def __post_init__(self) -> None:
        total = self.rules.sum((1, 2)) + self.words.sum(1)
        if not np.allclose(total, 1.0):
            raise ValueError(
                "the probabilities of each nonterminal's productions must sum to 1; here they sum "
                f"to {total.tolist()}"
            )

    def leaves(self, tokens: Symbols, known: Known) -> Floats:
        """Return p(a -> x_t), (B, n, A), where x_t is known, p(a -> any word) elsewhere."""
        return np.where(known[..., None], self.words.T[tokens], self.words.sum(1))

    def inside(self, leaves: Floats) -> Floats:
        """Return the table inside_ij(a), (B, n + 1, n + 1, A)."""
        B, n, A = leaves.shape
        table = np.zeros((B, n + 1, n + 1, A))
        table[:, np.arange(n), np.arange(1, n + 1)] = leaves
        flat = self.rules.reshape(A, A * A)
        for width in range(2, n + 1):
            starts = np.arange(n - width + 1)[:, None]
            splits = starts + np.arange(1, width)  # (spans, splits)
            # (B, spans, splits, A)
            left, right = table[:, starts, splits], table[:, splits, starts + width]
            pairs = left.swapaxes(2, 3) @ right  # (B, spans, A, A)
            spans = pairs.reshape(B, len(starts), A * A) @ flat.T
            table[:, starts[:, 0], starts[:, 0] + width] = spans
        return table

    def outside_leaves(self, left: Floats, right: Floats) -> Floats:
        """Return the outside probabilities of the leaves, (B, n, A).

        Args:
            left: Inside table that siblings to the left of a span read.
            right: Inside table that siblings to the right of a span read.
        """
        B, n, A = len(left), left.shape[1] - 1, left.shape[3]
        table = np.zeros((B, n + 1, n + 1, A))
        table[:, 0, n, 0] = 1.0
        as_left = self.rules.transpose(0, 2, 1).reshape(A * A, A)  # (a c, b): b is the left child
        as_right = self.rules.reshape(A * A, A)  # (a c, b): b is the right child
        for width in range(n - 1, 0, -1):
            for i in range(n - width + 1):
                j = i + width
                # (B, A of a, A of c)
                with_right = table[:, i, j + 1 :].swapaxes(1, 2) @ right[:, j, j + 1 :]
                with_left = table[:, :i, j].swapaxes(1, 2) @ left[:, :i, i]
                table[:, i, j] = (
                    with_right.reshape(B, A * A) @ as_left + with_left.reshape(B, A * A) @ as_right
                )
        leaves: Floats = table[:, np.arange(n), np.arange(1, n + 1)]
        return leaves


@dataclass(frozen=True)
class GrammarSource(ExactSource):
    """Sentences of a grammar, conditioned on their length."""

    grammar: Grammar

    @property
    def symbols(self) -> int:
        """The number of words."""
        return self.grammar.words.shape[1]

    @cached_property
    def _spans(self) -> Floats:
        """p(a yields exactly n words), (length + 1, A)."""
        nothing = np.zeros((1, self.length), np.int64)
        unknown = self.grammar.leaves(nothing, nothing.astype(np.bool_))
        spans: Floats = self.grammar.inside(unknown)[0, 0]
        return spans

    def sample(self, count: int, rng: np.random.Generator) -> Symbols:
        """Return sampled sentences (count, length).

        Trees grow from the start symbol down, all sentences together, widest nodes first. A node's
        split and children are drawn in proportion to what they can yield.
        """
        A = len(self.grammar.rules)
        tokens = np.empty((count, self.length), np.int64)
        nothing = np.zeros(count, np.int64)
        # by width, the nodes still to be expanded: nonterminal, sentence, first word
        waiting: dict[int, list[tuple[Symbols, Symbols, Symbols]]] = {
            width: [] for width in range(1, self.length + 1)
        }
        waiting[self.length].append((nothing, np.arange(count), nothing))
        for width in range(self.length, 1, -1):
            if not waiting[width]:
                continue
            symbol, row, start = (
                np.concatenate(parts) for parts in zip(*waiting.pop(width), strict=True)
            )
            splits = np.arange(1, width)
            children = (self._spans[splits], self._spans[width - splits])
            weights = np.einsum("abc,kb,kc->akbc", self.grammar.rules, *children)
            choice = _draw_from_rows(weights.reshape(A, -1), symbol, rng)
            split, left, right = choice // (A * A) + 1, choice // A % A, choice % A
            for cut in splits.tolist():
                here = split == cut
                waiting[cut].append((left[here], row[here], start[here]))
                waiting[width - cut].append((right[here], row[here], start[here] + cut))
        symbol, row, start = (np.concatenate(parts) for parts in zip(*waiting[1], strict=True))
        tokens[row, start] = _draw_from_rows(self.grammar.words, symbol, rng)
        return tokens

    def log_conditionals(self, tokens: Symbols, left: Known, right: Known) -> Floats:
        """Return the conditionals by two inside passes and one outside pass."""
        grammar = self.grammar
        after = grammar.inside(grammar.leaves(tokens, right))
        before = after if left is right else grammar.inside(grammar.leaves(tokens, left))
        joint = grammar.outside_leaves(before, after) @ grammar.words
        with np.errstate(invalid="ignore"):
            return floored_log(joint / joint.sum(2, keepdims=True))


def _draw_from_rows(weights: Floats, rows: Symbols, rng: np.random.Generator) -> Symbols:
    """Return for each of `rows` an index drawn in proportion to that row of the weights (A, K)."""
    uniform, edges = rng.random(len(rows)), np.cumsum(weights, axis=1)
    drawn = np.empty(len(rows), np.int64)
    for row in np.unique(rows).tolist():
        here = rows == row
        drawn[here] = np.searchsorted(edges[row], uniform[here] * edges[row, -1], side="right")
    return drawn


KINDS, FILLERS, SLIP = 3, 4, 0.05  # kinds of brackets, filler words, and disagreeing brackets


def bracket_grammar() -> Grammar:
    """Return a grammar of nested clauses whose closing word agrees with the opening word.

        S -> S S | O_i C_i | O_i K_i | filler,   C_i -> S K_i,   O_i, K_i -> one of two words

    A closing word is of another kind with probability SLIP. There are 1 + 3 KINDS nonterminals; the
    words are openers, closers, fillers, in this order.
    """
    A, V = 1 + 3 * KINDS, 4 * KINDS + FILLERS
    rules, words = np.zeros((A, A, A)), np.zeros((A, V))
    rules[0, 0, 0] = 0.25
    # some fillers are more common
    words[0, 4 * KINDS :] = 0.35 * np.arange(FILLERS, 0, -1) / (FILLERS * (FILLERS + 1) / 2)
    for i in range(KINDS):
        opener, clause, closer = 1 + 3 * i, 2 + 3 * i, 3 + 3 * i
        rules[0, opener, clause], rules[0, opener, closer] = 0.3 / KINDS, 0.1 / KINDS
        rules[clause, 0, closer] = 1.0
        words[opener, 2 * i : 2 * i + 2] = 0.7, 0.3
        kind = np.full(KINDS, SLIP / (KINDS - 1))
        kind[i] = 1.0 - SLIP
        words[closer, 2 * KINDS : 4 * KINDS] = np.outer(kind, (0.6, 0.4)).ravel()
    return Grammar(rules, words)
