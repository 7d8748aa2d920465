"""A study as rows: Markdown for people, CSV for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zenflow.bench.tables import Column, markdown, number, share
from zenflow.report import names, settings
from zenflow.report.figures import FINAL, Spread, score_names
from zenflow.report.runs import LeftOut, Run
from zenflow.report.settings import Values
from zenflow.report.study import Setting, Study
from zenflow.terminal import counted

Row = dict[str, Any]
LEGEND = """\
Mean ± standard deviation over the runs of a setting, which differ in the seed alone (n - 1 in the denominator). Loss
and scores (accuracy and others: more is better) are of the held-out samples. Training time is the sum of the steps' own
times, the first step's compilation included and evaluations excluded; between two evaluations the loss is taken as
linear in it. Differences are those of the means; above zero is worse. Their ± is the standard deviation of the
differences seed by seed, where both settings have the same seeds. Median and p95 are of single steps. M: bytes a step
in units of the weights' bytes. Stall: the device's share of time spent waiting for the CPU or PCIe. Left out: runs of
the setting that are listed at the end."""


def within(form: Callable[[float], str]) -> Callable[[Spread], str]:
    """A spread as mean ± standard deviation, each in `form`."""
    return lambda value: form(value.mean) if value.std is None else f"{form(value.mean)} ± {form(value.std)}"


def difference(value: float) -> str:
    """5 as +5.00%, and no minus before a zero."""
    return f"{value:+.{1 if abs(value) >= 99.95 else 2}f}%".replace("-0.00", "+0.00")


def seed_by_seed(value: tuple[float, Spread | None]) -> str:
    """A difference of means, and how much the differences of single seeds vary, if that is known."""
    mean, pairs = value
    return difference(mean) if pairs is None or pairs.std is None else f"{difference(mean)} ± {pairs.std:.2f}"


def three_digits(value: float) -> str:
    """1234.5 as 1,230, and 0.12345 as 0.123."""
    return f"{float(f'{value:.3g}'):,.12g}"


def time_words(seconds: float) -> str:
    """In the unit in which it is read best."""
    for limit, unit, divisor in ((1, "ms", 1e-3), (120, "s", 1), (7200, "min", 60)):
        if seconds < limit:
            return f"{three_digits(seconds / divisor)} {unit}"
    return f"{three_digits(seconds / 3600)} h"


def quality_columns(study: Study) -> list[Column]:
    """Losses, scores, and how they compare; those that no setting has fall away in `markdown`."""
    loss = within(number(4))
    against = "" if study.baseline is None else f"vs {study.baseline.name}"
    names = score_names([run for setting in study.settings for run in setting.runs])
    columns = [Column("setting", "name"), Column("runs", "runs", number(0)), Column("left out", "left_out", number(0))]
    all_end_there = all(len(run.steps) == study.step for setting in study.settings for run in setting.runs)
    if study.step is not None:
        columns += [
            Column(f"loss after {counted(study.step, 'step')}", "loss_at_equal_steps", loss),
            Column(against, "vs_steps", seed_by_seed),
        ]
    return [
        *columns,
        Column(f"loss after {time_words(study.seconds)}", "loss_at_equal_seconds", loss),
        Column(against, "vs_seconds", seed_by_seed),
        *([] if all_end_there else [Column("final loss", "final_loss", loss)]),
        *(Column(f"final {name}", f"{FINAL}{name}", loss) for name in names),
        Column("best loss", "best_loss", loss),
    ]


def speed_columns() -> list[Column]:
    """Times of a step, and what an engine that offloads has."""
    return [
        Column("setting", "name"),
        Column("tokens/s", "tokens_per_second", within(number(0))),
        Column("median ms", "step_ms_median", within(number(2))),
        Column("p95 ms", "step_ms_p95", within(number(2))),
        Column("stall", "stall_share", within(share)),
        Column("to host M", "m_to_host", within(number(3))),
        Column("to device M", "m_to_device", within(number(3))),
        Column("worker busy", "worker_busy_share", within(share)),
        Column("skipped steps", "skipped_steps", within(number(1))),
    ]


def setting_row(setting: Setting, study: Study) -> Row:
    """A setting's spreads and differences under the figures' names; no offload, no figures of it."""
    row: Row = {"name": _cell(setting.name), "runs": len(setting.runs), "left_out": setting.left_out or None}
    row |= setting.spreads
    if setting.values["engine"] in (*settings.ADAMWS, *settings.PEERS, settings.SIMULATED):
        row |= dict.fromkeys(("stall_share", "m_to_host", "m_to_device", "worker_busy_share"))
    if setting.values["engine"] in (*settings.ADAMWS, *settings.PEERS):
        row["skipped_steps"] = None
    if setting is not study.baseline:
        pairs = setting.pairs
        for name, value in (("steps", setting.vs_steps), ("seconds", setting.vs_seconds)):
            row[f"vs_{name}"] = None if value is None else (value, pairs.get(f"loss_at_equal_{name}"))
    return row


def study_text(study: Study, pictures: Sequence[tuple[str, Path]]) -> str:
    """A study's section: what was compared, two tables, notes, and links to the pictures (title, path)."""
    rows = [setting_row(setting, study) for setting in study.settings]
    runs = sum(len(setting.runs) for setting in study.settings)
    count = f"{counted(runs, 'run')} of {counted(len(rows), 'setting')}"
    parts = [f"## {_cell(study.title)}", f"{count}. {_compared(study)}"]
    parts += [f"Note: {_cell(note)}" for note in study.notes]
    parts += [f"### Quality\n\n{markdown(rows, quality_columns(study))}"]
    parts += [f"### Speed\n\n{markdown(rows, speed_columns())}"]
    parts += [f"![{_cell(title)}]({path.name})" for title, path in pictures]
    return "\n\n".join(parts)


