"""Properties of every system in the registry, except Tracformer."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toys import (
    DIFFUSION_MODES,
    FAMILIES,
    SMALL,
    SYSTEM_MODES,
    SYSTEMS,
    TRACFORMER,
    UNTIED,
    random_question,
    small_baseline,
)
from tracformer.baselines import find_family, load_model
from tracformer.baselines.frequencies import Frequencies, FrequenciesConfig
from tracformer.model.batch import Batch

pytest.importorskip("transformers")


@pytest.mark.parametrize(("family", "mode"), SYSTEM_MODES)
def test_padding_is_ignored(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(5, 10)
    inside = torch.arange(10) < lengths[:, None]
    for rubbish in (99, -5):
        padded = model(Batch(tokens.masked_fill(~inside, rubbish), context, lengths), mode)
        for row, length in enumerate(lengths.tolist()):
            alone = model(
                Batch(tokens[row : row + 1, :length], context[row : row + 1, :length]), mode
            )
            torch.testing.assert_close(padded[row : row + 1, :length], alone, rtol=0, atol=1e-10)
            assert not padded[row, length:].any()


@pytest.mark.parametrize(("family", "mode"), SYSTEM_MODES)
def test_each_logit_depends_only_on_what_its_mode_allows(family: str, mode: str) -> None:
    """A given position is predicted as if it were the only target, so one rule holds for every t."""
    length = 8
    model = small_baseline(family)
    tokens = random_question(1, length)[0]
    context = torch.tensor([[True, False, False, True, True, False, True, False]])
    before = model(Batch(tokens, context), mode)[0]
    for changed in range(length):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 3) % 7
        moved = (model(Batch(other, context), mode)[0] != before).any(-1)
        for t in range(length):
            given, earlier = bool(context[0, changed]), changed < t
            seen = {"car": given or earlier, "ac": given, "ar": earlier}[mode] and changed != t
            assert moved[t] == seen, (changed, t)


@pytest.mark.parametrize(("family", "mode"), [pair for pair in SYSTEM_MODES if pair[1] != "ac"])
def test_all_completions_sum_to_one(family: str, mode: str) -> None:
    model = small_baseline(family, vocab_size=3, max_length=6)
    context = torch.tensor([[False, True, False, False, True, False]])
    if mode == "ar":
        context = torch.zeros(1, 5, dtype=torch.bool)
    free = [t for t, given in enumerate(context[0].tolist()) if not given]
    fillings = torch.tensor(list(itertools.product(range(3), repeat=len(free))))
    tokens = torch.ones(len(fillings), context.shape[1], dtype=torch.int64)
    tokens[:, free] = fillings
    log_prob = model.log_prob(Batch(tokens, context.expand(len(tokens), -1)), mode)
    assert abs(float(log_prob.sum(1).exp().sum().detach()) - 1) < 1e-9
    assert bool((log_prob[:, context[0]] == 0).all())


@pytest.mark.parametrize(("family", "mode"), SYSTEM_MODES)
def test_logits_at_equals_forward(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(3, 9)
    everything = model(Batch(tokens, context, lengths), mode)
    for wanted in (
        ~context & (torch.arange(9) < lengths[:, None]),
        torch.arange(9).expand(3, 9) < 2,
    ):
        torch.testing.assert_close(
            model.logits_at(Batch(tokens, context, lengths), mode, wanted),
            everything[wanted],
            rtol=0,
            atol=1e-10,
        )


@pytest.mark.parametrize(
    ("family", "mode", "tied"),
    [(*pair, True) for pair in SYSTEM_MODES]
    + [(*pair, False) for pair in UNTIED]
    + [(f"{system} d_condition=6", "diffusion", True) for system in SYSTEMS],
)
def test_every_parameter_has_a_gradient(family: str, mode: str, tied: bool) -> None:
    """Data-parallel training would stop at a parameter without a gradient."""
    model = small_baseline(family, dropout=0.1, **({} if tied else {"tied": False})).train()
    tokens, context, lengths = random_question(4, 12)
    torch.manual_seed(0)  # diffusion draws its noise
    model.loss(Batch(tokens, context, lengths), mode).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        # the same for every key: the softmax does not see it
        if not name.endswith(("k_proj.bias", "key.bias")):
            assert float(parameter.grad.abs().max()) > 1e-9, name


@pytest.mark.parametrize(("family", "mode"), UNTIED)
def test_every_row_of_the_embedding_has_a_gradient(family: str, mode: str) -> None:
    """No row of the embedding is frozen as padding.

    With an untied head, a row learns only as an input.
    """
    model = small_baseline(family, tied=False)
    tokens = torch.arange(7)[None]
    model.loss(Batch(tokens, tokens < 6), mode).backward()
    grad = model.embedding_tables()[0].grad
    assert grad is not None
    assert bool(grad[:6].any(1).all())


@pytest.mark.parametrize(("family", "mode"), [*SYSTEM_MODES, ("sedd d_condition=6", "diffusion")])
def test_recomputing_activations_gives_the_same_gradients(family: str, mode: str) -> None:
    model = small_baseline(family).train()
    tokens, context, lengths = random_question(3, 10)
    gradients = []
    for recompute in (False, True, False):
        model.checkpoint_activations = recompute
        model.zero_grad()
        torch.manual_seed(0)  # sigma-gpt draws its orders, sedd its noise
        model.loss(Batch(tokens, context, lengths), mode).backward()
        gradients.append(
            {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        )
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "mode", "tied"),
    [(*pair, True) for pair in SYSTEM_MODES + DIFFUSION_MODES]
    + [(*pair, False) for pair in UNTIED],
)
def test_a_saved_model_loads_unchanged(family: str, mode: str, tied: bool, tmp_path: Path) -> None:
    model = small_baseline(family, **({} if tied else {"tied": False}))
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=torch.float64)
    assert type(again) is type(model)
    assert again.config == model.config
    tokens, context, lengths = random_question(2, 12)
    torch.testing.assert_close(
        again(Batch(tokens, context, lengths), mode),
        model(Batch(tokens, context, lengths), mode),
        rtol=0,
        atol=1e-13,
    )
    assert again.num_parameters() == model.num_parameters()  # what was tied is tied again
    # what training exports is what a folder holds
    assert set(dict(model.named_parameters())) == set(model.tensors())


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_have_no_row_for_the_mask(family: str) -> None:
    model = small_baseline(family)
    assert model.head.shape == (7, 8)
    assert model.head_bias is None or model.head_bias.shape == (7,)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bart", {"d_model": 9}, "d_model is 9, not divisible by n_head 2"),
        ("bert", {"dropout": 1.0}, r"dropout is 1\.0"),
        ("bert-bidir", {"init_std": 0.0}, r"init_std is 0\.0"),
        ("gpt2", {"bos_id": 7}, r"bos_id is 7; it must lie in 0\.\.6"),
        ("gpt2-fim", {"max_holes": 0}, "max_holes is 0"),
        ("gpt2", {"modes": ("car",)}, r"modes is \('car',\)"),
        ("bart", {"positions_from": "sines"}, "positions_from is 'sines'; allowed: normal, sinu"),
        ("bart", {"norm": "none"}, "norm is 'none'; allowed: post, pre"),
        ("bert", {"norm": "none"}, "norm is 'none'; allowed: post, pre"),
        ("mdlm", {**TRACFORMER, "time_conditioning": True}, "time_conditioning is True"),
        ("mdlm", {"backbone": "lstm"}, "backbone is 'lstm'"),
        ("as-arm", {"order": "any"}, "order is 'any'; allowed: text, random"),
    ],
)
def test_bad_configurations(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_baseline(family, **changes)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for family in FAMILIES:
        kind = find_family(family).model_class
        # reading a configuration does not need the package
        config = kind.config_class.preset("tiny")
        with pytest.raises(
            ImportError,
            match=rf"the system '{family}' needs the package 'transformers'.*tracformer\[peers\]",
        ):
            kind(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_can_start_as_sinusoids(family: str) -> None:
    """Every table is the same, each row rotated against the one before by the same angles.

    Everything else is drawn as before.
    """
    kind = find_family(family).model_class
    models = []
    for start in ("normal", "sinusoids"):
        torch.manual_seed(0)
        models.append(
            kind(
                kind.config_class(
                    **{**SMALL, "max_length": 64, "init_std": 0.05, "positions_from": start}
                )
            )
        )
    plain, model = (dict(each.named_parameters()) for each in models)
    moved = [name for name in plain if not torch.equal(plain[name], model[name])]
    assert len(moved) == (2 if family == "bart" else 1)
    for name in moved:
        table = model[name].detach()[len(model[name]) % 32 :]  # BART's first two rows are unused
        sines, cosines = table.chunk(2, dim=1)
        assert model[name].requires_grad
        torch.testing.assert_close(sines**2 + cosines**2, torch.full_like(sines, 2 * 0.05**2))
        turned = sines[:-1] * cosines[1:] - cosines[:-1] * sines[1:]
        torch.testing.assert_close(turned, turned[:1].expand_as(turned), rtol=0, atol=1e-6)
        assert not sines[0].any()


def model(**changes: int) -> Frequencies:
    return Frequencies(FrequenciesConfig(**{"vocab_size": 5, "max_length": 12, **changes}))


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_frequencies_ignore_the_given_tokens(mode: str) -> None:
    frequencies = model()
    with torch.no_grad():
        frequencies.scores.normal_()
    tokens = torch.randint(5, (3, 12))
    whole = frequencies.log_prob(Batch(tokens, torch.zeros(3, 12, dtype=torch.bool)), mode)
    context = torch.rand(3, 12) < 0.5
    assert torch.equal(
        frequencies.log_prob(Batch(tokens, context), mode), whole.masked_fill(context, 0.0)
    )


def test_the_loss_is_minimal_at_the_frequencies() -> None:
    frequencies = model().double()
    counts = torch.tensor([1.0, 3.0, 8.0, 20.0, 400.0], dtype=torch.float64)
    tokens = torch.arange(5).repeat_interleave(counts.long()).view(-1, 12)
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    optimizer = torch.optim.LBFGS(
        frequencies.parameters(), max_iter=200, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = frequencies.loss(Batch(tokens, nothing), "ac")
        value.backward()
        return value

    optimizer.step(loss)
    found = frequencies(Batch(tokens[:1], nothing[:1]), "ac")[0, 0].softmax(0)
    torch.testing.assert_close(found, counts / counts.sum(), rtol=1e-3, atol=0.0)
