import pytest

from tracformer.data.detokenize import (
    DETOKENIZERS,
    detokenizer,
    lambada,
    one_billion_words,
    ptb,
    wikitext,
)

NATURAL = """= Title =

"Well," she said (twice), "it's 10:30; don't wait!" The girls' toys cost $5.50, or 20% less: a well-known, 1,000-year-old 'rule'.
He pressed the 's' key. [Note] {x} U.S.'s #1 song...

== Part =="""


@pytest.mark.parametrize("name", DETOKENIZERS)
def test_natural_text_stays(name: str) -> None:
    assert DETOKENIZERS[name](NATURAL) == NATURAL


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (" = = = Early life = = = \n", "=== Early life ===\n"),
        (" = Kirby 's Block Ball = ", "= Kirby's Block Ball ="),
        (" a well @-@ known 1 @,@ 000 @.@ 5 man ", "a well-known 1,000.5 man"),
        (" He ( the other ) left , at 10 : 30 ; why ? ", "He (the other) left, at 10:30; why?"),
        (
            ' the " first " and " second " , he said : " third . " ',
            'the "first" and "second", he said: "third."',
        ),
        (' ( " nested " ) and " end "', '("nested") and "end"'),
        (
            " it 's the U.S. ' s law , they 'll say , the viewers ' own ",
            "it's the U.S.'s law, they'll say, the viewers' own",
        ),
        (" called ' big ' , worth $ 5 and 20 % ", "called 'big', worth $5 and 20%"),
        (" wait ... <unk> . ", "wait... <unk>."),
        (" a .45 calibre = x ", "a .45 calibre = x"),
    ],
)
def test_wikitext(before: str, after: str) -> None:
    assert wikitext(before) == after
    assert wikitext(after) == after


def test_ptb_keeps_its_own_words() -> None:
    assert ptb(
        " mr. <unk> is n't paying $ N million for N \\/ N of the bank 's <unk> \n we 've # N \n"
    ) == ("mr. <unk> isn't paying $N million for N/N of the bank's <unk>\nwe've #N\n")


def test_lambada_in_both_releases() -> None:
    lower = "`` i 'd ca n't say , '' he said . `` why ? ''"
    assert lambada(lower) == '"i\'d can\'t say," he said. "why?"'
    assert (
        lambada("\u201cI can\u2019t,\u201d he said.\n\n\u2018Why?\u2019")
        == "\"I can't,\" he said.\n\n'Why?'"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("But now , it 's said they won 't pay £ 10m .", "But now, it's said they won't pay £10m."),
        ('" We did , " she said -- " twice . "', '"We did," she said -- "twice."'),
        ('It was fine , " he said .', 'It was fine," he said.'),
        ('" It goes on and on .', '"It goes on and on.'),
        ('It ended here . "', 'It ended here."'),
        ("Up 5 % ( AP ) , No. # 1 !", "Up 5% (AP), No. #1!"),
    ],
)
def test_one_billion_words(before: str, after: str) -> None:
    assert one_billion_words(before) == after
    assert one_billion_words(after) == after


def test_by_name() -> None:
    assert detokenizer(None)("a , b") == "a , b"
    with pytest.raises(
        ValueError, match="detokenize is 'x'; allowed: wikitext, ptb, lambada, 1bw, or none"
    ):
        detokenizer("x")
