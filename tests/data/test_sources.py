"""Sources: files, folders, globs and named data sets in a local folder; detokenization."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tracformer.data import corpora, named_sets
from tracformer.data import documents as documents_module
from tracformer.data.hub_sources import (
    DETOKENIZERS,
    detokenizer,
    lambada,
    one_billion_words,
    ptb,
    wikitext,
)
from tracformer.data.make_tokenizer import ALPHABETS, char_tokenizer, choose_tokenizer
from tracformer.data.sources import (
    JoinedSource,
    TextSource,
    file_hashes,
    open_source,
    open_sources,
    parse_validation,
    whole_documents,
    with_gaps_of,
)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(where: Any, **options: Any) -> list[str]:
    return list(whole_documents(open_source(where, **options)))


@pytest.mark.parametrize("end", ["", ".gz"])
def test_documents_of_text_files(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / f"a.txt{end}", "one\n<|endoftext|>\ntwo\nlines\n")
    assert read(path) == ["one", "two\nlines"]
    assert read(path, documents="file") == ["one\n<|endoftext|>\ntwo\nlines\n"]
    assert read(path, separator="two") == ["one\n<|endoftext|>", "lines"]
    assert read(path, documents="line") == ["one", "<|endoftext|>", "two", "lines"]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_documents_of_jsonl_files(tmp_path: Path, end: str) -> None:
    rows = [{"text": "one\ntwo", "n": 1}, {"text": "\u2028 three"}, {"text": " "}]
    path = write(
        tmp_path / f"a.jsonl{end}", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    )
    assert read(path) == ["one\ntwo", "\u2028 three"]
    other = write(tmp_path / "b.jsonl", '{"body": "x"}\n')
    assert read(other, field="body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 3}', "line 2 has no text under 'text': it holds the keys 'text'"),
        (
            '{"body": "x"}',
            "line 2 has no text under 'text': it holds the keys 'body'; give the right field with "
            "field=",
        ),
        ("[1]", "line 2 has no text under 'text': it holds a list"),
        ('{"text": "x"', "line 2 is not JSON"),
        ('{"text": "\\ud800"}', "line 2 contains half of a surrogate pair"),
    ],
)
def test_wrong_jsonl_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_documents_of_fasta_files(tmp_path: Path, end: str) -> None:
    path = write(
        tmp_path / f"a.fasta{end}", "; comment\n\n>one first\nac-g\r\nT.n*\n>empty\n\n> \nGG A\n"
    )
    assert read(path) == ["ACGTN", "GGA"]
    assert read(path, gaps="keep") == ["AC-GT-N", "GGA"]


def test_gaps_are_kept_for_a_tokenizer_that_has_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.fasta", ">one\nac-gT.n\n")
    aligned, plain = char_tokenizer(ALPHABETS["dna-aligned"]), char_tokenizer(ALPHABETS["dna"])
    assert list(whole_documents(with_gaps_of(aligned, open_source(path)))) == ["AC-GT-N"]
    assert list(whole_documents(with_gaps_of(plain, open_source(path)))) == ["ACGTN"]
    assert list(whole_documents(with_gaps_of(aligned, open_source(path, gaps="remove")))) == [
        "ACGTN"
    ]
    assert (
        open_source(path).describe()["gaps"],
        with_gaps_of(aligned, open_source(path)).describe()["gaps"],
    ) == ("remove", "keep")


def test_a_long_fasta_record_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_CHARACTERS", 10)
    path = write(tmp_path / "a.fa", ">chr1\n" + "ACGTACG\n" * 20 + ">chr2\nA\n")
    pieces = list(open_source(path).pieces())
    assert max(len(piece.text) for piece in pieces) < 20
    assert read(path) == ["ACGTACG" * 20, "A"]
    assert pieces[0].origin == f"{path}, record chr1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ACGT\n>x\nA", "line 1 is 'ACGT'"),
        ("\n", "has no FASTA record"),
        (">a\n\n>b\n", "no text"),
    ],
)
def test_wrong_fasta_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "a.fasta", text))


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"a\.txt: there is no text in it"):
        read(write(tmp_path / "a.txt", text))


def test_folders_globs_and_lists(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "B")
    write(tmp_path / "deep" / "a.txt.gz", "A")
    write(tmp_path / "notes.md", "N")
    assert read(tmp_path) == ["B", "A"]
    assert read(str(tmp_path / "*.txt")) == ["B"]
    assert read(str(tmp_path / "**" / "*.txt*")) == ["B", "A"]
    assert read([tmp_path / "deep", tmp_path / "b.txt"]) == ["A", "B"]
    assert read(tmp_path / "notes.md", format="text") == ["N"]
    write(tmp_path / "c.jsonl", '{"text": "C"}')
    with pytest.raises(ValueError, match=r"have several formats \(jsonl, text\)"):
        read(tmp_path)
    assert read(tmp_path, format="jsonl") == ["C"]


def test_runs_inside_a_folder_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "A"}')
    write(tmp_path / "own" / "train.json", "{}")  # a file of this name alone is no run
    write(tmp_path / "own" / "b.jsonl", '{"text": "B"}')
    for name in ("train.json", "log.jsonl", "deep/c.jsonl"):
        write(tmp_path / "runs" / "my" / name, '{"text": "C"}')
    assert read(tmp_path) == read(str(tmp_path / "**" / "*.jsonl")) == ["A", "B"]
    assert (
        read(tmp_path / "runs" / "my" / "deep")
        == read(str(tmp_path / "runs" / "my" / "*" / "*.jsonl"))
        == ["C"]
    )


def test_places_without_data_are_errors(tmp_path: Path) -> None:
    write(tmp_path / "notes.md", "N")
    with pytest.raises(
        ValueError, match=r"unknown file name ending; rename the file .*prepare --format text"
    ):
        open_source(tmp_path / "notes.md")
    with pytest.raises(ValueError, match=r"has no file that ends in \.txt"):
        open_source(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"no such file or folder, and no named data set \(wikitext2"
    ):
        open_source(tmp_path / "missing.txt")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        open_source(str(tmp_path / "*.txt"))
    with pytest.raises(ValueError, match="there is no file to read"):
        open_source([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "format is 'csv'; allowed: text, jsonl, parquet, fasta"),
        ({"documents": "page"}, "documents is 'page'; allowed: separator, file, line"),
        ({"gaps": "drop"}, "gaps is 'drop'; allowed: remove, keep"),
        ({"separator": ""}, "separator is empty"),
        ({"seperator": "x"}, "unknown options: seperator; known: documents, separator"),
        ({"detokenize": "bert"}, "detokenize is 'bert'; allowed: wikitext"),
    ],
)
def test_unknown_options_are_errors(tmp_path: Path, options: dict[str, str], message: str) -> None:
    path = write(tmp_path / "a.txt", "a")
    with pytest.raises(ValueError, match=message):
        open_source(path, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "a.txt",
            {"gaps": "keep"},
            r"gaps is 'keep', but .*a\.txt is read as text: the option is for fasta and alignment only",
        ),
        (
            "a.txt",
            {"documents": "line", "field": "body"},
            r"field is 'body', but .* is read as text: the option is for jsonl and parquet only",
        ),
        (
            "a.jsonl",
            {"documents": "line"},
            r"documents is 'line', but .* is read as jsonl: the option is for text only",
        ),
        ("a.fasta", {"field": "body"}, r"field is 'body', but .* is read as fasta"),
    ],
)
def test_options_of_another_format_are_errors(
    tmp_path: Path, name: str, options: dict[str, str], message: str
) -> None:
    path = write(tmp_path / name, "a")
    with pytest.raises(ValueError, match=message):
        open_sources(path, **options)
    open_sources(path, documents="separator", field="text")  # as they are anyway


def test_options_of_files_are_errors_for_the_hub() -> None:
    for where in ("hf:owner/name", "wikitext2"):
        with pytest.raises(ValueError, match=f"data set '{where}': .*'gaps'"):
            open_sources(where, gaps="keep")


def test_detokenized_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", " = A = \n \n a @-@ b , c . \n \n = B = \n \n d \n")
    assert read(path, documents="article", detokenize="wikitext") == [
        "= A =\n\na-b, c.\n\n",
        "= B =\n\nd\n",
    ]


def test_descriptions_and_hashes_of_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abc")
    source = open_sources(path)["train"]
    assert source.describe()["files"] == [{"name": "a.txt", "bytes": 3}]
    assert source.size() == 3
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_hashes(source) == [digest]
    assert file_hashes(JoinedSource((source, TextSource(["x"]), source))) == [digest, digest]
    assert open_source(write(tmp_path / "a.txt.gz", "abc")).size() is None


def test_a_file_as_the_validation_split(tmp_path: Path) -> None:
    train, held = write(tmp_path / "a.txt", "abc"), write(tmp_path / "held.txt", "x\ny\n")
    sources = open_sources(train, validation=held, documents="line")
    assert {name: list(whole_documents(source)) for name, source in sources.items()} == {
        "train": ["abc"],
        "validation": ["x", "y"],
    }
    assert list(open_sources("wikitext2", validation=held)) == ["train", "validation", "test"]
    assert (
        open_sources("wikitext2", validation=held)["validation"].describe()["files"][0]["name"]
        == "held.txt"
    )
    with pytest.raises(
        ValueError, match=r"held\.txt is given both for training and for validation"
    ):
        open_sources(tmp_path, validation=tmp_path / ".." / tmp_path.name / "held.txt")
    with pytest.raises(
        FileNotFoundError, match=r"validation is '.*nothere': no such file or folder"
    ):
        open_sources(train, validation=tmp_path / "nothere")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        open_sources(train, validation=str(tmp_path / "*.nothere"))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0.1", (0.1, None)),
        ("0", (0.0, None)),
        ("./0.1", (0.0, "./0.1")),
        ("a*.txt", (0.0, "a*.txt")),
    ],
)
def test_validation_is_a_fraction_or_a_place(text: str, parsed: tuple[float, str | None]) -> None:
    assert parse_validation(text) == parsed


@pytest.mark.parametrize("text", ["", "-0.1", "0.51", "nan"])
def test_validation_out_of_range_is_an_error(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"validation is '{text}'; it must be a fraction from 0 to 0.5"
    ):
        parse_validation(text)


def test_a_tokenizer_is_chosen_by_kind_and_size(tmp_path: Path) -> None:
    dna = write(tmp_path / "a.fasta", ">x\nAC-GT\n")
    protein = write(tmp_path / "b.fasta", ">x\nMKV\n")
    assert choose_tokenizer({"train": open_source(dna)}) == "dna"
    assert choose_tokenizer({"train": open_source(dna, gaps="keep")}) == "dna-aligned"
    assert choose_tokenizer({"train": open_source(protein)}) == "protein"
    for letters, chosen in (
        ("ACGU", "rna"),
        ("ACGTU", "nucleotide"),
        ("ACGT" * 20 + "R", "nucleotide"),
        ("ACGT" * 4 + "RRKM", "protein"),
    ):
        path = write(tmp_path / "c.fasta", f">x\n{letters}\n")
        assert choose_tokenizer({"train": open_source(path)}) == chosen
        assert choose_tokenizer({"train": open_source(path, gaps="keep")}) == f"{chosen}-aligned"
    coded = write(tmp_path / "d.fasta", f">x\n{'ACGT' * 20}Y\n")
    # it covers every split
    assert (
        choose_tokenizer({"train": open_source(dna), "validation": open_source(coded)})
        == "nucleotide"
    )
    with pytest.raises(
        ValueError,
        match=r"e\.fasta is mostly nucleotides, .* no nucleotide codes: '\*', 'E'\. Is it a protein\?",
    ):
        choose_tokenizer(
            {"train": open_source(write(tmp_path / "e.fasta", f">x\n{'ACGT' * 20}*EA\n"))}
        )
    assert choose_tokenizer({"train": TextSource(["a little text"])}) == "byte"
    assert (
        choose_tokenizer({"test": open_source(write(tmp_path / "a.txt", "many words " * 20_000))})
        == "bpe:1024"
    )


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_text(
        "\n = A = \n\n the cat , it sat . \n\n = B = \n\n more \n"
    )
    (tmp_path / "wikitext-2" / "valid.txt").write_text(" = C = \n\n a dog @-@ like cat . \n")
    (tmp_path / "ptb.txt").write_text(" it 's no \n do n't \n")
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "test.jsonl").write_text('{"text": "“Yes,” he said"}\n')
    return tmp_path


def test_named_sets_from_files(shelf: Path) -> None:
    sources = open_sources("wikitext2", folder=shelf)
    assert {split: list(whole_documents(source)) for split, source in sources.items()} == {
        "train": ["= A =\n\nthe cat, it sat.\n\n", "= B =\n\nmore\n"],
        "validation": ["= C =\n\na dog-like cat.\n"],
    }
    assert list(whole_documents(open_sources("ptb", folder=shelf)["train"])) == ["it's no", "don't"]
    assert list(whole_documents(open_sources("lambada", folder=shelf)["test"])) == [
        '"Yes," he said'
    ]


def test_two_sets_are_trained_on_together(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"= X =\nsome words\n\n= Y =\nothers\n\n"
    (shelf / "wikipedia-2006.txt").write_bytes(text)
    monkeypatch.setattr(corpora, "TEXT_SHA256", corpora.hashlib.sha256(text).hexdigest())
    for names in ("wikitext2+wikipedia-2006", ["wikitext2", "wikipedia-2006"]):
        sources = open_sources(names, folder=shelf)
        assert set(sources) == {"train", "validation"}
        assert [text[:5] for text in whole_documents(sources["train"])] == [
            "= A =",
            "= B =",
            "= X =",
            "= Y =",
        ]
    assert [part.get("name") for part in sources["train"].describe()["joined"]] == [
        None,
        "wikipedia-2006",
    ]


def test_missing_sets_are_named(shelf: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="has no data set 1bw: neither a folder 1bw or lm1b"
    ):
        open_sources("1bw", folder=shelf)
    with pytest.raises(ValueError, match="only named data sets are looked up in a folder"):
        open_sources("my.txt", folder=shelf)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        open_sources("ptb", folder=shelf / "nowhere")


def test_names_of_data_sets() -> None:
    assert named_sets(["wikitext2", "my.txt"]) == ()
    assert named_sets(Path("wikitext2")) == ()
    assert named_sets("wikitext2") == ("wikitext2",)


def test_wikipedia_takes_no_options() -> None:
    with pytest.raises(
        ValueError, match="field is given for wikipedia-2006, a text with a recorded hash"
    ):
        open_sources("wikipedia-2006", field="body")


NATURAL = """= Title =

"Well," she said (twice), "it's 10:30; don't wait!" The girls' toys cost $5.50, or 20% less: a well-known, 1,000-year-old 'rule'.
He pressed the 's' key. [Note] {x} U.S.'s #1 song...

== Part =="""


@pytest.mark.parametrize("name", DETOKENIZERS)
def test_natural_text_does_not_change(name: str) -> None:
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
def test_wikitext_is_detokenized(before: str, after: str) -> None:
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
def test_one_billion_words_is_detokenized(before: str, after: str) -> None:
    assert one_billion_words(before) == after
    assert one_billion_words(after) == after


def test_detokenizers_by_name() -> None:
    assert detokenizer(None)("a , b") == "a , b"
    with pytest.raises(
        ValueError, match="detokenize is 'x'; allowed: wikitext, ptb, lambada, 1bw, or none"
    ):
        detokenizer("x")
