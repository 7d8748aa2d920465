"""Which runs are one setting, how settings are called, and which one a baseline is."""

from __future__ import annotations

import pytest

from tests.report.making import ZERO_OFFLOAD, config, make
from zenflow.report.names import brief, field_names
from zenflow.report.runs import read
from zenflow.report.settings import (
    differing,
    key,
    matches,
    order,
    parse_overrides,
    setting_of,
    task_name,
    task_of,
)
from zenflow.report.study import studies
from zenflow.report.tables import setting_row
from zenflow.training.errors import InputError

ZERO = {name.replace(".", "__"): value for name, value in ZERO_OFFLOAD.items()}


def settings(*changes: dict) -> list:
    return [setting_of(config(**change), "cpu, 1 thread") for change in changes]


def named(found: list) -> list[str]:
    return [str(name) for name in field_names(found, differing(found))]


def names(*changes: dict) -> list[str]:
    return named(settings(*changes))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"name": "other"},
        {"plot": False},
        {"tracking__mode": "offline"},
        {"data__path": "/opt/python"},
        {"trace_steps": [1, 2]},
        {"device": "cuda"},
        {"threads": 2},
        {"save_model": True},
        {"checkpoint_every": 5},
        {"keep_checkpoints": 1},
        {"checkpoint_minutes": 5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_bears_on_no_result_makes_no_setting(change):
    first, second = settings({}, change)
    assert key(first) == key(second) and names({}, change) == ["zenflow", "zenflow"]
    on_a_gpu = [setting_of(config(**each), "NVIDIA H200") for each in ({}, change)]
    assert key(on_a_gpu[0]) == key(on_a_gpu[1])


@pytest.mark.parametrize(
    "change",
    [{"optimizer__lr": 0.1}, {"engine__upload": "step"}, {"steps": 8}, {"engine": {}}, {"trace": "trace.json"}],
    ids=lambda change: next(iter(change)),
)
def test_what_does_makes_one(change):
    first, second = settings({}, change)
    assert key(first) != key(second)


def test_a_file_s_path_and_the_machine_are_part_of_a_setting():
    paths = ["/a/one/text.txt", "/a/two/text.txt"]
    for kind in ("file", "alpaca"):
        first, second = (task_of(config(data__kind=kind, data__path=path)) for path in paths)
        assert key(first) != key(second)
    gpu, cpu = (setting_of(config(), machine) for machine in ("NVIDIA H200", "cpu, 2 threads"))
    assert named([gpu, cpu]) == [
        "NVIDIA H200",
        "cpu",
    ]


def test_runs_that_differ_in_threads_alone_are_one_setting_with_a_note(tmp_path):
    machines = ["cpu, 1 threads", "cpu, 1 thread", "cpu, 2 threads"]  # the first as older runs have it
    folders = [
        make(tmp_path / str(seed), {0: 2.0, 4: 1.0}, seed=seed, threads=seed, totals={"device": machine})
        for seed, machine in enumerate(machines)
    ]
    (study,) = studies([read(folder) for folder in folders], [], {})
    assert [setting.seeds for setting in study.settings] == [[0, 1, 2]]
    assert study.notes == ["The runs on the CPU had several numbers of threads, which move their speed: 1, 2."]
    (alike,) = studies([read(folder) for folder in folders[:2]], [], {})
    assert alike.notes == []


def test_names_hold_the_differing_keys_alone_in_one_order():
    changes = [{"optimizer__lr": lr, "engine__topk_ratio": k} for lr in (1e-4, 2e-3) for k in (0.05, 0.1)]
    expected = ["k 0.05, lr 0.0001", "k 0.1, lr 0.0001", "k 0.05, lr 0.002", "k 0.1, lr 0.002"]
    assert names(*changes) == expected
    assert names(*changes[::-1]) == expected[::-1]


def test_an_engine_is_named_by_its_choice_and_what_it_implies_is_left_out():
    assert names({"engine": {}}, ZERO, {}) == ["adamw", "zero_offload", "zenflow"]
    assert names({"engine": {}}, ZERO, {}, {"engine__update_interval": 8}) == [
        "adamw",
        "zero_offload",
        "zenflow, U 4",
        "zenflow, U 8",
    ]
    assert names({"engine": {}}) == ["adamw"]


def test_a_schedule_is_no_part_of_synchronous_offload_and_names_the_others():
    usual = {"engine__stagger": True, "engine__weight_prediction": 1.0, "engine__visible_after": 2}
    paper = {"engine__stagger": False, "engine__weight_prediction": 0.0, "engine__visible_after": 4}
    undelayed = {"engine__visible_after": 0}
    zeros = (ZERO, ZERO | paper | undelayed, ZERO | usual | undelayed)
    assert len({key(setting_of(config(**change), None)) for change in zeros}) == 1
    expected = ["zenflow, stagger false, weight_prediction 0", "zenflow, stagger true, weight_prediction 1"]
    assert names(ZERO | paper | undelayed, paper, usual) == ["zero_offload", *expected]


def test_values_are_shown_so_that_they_differ():
    lrs = [1e-4, 1.00000001e-4]
    assert names(*({"optimizer__lr": lr} for lr in lrs)) == ["lr 0.0001", "lr 0.000100000001"]
    assert names({"engine__overlap_step": True}, {"engine__overlap_step": False}) == [
        "overlap_step true",
        "overlap_step false",
    ]
    assert names({"model__path": "/m/a/x"}, {"model__path": "/m/b/x"}) == ["path a/x", "path b/x"]
    assert names({"evaluate_every": None}, {"evaluate_every": 2}) == ["evaluate_every null", "evaluate_every 2"]


def briefs(*changes: dict) -> tuple[list[str], str]:
    found = settings(*changes)
    return brief(field_names(found, differing(found)))


def test_a_label_leaves_out_what_most_settings_have():
    grid = [{"engine__topk_ratio": k, "optimizer__lr": 2e-3} for k in (0.05, 0.1, 0.2)]
    other = {"engine__upload": "step", "engine__accumulate_on": "host", "optimizer__lr": 1e-4}
    labels, usual = briefs({"engine": {}}, *grid, other)
    assert labels == ["adamw", "zenflow, k 0.05", "zenflow, k 0.1", "zenflow, k 0.2",
                      "zenflow, k 0.1, accumulate_on host, upload step, lr 0.0001"]  # fmt: skip
    assert usual == "accumulate_on gpu, upload backward, lr 0.002"


def test_short_names_are_labels():
    changes = [{"engine": {}}, {"engine__topk_ratio": 0.2}, {"engine__topk_ratio": 0.3}]
    assert briefs(*changes) == (names(*changes), "")


def test_labels_are_as_distinct_as_names():
    """A delay that follows from other values is in no name, so the usual one is in every label."""
    long = {"engine__accumulate_on": "host", "engine__upload": "step"}
    changes = [
        {"engine__visible_after": 2},
        {"engine__visible_after": 2} | long,
        {"engine__visible_after": 4} | long,
        long,
    ]
    labels, usual = briefs(*changes)
    assert len(set(labels)) == len(set(names(*changes))) and "visible_after" not in usual
    assert sum("visible_after 2" in label for label in labels) == 2


def test_equal_last_names_are_told_apart():
    first = {"model": {"kind": "tiny", "size": 1}, "data": {"kind": "stdlib", "size": 1}}
    second = {"model": {"kind": "tiny", "size": 2}, "data": {"kind": "stdlib", "size": 3}}
    assert names(first, second) == ["model.size 1, data.size 1", "model.size 2, data.size 3"]


def test_runs_group_by_seed_in_a_study(tmp_path):
    for number, (k, seed) in enumerate([(0.1, 1), (0.05, 0), (0.1, 0), (0.05, 2)]):
        make(tmp_path / str(number), {0: 2.0, 4: 1.0 + seed}, seed=seed, engine__topk_ratio=k)
    (study,) = studies([read(folder) for folder in sorted(tmp_path.iterdir())], [], {})
    assert [(setting.name, setting.seeds) for setting in study.settings] == [("k 0.05", [0, 2]), ("k 0.1", [0, 1])]
    assert study.keys == ["engine.topk_ratio"] and study.title == "tiny on stdlib"
    spread = study.settings[0].spreads["loss_at_equal_steps"]
    assert (spread.mean, spread.std, spread.n) == (2.0, pytest.approx(2**0.5), 2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model__path": "/m/pretrain/model/"}, "pretrain/model on stdlib"),
        ({"model__path": "/m/llama"}, "llama on stdlib"),
        ({"data__kind": "file", "data__path": "/d/one.txt"}, "tiny on one.txt"),
        ({"data__kind": "headers", "data__path": "/d/include"}, "tiny on headers include"),
        ({"data__kind": "headers", "data__path": None}, "tiny on headers"),
        ({"data__kind": "glue", "data__task": "cola"}, "tiny on cola"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_task_is_named_so_that_it_says_something(change, name):
    assert task_name(config(**change)) == name


def test_tasks_of_one_name_are_told_apart_by_as_little_of_a_path_as_does(tmp_path):
    paths = ["/a/one/text.txt", "/b/two/text.txt", "/c/two/text.txt"]
    for place, path in enumerate(paths):
        make(tmp_path / str(place), {0: 2.0, 4: 1.0}, data__kind="file", data__path=path)
    found = studies([read(folder) for folder in sorted(tmp_path.iterdir())], [], {})
    ends = ["b/two/text.txt", "c/two/text.txt", "one/text.txt"]
    assert [study.title for study in found] == [f"tiny on text.txt, path {end}" for end in ends]


def test_models_and_data_are_compared_apart(tmp_path):
    """Three tasks, two of them of one name; weights of another type are still the same task."""
    changes = [{}, {"model__dtype": "bfloat16"}, {"model__layers": 3}, {"data__kind": "austen"}]
    runs = [read(make(tmp_path / str(place), {0: 2.0, 4: 1.0}, **change)) for place, change in enumerate(changes)]
    found = studies(runs, [], {})
    assert [(study.title, len(study.settings)) for study in found] == [
        ("tiny on austen", 1),
        ("tiny on stdlib, layers 2", 2),
        ("tiny on stdlib, layers 3", 1),
    ]


class TestBaseline:
    @pytest.fixture
    def runs(self, tmp_path) -> list:
        """AdamW at two learning rates and ZenFlow at two k: losses after the last step 2.0, 1.6, 2.2 and 2.4."""
        made = [
            make(tmp_path / "0", {0: 4.0, 4: 2.0}, 1.0, engine={}, optimizer__lr=0.1),
            make(tmp_path / "1", {0: 4.0, 4: 1.6}, 1.0, engine={}, optimizer__lr=0.2),
            make(tmp_path / "2", {0: 4.0, 4: 2.2}, 2.0, optimizer__lr=0.2),
            make(tmp_path / "3", {0: 4.0, 4: 2.4}, 2.0, optimizer__lr=0.2, engine__topk_ratio=0.5),
        ]
        return [read(folder) for folder in made]

    def test_is_the_best_adamw_unless_it_is_named(self, runs):
        (study,) = studies(runs, [], {})
        assert study.baseline.name == "adamw, lr 0.2" and study.settings[0] is study.baseline
        assert any("best of 2 AdamW settings" in note for note in study.notes)
        zenflow = study.settings[-1]
        assert zenflow.vs_steps == pytest.approx(50.0) and study.baseline.vs_steps == 0.0
        # After the 4 s of the shortest run ZenFlow is half way from 4.0 to 2.4.
        assert zenflow.vs_seconds == pytest.approx(100 * (3.2 / 1.6 - 1))

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            (["engine=adamw", "optimizer.lr=1e-1"], "adamw, lr 0.1"),
            (["engine=zenflow", "engine.topk_ratio=.5"], "zenflow, k 0.5, lr 0.2"),
            (["engine.topk_ratio=0.1"], "zenflow, k 0.1, lr 0.2"),
        ],
        ids=" ".join,
    )
    def test_may_be_any_setting(self, runs, words, name):
        (study,) = studies(runs, [], parse_overrides(words))
        assert study.baseline.name == name

    def test_that_fits_several_names_them_and_what_differs(self, runs):
        with pytest.raises(InputError, match=r"fits 2 settings .*adamw, lr 0\.1; adamw, lr 0\.2.*of optimizer\.lr"):
            studies(runs, [], parse_overrides(["engine=adamw"]))

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["engine=sgd"], r"engine=sgd fits no run; allowed: engine of adamw, zenflow"),
            (["optimizer.lr=3"], r"optimizer\.lr=3 fits no run; allowed: optimizer\.lr of 0\.1, 0\.2"),
            (["lr=0.1"], r"lr=0\.1 fits no run; allowed: a key of engine, engine\.topk_ratio, optimizer\.lr"),
            (["engine=zenflow", "optimizer.lr=0.1"], r"fits no run as a whole; allowed: one of adamw, lr 0\.1; "),
        ],
        ids=["value", "number", "key", "together"],
    )
    def test_that_fits_none_says_what_is_allowed(self, runs, words, message):
        with pytest.raises(InputError, match=message):
            studies(runs, [], parse_overrides(words))

    @pytest.mark.parametrize("word", ["adamw", "=adamw", "engine="])
    def test_is_given_as_key_and_value(self, word):
        with pytest.raises(InputError, match="KEY=VALUE"):
            parse_overrides([word])

    def test_knows_what_zero_offload_implies(self):
        (values,) = settings(ZERO)
        wanted = {"engine.topk_ratio": 0, "engine.overlap_step": False}
        assert matches(values, wanted) and not matches(values, wanted | {"engine.update_interval": 2})

    def test_is_none_without_adamw(self, runs):
        (study,) = studies(runs[2:], [], {})
        assert study.baseline is None and study.settings[0].vs_steps is None


