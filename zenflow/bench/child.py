"""One contestant in a process of its own. Speaks JSON lines on what was its stdout.

What libraries print goes to stderr, so that nothing comes between the lines. torch is loaded after the process has been
bound to its cores: thread pools are sized by them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import IO

from zenflow.bench.processes import die_with_parent
from zenflow.bench.registry import Job


def main(text: str) -> int:
    """Run the job in `text`, JSON of `Job`'s fields; the last line is its result or `{"error": ...}`."""
    die_with_parent()
    answers = _take_stdout()
    try:
        job = Job(**json.loads(text))
        if job.cores is not None:
            os.sched_setaffinity(0, job.cores)
        from zenflow.bench.measure import measure

        result = measure(job)
    except Exception as error:
        traceback.print_exc()
        lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
        result = {"error": " ... ".join(dict.fromkeys((lines[0], lines[-1])))}
    print(json.dumps(result), file=answers, flush=True)
    return 1 if "error" in result else 0


def _take_stdout() -> IO[str]:
    """A stream on the real stdout; from here on everything else that is printed goes to stderr."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
