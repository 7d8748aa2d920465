"""Settings of ZenFlow as words on the command line: `U=4,accumulate_on=host`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from typing import Any

from zenflow.config import ZenFlowConfig

SHORT = {"k": "topk_ratio", "U": "update_interval"}
DEFAULT_VARIANTS = (
    *("U=4", "U=8", "U=4,stagger=false,weight_prediction=0"),  # the last: the paper's schedule
    *("U=4,accumulate_on=host", "U=4,accumulate_on=host,deferred_rule=replay"),
)
WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Variant:
    """A name for the table, and the fields of `ZenFlowConfig` that it sets; `window` is its U in steps."""

    text: str
    settings: dict[str, Any]

    @property
    def window(self) -> int:
        return ZenFlowConfig(**self.settings).resolved().update_interval


def parse_variant(text: str) -> Variant:
    """`key=value,...` with the keys k, U and the fields of the installed `ZenFlowConfig`.

    Raises ValueError naming the bad key or value and what is allowed.
    """
    allowed = {field.name for field in fields(ZenFlowConfig)}
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        name = SHORT.get(key, key)
        if not equals:
            raise ValueError(f"{part!r} in {text!r} has no '='; allowed: key=value, as in U=4,k=0.1")
        if name not in allowed:
            raise ValueError(
                f"{key!r} in {text!r} is no setting of the installed zenflow; allowed: "
                f"{', '.join([*SHORT, *sorted(allowed)])}"
            )
        if name in settings:
            raise ValueError(f"{text!r} sets {name} twice; allowed: once")
        settings[name] = _value(value, name)
    try:
        ZenFlowConfig(**settings)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    return Variant(text, settings)


def _value(text: str, name: str) -> Any:
    # The words of deferred_lr_scale are words: its "none" is not None.
    if text.lower() in WORDS and not (name == "deferred_lr_scale" and text == "none"):
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
