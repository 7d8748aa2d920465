"""What is printed: numbers with the right form of their noun, lines that say whose they are."""

from __future__ import annotations

import logging

import pytest

from zenflow.terminal import LineFormatter, counted, lines_of_job, show


@pytest.mark.parametrize(
    ("number_of", "said"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (12345, "12,345 threads")]
)
def test_a_number_of_things(number_of, said):
    assert counted(number_of, "thread") == said


@pytest.mark.parametrize(("job", "begin"), [(None, ""), (0, "#0 "), (12, "#12 ")])
def test_each_line_of_a_job_names_it(capsys, job, begin):
    record = logging.LogRecord("zenflow", logging.INFO, __file__, 1, "a\nb %d", (3,), None)
    formatter = LineFormatter("%(name)s: %(message)s")
    with lines_of_job(job):
        assert formatter.format(record) == f"{begin}zenflow: a\n{begin}b 3"
        show("c\nd")
    assert capsys.readouterr().out == f"{begin}c\n{begin}d\n"


def test_lines_after_a_job_name_none(capsys):
    with pytest.raises(ValueError, match="broken"), lines_of_job(3):
        raise ValueError("broken")
    show("a")
    assert capsys.readouterr().out == "a\n"
