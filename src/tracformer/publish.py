"""Publish models: folders that need no tracformer, model cards, uploads to the Hugging Face hub.

A model card says what the model is, how to load it, and how it was evaluated, as Markdown with the
front matter that the hub reads. `export_folder` writes all files of a published model.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError, safe_open

from tracformer.baselines import is_foreign
from tracformer.data.make_tokenizer import load_tokenizer
from tracformer.data.tokenizer import Tokenizer
from tracformer.files import CHECKSUMS_FILE, optional_package, verify_checksums, write_atomically
from tracformer.generation.generation_config import (
    FILE,
    read_generation_config,
    write_generation_config,
)
from tracformer.loading import find_folder, require_fit
from tracformer.model import Tracformer, TracformerConfig, storage

CARD_FILE = "README.md"
Evaluation = Mapping[str, Mapping[str, float | str]]  # row -> column -> value

ANSWERS = {
    "car": "each predicted token from the given tokens and all before it; the product is exact",
    "ac": "each predicted token from the given tokens alone: a marginal",
    "ar": "left to right, from the tokens before; exact",
}

LOADING = """With the library `tracformer`, which fills blanks of unknown length and is faster:

```python
import tracformer

lm = tracformer.load("{name}")
print(lm.infill("text before [[5]] text after")[0].text)  # a blank of 5 tokens
```