def test_bf16_adamw_among_fp32_settings_puts_no_dtype_into_every_name():
    known = [
        {"engine": "adamw", "model.dtype": "float32"},
        {"engine": "adamw_bf16", "model.dtype": "bfloat16"},
        {"engine": "zenflow", "engine.topk_ratio": 0.1, "model.dtype": "float32"},
    ]
    assert named(known) == ["adamw", "adamw_bf16", "zenflow"]
    mixed = [*known, {"engine": "adamw", "model.dtype": "bfloat16"}]
    assert named(mixed) == [
        "adamw, dtype float32",
        "adamw_bf16",
        "zenflow, dtype float32",
        "adamw, dtype bfloat16",
    ]


def test_other_projects_offloads_are_told_by_their_name_and_what_they_have():
    peer = {"engine": {"peer": "deepspeed_zenflow", "topk_ratio": 0.1, "update_interval": 4, "overlap_step": True}}
    narrow = {"engine": peer["engine"] | {"topk_ratio": 0.05}}
    others = [{"engine": {"peer": name}} for name in ("torchao_offload", "deepspeed_offload")]
    adamws = [{"engine": {"masters": True, "offload": offload}} for offload in (False, True)]
    assert names(*adamws, *others, peer, {}) == [
        *("adamw", "adamw_offload", "torchao_offload", "deepspeed_offload", "deepspeed_zenflow", "zenflow")
    ]
    assert names(others[0], peer, narrow, {}) == [
        *("torchao_offload", "deepspeed_zenflow, k 0.1", "deepspeed_zenflow, k 0.05", "zenflow, k 0.1")
    ]
    assert names({"engine": others[0]["engine"], "optimizer__lr": 0.1}, others[1])[0] == "torchao_offload, lr 0.1"


