import torch

from tracformer.attention.layout import Layout, mirrored


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


def test_a_query_stands_on_its_nearest_key() -> None:
    # rows: position 0, 2, 3 of the first sequence, position 1 of the second
    forwards, backwards = layout().query_slots.tolist()
    assert forwards == [-1, 1, 2, 4]
    assert backwards == [8 + 2, 8 + 0, -1, -1]
