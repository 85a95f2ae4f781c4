"""How a model's fills are made by default: `generation_config.json` beside its `config.json`.

- `GenerationConfig`: the settings, and `apply`, which gives them to options that a caller left out.
- `read_generation_config`, `write_generation_config`: the file.

Precedence, highest first: options that the caller gives (flags, keyword arguments, fields of a
request); the model's settings for the quality in use; the defaults of `InfillOptions`. The quality
in use is the caller's, or else the model's, with one exception: where the model says `best`, but
the call streams, or names an option in `OWN_METHOD`, it is `fast`.

This module does not import torch.
"""

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer.files import write_atomically
from tracformer.generation.request_options import QUALITIES, InfillOptions, parse_search
from tracformer.options import build, check_options, option

if TYPE_CHECKING:
    from tracformer.data.tokenizer import Tokenizer

FILE = "generation_config.json"
# Options that say how fills are drawn or chosen. `best` does that itself: its settings are used
# with one of these only if the caller asks for `best` by name.
SAMPLED = {"temperature", "top_k", "top_p", "min_p", "best_of", "search"}
# Those that cannot hold for the fills of a beam, so not for `best` either.
NOT_SEARCHED = {"order", "k", "threshold", "steps", "lengths", "length_draws"} | {
    "repetition_penalty",
    "no_repeat_ngram",
    "required",
}
OWN_METHOD = SAMPLED | NOT_SEARCHED
# Keys that `transformers` writes into a file of this name.
FOREIGN_KEYS = {
    "_from_model_config",
    "bos_token_id",
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
}


@dataclass(frozen=True)
class GenerationConfig:
    """Default settings of a model's fills. The defaults are exact samples, as for research.

    Args:
        quality: Quality that is used if the caller names none.
        temperature: Temperature of `fast`, and of the samples among the candidates of `best`.
        top_p: Likewise.
        best_of: Number of samples among the candidates of `best`.
        beam: Width of the beam search for the other candidates of `best`.
        reread: Rank the candidates of `best` also by the left-to-right probability of the text, if
            the model has mode `ar`.

    Raises:
        ValueError: A value is out of bounds.

    Example:
        >>> GenerationConfig(quality="fast").apply(InfillOptions.make(top_p=0.5)).sampler.top_p
        0.5
    """

    quality: str = option("raw", "quality used if none is given", choices=QUALITIES)
    temperature: float = option(
        0.8, "temperature of fast and of the samples of best", low=0, below=float("inf")
    )
    top_p: float = option(
        0.9, "nucleus probability of fast and of the samples of best", above=0, high=1
    )
    best_of: int = option(16, "number of samples among the candidates of best", low=1, high=1024)
    beam: int = option(16, "beam width for the candidates of best", low=1, high=1024)
    reread: bool = option(True, "rank the candidates of best also by the text read left to right")

    def __post_init__(self) -> None:
        check_options(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as the file holds them."""
        return dataclasses.asdict(self)

    @property
    def sampling(self) -> dict[str, float]:
        """Temperature and top-p where fills cannot be searched for; empty under `raw`."""
        if self.quality == "raw":
            return {}
        return {"temperature": self.temperature, "top_p": self.top_p}

    def apply(
        self, options: InfillOptions, *, searchable: bool = True, stream: bool = False
    ) -> InfillOptions:
        """Return options in which everything that the caller left out is filled in.

        Args:
            options: Options of a caller.
            searchable: Whether the mode in use has an exact joint probability and left-to-right
                filling, which `best` needs.
            stream: Tokens are shown as they arrive, so that fills cannot be compared first.

        Raises:
            ValueError: Quality `best` contradicts `stream` or another option.
        """
        given, quality = options.given, options.quality
        if quality is None:
            quality = self.quality
            if quality == "best" and (stream or not searchable or given & OWN_METHOD):
                quality = "fast"
        elif quality == "best":
            self._check_best(options, stream)
        if quality == "raw" or (quality == "fast" and options.search is not None):
            return replace(options, quality=quality)
        if options.mode != "diffusion":
            missing = {
                name: getattr(self, name) for name in ("temperature", "top_p") if name not in given
            }
            sampler = replace(options.sampler, **missing)
        else:
            sampler = options.sampler
        if quality == "fast":
            return replace(options, quality=quality, sampler=sampler)
        return replace(
            options,
            quality=quality,
            sampler=sampler,
            best_of=options.best_of or max(self.best_of, options.n),
            search=options.search or f"beam:{max(self.beam, options.n)}",
            reread=options.reread if "reread" in given else self.reread,
        )

    def _check_best(self, options: InfillOptions, stream: bool) -> None:
        if stream:
            raise ValueError(
                "quality is 'best', which compares whole fills and cannot be streamed; use "
                "quality fast or raw, or do not stream"
            )
        for name in sorted(NOT_SEARCHED & options.given):
            holder = options if hasattr(options, name) else options.sampler
            raise ValueError(
                f"quality is 'best', which searches from left to right; {name} is "
                f"{getattr(holder, name)!r}, which has no meaning there: leave it out, or use "
                "quality fast or raw"
            )
        if options.sampler.temperature == 0:
            raise ValueError(
                "quality is 'best' and temperature is 0: best compares several candidates, greedy "
                "filling gives one; leave one of them out"
            )
        if options.search is not None and parse_search(options.search)[0] != "beam":
            raise ValueError(
                f"quality is 'best' and search is {options.search!r}; best takes beam:WIDTH only: "
                "leave one of them out"
            )


RAW = GenerationConfig()  # of a model without the file
# Of a model of text, where a good fill is wanted more than a varied one.
FOR_TEXT = GenerationConfig(quality="best")
# Of DNA, proteins and other symbols, where the variety of exact samples matters.
FOR_SYMBOLS = GenerationConfig(quality="raw", temperature=1.0, top_p=1.0)


def settings_for(tokenizer: "Tokenizer") -> GenerationConfig:
    """Return the settings of a new model: for text, or for the letters of a known alphabet."""
    from tracformer.data.make_tokenizer import ALPHABETS, name_of

    return FOR_SYMBOLS if name_of(tokenizer) in ALPHABETS else FOR_TEXT


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the settings of a model's folder; `RAW` if it has none.

    A file that `transformers` wrote for its own use, without `quality`, counts as none.

    Raises:
        ValueError: The file is not JSON, has an unknown key, or a value is out of bounds.
    """
    path = folder / FILE
    if not path.is_file():
        return RAW
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; expected a JSON object")
    if "quality" not in values and values.keys() & FOREIGN_KEYS:
        return RAW
    own = {key: value for key, value in values.items() if key not in FOREIGN_KEYS}
    try:
        return build(GenerationConfig, own)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_generation_config(folder: Path, config: GenerationConfig) -> None:
    """Write the settings of a model into its folder."""
    write_atomically(folder / FILE, json.dumps(config.to_dict(), indent=2) + "\n")
