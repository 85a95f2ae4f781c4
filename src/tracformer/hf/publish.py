"""Model cards, and upload to the Hugging Face hub.

A model card says what the model is, how to load it, and how it was evaluated, as Markdown with the
front matter that the hub reads.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
import yaml

from tracformer.checksums import CHECKSUMS_FILE
from tracformer.data.tokenizer import Tokenizer
from tracformer.files import optional_package, write_atomically
from tracformer.model import Tracformer, TracformerConfig, storage

CARD_FILE = "README.md"
Evaluation = Mapping[str, Mapping[str, float | str]]  # row -> column -> value

ANSWERS = {
    "car": "each predicted token from the given tokens and all before it; the product is exact",
    "ac": "each predicted token from the given tokens alone: a marginal",
    "ar": "left to right, from the tokens before; exact",
}

LOADING = """```python
import tracformer.hf
from transformers import pipeline

fill = pipeline("fill-mask", model="{name}")
```

or, for exact probabilities of any filling, with the library alone:

```python
from tracformer import Tracformer

model = Tracformer.from_pretrained("FOLDER")  # a local copy of this repository
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
        f"## Use\n\n{LOADING.format(name=name or 'OWNER/NAME')}",
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


def _cell(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The files of a model. A training run's checkpoints and logs, in the same folder, are not uploaded.
FILES = [
    CARD_FILE,
    "LICENSE",
    storage.CONFIG_FILE,
    "generation_config.json",
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
