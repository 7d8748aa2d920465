"""`zenflow-report` as a whole: tables, files, what it needs and what it refuses."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import experiments.train
from tests.commands import BRIEF, ENVIRONMENT, ROOT, runner
from tests.report.making import ZERO_OFFLOAD, config, lines, make, write_lines
from zenflow.report import command, files

PICTURES = ["heat_map_seconds", "heat_map_steps", "loss_seconds", "loss_steps", "pareto", "step_time"]


@pytest.fixture
def sweep(tmp_path) -> Path:
    """AdamW and synchronous offload with two seeds, a grid of k and U without its last cell, a run that failed."""
    runs = tmp_path / "runs"
    for seed in (0, 1):
        make(runs / "adamw" / str(seed), {0: 4.0, 2: 2.5, 4: 2.0 + 0.1 * seed}, 1.0, seed=seed, engine={})
        zero = {name.replace(".", "__"): value for name, value in ZERO_OFFLOAD.items()}
        make(runs / "zero" / str(seed), {0: 4.0, 2: 2.5, 4: 2.0 + 0.1 * seed}, 2.0, seed=seed, **zero)
        for place, (k, u) in enumerate([(0.05, 2), (0.05, 4), (0.1, 2)]):
            losses = {0: 4.0, 2: 3.0, 4: 2.2 + k * u + 0.1 * seed}
            changes = {"engine__topk_ratio": k, "engine__update_interval": u}
            make(runs / "sweep" / f"{2 * place + seed}", losses, 1.25, seed=seed, **changes)
    failed = make(runs / "sweep" / "6", {0: 4.0}, seed=2, engine__topk_ratio=0.1, engine__update_interval=2)
    (failed / "summary.json").unlink()
    return runs


def test_tables_of_a_sweep(report, sweep, no_pictures):
    outcome = report(sweep)
    assert outcome.code == 0 and outcome.error == ""
    names = [row["setting"] for row in outcome.rows("groups")]
    assert names == ["adamw", "zero_offload", "zenflow, k 0.05, U 2", "zenflow, k 0.05, U 4", "zenflow, k 0.1, U 2"]
    row = outcome.setting("zenflow, k 0.1, U 2")
    assert (row["runs"], row["left_out"], row["seeds"], row["baseline"]) == ("2", "1", "0 1", "adamw")
    assert (row["equal_steps"], row["equal_seconds"]) == ("4", "4.0")
    assert float(row["loss_at_equal_steps_mean"]) == pytest.approx(2.45)
    assert float(row["loss_at_equal_steps_std"]) == pytest.approx(0.1 / 2**0.5)
    assert float(row["loss_at_equal_steps_vs_baseline_percent"]) == pytest.approx(100 * (2.45 / 2.05 - 1))
    # 4 s are 0.6 of the way from the evaluation at 2.5 s to the one at 5 s.
    late = 3.0 + 0.6 * (2.45 - 3.0)
    assert float(row["loss_at_equal_seconds_mean"]) == pytest.approx(late)
    assert float(row["loss_at_equal_seconds_vs_baseline_percent"]) == pytest.approx(100 * (late / 2.05 - 1))
    assert float(row["loss_at_step_2_mean"]) == 3.0 and float(row["m_to_host_mean"]) == 0.25
    # Seed by seed: 100 * (2.4 / 2.0 - 1) and 100 * (2.5 / 2.1 - 1), of which the half distance times the root of 2.
    std = 100 * (2.4 / 2.0 - 2.5 / 2.1) / 2**0.5
    assert float(row["loss_at_equal_steps_vs_baseline_percent_std"]) == pytest.approx(std)
    cells = rf"+2\.4500 ± 0\.0707 \| +\+19\.51% ± {std:.2f} \|"
    assert re.search(rf"\| zenflow, k 0\.1, U 2 +\| +2 \| +1 \| {cells}", outcome.text)
    assert re.search(r"\| adamw +\| [^|]+\| [^|]+\| [^|]+\| +- \|", outcome.text.split("### Speed")[1])
    assert outcome.text in outcome.printed and f"Everything is in {outcome.folder}" in outcome.printed


def test_every_run_has_a_row_and_those_left_out_their_reason(report, sweep, no_pictures):
    outcome = report(sweep)
    rows = outcome.rows("report")
    assert [row["status"] for row in rows] == ["whole"] * 10 + ["left out"]
    assert len({row["folder"] for row in rows}) == 11
    last = rows[-1]
    assert last["reason"].startswith("unfinished: no evaluation after step 4") and last["final_loss"] == ""
    assert rows[0]["loss_at_step_0"] == "4.0" and rows[0]["seed"] == "0"
    assert "| sweep/6 | zenflow, k 0.1, U 2 | 2    | unfinished: no evaluation after step 4" in outcome.text


def test_a_markdown_table_stays_one(report, tmp_path, no_pictures):
    made = make(tmp_path / "runs" / "a|b", {0: 2.0, 4: 1.0})
    (made / "metrics.jsonl").unlink()
    make(tmp_path / "runs" / "c", {0: 2.0, 4: 1.0})
    tables = [line for line in report(tmp_path / "runs").text.splitlines() if line.startswith("|")]
    assert any("a\\|b" in line for line in tables)
    rules = [line for line in tables if set(line) <= set("|-: ")]
    assert rules and all(re.fullmatch(r"\|( -+:? \|)+", line) for line in rules)


def test_every_score_is_shown(report, tmp_path, no_pictures):
    """Whatever an evaluation holds, also where the other settings have it not."""
    for seed, accuracy in ((0, 0.5), (1, 0.75)):
        scores = {"accuracy": {0: 0.25, 4: accuracy}, "some_score": {0: 0.0, 4: 0.125}}
        make(tmp_path / "runs" / str(seed), {0: 2.0, 4: 1.0}, scores=scores, seed=seed)
    make(tmp_path / "runs" / "2", {0: 2.0, 4: 1.0}, engine={})
    outcome = report(tmp_path / "runs")
    assert re.search(r"\| adamw +\|.* +- \| +- \|", outcome.text)
    assert re.search(r"final accuracy \| +final some_score \|", outcome.text)
    assert re.search(r"0\.6250 ± 0\.1768 \| +0\.1250 ± 0\.0000 \|", outcome.text)
    assert float(outcome.setting("zenflow")["final_some_score_mean"]) == 0.125


def test_cautions_are_in_the_report(report, tmp_path, no_pictures):
    make(tmp_path / "runs" / "0", {0: 2.0, 4: 1.0}, engine={})
    make(tmp_path / "runs" / "1", {0: 2.0, 4: 1.0}, engine={}, totals={"torch": "2.11.0"})
    make(tmp_path / "runs" / "2", {0: 2.0, 6: 1.0}, steps=6)
    again = lines(config(steps=6), {6: 1.0})[-3:]
    write_lines(tmp_path / "runs" / "2", lines(config(steps=6), {0: 2.0, 6: 1.0}) + again)
    text = report(tmp_path / "runs").text
    for words in (
        "has seed 0 more than once",
        "several versions of torch: 2.10.0, 2.11.0",
        "The runs differ in length",
        "no step after which all runs were evaluated",
        "2 lines of steps were written anew",
    ):
        assert words in text, words


def test_names_that_are_no_text_are_written_escaped(report, tmp_path, no_pictures):
    """A folder's bytes may be no UTF-8, and JSON may hold half a pair of surrogates."""
    make(tmp_path / "runs" / "\udcff", {0: 2.0, 4: 1.0}, data__path="a\ud800", data__kind="file")
    outcome = report(tmp_path / "runs")
    assert outcome.code == 0 and r"tiny on a\ud800" in outcome.text and r"tiny on a\ud800" in outcome.printed
    assert outcome.rows("report")[0]["folder"].endswith(r"runs/\udcff")


