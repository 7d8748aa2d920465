"""The picture of a run shows its losses and every score that its evaluations hold."""

from __future__ import annotations

import pytest

from zenflow.training.metrics import Evaluation, History
from zenflow.training.plot import draw

pytest.importorskip("matplotlib")


def figure_of(*evaluations: Evaluation):
    return draw(History(losses=[3.0, 2.0], evaluations=list(evaluations)), "a run")


def test_without_scores_there_is_the_loss_alone():
    (axis,) = figure_of(Evaluation(0, 3.0, None), Evaluation(2, 2.5, None)).axes
    assert axis.get_title(loc="left") == "a run"
    curves = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert curves["train, each step"] == [[1, 3.0], [2, 2.0]]
    assert curves["validation"] == [[0, 3.0], [2, 2.5]]


@pytest.mark.parametrize(
    ("scores", "label"),
    [({"accuracy": 0.5}, "validation accuracy"), ({"pearson": 0.25, "f1": 0.125}, "validation scores")],
    ids=["one", "several"],
)
def test_every_score_has_a_line(scores, label):
    known = {name: value for name, value in scores.items() if name != "accuracy"}
    points = [Evaluation(step, 3.0, scores.get("accuracy"), known) for step in (0, 2)]
    axis = figure_of(*points).axes[1]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert lines == {name: [[0, value], [2, value]] for name, value in scores.items()}
    assert axis.get_ylabel() == label and (axis.get_legend() is not None) == (len(scores) > 1)
