"""Instructions with their responses, as in Alpaca's JSON, and the two prompts that its models are trained on."""

from __future__ import annotations

from pathlib import Path

from zenflow.training.files import json_records, text_of

# The wording is part of the format: models that were tuned on it expect it to the letter.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def prompt(instruction: str, context: str) -> str:
    """What comes before the response; `context` is the sample's input, empty if it has none."""
    if not context:
        return WITHOUT_INPUT.format(instruction=instruction)
    return WITH_INPUT.format(instruction=instruction, input=context)


def read(path: Path) -> list[tuple[str, str]]:
    """Prompt and response of each sample of a JSON list, or of a file with one object a line, in the file's order.

    Fields: `instruction`, `output`, and `input`, which may be missing. Errors: InputError with the line or the sample.
    """
    samples = []
    for place, record in json_records(path):
        instruction, output = (text_of(record, name, path, place) for name in ("instruction", "output"))
        context = text_of(record, "input", path, place) if "input" in record else ""
        samples.append((prompt(instruction, context), output))
    return samples