def test_what_the_terminal_cannot_write_is_printed_escaped(tmp_path, monkeypatch, no_pictures):
    make(tmp_path / "runs" / "0", {0: 2.0, 4: 1.0}, engine={})
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", printed)
    assert command.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert rb"The baseline is \u201cadamw\u201d" in printed.buffer.getvalue()


def test_settings_may_hold_dicts_in_lists(report, tmp_path, no_pictures):
    for value in (1, 2):
        make(tmp_path / "runs" / str(value), {0: 2.0, 4: 1.0}, optimizer__parts=[{"a": value}])
    assert "2 runs of 2 settings" in report(tmp_path / "runs").text


def test_without_a_baseline_the_reason_is_the_one_that_holds(report, tmp_path, no_pictures):
    make(tmp_path / "runs" / "0", {0: 2.0, 4: 1.0})
    told = "There is no baseline, and so no differences: "
    assert f"{told}AdamW was not run.\n" in report(tmp_path / "runs").text
    make(tmp_path / "runs" / "1", {0: 2.0, 4: 1.0}, engine={}, data__kind="austen")
    text = report(tmp_path / "runs", "--baseline", "engine=adamw").text
    assert f"{told}--baseline names no setting here.\n" in text and "AdamW was not run" not in text


def test_two_models_get_a_section_each(report, tmp_path):
    make(tmp_path / "runs" / "0", {0: 2.0, 4: 1.0})
    make(tmp_path / "runs" / "1", {0: 2.0, 4: 1.0}, data__kind="austen")
    outcome = report(tmp_path / "runs")
    assert re.findall("^## (.* on .*)$", outcome.text, flags=re.M) == ["tiny on austen", "tiny on stdlib"]
    stems = ["loss_seconds", "loss_steps", "step_time"]
    assert outcome.pictures() == sorted(stems + [f"{stem}-2" for stem in stems])


