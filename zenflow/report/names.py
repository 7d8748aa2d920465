"""How settings are called: by the fields in which they differ or, shorter, by what their sweeps varied."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from zenflow.report.settings import DELAY, WITHOUT_EFFECT, Values, has, parsed, printable, value_of

SYMBOLS = {"engine.topk_ratio": "k", "engine.update_interval": "U"}
LONG = 30  # characters, from which on a name is too long for a picture
ANYTHING = ("experiment", "debug")  # groups whose files may set any key
QUOTES = "'\""


@dataclass(frozen=True)
class Name:
    """A setting's name before it is written: words by key, as {"engine": "zenflow", "engine.topk_ratio": "k 0.05"}."""

    words: dict[str, str]
    engine: str  # the name where there is no word

    def __str__(self) -> str:
        return self.without({})

    def without(self, usual: dict[str, str]) -> str:
        """The name less words that go without saying."""
        return ", ".join(word for key, word in self.words.items() if usual.get(key) != word) or self.engine


def field_names(settings: Sequence[Values], keys: Sequence[str]) -> list[Name]:
    """Each setting by its values of `keys`, as "zenflow, k 0.05, U 4"; the engine alone where nothing differs."""
    short, names = _short_keys(keys), []
    shown = {key: {value_of(values, key) for values in settings} for key in keys}
    for values in settings:
        engine = str(values["engine"])
        words = {"engine": engine} if "engine" in keys or not keys else {}
        for key in keys:
            if key == "engine" or not has(values, key) or (key == DELAY and key not in values):
                continue  # a delay that nobody has chosen follows from the others
            word = show_value(value_of(values, key), shown[key])
            words[key] = word if key == "machine" else f"{short[key]} {word}"
        names.append(Name(words, engine))
    return names


def override_names(
    settings: Sequence[Values], keys: Sequence[str], given: Sequence[Values | None]
) -> list[Name] | None:
    """Each setting by its overrides, as "stagger, lr 2e-5", less what all have; None where that says too little.

    keys: in which the settings differ. given: a setting's overrides, as `parse` has them; None if its runs have several
    or none. They say which keys are told, the settings their values. They say enough if settings that leave a key out
    have one value of it for each choice of the groups that it is in, and no two settings have one name.
    """
    if None in given:
        return None
    chosen = [_chosen(values, words) for values, words in zip(settings, given, strict=True)]
    for key in keys:
        silent: dict[Hashable, set[Hashable]] = {}
        for values, words in zip(settings, chosen, strict=True):
            if key not in words and has(values, key):
                silent.setdefault(_choices(words, key), set()).add(value_of(values, key))
        if any(len(values) > 1 for values in silent.values()):
            return None
    known = list(dict.fromkeys(key for values in (*settings, *chosen) for key in values))
    told = sorted({key for words in chosen for key in words}, key=known.index)
    varied = [key for key in told if len({words.get(key, ...) for words in chosen}) > 1]
    short, names = _short_keys(varied), []
    shown = {key: {words.get(key) for words in chosen} for key in varied}
    for values, words in zip(settings, chosen, strict=True):
        own = {key: show_value(words[key], shown[key]) for key in varied if key in words and has(values, key)}
        texts = {key: word if key == "engine" else f"{short[key]} {word}" for key, word in own.items()}
        names.append(Name(texts, str(words["engine"])))
    return names if len({str(name) for name in names}) == len(names) else None


def _chosen(values: Values, given: Values) -> Values:
    """The overrides with the values that they came to, and the engine."""
    return {"engine": values["engine"]} | {
        key: word if key == "engine" else values.get(key, word) for key, word in given.items()
    }


def _choices(words: Values, key: str) -> Hashable:
    """What overrides chose of the groups that may set a key."""
    return frozenset((name, word) for name, word in words.items() if key.startswith(f"{name}.") or name in ANYTHING)


def parse(words: Sequence[str] | None) -> Values | None:
    """A job's overrides by key, those inside a variant like the others; without the seed and what bears on no result.

    None where there are none to be read, or two for one key.
    """
    if words is None:
        return None
    given: Values = {}
    for word in " ".join(text.removeprefix("variant=").strip(QUOTES) for text in words).split():
        key, equals, text = word.lstrip("+").partition("=")
        if word == "null":  # a variant that changes nothing
            continue
        if not equals or key.startswith("~"):
            return None
        if key in WITHOUT_EFFECT or f"{key}.".startswith("tracking."):
            continue
        value = parsed(text.strip(QUOTES))
        if given.setdefault(key, value) != value:
            return None
    return given


def plain_name(given: Values) -> str:
    """One run by all its overrides."""
    short = _short_keys(list(given))
    words = {key: show_value(value, {value}) for key, value in given.items()}
    return ", ".join(word if key == "engine" else f"{short[key]} {word}" for key, word in words.items())


def brief(names: Sequence[Name], *, silent: bool = False) -> tuple[list[str], str]:
    """Labels for a picture, and what they leave out: of long names the words that most have.

    They are as distinct as the full names, which they are where these are short enough. silent: whether a name without
    a word for a key may mean any value of it, so that only words which every name has may be left out.
    """
    full = [str(name) for name in names]
    if max(map(len, full)) <= LONG:
        return full, ""
    usual = {}
    for key in sorted(
        {key: None for name in names for key in name.words}, key=lambda key: not key.startswith("engine")
    ):
        words = [name.words[key] for name in names if key in name.words]
        if key not in ("engine", "machine", DELAY, *SYMBOLS) and not (silent and len(words) < len(names)):
            usual[key] = max(words, key=words.count)
    short = [name.without(usual) for name in names]
    return (short, ", ".join(usual.values())) if len(set(short)) == len(short) else (full, "")


def details(values: Values, others: Sequence[Values], keys: Sequence[str]) -> list[str]:
    """What tells a task from others, as "path one/text.txt": its values of `keys`."""
    short = _short_keys(keys)
    return [
        f"{short[key]} {show_value(value_of(values, key), {value_of(other, key) for other in others})}" for key in keys
    ]


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    lasts = [key.rpartition(".")[2] for key in keys]
    return {
        key: SYMBOLS.get(key, last if lasts.count(last) == 1 else key) for key, last in zip(keys, lasts, strict=True)
    }


def show_value(value: Hashable, others: set[Hashable]) -> str:
    """A value in few characters; of a path as many last parts as tell it from the others."""
    if isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return re.sub(r"(e[+-])0+", r"\1", text)
    if isinstance(value, str):
        if "/" not in value:
            return printable(value)
        parts, rivals = value.split("/"), [other.split("/") for other in others if isinstance(other, str)]
        for count in range(1, len(parts) + 1):
            if sum(rival[-count:] == parts[-count:] for rival in rivals) == 1:
                return printable("/".join(parts[-count:]))
    return json.dumps(value)
