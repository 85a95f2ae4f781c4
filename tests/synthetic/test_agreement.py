import random

from tracformer.data import toy_stories as agreement


def test_stories_follow_the_rules_and_stay_in_the_vocabulary() -> None:
    rng = random.Random(0)
    known = set(agreement.vocabulary())
    for _ in range(200):
        words = agreement.write_story(rng)
        assert set(words) <= known
        assert agreement.follows_the_rules(words)


def test_broken_agreement_is_seen() -> None:
    words = agreement.write_story(random.Random(1))
    for far in ("she", "he", "her", "him", *agreement.COLOURS, *agreement.THINGS):
        if far in words:
            last = len(words) - 1 - words[::-1].index(far)
            swapped = {"she": "he", "he": "she", "her": "him", "him": "her"}.get(far)
            other = swapped or next(
                w
                for group in (agreement.COLOURS, agreement.THINGS)
                if far in group
                for w in group
                if w != far
            )
            assert not agreement.follows_the_rules([*words[:last], other, *words[last + 1 :]])
