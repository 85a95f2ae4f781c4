"""What the protocols' requests are made of: texts that are text, and models that are strict or lenient about fields they do not know."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is NUL, which is not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not text") from None
    return text


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, Field(max_length=200)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stops = Annotated[Text, Field(min_length=1, max_length=200)] | list[Annotated[Text, Field(min_length=1, max_length=200)]]


class Strict(BaseModel):
    """A field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """Clients of other servers send fields that mean nothing here: they are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def listed(stops: str | list[str] | None) -> tuple[str, ...]:
    return () if stops is None else (stops,) if isinstance(stops, str) else tuple(stops)
