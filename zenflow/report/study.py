"""Runs of one model on one data set side by side: settings, what they are compared at, and the baseline."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zenflow.report import names, settings
from zenflow.report.figures import (
    Spread,
    equal_seconds,
    equal_step,
    loss_at_seconds,
    loss_at_step,
    percent,
    run_figures,
)
from zenflow.report.figures import spread as spread_of
from zenflow.report.runs import LeftOut, Run
from zenflow.report.settings import ADAMW, Values
from zenflow.report.split import Part, parts_of
from zenflow.terminal import counted
from zenflow.training.errors import InputError

NOT_IN_LINES = "Traffic in M and stalls between two steps, which only a summary holds, are left out."


@dataclass(eq=False)
class Setting:
    """Runs that differ in the seed alone. `figures` are those of its runs, `spreads` their means, under equal names.

    `label` is the name in a picture, which is shorter where names are long (`Study.usual`). `fields` is the name by the
    fields in which the settings differ, which `name` is, too, unless the sweep's overrides say it shorter; `engine` is
    the engine as `name` calls it.
    `vs_steps` and `vs_seconds`: percent by which the mean validation loss lies above the baseline's, at equal steps and
    at equal training time; None without a baseline. `pairs` are the same differences seed by seed, where both have the
    same seeds, under the figures' names.
    """

    name: str
    values: Values
    runs: list[Run]
    left_out: int = 0
    figures: list[dict[str, float | None]] = field(default_factory=list)
    spreads: dict[str, Spread | None] = field(default_factory=dict)
    vs_steps: float | None = None
    vs_seconds: float | None = None
    pairs: dict[str, Spread | None] = field(default_factory=dict)
    label: str = ""
    fields: str = ""
    engine: str = ""

    @property
    def overrides(self) -> Values | None:
        """What its runs' sweeps varied for it; None if that is not the same for all, or not known."""
        given = [names.parse(run.overrides) for run in self.runs]
        return given[0] if all(one == given[0] for one in given) else None

    @property
    def seeds(self) -> list[int]:
        return [run.config["seed"] for run in self.runs]

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs."""
        spread = self.spreads[name]
        return None if spread is None else spread.mean


@dataclass
class Study:
    """Settings of one task, sorted; `keys` are those in which they differ. `notes` are sentences of caution.

    `usual` are the values of most settings, which their labels leave out; empty where nothing is left out. `asked`:
    whether the user named the baseline.
    """

    title: str
    keys: list[str]
    settings: list[Setting]
    step: int | None  # the last after which all were evaluated
    seconds: float  # of training, the shortest run's
    baseline: Setting | None = None
    notes: list[str] = field(default_factory=list)
    usual: str = ""
    asked: bool = False

    @property
    def base_name(self) -> str:
        """The baseline as a word of a title."""
        return "AdamW" if self.baseline.values["engine"] == ADAMW else f"“{self.baseline.label}”"


def studies(
    runs: Sequence[Run], left_out: Sequence[LeftOut], baseline: Values, split: Sequence[str] = ()
) -> list[Study]:
    """One study for each task and each value of the `split` keys, sorted by title and value.

    `baseline` are the wanted values; with none it is an AdamW setting. Errors: InputError if `baseline` fits no setting
    of any study, or several of one; for a key of `split` that no run has.
    """
    found = [_study(part, left_out) for part in parts_of(runs, split)]
    for study in found:
        study.asked = bool(baseline)
        _compare(study, _asked_for(study, baseline) if baseline else _best_adamw(study))
    if baseline and found and not any(study.baseline for study in found):
        raise InputError(_no_baseline(found, baseline))
    return found


def _study(part: Part, left_out: Sequence[LeftOut]) -> Study:
    grouped: dict[Hashable, Setting] = {}
    for run in part.runs:
        values = settings.setting_of(run.config, run.summary.get("device"))
        grouped.setdefault(settings.key(values), Setting("", values, [])).runs.append(run)
    members = list(grouped.values())
    all_values = [setting.values for setting in members]
    keys = settings.differing(all_values)
    fields = names.field_names(all_values, keys)
    short = names.override_names(all_values, keys, [setting.overrides for setting in members])
    labels, usual = names.brief(fields) if short is None else names.brief(short, silent=True)
    for setting, name, full, label in zip(members, short or fields, fields, labels, strict=True):
        setting.name, setting.engine, setting.fields, setting.label = str(name), name.engine, str(full), label
    study = Study(part.title, keys, members, equal_step(part.runs), equal_seconds(part.runs), usual=usual)
    study.settings.sort(key=lambda setting: settings.order(setting.values, keys))
    for setting in study.settings:
        setting.runs.sort(key=lambda run: run.config["seed"])
        setting.left_out = sum(_belongs(other, setting) for other in left_out)
        setting.figures = [_figures(run, study) for run in setting.runs]
        known = dict.fromkeys(name for figures in setting.figures for name in figures)
        setting.spreads = {name: spread_of([figures.get(name) for figures in setting.figures]) for name in known}
    study.notes = [*part.notes, *_notes(study, part.runs)]
    return study


def _belongs(run: LeftOut, setting: Setting) -> bool:
    """Whether a run that was left out would have been one of the setting's, as far as its configuration tells."""
    if run.config is None:
        return False
    machine = setting.values.get("machine")
    return settings.key(settings.setting_of(run.config, machine)) == settings.key(setting.values)


def _figures(run: Run, study: Study) -> dict[str, float | None]:
    return run_figures(run) | {
        "loss_at_equal_steps": loss_at_step(run, study.step),
        "loss_at_equal_seconds": loss_at_seconds(run, study.seconds),
        **{f"loss_at_step_{point.step}": point.loss for point in run.evaluations},
    }