def test_without_matplotlib_there_are_tables_and_a_word_about_it(report, sweep, no_pictures):
    outcome = report(sweep)
    assert outcome.code == 0 and "matplotlib is not installed (the extra `plot`)" in outcome.printed
    assert sorted(path.name for path in outcome.folder.iterdir()) == ["groups.csv", "report.csv", "report.md"]
    assert "](" not in outcome.text


def test_pictures_of_a_sweep_and_of_a_later_smaller_one(report, sweep):
    outcome = report(sweep)
    assert outcome.pictures() == PICTURES
    assert sorted(re.findall(r"\]\((.*)\.png\)", outcome.text)) == PICTURES
    (outcome.folder / "mine.png").write_bytes(b"")
    later = report(sweep / "adamw")
    assert later.pictures() == ["loss_seconds", "loss_steps", "mine", "step_time"]


def test_the_same_runs_give_the_same_files_wherever_they_lie(report, sweep, tmp_path, no_pictures):
    first = report(sweep)
    text, groups = first.text, first.rows("groups")
    shutil.move(sweep, tmp_path / "moved")
    second = report(tmp_path / "moved")
    assert (second.text, second.rows("groups")) == (text, groups)


def test_a_whole_report_of_runs_left_out_is_written_and_fails(report, tmp_path, no_pictures):
    made = make(tmp_path / "runs" / "0", {0: 2.0, 4: 1.0})
    (made / "config.json").write_text("{")
    outcome = report(tmp_path / "runs")
    assert outcome.code == 1 and "none of 1 run is whole" in outcome.error
    assert "config.json is damaged: no JSON" in outcome.text and outcome.rows("report")[0]["status"] == "left out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is no folder; allowed: a folder below which"),
        (
            ["runs", "--baseline", "engine=sgd"],
            "baseline engine=sgd fits no run; allowed: engine of adamw, zero_offload",
        ),
        (["runs", "--baseline", "adamw"], "baseline 'adamw' is no setting; allowed: KEY=VALUE"),
    ],
)
def test_a_mistake_is_a_sentence_and_leaves_nothing(report, sweep, monkeypatch, words, message):
    monkeypatch.chdir(sweep.parent)
    outcome = report(*words)
    assert outcome.code == 1 and message in outcome.error and outcome.error.startswith("zenflow-report: ")
    assert not outcome.folder.exists()


def test_a_folder_that_cannot_be_made_is_named(report, sweep, tmp_path):
    (tmp_path / "out").write_text("a file")
    assert f"{tmp_path / 'out'} cannot be written (File exists)" in report(sweep).error


def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    files.write(path, "older")
    with open(path) as reader:
        files.write(path, "old")
        assert reader.read() == "older", "the file was written in place"

    def broken(self, content):
        with open(self, "wb") as file:
            file.write(content[:1])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(OSError, match="no space left"):
        files.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_it_needs_neither_torch_nor_hydra_nor_yaml(sweep, tmp_path):
    """As `python -m zenflow.report`, where none of them can be imported."""
    missing = ("torch", "triton", "hydra", "omegaconf", "yaml", "wandb", "matplotlib")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
import importlib.util
importlib.util.find_spec = lambda name: None
import zenflow.report.__main__
"""
    arguments = [sys.executable, "-c", code, sweep, "--out", tmp_path / "out"]
    done = subprocess.run(arguments, env=ENVIRONMENT, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.md").exists()


def test_a_report_is_made_where_nothing_can_be_printed(sweep, tmp_path):
    arguments = [sys.executable, "-m", "zenflow.report", sweep, "--out", tmp_path / "out"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "cannot be printed (No space left on device)" in done.stderr
    assert (tmp_path / "out" / "report.md").exists()


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    lines_of_code = "\n".join(code for language, code in blocks if not language).splitlines()
    return [line.split("  #")[0].strip() for line in lines_of_code if line.startswith("zenflow-report")]


def test_the_commands_in_the_readme_and_the_help_parse():
    examples = [line.strip() for line in command.HELP.splitlines() if line.startswith("  zenflow-report")]
    assert len(readme_commands()) >= 2 and len(examples) >= 2
    for line in readme_commands() + examples:
        args = command._parser().parse_args(shlex.split(line)[1:])
        assert args.folders and command.parse_overrides(args.baseline) is not None


def test_a_real_run_reads(report, tmp_path, monkeypatch, capsys):
    """What `zenflow-train` writes today is what is read here."""
    train = runner(experiments.train.main, "zenflow-train", tmp_path, monkeypatch, capsys)
    sweep = train("-m", *BRIEF, "evaluate_every=2", "seed=0,1")
    assert sweep.code == 0, sweep.err
    outcome = report(sweep.folder)
    assert outcome.code == 0, outcome.error
    assert "2 runs of 1 setting" in outcome.printed and "0 runs left out" in outcome.printed
    assert "loss_steps" in outcome.pictures()
