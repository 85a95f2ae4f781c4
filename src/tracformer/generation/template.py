r"""Blanks in text: `[[...]]`, and where their tokens stand.

What a blank holds: nothing (`[[]]`, the model chooses the length), a number of tokens (`[[8]]`), a
range (`[[3-8]]`); in a text to score, the literal text itself. `\[[` and `\]]` write the two
characters; right before either, `\\` writes one backslash. Of more than two `[` in a row the last
two open a blank; of more than two `]` the first two close it.

>>> parse("Once upon a time [[3-8]] lived.").contents
('3-8',)
>>> parse(r"a \[[list]] of [[2]]").pieces
('a [[list]] of ', '')
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tracformer.generation.results import Candidates, Span
from tracformer.generation.token_text import Spelling
from tracformer.model.batch import Batch

# a row of backslashes is tried once, from its first
MARK = re.compile(r"(?<!\\)(?P<slashes>\\*)(?P<bracket>\[\[|\]\])")
ROW = re.compile(r"\[*")


class Template(NamedTuple):
    """A text cut at its blanks: pieces[0] contents[0] pieces[1] ... pieces[-1]."""

    pieces: tuple[str, ...]
    contents: tuple[str, ...]
    # the tokens of pieces[0], where they are given and not those of its text
    first: tuple[int, ...] | None = None


class Lengths(NamedTuple):
    """How many tokens a blank may have; `high` None: as many as the caller allows."""

    low: int
    high: int | None


def parse(text: str | Template, required: bool = True) -> Template:
    """Cut a text at its blanks; a text with one that is not closed is an error, and so is one
    without any where they are `required`.

    What is cut already stays as it is: so a caller asks about texts in which brackets are brackets.
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
            row = ROW.match(text, at)  # the last two of the row open
            assert row is not None
            current.append(row[0])
            at = row.end()
        opened = at - 2 if opens else -1
        parts.append("".join(current))
        current = []
    if opened >= 0:
        raise ValueError(
            f"the blank that opens at character {opened} is not closed; write ]] behind it, or "
            "\\[[ for the characters themselves"
        )
    if not parts and required:
        raise ValueError(
            "the text has no blank; write [[8]] for eight tokens to be filled, or [[ and ]] around "
            "what is to be scored"
        )
    return Template((*parts[0::2], "".join(current) + text[at:]), tuple(parts[1::2]))


def write(pieces: Sequence[str], contents: Sequence[str]) -> str:
    """The text that `parse` cuts into these: literal brackets are escaped."""
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
    """The given pieces as `write` writes them, a blank behind each but the last."""
    return [*(_escape(piece, before="[") for piece in pieces[:-1]), _escape(pieces[-1])]


def parse_lengths(content: str) -> Lengths:
    """What a blank to fill holds: nothing, a number, or a range."""
    if content == "":
        return Lengths(1, None)
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", content)
    if match is None:
        raise ValueError(
            f"a blank holds {_shown(content)}; write [[]], a number of tokens such as [[8]], a "
            "range such as [[3-8]], "
            "or \\[[ for the characters themselves"
        )
    low, high = int(match[1]), int(match[2] or match[1])
    if low == 0:
        raise ValueError(f"a blank asks for {content} tokens; the least is 1")
    if high < low:
        raise ValueError(
            f"a blank asks for {content} tokens; write the smaller number first: [[{high}-{low}]]"
        )
    return Lengths(low, high)


class Laid(NamedTuple):
    """One sequence with its blanks laid out."""

    tokens: list[int]
    context: list[bool]
    starts: tuple[int, ...]  # first token of each blank
    lengths: tuple[int, ...]  # tokens of each blank

    def place(self, position: int) -> tuple[int, int]:
        """Which blank a position lies in, and which of its tokens it is."""
        for blank, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if start <= position < start + length:
                return blank, position - start
        raise ValueError(f"position {position} is given, not blank")