"""
WITHOUT_LIBRARY = """With `transformers` alone; it runs `modeling_tracformer.py` of this repository:

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained("{name}", trust_remote_code=True)
text = "text before" + 5 * tokenizer.mask_token + " text after"
text += tokenizer.eos_token or ""  # a whole text; leave it out for a part of one
filled = model.infill(
    tokenizer(text, return_tensors="pt").input_ids, forbidden=[tokenizer.eos_token_id]
)
print(tokenizer.decode(filled.sequences[0]), filled.log_probs)
```"""


def model_card(
    config: TracformerConfig,
    tokenizer: Tokenizer | None = None,
    evaluation: Evaluation | None = None,
    *,
    name: str = "",
    license: str = "apache-2.0",
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
    language: str | None = None,
) -> str:
    """Return a model card as Markdown.

    Args:
        config: Configuration of the model.
        tokenizer: Its tokenizer, to be named in the card.
        evaluation: Maps a row of the table (a data set and its contexts) to its columns. Name the
            kind of answer (exact, marginal or bound) in a column of perplexities: they cannot be
            compared.
        name: Title, and the model's name in the loading example.
        license: License, as the hub names it.
        tags: Further tags.
        datasets: Names of the training data on the hub.
        language: Language code.
    """
    front: dict[str, object] = {
        "license": license,
        "library_name": "tracformer",
        "pipeline_tag": "fill-mask",
    }
    front["tags"] = list(dict.fromkeys(("tracformer", "infilling", "fill-mask", *tags)))
    if datasets:
        front["datasets"] = list(datasets)
    if language is not None:
        front["language"] = language
    with torch.device("meta"):
        size = Tracformer(config, attention="reference").num_parameters()
    facts = [
        f"A Tracformer of {size:,} parameters ({config.n_layer} encoder and {config.n_layer} "
        f"decoder layers, width {config.d_model}) for sequences of up to {config.max_length} "
        f"tokens from a vocabulary of {config.vocab_size:,}. It fills blanks anywhere in a "
        "sequence."
    ]
    if tokenizer is not None:
        facts.append(
            f"Tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, SHA-256 "
            f"`{tokenizer.fingerprint}`."
        )
    modes = "\n".join(f"- `{mode}`: {ANSWERS[mode]}" for mode in config.modes)
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name or 'Tracformer'}",
        "\n\n".join(facts),
        "## Use\n\n" + (LOADING + WITHOUT_LIBRARY).format(name=name or "OWNER/NAME"),
        f"## Modes\n\nTrained for:\n\n{modes}",
        f"## Evaluation\n\n{evaluation_table(evaluation) if evaluation else 'None was recorded.'}",
    ]
    return "\n\n".join(sections) + "\n"


def evaluation_table(evaluation: Evaluation) -> str:
    """Return a Markdown table with all columns of all rows, in order of first appearance.

    >>> wikitext = {"answer": "exact", "perplexity": 29.376}
    >>> print(evaluation_table({"wikitext103": wikitext, "ptb": {"perplexity": 100.0}}))
    |  | answer | perplexity |
    |---|---|---|
    | wikitext103 | exact | 29.38 |
    | ptb |  | 100 |
    """
    columns = list(dict.fromkeys(column for row in evaluation.values() for column in row))
    lines = [
        ["", *columns],
        *(
            [name, *(_cell(row.get(column, "")) for column in columns)]
            for name, row in evaluation.items()
        ),
    ]
    rendered = [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    ]
    return "\n".join([rendered[0], "|---" * (len(columns) + 1) + "|", *rendered[1:]])


def write_model_card(
    folder: str | PathLike[str],
    *,
    evaluation: Evaluation | None = None,
    tokenizer: Tokenizer | None = None,
    name: str = "",
    license: str = "apache-2.0",
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
    language: str | None = None,
) -> Path:
    """Write the card of a folder's model as its `README.md`, replacing an existing one.

    The arguments are those of `model_card`; the configuration is the folder's.
    """
    config = storage.load_config(folder, TracformerConfig)
    card = model_card(
        config,
        tokenizer,
        evaluation,
        name=name,
        license=license,
        tags=tags,
        datasets=datasets,
        language=language,
    )
    path = Path(folder) / CARD_FILE
    write_atomically(path, card)
    return path


def export_folder(
    where: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    name: str = "",
    license: str = "apache-2.0",
    verify: bool = True,
) -> Path:
    """Write a Tracformer as a folder that `transformers` loads without this library.

    The folder has `config.json`, `model.safetensors`, the tokenizer, `generation_config.json`,
    `modeling_tracformer.py`, and a model card. A card that the model has already is kept.

    Args:
        where: The model, as in `find_folder`.
        folder: Folder to write; it must be empty or missing.
        name: OWNER/NAME on the hub, for the card.
        license: License, for a new card.
        verify: Check the model's files against its checksums.

    Raises:
        FileExistsError: The folder is not empty.
        ValueError: The model is not a Tracformer.
    """
    source, target = find_folder(where), Path(folder)
    document = storage.load_document(source)
    if (family := document.get("model_type")) != TracformerConfig.model_type:
        instead = (
            "transformers' AutoModel reads its folder as it is"
            if is_foreign(document)
            else "share its folder as it is, for tracformer.load"
        )
        raise ValueError(
            f"{where} is a model of type {family!r}; only Tracformers can be exported: {instead}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; give a new folder")
    if verify:
        verify_checksums(source)
    tokenizer = load_tokenizer(source)
    model = Tracformer.from_pretrained(
        source, dtype=_stored_dtype(source), document=document, attention="reference"
    )
    require_fit(model, tokenizer, source)
    model.save_pretrained(target)
    tokenizer.save(target)
    write_generation_config(target, read_generation_config(source))
    if (source / CARD_FILE).is_file():
        card = (source / CARD_FILE).read_text(encoding="utf-8").rstrip()
        example = WITHOUT_LIBRARY.format(name=name or "OWNER/NAME")
        if "trust_remote_code" not in card:
            card += f"\n\n## Without tracformer\n\n{example}"
        write_atomically(target / CARD_FILE, card + "\n")
    else:
        write_model_card(target, tokenizer=tokenizer, name=name, license=license)
    return target


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the precision in which a folder's weights are stored."""
    try:
        with safe_open(folder / storage.WEIGHTS_FILE, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(next(iter(file.keys())))
            return tensor.dtype
    except (OSError, SafetensorError):
        return torch.float32  # reading the weights explains what is wrong with the file


def _cell(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The files of a model. A training run's checkpoints and logs, in the same folder, are not uploaded.
FILES = [
    CARD_FILE,
    "LICENSE",
    storage.CONFIG_FILE,
    storage.CODE_FILE,
    FILE,
    storage.WEIGHTS_FILE,
    CHECKSUMS_FILE,
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]


def push_folder(
    folder: str | PathLike[str],
    repo_id: str,
    *,
    evaluation: Evaluation | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> str:
    """Upload a model's folder to the hub, and return the address of the commit.

    Only the files of the model are uploaded. A repository that does not exist is created. The card
    is written into the folder first, unless there is one and no `evaluation` to add.

    Args:
        folder: The model's folder.
        repo_id: OWNER/NAME.
        evaluation: Table for the card, see `model_card`.
        private: Whether a new repository is private.
        token: Access token; by default the one that is stored.
        revision: Branch.
        create_pr: Open a pull request instead of committing.
        commit_message: Message of the commit.
    """
    huggingface_hub = optional_package("huggingface_hub", "uploading to the Hugging Face hub", "hf")
    # Fails for a folder without a model, before a repository is created.
    storage.load_config(folder, TracformerConfig)
    if evaluation is not None or not (Path(folder) / CARD_FILE).is_file():
        write_model_card(folder, evaluation=evaluation, name=repo_id)
    api = huggingface_hub.HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo.repo_id,
        folder_path=folder,
        allow_patterns=FILES,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message or "Upload a Tracformer",
    )
    return str(commit.commit_url)
