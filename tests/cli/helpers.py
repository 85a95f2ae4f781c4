"""A small model with random weights in a folder, and the command line called in this process."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tracformer import Tracformer, TracformerConfig
from tracformer.cli import main
from tracformer.data import Tokenizer


def save_model(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """Weights wide enough that probabilities differ."""
    torch.manual_seed(0)
    values = {
        "max_length": 64,
        "n_layer": 6,
        "n_head": 2,
        "d_model": 16,
        "n_max": 4,
        "init_std": 0.3,
        **changes,
    }
    model = Tracformer(TracformerConfig(vocab_size=tokenizer.vocab_size, **values), "blocked")
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


class Caller:
    """`tracformer WORDS...` with everything it prints."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
    ) -> None:
        self.capsys, self.monkeypatch, self.model = capsys, monkeypatch, model

    def __call__(self, verb: str, *words: str, stdin: bytes | None = None) -> str:
        """Return the output of a successful call."""
        code, out, err = self.call(verb, "-m", str(self.model), *words, stdin=stdin)
        assert (code, err) == (0, "")
        return out

    def json(self, verb: str, *words: str, stdin: bytes | None = None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(verb, *words, "--json", stdin=stdin).splitlines()]

    def refused(self, verb: str, *words: str, stdin: bytes | None = None) -> str:
        """Return the error of a wrong call: one line, exit code 2."""
        code, out, err = self.call(verb, *words, stdin=stdin)
        assert (code, out) == (2, "")
        assert err.startswith(f"tracformer {verb}: ")
        assert err.count("\n") == 1
        return err

    def call(self, *words: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        with self.monkeypatch.context() as patch:
            if stdin is not None:
                patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            code = main(words)
        reported = self.capsys.readouterr()
        return code, reported.out, reported.err