def _compare(study: Study, baseline: Setting | None) -> None:
    study.baseline = baseline
    if baseline is None:
        return
    study.settings.sort(key=lambda setting: setting is not baseline)
    for setting in study.settings:
        for field_name, figure in (("vs_steps", "loss_at_equal_steps"), ("vs_seconds", "loss_at_equal_seconds")):
            setattr(setting, field_name, percent(setting.spreads[figure], baseline.spreads[figure]))
            setting.pairs[figure] = None if setting is baseline else _paired(setting, baseline, figure)


def _paired(setting: Setting, baseline: Setting, name: str) -> Spread | None:
    """By how many percent a figure lies above the baseline's of the same seed; None unless both have the same seeds."""
    ours, theirs = (
        {run.config["seed"]: figures[name] for run, figures in zip(side.runs, side.figures, strict=True)}
        for side in (setting, baseline)
    )
    if ours.keys() != theirs.keys() or None in (*ours.values(), *theirs.values()) or 0 in theirs.values():
        return None
    once = len(ours) == len(setting.runs) == len(baseline.runs)
    return spread_of([100 * (ours[seed] / theirs[seed] - 1) for seed in ours]) if once else None


def _best_adamw(study: Study) -> Setting | None:
    """The AdamW setting with the lowest loss at equal steps: the strongest one to be compared with."""
    candidates = [setting for setting in study.settings if setting.values["engine"] == ADAMW]
    figure = "final_loss" if study.step is None else "loss_at_equal_steps"
    best = min(candidates, key=lambda setting: setting.mean(figure), default=None)
    if len(candidates) > 1:
        study.notes.append(
            f"The baseline is the best of {len(candidates)} AdamW settings, “{best.name}”; --baseline takes another."
        )
    return best


def _asked_for(study: Study, wanted: Values) -> Setting | None:
    fitting = [setting for setting in study.settings if settings.matches(_as_called(setting), wanted)]
    fitting = fitting or [setting for setting in study.settings if settings.matches(setting.values, wanted)]
    if len(fitting) > 1:
        names = "; ".join(setting.name for setting in fitting)
        raise InputError(
            f"baseline {_words(wanted)} fits {len(fitting)} settings of {study.title} ({names}); "
            f"give --baseline once more with one of {', '.join(settings.differing([s.values for s in fitting]))}."
        )
    if not fitting:
        study.notes.append(f"No setting here has the baseline's {_words(wanted)}: no differences.")
    return fitting[0] if fitting else None


def _as_called(setting: Setting) -> Values:
    return setting.values | {"engine": setting.engine}


def _words(wanted: Values) -> str:
    return " ".join(f"{name}={value}" for name, value in wanted.items())


def _no_baseline(found: Sequence[Study], wanted: Values) -> str:
    """What is allowed: the values that there are of the first key that does not fit."""
    members = [setting for study in found for setting in study.settings]
    present = [*map(_as_called, members), *(setting.values for setting in members)]
    for name, value in wanted.items():
        if not any(settings.matches(values, {name: value}) for values in present):
            known = dict.fromkeys(str(values[name]) for values in present if name in values)
            keys = dict.fromkeys(key for study in found for key in study.keys)
            allowed = f"{name} of {', '.join(known)}" if known else f"a key of {', '.join(keys) or 'engine'}"
            return f"baseline {name}={value} fits no run; allowed: {allowed}."
    allowed = "; ".join(dict.fromkeys(setting.name for setting in members))
    return f"baseline {_words(wanted)} fits no run as a whole; allowed: one of {allowed}."


def _notes(study: Study, runs: Sequence[Run]) -> list[str]:
    notes = []
    if (upto := runs[0].upto) is not None:
        notes.append(
            f"{_whose(runs)}; all figures are of the first {counted(upto, 'step')}, as --steps asks. {NOT_IN_LINES}"
        )
    if study.step is None:
        notes.append("There is no step after which all runs were evaluated: nothing is compared at equal steps.")
    if len({run.config["steps"] for run in runs}) > 1:
        notes.append("The runs differ in length: at equal steps the longer ones are amid their learning rate's course.")
    for setting in study.settings:
        if twice := sorted({seed for seed in setting.seeds if setting.seeds.count(seed) > 1}):
            words = ", ".join(map(str, twice))
            notes.append(f"“{setting.name}” has seed {words} more than once: its spread is not one of seeds.")
    versions = sorted({_word(run.summary.get("torch")) for run in runs if not run.unfinished})
    if len(versions) > 1:
        notes.append(f"The runs were made with several versions of torch: {', '.join(versions)}.")
    threads = {settings.cpu_threads(run.summary.get("device")) for run in runs} - {None}
    if len(threads) > 1:
        words = ", ".join(map(str, sorted(threads)))
        notes.append(f"The runs on the CPU had several numbers of threads, which move their speed: {words}.")
    if repeated := sum(run.repeated for run in runs):
        lines = "line of a step was" if repeated == 1 else "lines of steps were"
        notes.append(f"{repeated:,} {lines} written anew after a resumption; what was written last counts.")
    return notes


def _word(value: Any) -> str:
    return settings.NOT_RECORDED if value is None else str(value)


def _whose(runs: Sequence[Run]) -> str:
    early = [run for run in runs if run.unfinished]
    if not early:
        return "All of the runs are whole"
    made, wanted = _range([run.made for run in early]), _range([run.config["steps"] for run in early])
    return f"Unfinished: {len(early)} of {counted(len(runs), 'run')}, with {made} of {wanted} steps"


def _range(values: Sequence[int]) -> str:
    first, last = min(values), max(values)
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
