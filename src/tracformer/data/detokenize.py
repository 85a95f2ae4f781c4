"""Undo the tokenization of WikiText, PTB, LAMBADA and 1BW, so that a tokenizer sees natural text.

These corpora are published with spaces around punctuation and other marks. `DETOKENIZERS` maps the
name of each to a function. Each function works line by line and leaves natural text as it is,
except for spaces at the ends of lines. `<unk>` and PTB's `N` stay: they are part of the corpora.
"""

import re
from collections.abc import Callable

Rule = tuple[re.Pattern[str], str]


def _rules(*pairs: tuple[str, str]) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


# Patterns begin with a plain character where possible, which makes the search several times
# faster. Lines are already stripped.
SPACING = _rules(
    (r" ([,;:!?%]|\.+)(?=\s|$|[\"')\]}])", r"\1"),  # word , -> word,
    (r"([(\[{]) (?=\S)", r"\1"),  # ( word -> (word
    (r" ([)\]}])", r"\1"),  # word ) -> word)
    (r"([$£€]) (?=[\dN<])", r"\1"),  # $ 5 -> $5
    (r" # (?=[\dN<])", " #"),  # the # 1 song -> the #1 song
)
CONTRACTIONS = _rules(
    (r" n't\b", "n't"),  # do n't -> don't
    (r" '(s|S|t|m|M|re|ve|ll|d)\b(?!')", r"'\1"),  # it 's -> it's, didn 't -> didn't
    (r" ' s\b", "'s"),  # the U.S. ' s law -> the U.S.'s law
    (r"s '(?= \w)", "s'"),  # viewers ' opinions -> viewers' opinions
)
NUMBERS = _rules(
    (r" @([-,.])@ ", r"\1"),  # 0 @.@ 7 -> 0.7, well @-@ known -> well-known
    (r" (?<=\d ): (?=\d\d\b)", ":"),  # 10 : 30 -> 10:30
)
SINGLE_QUOTES = _rules((r"'(?<!\S') ([^']+?) '(?=[\s,.;:!?)]|$)", r"'\1'"))
HEADING = re.compile(r"((?:= )+)([^=\s].*?)((?: =)+)")
QUOTE = re.compile('"')
BEGUN_BEFORE = re.compile(r'[^"]*[,.!?] " [a-z]')  # It was fine , " he said .
# what may stand before and after a quote
OPENERS, CLOSERS = ("", " ", "(", "[", "{"), ("", " ", ",", ".", ";", ":", "!", "?", ")", "]", "}")


def wikitext(text: str) -> str:
    r"""Undo `@-@`, spaced punctuation, brackets and quotes, and `= = Section = =` lines.

    >>> wikitext(' = = Size = = \n It weighs 0 @.@ 7 kg ( 1 @.@ 5 lb ) , and is " red " . ')
    '== Size ==\nIt weighs 0.7 kg (1.5 lb), and is "red".'
    """
    return _by_line(text, _wikitext_line)


def ptb(text: str) -> str:
    r"""Undo spaced contractions and currency and the escaped slash; PTB has little punctuation.

    >>> ptb(" the <unk> do n't pay $ N or N \\/ N for viewers ' shows ")
    "the <unk> don't pay $N or N/N for viewers' shows"
    """
    return _by_line(
        text,
        lambda line: _apply(
            line.strip().replace(" \\/ ", "/").replace("\\/", "/"), CONTRACTIONS, SPACING
        ),
    )


def lambada(text: str) -> str:
    r"""Undo what PTB does, and its quotes; in the cased release only the curly quotes change.

    >>> lambada("`` do n't put those on me , '' i whispered .")
    '"don\'t put those on me," i whispered.'
    """
    return _by_line(text, _lambada_line)


def one_billion_words(text: str) -> str:
    r"""Undo spaced punctuation, quotes, contractions and currency.

    >>> one_billion_words('" We didn \'t pay $ 2,900 ( a lot ) , " he said .')
    '"We didn\'t pay $2,900 (a lot)," he said.'
    """
    return _by_line(
        text,
        lambda line: _pair_quotes(
            _apply(line.strip(), CONTRACTIONS, NUMBERS, SPACING, SINGLE_QUOTES)
        ),
    )


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "wikitext": wikitext,
    "ptb": ptb,
    "lambada": lambada,
    "1bw": one_billion_words,
}


def detokenizer(name: str | None) -> Callable[[str], str]:
    """Return a function of `DETOKENIZERS` by name; None leaves text as it is."""
    if name is None:
        return str
    if name not in DETOKENIZERS:
        raise ValueError(f"detokenize is {name!r}; allowed: {', '.join(DETOKENIZERS)}, or none")
    return DETOKENIZERS[name]


def _by_line(text: str, change: Callable[[str], str]) -> str:
    return "\n".join(map(change, text.split("\n")))


def _apply(line: str, *groups: list[Rule]) -> str:
    for group in groups:
        for pattern, replacement in group:
            line = pattern.sub(replacement, line)
    return line


def _wikitext_line(line: str) -> str:
    line = line.strip()
    if heading := HEADING.fullmatch(line):
        before, title, after = heading.groups()
        return f"{before.replace(' ', '')} {_wikitext_words(title)} {after.replace(' ', '')}"
    return _wikitext_words(line)


def _wikitext_words(line: str) -> str:
    return _pair_quotes(_apply(line, NUMBERS, CONTRACTIONS, SPACING, SINGLE_QUOTES))


def _lambada_line(line: str) -> str:
    for old, new in (
        ("``", '"'),
        ("''", '"'),
        ("\u201c", '"'),
        ("\u201d", '"'),
        ("\u2018", "'"),
        ("\u2019", "'"),
    ):
        line = line.replace(old, new)
    return _pair_quotes(_apply(line.strip(), CONTRACTIONS, SPACING, SINGLE_QUOTES))


def _pair_quotes(line: str) -> str:
    """Turn `" word "` into `"word"`.

    A quote with spaces on both sides opens or closes in turn, unless an end of the line, a bracket
    or punctuation decides it.
    """
    inside = line.count('"') % 2 == 1 and BEGUN_BEFORE.match(line) is not None
    parts, done = [], 0
    for match in QUOTE.finditer(line):
        at = match.start()
        left, right = line[at - 1 : at] if at else "", line[at + 1 : at + 2]
        left_free, right_free = left in OPENERS, right in CLOSERS
        if left_free and right_free:
            surely_opens, surely_closes = left != " ", right != " "
            inside = surely_opens or (not surely_closes and not inside)
            space = at + 1 if inside else at - 1
            if line[space : space + 1] == " " and space >= done:
                parts.append(line[done:space])
                done = space + 1
        elif left_free or right_free:  # natural text already
            inside = left_free
    return "".join([*parts, line[done:]])
