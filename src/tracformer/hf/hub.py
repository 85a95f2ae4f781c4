"""Upload a model's folder to the Hugging Face hub."""

from os import PathLike
from pathlib import Path

from tracformer.files import optional_package
from tracformer.hf.card import CARD_FILE, Evaluation, write_model_card
from tracformer.model import TracformerConfig, storage

# What belongs to a model. A training run keeps its checkpoints and logs close by, and they are nobody else's business.
FILES = [
    CARD_FILE,
    "LICENSE",
    storage.CONFIG_FILE,
    storage.WEIGHTS_FILE,
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
    """Create the repository where there is none, upload what belongs to the model, and return the address of the commit.

    The card is written into the folder first, unless it has one and there is no evaluation to add.
    """
    huggingface_hub = optional_package("huggingface_hub", "uploading to the Hugging Face hub", "hf")
    storage.load_config(folder, TracformerConfig)  # a folder without a model stops here, before anything is created
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
