"""How tasks are learned and measured: scores, the mean over a step's labels, held-out figures, pairs of texts."""

from __future__ import annotations

import json
import math
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.experiments.folders import bert_folder
from zenflow.training.data import IGNORED, Dataset, LabelledSamples, Order, ResponseSamples
from zenflow.training.engines import Engine
from zenflow.training.loop import Loop
from zenflow.training.metrics import Recorder, StepTimer
from zenflow.training.models import Classifier, TinyModel, load_tokenizer
from zenflow.training.schema import ModelConfig, TrainConfig
from zenflow.training.scores import SCORES, accuracy, f1, matthews, pearson, spearman
from zenflow.training.tokenizer import ByteTokenizer

CPU = torch.device("cpu")
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def as_tensors(predicted, true) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(predicted), torch.tensor(true)


@pytest.mark.parametrize(
    ("predicted", "true", "value"),
    [
        ([1, 0, 1, 1], [1, 1, 1, 0], -1 / 3),  # one of four each way: (2 x 0 - 1 x 1) / sqrt(3 x 3 x 1 x 1)
        ([1, 1, 0, 0], [1, 1, 0, 0], 1.0),
        ([0, 0, 1, 1], [1, 1, 0, 0], -1.0),
        ([1, 0, 1, 0], [1, 1, 0, 0], 0.0),
        ([2, 0, 1], [2, 0, 1], 1.0),
        # What predicts one class only, or meets one only, has no correlation.
        ([0] * 10, [0] * 9 + [1], 0.0),
        ([0] * 4 + [1], [0] * 5, 0.0),
        ([3] * 5, [3] * 5, 0.0),
        ([1], [1], 0.0),
    ],
)
def test_matthews_known_values(predicted, true, value):
    assert matthews(*as_tensors(predicted, true)) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_matthews_is_the_correlation_of_the_indicators(classes):
    generator = torch.Generator().manual_seed(classes)
    true = torch.randint(classes, (101,), generator=generator)
    predicted = torch.where(torch.rand(101, generator=generator) < 0.4, true, true.roll(3))
    one_hot = [np.eye(classes)[part.numpy()] for part in (predicted, true)]
    x, y = (part - part.mean(axis=0) for part in one_hot)
    assert matthews(predicted, true) == pytest.approx((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))
    if classes == 2:
        assert matthews(predicted, true) == pytest.approx(np.corrcoef(predicted, true)[0, 1])


def test_matthews_of_many_samples_does_not_overflow():
    true = torch.arange(4_000_001) % 2
    predicted = true.clone()
    predicted[:1_000_000] = 1 - predicted[:1_000_000]
    assert matthews(predicted, true) == pytest.approx(np.corrcoef(predicted, true)[0, 1], rel=1e-9)


def test_on_imbalanced_classes_accuracy_flatters_and_matthews_does_not():
    predicted, true = as_tensors([0] * 100, [0] * 87 + [1] * 13)
    assert accuracy(predicted, true) == 0.87 and matthews(predicted, true) == 0.0


@pytest.mark.parametrize(
    ("predicted", "true", "value"),
    [([1, 1, 0, 0], [1, 0, 1, 1], 2 / 5), ([0, 0], [0, 0], 0.0), ([0, 0], [1, 1], 0.0), ([1, 1], [1, 1], 1.0)],
)
def test_f1_is_of_class_1(predicted, true, value):
    assert f1(*as_tensors(predicted, true)) == pytest.approx(value)


def rank(values: torch.Tensor) -> torch.Tensor:
    """By the definition: how many are below, and half of the others that are equal."""
    below = (values[None] < values[:, None]).sum(1)
    return below + ((values[None] == values[:, None]).sum(1) - 1) / 2.0


def test_correlations_follow_their_definitions():
    generator = torch.Generator().manual_seed(0)
    true = (torch.rand(53, generator=generator) * 10).round() / 2  # with ties
    predicted = (true + torch.randn(53, generator=generator)).exp()
    assert pearson(predicted, true) == pytest.approx(np.corrcoef(predicted.double(), true.double())[0, 1])
    assert spearman(predicted, true) == pytest.approx(np.corrcoef(rank(predicted), rank(true))[0, 1])
    assert spearman(predicted, predicted.log()) == pytest.approx(1.0) != pearson(predicted, predicted.log())
    assert pearson(torch.full((4,), 0.1), torch.rand(4)) == spearman(torch.ones(3), torch.rand(3)) == 0.0


class Frozen(Engine):
    """An engine that records the gradients it is given and changes nothing."""

    param_groups = ({"lr": 0.0},)

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gradients = model, []

    def step(self) -> None:
        self.gradients.append([weight.grad.clone() for weight in self.model.parameters()])

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def flush(self) -> None:
        pass

    def report(self):
        return types.SimpleNamespace(grad_norm=1.0, skipped_steps=0)

    def records(self, wait: bool = False) -> None:
        pass


def loop_of(folder: Path, config: TrainConfig, model: nn.Module, data: Dataset):
    folder.mkdir()
    engine, timer = Frozen(model), StepTimer(CPU)
    with Recorder(folder, timer, engine, 1, None) as recorder:
        Loop(config, model, data, engine, recorder, timer).run()
    return engine.gradients, recorder.history


