"""A study for people: Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from zenflow.bench.tables import Column, markdown, number, share
from zenflow.locality.figures import Row, kind_rows, overlap_name, share_rows, survival_rows, top_name
from zenflow.locality.study import Study

LEGEND = """\
A channel is a column (an input feature) or a row (an output feature) of a parameter matrix; its score in a step is the
sum of the squares of its gradient. Top 1%: the channels with the highest scores of that step, at least one, and their
share of the matrix's squared gradient norm, as a mean over the steps. Median, p10 and p90 are over the matrices, each
counted once; overall is the share for all matrices together, in which those with large gradients weigh more. Selected
again: how much of a selection is selected once more so many steps later. Norm held: which share of that later step's
squared norm the old selection still has. Both are means over all pairs of steps so far apart. Matrices with fewer
elements than locality.min_numel, and vectors, are left out: they are always selected whole."""


def study_text(study: Study, rows: Sequence[Row], heading: Sequence[str]) -> str:
    """Heading, three tables and what their words mean; `rows` as `figures.matrix_rows` gives them."""
    chance = study.settings.topk_ratio
    parts = [
        "# Locality of the gradient",
        "\n".join(f"- {line}" for line in heading),
        "## Squared gradient norm in the top channels",
        markdown([_share_row(row) for row in share_rows(study, rows)], SHARES),
        f"## What is left of a selection of {100 * chance:.3g}% of the channels",
        markdown([_survival_row(row) for row in survival_rows(study, rows)], SURVIVAL),
        *_too_long(study, rows),
        f"Of channels chosen blindly {share(chance)} would be selected again.",
        "## By kind of layer, medians",
        markdown(kind_rows(study, rows), _kind_columns(study)),
        LEGEND,
    ]
    return "\n\n".join(parts) + "\n"


SHARES = (
    Column("channels", "name"),
    Column("median", "median", share),
    Column("p10", "p10", share),
    Column("p90", "p90", share),
    Column("overall", "overall", share),
    Column("matrices", "count", number(0)),
)
SURVIVAL = (
    Column("channels, steps later", "name"),
    Column("selected again: median", "median", share),
    Column("p10", "p10", share),
    Column("p90", "p90", share),
    Column("norm held: median", "held_median", share),
    Column("p10", "held_p10", share),
    Column("p90", "held_p90", share),
)


def _share_row(row: Row) -> Row:
    return row | {"name": f"top {100 * row['share']:g}% of the {row['dim']}s"}


def _survival_row(row: Row) -> Row:
    return row | {"name": f"{row['dim']}s, {row['lag']:,}"}


def _kind_columns(study: Study) -> list[Column]:
    return [
        Column("layer", "kind"),
        Column("channels", "dim"),
        Column("matrices", "matrices", number(0)),
        Column("of the norm", "weight", share),
        *(Column(f"top {100 * one:g}%", top_name(one), share) for one in study.settings.shares),
        *(Column(f"again after {lag:,}", overlap_name(lag), share) for lag in study.settings.lags),
    ]


def _too_long(study: Study, rows: Sequence[Row]) -> list[str]:
    known = {row["lag"] for row in survival_rows(study, rows)}
    missing = [f"{lag:,}" for lag in study.settings.lags if lag not in known]
    return [f"The run of {study.steps:,} steps is too short for {', '.join(missing)} steps later."] if missing else []
