"""Parameters live in flat storage. What the engine refuses, and what other code may do to the weights (X2)."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    RULES,
    Builder,
    Pair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)

SHAPES = [(6, 10), (9, 4), (3,)]


def model_of(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 7)).to(dtype).to(device)


def train(model: nn.Module, engine: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = next(model.parameters())
    for _ in range(steps):
        engine.zero_grad()
        batch = torch.randn(4, 10, generator=generator).to(weight)
        model(batch).float().square().sum().backward()
        engine.step()


def test_x2_overlapping_parameters_are_refused_by_name(build: Builder) -> None:
    base = torch.zeros(64)
    first, second = nn.Parameter(base[:40].view(4, 10)), nn.Parameter(base[30:60].view(3, 10))
    with pytest.raises(ValueError, match=r"encoder\.weight.*decoder\.weight|decoder\.weight.*encoder\.weight"):
        build([("encoder.weight", first), ("decoder.weight", second)])


def test_x2_two_parameters_over_the_same_storage_are_refused(build: Builder) -> None:
    base = torch.zeros(4, 10)
    other = nn.Parameter(torch.ones(5, 5))
    pointer = other.data_ptr()
    with pytest.raises(ValueError, match="storage|overlap|alias|memory"):
        build([other, nn.Parameter(base), nn.Parameter(base.view(10, 4))])
    assert other.data_ptr() == pointer
    assert bool((other == 1).all())


def test_x2_disjoint_views_of_one_storage_are_fine(device: str, build: Builder) -> None:
    base = torch.randn(70, generator=torch.Generator().manual_seed(0)).to(device)
    parameters = [nn.Parameter(base[:40].view(4, 10)), nn.Parameter(base[40:].view(3, 10))]
    pair = Pair(build, parameters, lr=0.1, topk_ratio=0.3, update_interval=2)
    for grads in make_gradients([(4, 10), (3, 10)], steps=5):
        pair.step(grads)
    pair.check_state()


def test_a_parameter_that_is_not_contiguous(device: str, build: Builder) -> None:
    """A transposed weight is trained as its values say."""
    weight = nn.Parameter(make_parameters([(10, 6)], device=device)[0].detach().t())
    pair = Pair(build, [weight], lr=0.1, topk_ratio=0.3, update_interval=2)
    for (grad,) in make_gradients([(6, 10)], steps=5):
        pair.step([grad])
    pair.check_state()


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.zeros(4, 4, dtype=torch.complex64), "complex"),
        (torch.zeros(4, 4, dtype=torch.float64), "float64"),
        (torch.eye(4).to_sparse(), "sparse"),
    ],
    ids=["complex", "float64", "sparse"],
)
def test_kinds_that_are_refused_by_name(tensor: torch.Tensor, word: str, build: Builder) -> None:
    good = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises((ValueError, TypeError), match=r"odd\.weight") as refusal:
        build([("good.weight", good), ("odd.weight", nn.Parameter(tensor))])
    assert word in str(refusal.value)


def test_a_sparse_gradient_is_refused_by_name_and_changes_nothing(build: Builder) -> None:
    table = nn.Embedding(8, 5, sparse=True)
    engine = build([("table.weight", table.weight)], lr=0.1, topk_ratio=0.3)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises((ValueError, RuntimeError), match=r"table\.weight.*sparse|sparse.*table\.weight"):
        engine.step()
    assert_same_bits(table.weight, before)
    assert engine.stats().steps == 0
    table.weight.grad = torch.ones(8, 5)
    engine.step()
    assert engine.stats().steps == 1
    assert not torch.equal(table.weight, before)


def test_no_parameters_is_an_error(build: Builder) -> None:
    with pytest.raises(ValueError, match="empty"):
        build([])


def test_x2_a_parameter_moved_by_data_is_adopted_or_refused(device: str, build: Builder) -> None:
    """`p.data = p.data.clone()` in the middle of a run: the new memory is trained on, or the step says why not."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=2)
    stream = make_gradients(SHAPES, torch.bfloat16, 8)
    for grads in stream[:3]:
        pair.step(grads)
    parameters[0].data = parameters[0].data.clone()
    try:
        for grads in stream[3:]:
            pair.step(grads)
    except (ValueError, RuntimeError) as refusal:
        assert "moved" in str(refusal) or "data" in str(refusal)
    else:
        pair.check_state()


@pytest.mark.parametrize("rule", RULES)
def test_a_weight_that_is_transposed_where_it_lies_is_trained_as_its_values_say(
    rule: str, device: str, build: Builder
) -> None:
    """`p.data = p.data.t()` of a square weight moves no memory and changes neither shape nor version."""
    ends = []
    for copied in (False, True):
        parameters = make_parameters([(6, 6), (3,)], torch.bfloat16, device)
        engine = build(parameters, lr=0.02, topk_ratio=0.3, update_interval=2, overlap_step=False, **RULES[rule])
        for number, grads in enumerate(make_gradients([(6, 6), (3,)], torch.bfloat16, 7)):
            if number == 4:
                turned = parameters[0].data.t()
                parameters[0].data = turned.clone(memory_format=torch.contiguous_format) if copied else turned
            feed(parameters, grads)
            engine.step()
        engine.flush()
        ends.append(snapshot(parameters))
    for one, other in zip(*ends, strict=True):
        assert_same_bits(one, other)


def _shorter(weight: torch.Tensor) -> torch.Tensor:
    return weight[:3]


