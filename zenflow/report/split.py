"""Which runs are compared with which: those of one task and, if a setting is split by, of one value of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from zenflow.report import settings
from zenflow.report.names import details
from zenflow.report.runs import Run
from zenflow.report.settings import Values
from zenflow.terminal import counted
from zenflow.training.errors import InputError


@dataclass(frozen=True)
class Part:
    """Runs that are one comparison, under its title; `notes` are sentences of caution."""

    title: str
    runs: list[Run]
    notes: list[str] = field(default_factory=list)


def parts_of(runs: Sequence[Run], split: Sequence[str] = ()) -> list[Part]:
    """One part for each task and each value that its runs have of the `split` keys, by title, then by value.

    A run whose engine has no use for a key, as AdamW for the engine's, is in the parts of all its values. Errors:
    InputError for a key that no run has.
    """
    _check(runs, split)
    tasks: dict[Hashable, list[Run]] = {}
    for run in runs:
        tasks.setdefault(settings.key(settings.task_of(run.config)), []).append(run)
    titled = sorted(zip(_titles(tasks), tasks.values(), strict=True), key=lambda pair: pair[0])
    return [part for title, members in titled for part in _split(title, members, split)]


def with_machines(runs: Sequence[Run]) -> list[Run]:
    """The same runs; unfinished ones with the machine of those that ended, if that is one: summary.json names it."""
    known: dict[str, set[str]] = {}
    for run in runs:
        if run.summary.get("device"):
            known.setdefault(str(run.config.get("device")), set()).add(run.summary["device"])
    result = []
    for run in runs:
        kind = str(run.config.get("device"))
        machines = {kind} if kind == "cpu" else known.get(kind, set())
        if run.unfinished and len(machines) == 1:
            run = replace(run, summary=run.summary | {"device": min(machines)})
        result.append(run)
    return result


def _setting(run: Run) -> Values:
    return settings.setting_of(run.config, run.summary.get("device"))


def _check(runs: Sequence[Run], split: Sequence[str]) -> None:
    known = [_setting(run) for run in runs]
    for key in split if runs else ():
        if not any(key in values for values in known):
            allowed = ", ".join(settings.differing(known)) or "none, for all runs are of one setting"
            raise InputError(f"split {key} is no setting of these runs; allowed: {allowed}.")


def _titles(tasks: dict[Hashable, list[Run]]) -> list[str]:
    """The names of the tasks; where two have the same, with what differs between these."""
    configs = [members[0].config for members in tasks.values()]
    names = [settings.task_name(config) for config in configs]
    titles = []
    for name, config in zip(names, configs, strict=True):
        rivals = [settings.task_of(other) for other, same in zip(configs, names, strict=True) if same == name]
        titles.append(", ".join([name, *details(settings.task_of(config), rivals, settings.differing(rivals))]))
    return titles


def _split(title: str, runs: list[Run], split: Sequence[str]) -> list[Part]:
    """A task's parts: one for each set of values that no other set has more of."""
    values = [_setting(run) for run in runs]
    own = [{key: settings.value_of(each, key) for key in split if settings.has(each, key)} for each in values]
    distinct = [mine for place, mine in enumerate(own) if mine not in own[:place]]
    whole = [mine for mine in distinct if not any(_within(mine, other) for other in distinct)]
    parts = []
    for mine in sorted(whole, key=lambda mine: [(key in mine, settings.place_of(mine.get(key))) for key in split]):
        members = [run for run, theirs in zip(runs, own, strict=True) if theirs == mine or _within(theirs, mine)]
        told = [word for word in details(mine, own, list(mine)) if word not in title.split(", ")]
        shared = sum(_within(theirs, mine) for theirs in own)
        note = f"Without {' or '.join(split)}, and so in several comparisons: {counted(shared, 'run')}."
        parts.append(Part(", ".join([title, *told]), members, [note] if shared else []))
    return parts


def _within(fewer: Values, more: Values) -> bool:
    return fewer.items() < more.items()
