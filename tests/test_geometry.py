"""Key sets and scopes, mirror images, and the layout of both readings of a batch."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracformer import geometry
from tracformer.attention.reference import Layout, mirrored

layers = st.integers(1, 12)
key_counts = st.integers(2, 40)


def test_short_reach_reads_everything() -> None:
    assert geometry.encoder_offsets(4, 16) == tuple(range(9))
    assert geometry.encoder_offsets(5, 16) == tuple(range(17))  # w = n_max: 17 keys


def test_step_divides_reach() -> None:
    assert geometry.encoder_offsets(6, 16) == tuple(range(0, 33, 2))


def test_paper_small_has_a_far_key_in_layers_9_and_10() -> None:
    odd = [
        layer
        for layer in range(1, 11)
        if geometry.arithmetic_run(geometry.encoder_offsets(layer, 16), 1024).extra
    ]
    assert odd == [9, 10]
    assert geometry.encoder_offsets(9, 16)[-2:] == (255, 256)


def test_two_keys() -> None:
    assert geometry.encoder_offsets(5, 2) == (0, 16)


def test_rounded_key_set() -> None:
    assert geometry.encoder_offsets(6, 5, "rounded") == (0, 8, 16, 24, 32)
    assert geometry.encoder_offsets(5, 4, "rounded") == (0, 5, 11, 16)
    assert geometry.encoder_offsets(3, 5, "rounded") == (0, 1, 2, 3, 4)


@given(layers, key_counts, st.sampled_from(geometry.KEY_SETS))
def test_offsets_rise_from_the_query_to_the_reach(layer: int, n_max: int, key_set: str) -> None:
    offsets = geometry.encoder_offsets(layer, n_max, key_set)
    assert offsets[0] == 0
    assert offsets[-1] == geometry.reach(layer)
    assert all(a < b for a, b in itertools.pairwise(offsets))
    if key_set == "rounded":
        assert len(offsets) == min(n_max, geometry.reach(layer) + 1)


@given(layers, key_counts, st.sampled_from(geometry.KEY_SETS))
def test_scope_by_composition_is_the_last_2_to_the_l(layer: int, n_max: int, key_set: str) -> None:
    scope = {0}
    for below in range(1, layer + 1):
        scope = {o + s for o in geometry.encoder_offsets(below, n_max, key_set) for s in scope}
    assert scope == set(range(geometry.scope_size(layer)))


@given(st.integers(1, 70), st.integers(1, 70), st.lists(st.integers(0, 40), unique=True))
def test_encoders_mirror_each_other(length: int, t: int, distances: list[int]) -> None:
    t = min(t, length)
    offsets = (0, *sorted(set(distances) - {0}))
    mirrored = [length + 1 - key for key in geometry.prefix_encoder_keys(length + 1 - t, offsets)]
    assert list(geometry.suffix_encoder_keys(t, offsets, length)) == mirrored


@given(st.integers(1, 7), st.data())
def test_a_decoder_layer_tiles_prefix_and_suffix(n_layer: int, data: st.DataObject) -> None:
    """Each input is in the scope of exactly one key: all before t by prefix keys,
    all after t by suffix keys.
    """
    length = data.draw(st.integers(1, 2**n_layer))
    t = data.draw(st.integers(1, length))
    layer = data.draw(st.integers(1, n_layer))
    stride = geometry.decoder_stride(layer, n_layer)
    scope = geometry.scope_size(geometry.paired_encoder_layer(layer, n_layer))
    assert stride == scope
    before = [
        i
        for key in geometry.prefix_decoder_keys(t, stride)
        for i in range(max(1, key - scope + 1), key + 1)
    ]
    after = [
        i
        for key in geometry.suffix_decoder_keys(t, stride, length)
        for i in range(key, min(length, key + scope - 1) + 1)
    ]
    assert sorted(before) == list(range(1, t))
    assert sorted(after) == list(range(t + 1, length + 1))


@given(layers, key_counts, st.integers(1, 5000), st.sampled_from(geometry.KEY_SETS))
def test_arithmetic_run_loses_no_key(layer: int, n_max: int, length: int, key_set: str) -> None:
    offsets = geometry.encoder_offsets(layer, n_max, key_set)
    run = geometry.arithmetic_run(offsets, length)
    assert (*range(0, run.step * run.count, run.step), *run.extra) == tuple(
        o for o in offsets if o < length
    )


def test_wrong_key_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="n_max is 1"):
        geometry.encoder_offsets(3, 1)
    with pytest.raises(ValueError, match=r"'even'.*stepped, rounded"):
        geometry.encoder_offsets(3, 4, "even")


# ---- layout of a padded batch


def layout(readings: int = 2) -> Layout:
    return Layout(
        torch.tensor([4, 2]), length=4, readings=readings, rows=torch.tensor([0, 2, 3, 5])
    )


def test_each_sequence_is_mirrored_at_its_own_length() -> None:
    assert layout().mirror.tolist() == [[3, 2, 1, 0], [1, 0, 2, 3]]
    x = torch.randn(2, 4, 3)
    assert torch.equal(mirrored(mirrored(x, layout().mirror), layout().mirror), x)


def test_positions_are_true_positions() -> None:
    assert layout().positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3]]
    assert layout(readings=1).positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_the_slot_of_a_query_is_its_nearest_key() -> None:
    # rows: position 0, 2, 3 of the first sequence, position 1 of the second
    forwards, backwards = layout().query_slots.tolist()
    assert forwards == [-1, 1, 2, 4]
    assert backwards == [8 + 2, 8 + 0, -1, -1]
