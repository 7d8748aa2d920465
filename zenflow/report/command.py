"""The command line of `zenflow-report`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from zenflow.report.files import remove_others, write, write_csv
from zenflow.report.pictures import STEMS, SUFFIXES, draw
from zenflow.report.runs import LeftOut, Run, find, read
from zenflow.report.settings import parse_overrides
from zenflow.report.split import with_machines
from zenflow.report.study import Study, studies
from zenflow.report.tables import group_rows, report_text, run_rows, study_text
from zenflow.terminal import counted, show
from zenflow.training.errors import InputError

HELP = """\
Compare the runs below the given folders: single runs, sweeps, nested as they are. Writes report.md, report.csv (a row a
run), groups.csv (a row a setting: runs that differ in the seed alone) and, where matplotlib is installed, pictures.

  zenflow-report runs
  zenflow-report runs/sweep runs/adamw --out paper --baseline engine=adamw --baseline optimizer.lr=5e-5
  zenflow-report runs/sweep --split optimizer.lr
  zenflow-report runs/sweep --steps 900
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0, 1 if no run is whole, and SystemExit for a user's mistake."""
    args = _parser().parse_args(words)
    draws = find_spec("matplotlib") is not None
    try:
        runs, left_out = _read(args.folders, args.steps)
        found = studies(runs, left_out, parse_overrides(args.baseline), args.split)
        args.out.mkdir(parents=True, exist_ok=True)
        text = report_text(found, _sections(found, args.out, draws), left_out)
        write(args.out / "report.md", text)
        write_csv(args.out / "report.csv", run_rows(found, left_out))
        write_csv(args.out / "groups.csv", group_rows(found))
    except InputError as error:
        sys.exit(f"zenflow-report: {error}")
    except OSError as error:
        sys.exit(
            f"zenflow-report: {error.filename} cannot be written ({error.strerror}); give another folder as --out."
        )
    show(text)
    if not draws:
        show("No pictures: matplotlib is not installed (the extra `plot`).")
    show(f"Everything is in {args.out.resolve()}.")
    if not runs:
        wanted = "is whole" if args.steps is None else f"can be compared after {counted(args.steps, 'step')}"
        print(f"zenflow-report: none of {counted(len(left_out), 'run')} {wanted}; report.md says why.", file=sys.stderr)
    return 0 if runs else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="zenflow-report", description=HELP, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder with runs somewhere below it")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="made if missing (report)")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a value of the setting that the others are compared with; may be repeated (default: the best AdamW)",
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="KEY",
        help="make a comparison for each value of this setting, with a baseline of its own; may be repeated",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="N",
        help="compare after N steps: of every run that came so far, finished or not, what follows them is left out",
    )
    return parser


def _steps(word: str) -> int:
    if not (word.isdecimal() and int(word) > 0):
        raise ArgumentTypeError(f"{word!r}; allowed: an integer >= 1")
    return int(word)


def _read(folders: Sequence[Path], upto: int | None) -> tuple[list[Run], list[LeftOut]]:
    read_ones = [read(folder, upto) for folder in find(folders)]
    runs = [run for run in read_ones if isinstance(run, Run)]
    return with_machines(runs), [run for run in read_ones if isinstance(run, LeftOut)]


def _sections(found: Sequence[Study], out: Path, draws: bool) -> list[str]:
    """Each study's text, and its pictures; the second study's files end in -2. Older pictures are taken away."""
    sections, drawn = [], []
    for place, study in enumerate(found, 1):
        pictures = draw(study, out, "" if place == 1 else f"-{place}") if draws else []
        sections.append(study_text(study, pictures))
        drawn += [path.with_suffix(suffix) for _, path in pictures for suffix in SUFFIXES]
    remove_others(out, STEMS, drawn)
    return sections
