"""A model with its tokenizer: fill blanks, score text, list candidates, sample.

    lm = tracformer.load("runs/stories")
    lm.infill("Once upon a time [[3-8]] lived in a wood.")[0].text
    lm.score("Once upon a time [[a fox]] lived in a wood.").log_prob

Methods make requests (`infill.InfillRequest`, `scoring.ScoreRequest`, `continuation.SampleRequest`)
and run them. How blanks are written is in `template`, how lengths are chosen in `length_posterior`.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Self, overload

import torch

from tracformer import loading
from tracformer.data.tokenizer import Tokenizer
from tracformer.generation.continuation import SampleRequest
from tracformer.generation.decode import Runner
from tracformer.generation.generation_config import RAW, GenerationConfig, read_generation_config
from tracformer.generation.infill import InfillRequest, InfillRun, resolve_options
from tracformer.generation.request_options import InfillOptions, SampleOptions, ScoreOptions
from tracformer.generation.results import (
    Candidates,
    Infilled,
    Marginal,
    Sampled,
    Scored,
    TokenCallback,
)
from tracformer.generation.scoring import ScoreRequest, marginals, score, top_tokens
from tracformer.generation.template import Template
from tracformer.generation.token_text import spelling_of
from tracformer.model.base import ConditionalModel, check_mode, preferred_mode
from tracformer.model.batch import Batch
from tracformer.model.fast_step import check_kind
from tracformer.proteins.mutants import MutantScore, read_wild_type, score_mutants


class LanguageModel:
    """A model with its tokenizer: text in, text out.

    A sample depends on its text and seed alone, not on its batch.

    Args:
        model: The model; it is switched to eval mode.
        tokenizer: The tokenizer that the model was trained with.
        name: Name for messages.
        generation: Settings of fills, for options that a caller leaves out.

    Raises:
        ValueError: The tokenizer does not fit the model.

    Example:
        >>> import tracformer
        >>> lm = tracformer.load("stories")
        >>> [fill] = lm.infill("Once upon a [[1]], there was a cat.", temperature=0)
        >>> fill.spans[0].text
        ' time'
    """

    def __init__(
        self,
        model: ConditionalModel,
        tokenizer: Tokenizer,
        name: str = "",
        generation: GenerationConfig = RAW,
    ) -> None:
        loading.require_fit(model, tokenizer)
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.spelling = spelling_of(tokenizer)
        self.runner, self.generation = Runner(model), generation

    def on(self, runner: Runner) -> Self:
        """Return a copy of this language model that runs on a request of an engine.

        Args:
            runner: A request of an `Engine` on this language model's `model`.

        Raises:
            ValueError: The runner runs another model.
        """
        if runner.model is not self.model:
            raise ValueError("the runner runs another model; make its engine from this one's model")
        other = copy(self)
        other.runner = runner
        return other

    def lean(self, weights: str) -> Self:
        """Round a Tracformer's weights in place to "bfloat16" or "int8".

        Generation from left to right then reads fewer bytes. Scores and fills are those of the
        rounded weights.
        """
        self.model.lean(weights)
        return self

    @overload
    def infill(
        self,
        text: str | Template | InfillRequest,
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[Infilled]: ...

    @overload
    def infill(
        self,
        text: Sequence[str | Template | InfillRequest],
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[list[Infilled]]: ...

    def infill(
        self,
        text: str | Template | InfillRequest | Sequence[str | Template | InfillRequest],
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[Infilled] | list[list[Infilled]]:
        """Fill the blanks of a text, or of several texts in shared batches.

        Args:
            text: Text with blanks: [[]] (any length), [[5]] (5 tokens) or [[3-8]] (3 to 8 tokens).
                In a text without any, [MASK], <mask> or ____ is a blank of any length. Or a list
                of such texts; each gets what it would get alone. Requests that `infill_requests`
                made are not tokenized and checked again.
            n: Number of fills per text.
            options: Options; the defaults if None.
            callback: Called with the tokens of each step as they arrive. A `Callback` also
                receives drafts and lengths. Quality `best` cannot show tokens before all fills
                are made: with a callback the model's default is at most `fast`.
            **changes: Options to change, by name: see `InfillOptions` and `Sampler`.

        Returns:
            The fills of the text, or a list of fills for each text of a list.

        Raises:
            ValueError: A text has no blank or does not fit the model, an option is unknown or out
                of bounds, or options contradict each other.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> [fill] = lm.infill("Once upon a [[1]], there was a cat.", temperature=0)
            >>> fill.text
            'Once upon a time, there was a cat.'
        """
        one = isinstance(text, str | Template | InfillRequest)
        texts = [text] if isinstance(text, str | Template | InfillRequest) else list(text)
        requests = self._requests(texts, n, options, callback is not None, changes)
        if not requests:
            return []
        run = InfillRun(self.runner, self.spelling, requests[0].options, callback)
        results = run.run(requests)
        return results[0] if one else results

    def infill_requests(
        self,
        texts: Sequence[str | Template],
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        where: Sequence[str] = (),
        stream: bool = False,
        **changes: Any,
    ) -> list[InfillRequest]:
        """Tokenize texts and check that they can be filled, for later calls of `infill`.

        Args:
            texts: Texts with blanks.
            n: Number of fills per text.
            options: Options; the defaults if None.
            where: Where each text comes from, put before error messages, such as "line 3: ".
            stream: Tokens are to be shown as they arrive, so that quality `best` is not possible.
            **changes: Options to change, by name: see `InfillOptions` and `Sampler`.

        Raises:
            ValueError: What `infill` would raise before it fills anything.
        """
        if n is not None:
            changes["n"] = n
        found = resolve_options(
            self.model, InfillOptions.make(options, **changes), self.generation, stream=stream
        )
        names = where or [""] * len(texts)
        return [
            InfillRequest.make(self.model, self.spelling, text, found, name)
            for text, name in zip(texts, names, strict=True)
        ]

    def _requests(
        self,
        texts: Sequence[str | Template | InfillRequest],
        n: int | None,
        options: InfillOptions | None,
        stream: bool,
        changes: dict[str, Any],
    ) -> list[InfillRequest]:
        """Return texts as requests; those that are requests already stay as they are."""
        made = [text for text in texts if isinstance(text, InfillRequest)]
        if not made:
            plain = [text for text in texts if not isinstance(text, InfillRequest)]
            return self.infill_requests(plain, n, options=options, stream=stream, **changes)
        first = made[0].options
        same = (replace(each.options, seed=first.seed) == first for each in made)
        if len(made) < len(texts) or not all(same):
            raise ValueError(
                "requests that are filled together must have the same options, except for the seed"
            )
        if n is not None or options is not None or changes:
            raise ValueError("the texts are requests, which have their options; give no others")
        return made

    @overload
    def score(
        self,
        text: str | Template | ScoreRequest,
        *,
        options: ScoreOptions | None = None,
        **changes: Any,
    ) -> Scored: ...

    @overload
    def score(
        self,
        text: Sequence[str | Template | ScoreRequest],
        *,
        options: ScoreOptions | None = None,
        **changes: Any,
    ) -> list[Scored]: ...

    def score(
        self,
        text: str | Template | ScoreRequest | Sequence[str | Template | ScoreRequest],
        *,
        options: ScoreOptions | None = None,
        **changes: Any,
    ) -> Scored | list[Scored]:
        """Return the log-probability of the marked parts of a text, given the rest.

        Args:
            text: Text with marked parts, as in "a [[cat]]". A text without marks is scored whole,
                from left to right if no mode is given. Or a list of texts, or of requests that
                `score_requests` made.
            options: Options; the defaults if None.
            **changes: Options to change, by name: see `ScoreOptions`.

        Returns:
            The score of the text, or of each text of a list.

        Raises:
            ValueError: A text is empty or does not fit the model, or an option is unknown or out
                of bounds.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> likely, unlikely = lm.score(["Once upon a [[time]],", "Once upon a [[cat]],"])
            >>> likely.log_prob > unlikely.log_prob
            True
        """
        one = isinstance(text, str | Template | ScoreRequest)
        texts = [text] if isinstance(text, str | Template | ScoreRequest) else list(text)
        made = [each for each in texts if isinstance(each, ScoreRequest)]
        plain = [each for each in texts if not isinstance(each, ScoreRequest)]
        if made and (plain or options is not None or changes):
            raise ValueError("the texts are requests, which have their options; give no others")
        requests = made or self.score_requests(plain, options=options, **changes)
        if not requests:
            return []
        scores = score(self.runner, self.spelling, requests)
        return scores[0] if one else scores

    def score_requests(
        self,
        texts: Sequence[str | Template],
        *,
        options: ScoreOptions | None = None,
        where: Sequence[str] = (),
        **changes: Any,
    ) -> list[ScoreRequest]:
        """Tokenize texts and check that they can be scored, for later calls of `score`.

        Args:
            texts: Texts with marked parts, or to be scored whole.
            options: Options; the defaults if None.
            where: Where each text comes from, put before error messages, such as "line 3: ".
            **changes: Options to change, by name: see `ScoreOptions`.

        Raises:
            ValueError: What `score` would raise before it scores anything.
        """
        found = ScoreOptions.make(options, **changes)
        if found.mode is not None:
            check_mode(self.model.config, found.mode)
        names = where or [""] * len(texts)
        return [
            ScoreRequest.make(self.model, self.spelling, text, found, name)
            for text, name in zip(texts, names, strict=True)
        ]

    def score_tokens(
        self, token_ids: Sequence[int], context: Sequence[bool], mode: str | None = None
    ) -> tuple[float, ...]:
        """Return the log-probability of each token, without a tokenizer.

        Args:
            token_ids: Ids of the whole sequence.
            context: For each token, whether it is given.
            mode: `car`, `ac`, `ar` or `diffusion`; None: the first that the model has.

        Returns:
            Log-probabilities of the tokens that are not given; zero for given ones.

        Raises:
            ValueError: The sequence does not fit the model.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> lm.score_tokens(lm.tokenizer.encode("One day"), [True, True])
            (0.0, 0.0)
        """
        batch = self._batch(token_ids, context)
        found = self.runner.call(partial(self.model.log_prob, batch, self._mode(mode)))
        return tuple(found.double()[0].tolist())

    def top_tokens(
        self,
        token_ids: Sequence[int],
        context: Sequence[bool],
        top: int = 5,
        mode: str | None = None,
    ) -> Candidates:
        """Return the most likely tokens at each position that `score_tokens` scores.

        Args:
            token_ids: Ids of the whole sequence.
            context: For each token, whether it is given.
            top: Number of tokens to return for each position.
            mode: `car`, `ac` or `ar`; None: the first that the model has.

        Returns:
            Candidates for each position, most likely first; none where the token is given.

        Raises:
            ValueError: The sequence does not fit the model, or the mode gives a bound.
        """
        batch = self._batch(token_ids, context)
        [found] = top_tokens(self.runner, self.spelling, batch, self._mode(mode), top)
        return found

    def _batch(self, token_ids: Sequence[int], context: Sequence[bool]) -> Batch:
        tokens, given = torch.tensor([list(token_ids)]), torch.tensor([list(context)])
        return Batch(tokens, given).to(self.model.head.device)

    def marginals(
        self, text: str | Template, top: int = 5, *, mode: str | None = None, whole: bool = True
    ) -> list[Marginal]:
        """Return the most likely tokens at each position of blanks of fixed length.

        Each position is predicted from the given tokens alone; nothing is ruled out.

        Args:
            text: Text with blanks of fixed length, such as [[1]].
            top: Number of tokens to return for each position.
            mode: `ac`, or `car` for one blank of one token; None: ac if the model has it.
            whole: The text is a whole document. False: it is cut from a longer one.

        Returns:
            One record for each position of a blank.

        Raises:
            ValueError: A blank has no fixed length, the text does not fit the model, or the mode
                has no marginals of several tokens.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> [blank] = lm.marginals("Once upon a [[1]], there was a cat.")
            >>> blank.candidates[0].text
            ' time'
        """
        mode = self._mode("ac" if mode is None and "ac" in self.model.config.modes else mode)
        return marginals(self.runner, self.spelling, text, mode, whole, top)

    def score_mutants(
        self,
        wild_type: str,
        mutants: Sequence[str] | None = None,
        first: int | None = None,
        family: str | PathLike[str] | None = None,
        mode: str = "car",
    ) -> list[MutantScore]:
        """Return log p(mutant residues | rest) minus that of the wild type, in nats.

        Args:
            wild_type: Residues, a FASTA file with one record, or the name of a record of `family`.
            mutants: Such as "A24G", or "A24G:C30D" for two sites; None: every single substitution.
            first: Number of the first residue; None: that in the record's name, else 1.
            family: Alignment of the model's family; None: the profile in the model's folder.
            mode: "car" for exact joint probabilities, "ac" for the sum of marginals.

        Example:
            >>> import tracformer
            >>> tracformer.load("proteins").score_mutants("CLQPRPAMPC", ["C1W"])[0].log_ratio < 0
            True
        """
        wild = read_wild_type(wild_type, self.tokenizer, self.name, first, family)
        return score_mutants(self.model, self.tokenizer, wild, mutants, mode=mode)

    def sample(
        self,
        n: int | None = None,
        *,
        prompt: str | Sequence[int] = "",
        options: SampleOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[Sampled]:
        """Write a continuation of a prompt, or whole texts.

        A text ends at the end of text, at a stop string or after `max_tokens` tokens. Sampling is
        in mode `ar`. A model without it fills a blank of `max_tokens` tokens after the prompt.

        Args:
            n: Number of texts.
            prompt: Text or token ids that the texts begin with.
            options: Options; the defaults if None.
            callback: Called with the tokens of each step as they arrive.
            **changes: Options to change, by name: see `SampleOptions` and `Sampler`.

        Returns:
            The texts, prompt included.

        Raises:
            ValueError: The prompt does not fit the model, or an option is unknown or out of bounds.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> [text] = lm.sample(prompt="Once upon a", max_tokens=1, temperature=0)
            >>> text.text
            'Once upon a time'
        """
        if n is not None:
            changes["n"] = n
        found = SampleOptions.make(options, **changes)
        return SampleRequest.make(self.runner, self.spelling, prompt, found).run(callback)

    def _mode(self, mode: str | None) -> str:
        if mode is None:
            return preferred_mode(self.model.config)
        check_mode(self.model.config, mode)
        return mode


def load(
    where: str | PathLike[str],
    *,
    tokenizer: str | PathLike[str] | None = None,
    adapter: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: str = "float32",
    verify: bool = True,
    **options: Any,
) -> LanguageModel:
    """Load a model with its tokenizer.

    Args:
        where: Model folder, run folder (its best checkpoint, or else its last), name of a bundled
            model, "smollm2", or hub id OWNER/NAME. Published weights of GPT-2, SEDD and MDLM can be
            loaded, and any causal language model of `transformers`, which fills blanks once it has
            an adapter.
        tokenizer: Tokenizer for weights that come without one.
        adapter: Adapter of a causal language model, made by `tracformer adapt`. An adapter can also
            be loaded by itself: it names its base model.
        device: Device to load the model on.
        dtype: Data type of the weights.
        weights: "float32", or "bfloat16" or "int8" to round a Tracformer's weights for faster
            generation from left to right.
        verify: Check the folder's files against its `checksums.json`.
        **options: Options of the reader of published weights, such as `mask_token_id` and `ema`.

    Returns:
        The model, ready to fill and score texts.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: The folder holds no model, or model and tokenizer do not fit.

    Example:
        >>> import tracformer
        >>> tracformer.load("stories").model.config.modes
        ('car', 'ac', 'ar')
    """
    check_kind(weights)
    folder = loading.find_folder(where)
    generation = read_generation_config(folder)  # before the weights: it may be wrong
    model, text = loading.read(
        folder, device, dtype, tokenizer, adapter=adapter, verify=verify, **options
    )
    return LanguageModel(model, text, str(adapter or where), generation).lean(weights)
