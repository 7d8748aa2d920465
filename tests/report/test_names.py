"""Short names: what the sweeps varied, where it tells every setting, and the fields where it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.report.making import end_early, make
from zenflow.report.names import Name, brief, parse, show_value
from zenflow.report.runs import read
from zenflow.report.settings import parse_overrides
from zenflow.report.study import Study, studies
from zenflow.training.errors import InputError

STAGGER = {"engine__stagger": True, "engine__accumulate_on": "host"}
WHOLE = {0: 4.0, 4: 2.0}


def study_of(folder: Path, *runs: tuple[list[str] | None, dict]) -> Study:
    """Runs of these overrides, None for one of no sweep, and changes of the configuration."""
    made = [make(folder / str(place), WHOLE, job=job, **changes) for place, (job, changes) in enumerate(runs)]
    (study,) = studies([read(path) for path in made], [], {})
    return study


def names(folder: Path, *runs: tuple[list[str] | None, dict]) -> list[str]:
    return [setting.name for setting in study_of(folder, *runs).settings]


def rules(*lrs: float) -> list[tuple[list[str], dict]]:
    engines = [("adamw", {"engine": {}}), ("zenflow", {}), ("stagger", STAGGER)]
    return [
        ([f"seed={seed}", f"engine={engine}", f"optimizer.lr={lr}"], {"optimizer__lr": lr, "seed": seed} | changes)
        for engine, changes in engines
        for lr in lrs
        for seed in (0, 1)
    ]


def test_choices_of_a_group_are_names_and_the_fields_are_kept(tmp_path):
    study = study_of(tmp_path, *rules(2e-5, 1e-4))
    host, gpu = "zenflow, accumulate_on host, stagger true", "zenflow, accumulate_on gpu, stagger not recorded"
    assert [(setting.name, setting.fields) for setting in study.settings] == [
        ("adamw, lr 2e-5", "adamw, lr 2e-5"),
        ("adamw, lr 0.0001", "adamw, lr 0.0001"),
        ("zenflow, lr 2e-5", f"{gpu}, lr 2e-5"),
        ("zenflow, lr 0.0001", f"{gpu}, lr 0.0001"),
        ("stagger, lr 2e-5", f"{host}, lr 2e-5"),
        ("stagger, lr 0.0001", f"{host}, lr 0.0001"),
    ]
    assert [setting.seeds for setting in study.settings] == [[0, 1]] * 6
    assert [setting.label for setting in study.settings] == [setting.name for setting in study.settings]
    assert study.usual == "" and "engine.accumulate_on" in study.keys


def test_what_all_have_in_common_is_left_out(tmp_path):
    assert names(tmp_path / "lr", *rules(2e-5)) == ["adamw", "zenflow", "stagger"]
    alone = (["seed=3", "engine=stagger", "optimizer.lr=0.002"], STAGGER)
    assert names(tmp_path / "alone", alone) == ["stagger"]
    assert names(tmp_path / "none", (["seed=3"], STAGGER)) == ["zenflow"]


def test_a_variant_s_words_are_overrides(tmp_path):
    found = names(
        tmp_path,
        (["engine=adamw"], {"engine": {}, "optimizer__max_grad_norm": 1.0}),
        (["variant='engine=stagger optimizer.max_grad_norm=null'"], STAGGER | {"optimizer__max_grad_norm": None}),
        (["null"], {"optimizer__max_grad_norm": 1.0}),
        (["engine.update_interval=8 +engine.topk_ratio=0.2"],
         {"engine__update_interval": 8, "engine__topk_ratio": 0.2, "optimizer__max_grad_norm": 1.0}),
    )  # fmt: skip
    assert found == ["adamw", "zenflow", "stagger, max_grad_norm null", "zenflow, k 0.2, U 8"]


def test_a_sweep_of_fields_is_named_as_without_its_overrides(tmp_path):
    changes = [{"engine__topk_ratio": k, "optimizer__lr": lr} for lr in (1e-4, 2e-3) for k in (0.05, 0.1)]
    words = [[f"engine.topk_ratio={c['engine__topk_ratio']}", f"optimizer.lr={c['optimizer__lr']}"] for c in changes]
    swept = names(tmp_path / "swept", *zip(words, changes, strict=True))
    assert swept == ["k 0.05, lr 0.0001", "k 0.05, lr 0.002", "k 0.1, lr 0.0001", "k 0.1, lr 0.002"]
    assert swept == names(tmp_path / "single", *((None, change) for change in changes))


BF16 = {"engine": {"masters": False, "offload": False}, "model__dtype": "bfloat16"}


def test_bf16_adamw_needs_no_dtype(tmp_path):
    runs = [(["engine=adamw"], {"engine": {}}), (["engine=adamw_bf16 model.dtype=bfloat16"], BF16)]
    assert names(tmp_path, *runs) == ["adamw", "adamw_bf16"]


HOST = {"engine__accumulate_on": "host"}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(["engine=a"], {}), (None, HOST)], ["accumulate_on gpu", "accumulate_on host"]),
        ([(["engine=a"], {}), (["engine=a"], HOST)], ["accumulate_on gpu", "accumulate_on host"]),
        (
            [(["engine=a"], {}), (["engine=b"], {"seed": 1}), (["engine=c"], HOST)],
            ["accumulate_on gpu", "accumulate_on host"],
        ),
        ([(["what"], {}), (["engine=b"], HOST)], ["accumulate_on gpu", "accumulate_on host"]),
        ([(["engine=a"], {}), (["engine=b"], HOST | {"optimizer__lr": 0.5})],
         ["accumulate_on gpu, lr 0.002", "accumulate_on host, lr 0.5"]),
        ([(["engine=a"], {}), (["optimizer.lr=0.5"], {"optimizer__lr": 0.5})], ["a", "zenflow, lr 0.5"]),
        ([(["engine=a", "seed=0"], {}), (["engine=a", "seed=1"], {"seed": 1}), (["engine=b"], HOST)], ["a", "b"]),
        ([(["engine=a"], HOST), (["engine=a", "optimizer.lr=0.5"], {"optimizer__lr": 0.5})],
         ["accumulate_on gpu, lr 0.5", "accumulate_on host, lr 0.002"]),
        ([(["engine=zenflow"], {}), (["optimizer.lr=0.5"], HOST | {"optimizer__lr": 0.5})],
         ["accumulate_on gpu, lr 0.002", "accumulate_on host, lr 0.5"]),
        ([(["engine=a", "engine=b"], {}), (["engine=c"], HOST)], ["accumulate_on gpu", "accumulate_on host"]),
    ],
    ids=["single", "shared", "several", "unread", "given to a sweep as a whole", "said by one", "seeds",
         "given beside one choice", "given beside what is chosen if nothing is said", "two for one key"],
)  # fmt: skip
def test_names_are_those_of_the_fields_where_the_overrides_leave_something_open(tmp_path, runs, expected):
    assert names(tmp_path, *runs) == expected


def test_values_are_those_that_the_overrides_came_to(tmp_path):
    """A variant drops what was given for another engine, a resumed run has other threads, `auto` is resolved."""
    found = names(
        tmp_path,
        (["engine=stagger", "engine.update_interval=8"], STAGGER),
        (["engine=zenflow", "engine.topk_ratio=auto", "optimizer.schedule='constant'"],
         {"optimizer__schedule": "constant"}),
        (["engine=zenflow", "optimizer.betas=[0.9,0.99]"], {"optimizer__betas": [0.9, 0.99]}),
    )  # fmt: skip
    assert found == ["zenflow, k 0.1, schedule constant", "zenflow, betas [0.9, 0.99]", "stagger, U 4"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"sweep": "s", "job": 1e999, "overrides": []}',
        '{"sweep": "s", "job": 0, "overrides": 1}',
        10**5 * "[",
    ],
    ids=["torn", "list", "infinite", "no words", "deep"],
)
def test_a_damaged_note_is_none(tmp_path, text):
    made = make(tmp_path / "run", WHOLE, job=["engine=stagger"])
    (made / "job.json").write_text(text)
    assert read(made).overrides is None
    (made / "job.json").unlink()
    (made / "job.json").mkdir()
    assert read(made).overrides is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, None),
        ([], {}),
        (["seed=1", "threads=2", "name=x", "tracking.mode=offline"], {}),
        (["optimizer.lr=1e-4"], {"optimizer.lr": 0.0001}),
        (["++engine.stagger=true", "+a.b=null"], {"engine.stagger": True, "a.b": None}),
        (["engine=a optimizer.lr=2"], {"engine": "a", "optimizer.lr": 2}),
        (["~engine.stagger"], None),
        (["~engine.stagger=true"], None),
        (["engine=a", "engine=b"], None),
        (["engine=a", "engine=a"], {"engine": "a"}),
        (["optimizer.schedule='linear'", 'data.kind="x"', "tracking=offline"],
         {"optimizer.schedule": "linear", "data.kind": "x"}),
        (["variant=null"], {}),
    ],
)  # fmt: skip
def test_overrides_are_read(words, expected):
    assert parse(words) == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2e-5, "2e-5"), (1e-4, "0.0001"), (1e20, "1e+20"), (1.00000001e-10, "1.00000001e-10"), (1e-100, "1e-100")],
)
def test_an_exponent_has_no_zeros_before_it(value, shown):
    assert show_value(value, {value}) == shown


def test_a_label_of_overrides_leaves_out_what_all_say():
    """A key that one of them does not say has no usual value: what that one has is not known."""
    parts = [("adamw", 1), ("zenflow_with_a_long_name", 1), ("stagger", 2)]
    said = [Name({"engine": e, "a.b": f"b {n}", "a.some_key": "some_key 7"}, e) for e, n in parts]
    assert brief(said, silent=True) == (["adamw", "zenflow_with_a_long_name", "stagger, b 2"], "b 1, some_key 7")
    silent = [*said, Name({"engine": "other", "a.some_key": "some_key 7"}, "other")]
    labels, usual = brief(silent, silent=True)
    assert labels == ["adamw, b 1", "zenflow_with_a_long_name, b 1", "stagger, b 2", "other"]
    assert usual == "some_key 7"


class TestReport:
    @pytest.fixture
    def sweep(self, tmp_path) -> Path:
        for place, (job, changes) in enumerate(rules(2e-5, 1e-4)):
            make(tmp_path / "runs" / str(place), WHOLE, job=job, **changes)
        job, changes = ["seed=0", "engine=replay", "optimizer.lr=2e-05"], {"engine__upload": "step"}
        end_early(make(tmp_path / "runs" / "99", WHOLE, job=job, **changes), 1)
        return tmp_path / "runs"

    def test_says_once_what_a_name_stands_for(self, report, sweep, no_pictures):
        outcome = report(sweep, "--split", "optimizer.lr")
        (section,) = re.findall(r"## What the names stand for\n\n(.*?)\n\n", outcome.text, flags=re.S)
        assert section.splitlines() == [
            "- **zenflow**: zenflow, accumulate_on gpu, stagger not recorded",
            "- **stagger**: zenflow, accumulate_on host, stagger true",
        ]
        assert {row["setting"] for row in outcome.rows("report")} == {"adamw", "zenflow", "stagger", ""}
        row = next(row for row in outcome.rows("groups") if row["setting"] == "stagger")
        assert (row["engine"], row["engine.accumulate_on"], row["engine.stagger"]) == ("zenflow", "host", "True")

    def test_a_run_that_was_left_out_is_called_by_its_overrides(self, report, sweep, no_pictures):
        assert re.search(r"\| runs/99 +\| replay, lr 2e-5 +\| 0 ", report(sweep).text)

    def test_names_that_are_the_fields_are_not_explained(self, report, tmp_path, no_pictures):
        make(tmp_path / "runs" / "0", WHOLE)
        make(tmp_path / "runs" / "1", WHOLE, engine__upload="step")
        assert "names stand for" not in report(tmp_path / "runs").text

    def test_one_name_for_two_things_says_where(self, report, tmp_path, no_pictures):
        for place, (data, more) in enumerate((("austen", {}), ("stdlib", HOST))):
            for engine, changes in (("zenflow", {}), ("other", {"engine__upload": "step"} | more)):
                folder = tmp_path / "runs" / f"{place}{engine}"
                make(folder, WHOLE, job=[f"engine={engine}"], data__kind=data, **changes)
        lines = re.findall(r"^- \*\*.*", report(tmp_path / "runs").text, flags=re.M)
        assert "- **other** (tiny on austen): upload step" in lines
        assert "- **other** (tiny on stdlib): accumulate_on host, upload step" in lines

    def test_the_baseline_may_be_named_as_it_is_called(self, report, sweep, no_pictures):
        words = ("--baseline", "engine=stagger", "--baseline", "optimizer.lr=2e-5")
        assert "The baseline is “stagger, lr 2e-5”" in report(sweep, *words).text
        words = ("--baseline", "engine=zenflow", "--baseline", "optimizer.lr=2e-5")
        assert "The baseline is “zenflow, lr 2e-5”" in report(sweep, *words).text
        outcome = report(sweep, "--baseline", "engine=sgd")
        assert outcome.code == 1 and "allowed: engine of adamw, zenflow, stagger." in outcome.error


def test_the_engine_as_the_configuration_has_it_is_a_baseline_too(tmp_path):
    changes = {"0": ("adamw", {"engine": {}}), "1": ("stagger", STAGGER)}
    runs = [
        read(make(tmp_path / place, WHOLE, job=[f"engine={engine}"], **change))
        for place, (engine, change) in changes.items()
    ]
    (study,) = studies(runs, [], parse_overrides(["engine=zenflow"]))
    assert study.baseline.name == "stagger"
    with pytest.raises(InputError, match="allowed: engine of adamw, stagger, zenflow"):
        studies(runs, [], parse_overrides(["engine=sgd"]))
