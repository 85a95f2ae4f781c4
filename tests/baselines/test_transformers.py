"""The baselines equal the bare networks of `transformers` with the same weights."""

import pytest
import torch

from tests.toys import random_batch, random_question, small_baseline
from tracformer.baselines import transformer as dense
from tracformer.baselines.bart import Bart
from tracformer.baselines.bert import Bert
from tracformer.baselines.gpt2 import GPT2, GPT2Fim
from tracformer.model.batch import Batch

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 12,
}


def masked_batch(length: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, context, and the tokens with every target replaced by the mask, 7."""
    tokens, context, _ = random_question(3, length)
    return tokens, context, tokens.masked_fill(~context, 7)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tied", [True, False])
def test_bart(tied: bool, norm: str) -> None:
    ours = small_baseline("bart", tied=tied, norm=norm)
    assert isinstance(ours, Bart)
    kind = "MBart" if norm == "pre" else "Bart"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=8,
        d_model=8,
        max_position_embeddings=12,
        **{
            f"{half}_{what}": n
            for half in ("encoder", "decoder")
            for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
        },
        decoder_start_token_id=7,
        pad_token_id=None,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double().eval()
    weights = {f"model.{name}": tensor for name, tensor in ours.network.state_dict().items()}
    head = torch.cat((ours.head, torch.zeros(1, 8)))  # a row for the mask, which we never predict
    missing, unexpected = theirs.load_state_dict(
        {**weights, "lm_head.weight": ours.network.shared.weight if tied else head}, strict=False
    )
    assert missing == ["final_logits_bias"]
    assert not unexpected
    tokens, context, masked = masked_batch()
    start = torch.full((3, 1), 7)
    expected = theirs(
        input_ids=masked, decoder_input_ids=torch.cat((start, tokens[:, :-1]), 1)
    ).logits[..., :7]
    torch.testing.assert_close(
        ours(Batch(tokens, context), "car")[~context], expected[~context], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tied", [True, False])
def test_bert(tied: bool, norm: str) -> None:
    ours = small_baseline("bert", tied=tied, norm=norm)
    assert isinstance(ours, Bert)
    kind = "RobertaPreLayerNorm" if norm == "pre" else "Bert"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=8,
        intermediate_size=32,
        type_vocab_size=1,
        tie_word_embeddings=tied,
        pad_token_id=None,
        attn_implementation="eager",
        **SHAPE,
    )
    theirs = getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()
    theirs.load_state_dict(ours.network.state_dict())
    tokens, context, masked = masked_batch()
    places = torch.arange(masked.shape[1])[None]
    expected = theirs(
        input_ids=masked, attention_mask=torch.ones_like(masked), position_ids=places
    ).logits[..., :7]
    torch.testing.assert_close(
        ours(Batch(tokens, context), "ac")[~context], expected[~context], rtol=0, atol=1e-6
    )


def bare_gpt2(ours: GPT2) -> torch.nn.Module:
    shape = {**SHAPE, "max_position_embeddings": ours.config.positions}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=ours.config.rows, attn_implementation="eager", **shape)
    )
    theirs.transformer.load_state_dict(ours.network.state_dict())
    return theirs.double().eval()


def test_gpt2() -> None:
    ours = small_baseline("gpt2", bos_id=4)
    assert isinstance(ours, GPT2)
    tokens, context, _ = masked_batch()
    expected = bare_gpt2(ours)(
        input_ids=torch.cat((torch.full((3, 1), 4), tokens[:, :-1]), 1)
    ).logits
    torch.testing.assert_close(ours(Batch(tokens, context), "ar"), expected, rtol=0, atol=1e-6)


def test_gpt2_fim() -> None:
    """The example in the module's docstring, written by hand."""
    ours = small_baseline("gpt2-fim")
    assert isinstance(ours, GPT2Fim)
    a, b, c, d, e, f, g, h = 3, 1, 4, 1, 5, 2, 6, 5
    bos, hole, opening = 6, 7, 8
    tokens = torch.tensor([[a, b, c, d, e, f, g, h]])
    context = torch.tensor([[True, True, False, False, True, True, False, True]])
    reading = [bos, a, b, hole, e, f, hole, h, opening, c, d, opening, g]
    made, slots = ours.reorder(Batch(tokens, context))
    assert made.tolist() == [reading[:-1]]
    assert slots[~context].tolist() == [9, 10, 12]
    logits = bare_gpt2(ours)(input_ids=torch.tensor([reading])).logits[0, :, :7]
    log_prob = ours.log_prob(Batch(tokens, context), "car")
    for position, slot in ((2, 9), (3, 10), (6, 12)):
        expected = logits[slot - 1].log_softmax(-1)[tokens[0, position]]
        assert abs(float((log_prob[0, position] - expected).detach())) < 1e-6
    plain = bare_gpt2(ours)(input_ids=torch.tensor([[bos, a, b, c, d, e, f, g]])).logits[..., :7]
    torch.testing.assert_close(ours(Batch(tokens, context), "ar"), plain, rtol=0, atol=1e-6)


TRAINED = ["bart", "bert", "bert-bidir", "gpt2", "gpt2-fim", "mdlm"]


def loss_and_gradients(family: str, used: str) -> tuple[float, list[torch.Tensor]]:
    model = small_baseline(family)
    mode = model.config.modes[0]
    tokens, context, lengths = random_batch(model, 3, 12, seed=4)
    torch.manual_seed(0)  # diffusion draws its noise
    loss = model.loss(Batch(tokens, context, lengths), mode)
    loss.backward()
    if family != "mdlm":
        assert model.network.config._attn_implementation == used
    return float(loss.detach()), [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("family", TRAINED)
def test_plain_and_fused_attention_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_gradients = loss_and_gradients(family, "eager")
    monkeypatch.setattr(dense, "SHORT", 0)
    fused, fused_gradients = loss_and_gradients(family, "sdpa")
    assert plain == pytest.approx(fused, abs=1e-10)
    assert len(plain_gradients) == len(fused_gradients) > 0
    for one, other in zip(plain_gradients, fused_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_plain_attention_only_for_short_training_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert dense.trains_faster_plain(cpu, dense.SHORT)
    assert not dense.trains_faster_plain(cpu, dense.SHORT + 1)
    assert not dense.trains_faster_plain(torch.device("cuda"), 8)
    with torch.no_grad():
        assert not dense.trains_faster_plain(cpu, 8)
