r"""Text with blanks: `[[...]]`, its tokens, and where they stand.

- `parse`, `write`: between a text with brackets and a `Template`.
- `tokenize`: a `Template` as a `TokenizedText`, the tokens of its given pieces.
- `BlankLayout`, `to_batch`: token sequences with positions for the blanks.
- `spans_of`: the filled text again, with the place of each blank.

A blank holds nothing (`[[]]`, any length), a number of tokens (`[[8]]`) or a range (`[[3-8]]`); in
a text to score it holds the text to score. `\[[` and `\]]` write the brackets themselves; right
before either, `\\` writes one backslash. Of more than two `[` in a row the last two open a blank;
of more than two `]` the first two close it. In a text to fill without any `[[...]]`, the blanks of
other programs are read: `[MASK]`, `<mask>` or `____`, of any length.

>>> parse("Once upon a time [[3-8]] lived.").contents
('3-8',)
>>> parse(r"a \[[list]] of [[2]]").pieces
('a [[list]] of ', '')
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from tracformer.generation.results import Candidates, Span
from tracformer.generation.token_text import Spelling
from tracformer.model.batch import Batch

# the lookbehind makes a run of backslashes match once, from its first
MARK = re.compile(r"(?<!\\)(?P<slashes>\\*)(?P<bracket>\[\[|\]\])")
OPENINGS = re.compile(r"\[*")
# blanks of other programs; several in a row are one
FOREIGN = re.compile(r"(?:\[MASK\]|<mask>|_{3,})(?:\s*(?:\[MASK\]|<mask>|_{3,}))*")


class Lengths(NamedTuple):
    """How many tokens a blank may have; `high` is None for a blank of any length."""

    low: int
    high: int | None


@dataclass(frozen=True)
class Template:
    """A text cut at its blanks: pieces[0] contents[0] pieces[1] ... pieces[-1].

    Args:
        pieces: The given pieces of text, one more than there are blanks.
        contents: What stands in the brackets of each blank.
        first: Token ids of pieces[0], where they are given and need not be those of its text.
        note: What was read as a blank, where the text has no [[...]].
    """

    pieces: tuple[str, ...]
    contents: tuple[str, ...]
    first: tuple[int, ...] | None = None
    note: str = ""

    @cached_property
    def lengths(self) -> tuple[Lengths, ...]:
        """How many tokens each blank may have, or a ValueError."""
        return tuple(map(parse_lengths, self.contents))


def parse(text: str | Template, required: bool = True) -> Template:
    """Cut a text at its blanks. A `Template` is returned as it is.

    Args:
        text: The text.
        required: Read blanks of other programs in a text without [[...]]; refuse a text without
            any blank.

    Raises:
        ValueError: A blank is not closed, or there is none.
    """
    if isinstance(text, Template):
        return text
    parts: list[str] = []
    current: list[str] = []  # of the part that is being read
    opened, at = -1, 0
    while match := MARK.search(text, at):
        slashes, bracket = match["slashes"], match["bracket"]
        current += (text[at : match.start()], "\\" * (len(slashes) // 2))
        at = match.end()
        opens = bracket == "[[" and opened < 0
        if len(slashes) % 2 or not (opens or (bracket == "]]" and opened >= 0)):
            current.append(bracket)
            continue
        if opens:
            row = OPENINGS.match(text, at)  # the last two of the row open
            assert row is not None
            current.append(row[0])
            at = row.end()
        opened = at - 2 if opens else -1
        parts.append("".join(current))
        current = []
    if opened >= 0:
        raise ValueError(
            f"the blank that opens at character {opened} is not closed; write ]] after it, or "
            "\\[[ for the characters themselves"
        )
    if not parts and required:
        whole = "".join(current) + text[at:]
        if found := [match[0] for match in FOREIGN.finditer(whole)]:
            read = ", ".join(dict.fromkeys(found))
            note = f"no [[...]] in the text; read as blanks of any length: {read}"
            return Template(tuple(FOREIGN.split(whole)), ("",) * len(found), note=note)
        raise ValueError(
            "no blank found in the text. Mark one with [[]] (any length), [[5]] (5 tokens) or "
            "[[3-8]] (3 to 8 tokens); to score, put [[ and ]] around the text to score"
        )
    return Template((*parts[0::2], "".join(current) + text[at:]), tuple(parts[1::2]))


def write(pieces: Sequence[str], contents: Sequence[str]) -> str:
    """Return the text that `parse` cuts into these pieces and contents."""
    if len(pieces) != len(contents) + 1:
        raise ValueError(
            f"{len(contents)} blanks need {len(contents) + 1} pieces around them, not {len(pieces)}"
        )
    if wrong := next(
        (content for content in contents if content.startswith("[") or content.endswith("]")), None
    ):
        raise ValueError(
            f"a blank cannot hold text that begins with [ or ends with ]: {_shown(wrong)}; leave "
            "the bracket outside"
        )
    *before, last = escaped(pieces)
    opened = [
        piece + "[[" + _escape(content, before="]")
        for piece, content in zip(before, contents, strict=True)
    ]
    return "]]".join([*opened, last])


def escaped(pieces: Sequence[str]) -> list[str]:
    """Return given pieces with their brackets escaped; a blank follows each but the last."""
    return [*(_escape(piece, before="[") for piece in pieces[:-1]), _escape(pieces[-1])]


def parse_lengths(content: str) -> Lengths:
    """Return the lengths that the content of a blank allows: nothing, a number or a range."""
    if content == "":
        return Lengths(1, None)
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", content)
    if match is None:
        raise ValueError(
            f"a blank holds {_shown(content)}; write [[]], a number of tokens such as [[8]], a "
            "range such as [[3-8]], or \\[[ for the characters themselves"
        )
    low, high = int(match[1]), int(match[2] or match[1])
    if low == 0:
        raise ValueError(f"a blank asks for {content} tokens; the least is 1")
    if high < low:
        raise ValueError(
            f"a blank asks for {content} tokens; write the smaller number first: [[{high}-{low}]]"
        )
    return Lengths(low, high)


class BlankLayout(NamedTuple):
    """One token sequence with positions for its blanks."""

    tokens: list[int]
    context: list[bool]
    starts: tuple[int, ...]  # first position of each blank
    lengths: tuple[int, ...]  # number of tokens of each blank

    def place(self, position: int) -> tuple[int, int]:
        """Return the blank that holds a position, and the position's number in the blank."""
        for blank, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if start <= position < start + length:
                return blank, position - start
        raise ValueError(f"position {position} is given, not blank")