def stack(sequences: Sequence[Laid], device: torch.device) -> Batch:
    """Sequences side by side, as models take them."""
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
class Frame:
    """The given pieces and their tokens. Pieces are tokenised apart from what goes between them."""

    texts: tuple[str, ...]  # without the spaces that moved into blanks
    ids: tuple[tuple[int, ...], ...]
    spaced: tuple[bool, ...]  # for each blank: did the space before it move into it?
    end: tuple[int, ...] = ()  # end of text, where the text is a whole document

    @property
    def given(self) -> int:
        return sum(map(len, self.ids)) + len(self.end)

    def lay(self, fills: Sequence[Sequence[int]]) -> Laid:
        """The sequence with these tokens in its blanks."""
        tokens, context, starts = list(self.ids[0]), [True] * len(self.ids[0]), []
        for fill, ids in zip(fills, self.ids[1:], strict=True):
            starts.append(len(tokens))
            tokens += [*fill, *ids]
            context += [False] * len(fill) + [True] * len(ids)
        return Laid(
            tokens + list(self.end),
            context + [True] * len(self.end),
            tuple(starts),
            tuple(map(len, fills)),
        )

    def blank(self, lengths: Sequence[int]) -> Laid:
        """The sequence with blanks of these lengths; what stands in them does not matter."""
        return self.lay([[0] * length for length in lengths])

    def reader(self, spelling: Spelling) -> Callable[[Sequence[Sequence[int]]], str]:
        """From the tokens of the first blanks to the text of the last of these."""

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

    def fitting(
        self, wanted: Sequence[Lengths], max_length: int, max_blank: int
    ) -> tuple[list[tuple[int, int]], int]:
        """The range of each blank, cut to what can fit, and the room that all blanks share."""
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
                f"the blanks ask for {least} tokens where {room} fit: the given text has "
                f"{self.given} of the model's {max_length}; "
                "ask for fewer or shorten the text"
            )
        return [
            (low, min(max(low, max_blank) if high is None else high, room - least + low))
            for low, high in wanted
        ], room


def frame(template: Template, spelling: Spelling, whole: bool) -> Frame:
    """Tokenise the pieces.

    Where tokens begin with spaces, one space right before a blank moves into the blank.
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
    return Frame(texts, ids, spaced, (spelling.tokenizer.eot_id,) if whole else ())


def spans_of(
    of: Frame,
    laid: Laid,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    spelling: Spelling,
    texts: Sequence[str] | None = None,
    candidates: Candidates = (),
) -> tuple[str, tuple[Span, ...]]:
    """The whole text, and its blanks.

    tokens, log_probs, candidates: of the whole sequence; texts: of the blanks, where they are
    known.
    """
    text, spans = of.texts[0], []
    for number, (first, length, after) in enumerate(
        zip(laid.starts, laid.lengths, of.texts[1:], strict=True)
    ):
        ids = tuple(tokens[first : first + length])
        filling = (
            spelling.filling(text, tokens[:first], ids, of.spaced[number])
            if texts is None
            else texts[number]
        )
        shares, likely = (
            tuple(log_probs[first : first + length]),
            candidates[first : first + length],
        )
        names = tuple(spelling.token(each, first=first + i == 0) for i, each in enumerate(ids))
        spans.append(
            Span(len(text), len(text) + len(filling), filling, ids, names, shares, first, likely)
        )
        text += filling + after
    return text, tuple(spans)


def literal_fills(template: Template, of: Frame, spelling: Spelling) -> list[tuple[str, list[int]]]:
    """For a text to score: each blank's own text, with the space that moved into it,
    and its tokens.
    """
    fills = []
    for number, (content, moved) in enumerate(zip(template.contents, of.spaced, strict=True)):
        if not content:
            raise ValueError(
                "a pair of brackets to score is empty; write the text to score between [[ and ]]"
            )
        text = " " + content if moved else content
        ids = spelling.tokenizer.encode(text, inside=number > 0 or bool(of.ids[0]))
        if not ids:
            raise ValueError(
                f"{_shown(content)} is nothing to the model's tokeniser, so there is nothing to "
                "score; mark more of the text"
            )
        fills.append((text, ids))
    return fills


def _escape(text: str, before: str = "") -> str:
    """`before`: the bracket that opens or closes a blank right behind the text, if one does."""
    escaped = MARK.sub(lambda match: match["slashes"] * 2 + "\\" + match["bracket"], text)
    if not before:
        return escaped
    # backslashes that would be read as escaping the blank's brackets
    edge = re.search(rf"(?<!\\)(\\*)({re.escape(before)}?)\Z", escaped)
    assert edge is not None
    return escaped[: edge.start()] + edge[1] * 2 + edge[2]


def _shown(content: str) -> str:
    return repr(content if len(content) <= 30 else content[:27] + "...")