def responses() -> ResponseSamples:
    """Prompts of 2 and responses of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [2 + 1 + 5 * (number % 4) for number in range(24)]
    return ResponseSamples([torch.randint(1, 256, (n,), generator=generator).tolist() for n in lengths], [2] * 24, 0)


def test_every_token_of_a_step_weighs_the_same_however_the_step_is_cut(tmp_path):
    """The mean over micro batches of their means would weigh tokens of short responses more."""
    torch.manual_seed(0)
    model, samples = TinyModel(width=16, layers=1, heads=2, max_length=24), responses()
    runs = [
        loop_of(tmp_path / str(size), TrainConfig(steps=1, batch_size=size, accumulate=12 // size), model, data)
        for size in (12, 3, 1)
        for data in [Dataset(samples, samples, None)]
    ]
    for gradients, history in runs[1:]:
        assert history.losses == pytest.approx(runs[0][1].losses, rel=1e-5)
        for one, other in zip(gradients[0], runs[0][0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    numbers = Order(24, seed=0).take(0, 12)
    batches = [samples.batch([number]) for number in numbers]
    losses = [nn.functional.cross_entropy(model(*b.inputs).flatten(0, 1), b.labels.flatten()).item() for b in batches]
    weights = [batch.targets for batch in batches]
    assert runs[2][1].losses[0] == pytest.approx(np.average(losses, weights=weights), rel=1e-5)
    assert abs(np.mean(losses) - np.average(losses, weights=weights)) > 1e-3


def test_the_held_out_loss_is_the_mean_over_the_learned_tokens(tmp_path):
    torch.manual_seed(0)
    model, samples = TinyModel(width=16, layers=1, heads=2, max_length=24), responses()
    config = TrainConfig(steps=1, batch_size=5)
    _, history = loop_of(tmp_path / "run", config, model, Dataset(samples, samples, None))
    total, count = 0.0, 0
    for number in range(24):
        batch = samples.batch([number])
        learned = batch.labels != IGNORED
        logits = model(batch.input_ids, batch.attention_mask)[learned]
        total += nn.functional.cross_entropy(logits, batch.labels[learned], reduction="sum").item()
        count += int(learned.sum())
    assert history.evaluations[0].loss == pytest.approx(total / count, rel=1e-5)


class Telling(nn.Module):
    """A classifier whose logits are told by each text's first token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scale, self.classes = nn.Parameter(torch.ones(())), classes

    def forward(self, input_ids, attention_mask):
        told = input_ids[:, 0]
        return self.scale * (told.unsqueeze(1).float() if self.classes == 1 else torch.eye(self.classes)[told])


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_scores_are_of_all_held_out_samples_and_lie_in_every_record(tmp_path, classes):
    generator = torch.Generator().manual_seed(5)
    told = torch.randint(max(2, classes), (37,), generator=generator)
    labels = torch.where(torch.rand(37, generator=generator) < 0.7, told, told.roll(1))
    labels = [float(label) for label in labels] if classes == 1 else labels.tolist()
    samples = LabelledSamples([[number] for number in told.tolist()], labels, pad=0)
    names = ("pearson", "spearman") if classes == 1 else ("accuracy", "matthews", "f1")
    config = TrainConfig(steps=1, batch_size=8)
    _, history = loop_of(tmp_path / "run", config, Telling(classes), Dataset(samples, samples, classes, names))
    expected = {name: SCORES[name](told, torch.tensor(labels)) for name in names}
    assert history.evaluations[-1].named_scores == pytest.approx(expected)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {name: line[f"validation_{name}"] for name in names} == pytest.approx(expected)
    if classes == 1:
        mean = ((told - torch.tensor(labels)) ** 2).mean().item()
        assert history.evaluations[0].accuracy is None and history.evaluations[0].loss == pytest.approx(mean)


class Types(nn.Module):
    """An encoder that takes token types, and keeps those it was given."""

    def __init__(self, known: int) -> None:
        super().__init__()
        self.config, self.seen = types.SimpleNamespace(type_vocab_size=known), []

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        self.seen.append(token_type_ids)
        return types.SimpleNamespace(last_hidden_state=input_ids.unsqueeze(-1).float())


@needs_transformers
@pytest.mark.parametrize("known", [2, 1])
def test_pairs_come_with_their_token_types_where_the_encoder_has_some(tmp_path, known):
    bert_folder(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    pairs = [("the cat", "a dog and a cat"), ("what is it", "the mat")]
    rows, kinds = tokenizer.encode_pairs(pairs, 64)
    batch = LabelledSamples(rows, [0, 1], tokenizer.pad, kinds).batch([0, 1])
    assert batch.token_types.shape == batch.input_ids.shape and batch.to(CPU).token_types is batch.token_types
    for row, kind, (first, _) in zip(batch.input_ids.tolist(), batch.token_types.tolist(), pairs, strict=True):
        separator = row.index(3)  # [CLS] first [SEP] second [SEP]
        assert row[0] == 2 and row.count(3) == 2 and row[1:separator] == tokenizer.encode_bare([first])[0]
        assert kind == [0] * (separator + 1) + [1] * (row.index(3, separator + 1) - separator) + [0] * (
            len(row) - row.index(3, separator + 1) - 1
        )
    encoder = Types(known)
    Classifier(encoder, 1, 2)(*batch.inputs)
    assert encoder.seen[0] is (batch.token_types if known == 2 else None)
    assert Classifier(encoder, 1, 2)(batch.input_ids, batch.attention_mask).shape == (2, 2)


@pytest.mark.parametrize(("first", "second"), [(2, 100), (100, 2), (100, 100), (9, 1), (0, 30), (5, 4)])
@pytest.mark.parametrize("length", [4, 11, 12])
def test_a_pair_of_bytes_is_cut_from_its_longer_text(first, second, length):
    (row,), kinds = ByteTokenizer().encode_pairs([("a" * first, "b" * second)], length)
    kept = (row.count(ord("a")), row.count(ord("b")))
    assert kinds is None and row == [97] * kept[0] + [0] + [98] * kept[1]
    assert len(row) == min(length, first + 1 + second)
    if len(row) == length and sum(kept) < first + second:
        shorter = min(first, second, (length - 1) // 2)
        assert min(kept) >= shorter