def _compared(study: Study) -> str:
    if study.baseline is None:
        why = "--baseline names no setting here" if study.asked else "AdamW was not run"
        return f"There is no baseline, and so no differences: {why}."
    words = f"The baseline is “{study.baseline.name}”"
    base = study.baseline.spreads["loss_at_equal_seconds" if study.step is None else "loss_at_equal_steps"]
    if base.std is None:
        return f"{words}, one run: how far seeds alone move it is not known."
    return f"{words}; seeds alone move its loss by ± {100 * base.std / base.mean:.1f}%."


def report_text(studies: Sequence[Study], sections: Sequence[str], left_out: Sequence[LeftOut]) -> str:
    """The whole of report.md."""
    runs = {run.folder for study in studies for setting in study.settings for run in setting.runs}
    count = f"{counted(len(runs), 'run')} in {counted(len(studies), 'comparison')} of one model on one data set, "
    parts = ["# Report", f"{count}{counted(len(left_out), 'run')} left out.", *sections]
    if left_out:
        rows = [left_out_row(run) for run in left_out]
        columns = [Column("run", "run"), Column("setting", "setting"), Column("seed", "seed"), Column("why", "reason")]
        parts.append(f"## Runs that were left out\n\n{markdown(rows, columns)}")
    if short := _short_names(studies):
        parts.append("## What the names stand for\n\n" + "\n".join(short))
    return "\n\n".join([*parts, "## What the words mean", LEGEND]) + "\n"


def _short_names(studies: Sequence[Study]) -> list[str]:
    """A line for each name that a sweep's overrides gave: the fields in which its setting differs from others."""
    told: dict[tuple[str, str], list[str]] = {}
    for study in studies:
        for setting in study.settings:
            if setting.name != setting.fields:
                told.setdefault((setting.name, setting.fields), []).append(study.title)
    often, lines = [name for name, _ in told], []
    for (name, fields), titles in told.items():
        where = f" ({_cell('; '.join(titles))})" if often.count(name) > 1 else ""
        lines.append(f"- **{_cell(name)}**{where}: {_cell(fields)}")
    return lines