def to_batch(sequences: Sequence[BlankLayout], device: torch.device) -> Batch:
    """Return sequences as a batch, padded on the right."""
    width = max(len(each.tokens) for each in sequences)
    tokens = [each.tokens + [0] * (width - len(each.tokens)) for each in sequences]
    context = [each.context + [True] * (width - len(each.context)) for each in sequences]
    lengths = [len(each.tokens) for each in sequences]
    return Batch(
        torch.tensor(tokens, device=device),
        torch.tensor(context, device=device),
        torch.tensor(lengths, device=device),
    )


@dataclass(frozen=True)
class TokenizedText:
    """The given pieces of a template and their tokens, each piece tokenized by itself.

    Args:
        texts: The pieces, without spaces that moved into blanks.
        ids: Token ids of each piece.
        spaced: For each blank, whether the space before it moved into it.
        end: The end of text, where the text is a whole document.
        note: That of the template.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    spaced: tuple[bool, ...]
    end: tuple[int, ...] = ()
    note: str = ""

    @property
    def given(self) -> int:
        """Number of given tokens."""
        return sum(map(len, self.ids)) + len(self.end)

    def with_fills(self, fills: Sequence[Sequence[int]]) -> BlankLayout:
        """Return the sequence with these tokens in its blanks."""
        tokens, context, starts = list(self.ids[0]), [True] * len(self.ids[0]), []
        for fill, ids in zip(fills, self.ids[1:], strict=True):
            starts.append(len(tokens))
            tokens += [*fill, *ids]
            context += [False] * len(fill) + [True] * len(ids)
        return BlankLayout(
            tokens + list(self.end),
            context + [True] * len(self.end),
            tuple(starts),
            tuple(map(len, fills)),
        )

    def with_blanks(self, lengths: Sequence[int]) -> BlankLayout:
        """Return the sequence with blanks of these lengths."""
        return self.with_fills([[0] * length for length in lengths])

    def reader(self, spelling: Spelling) -> Callable[[Sequence[Sequence[int]]], str]:
        """Return a function from the tokens of the first blanks to the text of the last of them."""

        def read(fills: Sequence[Sequence[int]]) -> str:
            text, given = self.texts[0], list(self.ids[0])
            for number, fill in enumerate(fills[:-1]):
                text += (
                    spelling.filling(text, given, fill, self.spaced[number])
                    + self.texts[number + 1]
                )
                given += [*fill, *self.ids[number + 1]]
            return spelling.filling(text, given, fills[-1], self.spaced[len(fills) - 1])

        return read

    def word_starts(
        self, layout: BlankLayout, position: int, spelling: Spelling
    ) -> tuple[int, ...] | None:
        """Return the tokens allowed at a position: word starts after a moved space, else None."""
        starts = {start for start, moved in zip(layout.starts, self.spaced, strict=True) if moved}
        return spelling.word_starts if position in starts else None

    def length_ranges(
        self, wanted: Sequence[Lengths], max_length: int, max_blank: int
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the range of lengths of each blank that fits, and the room that all share.

        Args:
            wanted: Lengths that the blanks ask for.
            max_length: Longest sequence that the model takes.
            max_blank: Maximum length of a blank of any length.

        Raises:
            ValueError: The blanks do not fit the model.
        """
        room = max_length - self.given
        if room < len(wanted):
            raise ValueError(
                f"the given text has {self.given} "
                f"tokens{' with its end of text' if self.end else ''} and {len(wanted)} blanks; "
                f"this model takes {max_length} tokens in all: shorten the text"
            )
        least = sum(low for low, _ in wanted)
        if least > room:
            raise ValueError(
                f"the blanks ask for {least} tokens where {room} fit: the given text takes "
                f"{self.given} of the {max_length} tokens that this model reads; ask for fewer "
                "or shorten the text"
            )
        return [
            (low, min(max(low, max_blank) if high is None else high, room - least + low))
            for low, high in wanted
        ], room


