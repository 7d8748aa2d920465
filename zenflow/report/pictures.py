"""Which pictures a study gets, and their files. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zenflow.report.files import write
from zenflow.report.study import Study

STEMS = ("loss_steps", "loss_seconds", "scores", "heat_map_steps", "heat_map_seconds", "pareto", "step_time")
SUFFIXES = (".png", ".svg")


def draw(study: Study, out: Path, ending: str) -> list[tuple[str, Path]]:
    """Draw what the study has data for as PNG and SVG named STEM + `ending`; (title, path of the PNG) of each.

    Errors: ImportError without matplotlib.
    """
    from matplotlib import rc_context

    from zenflow.report.look import STYLE

    done = []
    with rc_context(STYLE):
        for stem, title, figure in _figures(study):
            assert stem in STEMS
            path = out / f"{stem}{ending}.png"
            for suffix in SUFFIXES:
                content = io.BytesIO()
                metadata = {"Date": None} if suffix == ".svg" else None  # the same runs give the same file
                figure.savefig(content, format=suffix[1:], metadata=metadata)
                write(path.with_suffix(suffix), content.getvalue())
            done.append((title, path))
    return done


def _figures(study: Study) -> Iterator[tuple[str, str, Any]]:
    """(stem, title, matplotlib figure), one at a time."""
    from zenflow.report import breakdown, curves, heat_map, pareto, scores

    for name, over_seconds in (("steps", False), ("seconds", True)):
        yield f"loss_{name}", *curves.draw(study, over_seconds)
    if (drawn := scores.draw(study)) is not None:
        yield "scores", *drawn
    for name, over_seconds in (("steps", False), ("seconds", True)):
        if (drawn := heat_map.draw(study, over_seconds)) is not None:
            yield f"heat_map_{name}", *drawn
    if len(study.settings) > 1:
        yield "pareto", *pareto.draw(study)
    yield "step_time", *breakdown.draw(study)
