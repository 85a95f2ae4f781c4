"""Short generated stories whose words agree across long distances.

    Mia carried the blue lamp to the market , where the tall men from the village sing all day .
    in the evening she sold the blue lamp to a baker , and the men thanked her .

The hero's gender decides two pronouns, the thing and its colour are repeated, and the number of the
crowd decides its verb and is repeated at the end. So a blank can only be filled with the words on
both sides of it, and every fill can be checked by rule.
"""

import random
import re

HEROES = {"she": ("Mia", "Anna", "Rosa", "Ida"), "he": ("Tom", "Ben", "Otto", "Karl")}
OBJECT_PRONOUN = {"she": "her", "he": "him"}
COLOURS = ("blue", "red", "green", "golden")
THINGS = ("lamp", "drum", "boat", "chair", "clock")
PLACES = ("market", "river", "castle", "harbour")
CROWDS = (("man", "men"), ("sailor", "sailors"), ("child", "children"), ("farmer", "farmers"))
LOOKS = ("tall", "old", "happy", "quiet")
HOMES = ("village", "island", "mountain", "city")
VERBS = (("sings", "sing"), ("works", "work"), ("dances", "dance"))
BUYERS = ("baker", "teacher", "doctor", "king")


def write_story(rng: random.Random) -> list[str]:
    """Return a story as words."""
    pronoun = rng.choice(("she", "he"))
    number = rng.randrange(2)
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    crowd, verb = rng.choice(CROWDS)[number], rng.choice(VERBS)[number]
    return (
        f"{rng.choice(HEROES[pronoun])} carried the {colour} {thing} to the {rng.choice(PLACES)} , "
        f"where the {rng.choice(LOOKS)} {crowd} "
        f"from the {rng.choice(HOMES)} {verb} all day . in the evening {pronoun} sold the {colour} "
        f"{thing} to a {rng.choice(BUYERS)} , "
        f"and the {crowd} thanked {OBJECT_PRONOUN[pronoun]} ."
    ).split()


def follows_the_rules(words: list[str]) -> bool:
    """Return whether `write_story` could have written these words."""
    return any(pattern.fullmatch(" ".join(words)) for pattern in _PATTERNS)


def vocabulary() -> list[str]:
    """Return every word that stories use, sorted."""
    chosen = [
        *HEROES.values(),
        COLOURS,
        THINGS,
        PLACES,
        *CROWDS,
        LOOKS,
        HOMES,
        *VERBS,
        BUYERS,
        HEROES,
        OBJECT_PRONOUN.values(),
    ]
    fixed = set(write_story(random.Random(0))) & set(write_story(random.Random(1)))
    return sorted({word for words in chosen for word in words} | fixed)


def _pattern(pronoun: str, number: int) -> re.Pattern[str]:
    def one(words: tuple[str, ...]) -> str:
        return f"({'|'.join(words)})"

    crowds, verbs = tuple(c[number] for c in CROWDS), tuple(v[number] for v in VERBS)
    return re.compile(
        f"{one(HEROES[pronoun])} carried the (?P<colour>{one(COLOURS)}) (?P<thing>{one(THINGS)}) "
        f"to the {one(PLACES)} , "
        f"where the {one(LOOKS)} (?P<crowd>{one(crowds)}) from the {one(HOMES)} {one(verbs)} all "
        "day \\. "
        f"in the evening {pronoun} sold the (?P=colour) (?P=thing) to a {one(BUYERS)} , "
        f"and the (?P=crowd) thanked {OBJECT_PRONOUN[pronoun]} \\."
    )


_PATTERNS = tuple(_pattern(pronoun, number) for pronoun in ("she", "he") for number in (0, 1))