def tokenize(template: Template, spelling: Spelling, whole: bool) -> TokenizedText:
    """Tokenize the pieces of a template.

    Where tokens begin with spaces, one space right before a blank moves into the blank: there a
    word without its space would be unlike anything the model saw in training.

    Args:
        template: The template.
        spelling: How the tokenizer's tokens are written.
        whole: The text is a whole document, so its end is given.
    """
    *before, last = template.pieces
    # tokens that are given stay as they are, with their last space
    fixed = template.first is not None
    spaced = tuple(
        piece.endswith(" ")
        and spelling.moves_spaces
        and (i > 0 or (not fixed and spelling.may_move_from(piece[:-1])))
        for i, piece in enumerate(before)
    )
    texts = (
        *(piece[:-1] if moved else piece for piece, moved in zip(before, spaced, strict=True)),
        last,
    )
    encode = spelling.tokenizer.encode
    ids = tuple(
        template.first or () if fixed and i == 0 else tuple(encode(text, i > 0)) if text else ()
        for i, text in enumerate(texts)
    )
    end = (spelling.tokenizer.eot_id,) if whole else ()
    return TokenizedText(texts, ids, spaced, end, template.note)


def spans_of(
    given: TokenizedText,
    layout: BlankLayout,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    spelling: Spelling,
    texts: Sequence[str] | None = None,
    candidates: Candidates = (),
) -> tuple[str, tuple[Span, ...]]:
    """Return the whole text, and the span of each blank.

    Args:
        given: The given pieces.
        layout: Where the blanks are.
        tokens: Token ids of the whole sequence.
        log_probs: Log-probabilities of the whole sequence.
        spelling: How the tokenizer's tokens are written.
        texts: Texts of the blanks, where they are known.
        candidates: Most likely tokens of the whole sequence, if there are any.
    """
    text, spans = given.texts[0], []
    for number, (first, length, after) in enumerate(
        zip(layout.starts, layout.lengths, given.texts[1:], strict=True)
    ):
        stop = first + length
        ids = tuple(tokens[first:stop])
        if texts is None:
            filling = spelling.filling(text, tokens[:first], ids, given.spaced[number])
        else:
            filling = texts[number]
        spans.append(
            Span(
                start=len(text),
                stop=len(text) + len(filling),
                text=filling,
                token_ids=ids,
                tokens=tuple(
                    spelling.token(each, first=first + i == 0) for i, each in enumerate(ids)
                ),
                log_probs=tuple(log_probs[first:stop]),
                first_token=first,
                candidates=candidates[first:stop],
            )
        )
        text += filling + after
    return text, tuple(spans)


def _escape(text: str, before: str = "") -> str:
    """Return a text with its brackets escaped.

    Args:
        text: The text.
        before: The bracket that opens or closes a blank right after the text, if one does.
    """
    escaped = MARK.sub(lambda match: match["slashes"] * 2 + "\\" + match["bracket"], text)
    if not before:
        return escaped
    # backslashes that would be read as escaping the blank's brackets
    edge = re.search(rf"(?<!\\)(\\*)({re.escape(before)}?)\Z", escaped)
    assert edge is not None
    return escaped[: edge.start()] + edge[1] * 2 + edge[2]


def _shown(content: str) -> str:
    return repr(content if len(content) <= 30 else content[:27] + "...")