def _other_shape(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(10, 6)


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t()


def _other_shape_elsewhere(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone().view(10, 6)


@pytest.mark.parametrize("change", [_shorter, _other_shape, _transposed, _other_shape_elsewhere])
def test_x2_a_shape_changed_after_construction_is_refused_and_may_be_changed_back(
    change: Callable[[torch.Tensor], torch.Tensor], device: str, build: Builder
) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=2)
    stream = make_gradients(SHAPES, torch.bfloat16, 8)
    for grads in stream[:3]:
        pair.step(grads)
    weight = parameters[0].data
    parameters[0].data = change(weight)
    parameters[0].grad = torch.ones_like(parameters[0])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 .*\(6, 10\)"):
        pair.engine.step()
    parameters[0].grad, parameters[0].data = None, weight
    for grads in stream[3:]:
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16], ids=["double", "bfloat16"])
def test_x2_a_dtype_changed_after_construction_is_refused(target: torch.dtype, device: str, build: Builder) -> None:
    model = model_of(device=device)
    engine = build(model.named_parameters(), lr=0.1, topk_ratio=0.3)
    train(model, engine, 2)
    model.to(target)
    before = snapshot(list(model.parameters()))
    with pytest.raises((ValueError, RuntimeError), match=r"0\.weight.*(dtype|float64|bfloat16|moved)"):
        train(model, engine, 1)
    for parameter, weight in zip(model.parameters(), before, strict=True):
        assert_same_bits(parameter, weight)


def test_x2_load_with_assign_leaves_the_loaded_bytes(device: str, build: Builder) -> None:
    """`assign=True` replaces the Parameter objects: the model's are out of the optimizer's hands."""
    model = model_of(device=device)
    engine = build(model.parameters(), lr=0.1, topk_ratio=0.3)
    train(model, engine, 5)
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in loaded.items()}, assign=True)
    try:
        train(model, engine, 5)
        engine.flush()
    except (ValueError, RuntimeError) as refusal:
        assert "parameter" in str(refusal).lower()
    for name, value in model.state_dict().items():
        assert_same_bits(value, loaded[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_x2_torch_save_holds_the_right_bytes(dtype: torch.dtype, device: str, build: Builder) -> None:
    model = model_of(dtype, device)
    engine = build(model.parameters(), lr=0.1, topk_ratio=0.3, update_interval=2)
    train(model, engine, 5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    held = torch.load(file, weights_only=True)
    now = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, engine, 4)
    for name, value in now.items():
        assert_same_bits(held[name], value, name)
    fresh = model_of(dtype, device)
    fresh.load_state_dict(held)
    for name, value in fresh.state_dict().items():
        assert_same_bits(value, now[name], name)


def test_x2_a_whole_model_can_be_saved_and_copied(build: Builder) -> None:
    model = model_of()
    engine = build(model.parameters(), lr=0.1, topk_ratio=0.3, update_interval=2)
    train(model, engine, 5)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    expected = snapshot(list(model.parameters()))
    train(model, engine, 4)
    for parameter, weight in zip(other.parameters(), expected, strict=True):
        assert_same_bits(parameter, weight)


def test_x2_save_pretrained_holds_the_right_bytes(tmp_path: Path, device: str, build: Builder) -> None:
    """Weights that are views of one storage, and a tied head, through safetensors and back."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).to(device)
    engine = build(model.parameters(), lr=0.1, topk_ratio=0.3, update_interval=2)
    tokens = torch.arange(8, device=device)[None]
    for _ in range(5):
        engine.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        engine.step()
    engine.flush()
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    expected = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert_same_bits(parameter, expected[name], name)


def test_weights_edited_between_steps_are_taken_over(device: str, build: Builder) -> None:
    """Where bits changed the master becomes the weight; elsewhere it keeps the bits below bf16."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, lr=0.01, topk_ratio=0.3, update_interval=2, overlap_step=False)
    for grads in make_gradients(SHAPES, torch.bfloat16, 4):
        feed(parameters, grads)
        engine.step()
    masters = [engine.channel_state(parameter).master for parameter in parameters]
    with torch.no_grad():
        parameters[0][2, :] = 5.0
    for parameter in parameters:
        parameter.grad = None
    engine.step()
    new = engine.channel_state(parameters[0]).master
    expected = masters[0].clone()
    expected[2, :] = 5.0
    assert_same_bits(new, expected)
    assert not torch.equal(masters[0].bfloat16().float(), masters[0])
    for parameter, master in zip(parameters[1:], masters[1:], strict=True):
        assert_same_bits(engine.channel_state(parameter).master, master)


def test_x3_weights_swapped_out_and_back_keep_the_low_bits(device: str, build: Builder) -> None:
    """X3: averaged weights for an evaluation, then the originals again: the next step is what it would have been."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), lr=0.01, topk_ratio=0.3, update_interval=2)
    for grads in make_gradients(SHAPES, torch.bfloat16, 11):
        pair.step(grads)
        kept = snapshot(pair.parameters)
        with torch.no_grad():
            for parameter in pair.parameters:
                parameter.mul_(0.5)
            for parameter, weight in zip(pair.parameters, kept, strict=True):
                parameter.copy_(weight)
    pair.check_state()


def test_reload_weights_takes_over_edits_through_data(device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, lr=0.0, weight_decay=0, topk_ratio=0.3, update_interval=2)
    for grads in make_gradients(SHAPES, torch.bfloat16, 3):
        feed(parameters, grads)
        engine.step()
    for parameter in parameters:
        parameter.data.fill_(0.75)
    engine.reload_weights()
    for grads in make_gradients(SHAPES, torch.bfloat16, 5):
        feed(parameters, grads)
        engine.step()
    for parameter in parameters:
        assert bool((parameter == 0.75).all())
        assert bool((engine.channel_state(parameter).master == 0.75).all())