def test_other_projects_offloads_stand_between_synchronous_offload_and_zenflow():
    peers = [{"engine": {"peer": name}} for name in ("torchao_offload", "deepspeed_offload")]
    found = settings({}, *peers, ZERO, {"engine": {"masters": True, "offload": True}})
    ordered = sorted(found, key=lambda values: order(values, differing(found)))
    assert [values["engine"] for values in ordered] == [
        *("adamw_offload", "zero_offload", "torchao_offload", "deepspeed_offload", "zenflow")
    ]


def test_of_other_projects_offloads_nothing_is_told_that_they_do_not_count(tmp_path):
    engines = [{"masters": True, "offload": False}, {"peer": "deepspeed_offload"}, config()["engine"]]
    losses = {0: 2.0, 2: 1.5, 4: 1.0}
    runs = [read(make(tmp_path / str(place), losses, engine=engine)) for place, engine in enumerate(engines)]
    (study,) = studies(runs, [], {})
    rows = {row["name"]: row for row in (setting_row(setting, study) for setting in study.settings)}
    assert list(rows) == ["adamw", "deepspeed_offload", "zenflow"]
    for name in ("stall_share", "m_to_host", "m_to_device", "worker_busy_share", "skipped_steps"):
        assert rows["deepspeed_offload"][name] is None and rows["zenflow"][name] is not None, name
    assert rows["deepspeed_offload"]["vs_seconds"] is not None