def left_out_row(run: LeftOut) -> Row:
    """A run without figures, for people: named by its last two folders, since the path may be long."""
    row = {"run": "/".join(run.folder.parts[-2:]), "reason": run.reason, "setting": "-", "seed": "-"}
    given = names.parse(run.overrides)
    if run.config is not None and given:
        row["setting"], row["seed"] = names.plain_name(given), str(run.config["seed"])
    elif run.config is not None:
        engine = run.config["engine"]
        parts = [f"{symbol} {engine[name]}" for name, symbol in SHOWN.items() if name in engine]
        row["setting"] = ", ".join([settings.engine_of(run.config), *parts])
        row["seed"] = str(run.config["seed"])
    return {name: _cell(value) for name, value in row.items()}


SHOWN = {"topk_ratio": "k", "update_interval": "U"}


def run_rows(studies: Sequence[Study], left_out: Sequence[LeftOut]) -> list[Row]:
    """report.csv: a row a run, those left out with their reason, and every evaluation's loss in a column of its own."""
    rows, late = [], []
    for study in studies:
        for setting in study.settings:
            for run, figures in zip(setting.runs, setting.figures, strict=True):
                here = {name: value for name, value in figures.items() if not name.startswith("loss_at_step_")}
                rows.append(_run_columns(run, study, setting) | here)
                late.append({name: value for name, value in figures.items() if name not in here})
    steps = sorted({name for figures in late for name in figures}, key=lambda name: int(name.rpartition("_")[2]))
    rows = [row | {name: figures.get(name) for name in steps} for row, figures in zip(rows, late, strict=True)]
    for run in left_out:
        seed = None if run.config is None else run.config["seed"]
        rows.append({"status": "left out", "reason": run.reason, "folder": str(run.folder), "seed": seed})
    return rows


def _run_columns(run: Run, study: Study, setting: Setting) -> Row:
    return {
        "status": "unfinished" if run.unfinished else "whole",
        "reason": run.unfinished,
        "folder": str(run.folder),
        "study": study.title,
        "setting": setting.name,
        "seed": run.config["seed"],
        **_values(setting.values, study.keys),
        "steps": len(run.steps),
        "machine": run.summary.get("device"),
        "torch": run.summary.get("torch"),
        "repeated_steps": run.repeated,
    }


def group_rows(studies: Sequence[Study]) -> list[Row]:
    """groups.csv: a row a setting; of each figure mean, standard deviation and n; differences in percent."""
    rows = []
    for study in studies:
        for setting in study.settings:
            row: Row = {"study": study.title, "setting": setting.name, **_values(setting.values, study.keys)}
            row |= {
                "runs": len(setting.runs),
                "left_out": setting.left_out,
                "seeds": " ".join(map(str, setting.seeds)),
                "baseline": None if study.baseline is None else study.baseline.name,
                "equal_steps": study.step,
                "equal_seconds": study.seconds,
                "loss_at_equal_steps_vs_baseline_percent": setting.vs_steps,
                "loss_at_equal_seconds_vs_baseline_percent": setting.vs_seconds,
                **{
                    f"{name}_vs_baseline_percent_std": None if pairs is None else pairs.std
                    for name, pairs in setting.pairs.items()
                },
            }
            for name, value in setting.spreads.items():
                row |= {f"{name}_mean": None, f"{name}_std": None, f"{name}_n": 0}
                if value is not None:
                    row |= {f"{name}_mean": value.mean, f"{name}_std": value.std, f"{name}_n": value.n}
            rows.append(row)
    return rows


def _values(values: Values, keys: Sequence[str]) -> Row:
    return {name: values.get(name) for name in ("engine", *keys)}


def _cell(text: str) -> str:
    """One line that a Markdown table can hold."""
    return " ".join(text.split()).replace("|", "\\|")
