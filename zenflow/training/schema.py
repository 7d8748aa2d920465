"""The configuration of a run as dataclasses, usable without Hydra.

Types, names and enums are checked while the configuration is composed; values by `checks.check`.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from zenflow.training.errors import InputError

Device = Enum("Device", ["auto", "cpu", "cuda"])
ModelKind = Enum("ModelKind", ["encoder", "causal", "tiny"])
TokenizerKind = Enum("TokenizerKind", ["auto", "bytes"])
Dtype = Enum("Dtype", ["auto", "float32", "bfloat16"])
DataKind = Enum("DataKind", ["snippets", "sms", "questions", "glue", "alpaca", "austen", "stdlib", "headers", "file"])
GlueTask = Enum("GlueTask", ["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"])
Schedule = Enum("Schedule", ["constant", "linear", "cosine"])
TrackingMode = Enum("TrackingMode", ["disabled", "offline", "online"])
SelectStrategy = Enum("SelectStrategy", ["auto", "step", "epoch"])
ChannelDim = Enum("ChannelDim", ["column", "row"])
Importance = Enum("Importance", ["square", "magnitude"])
ImportanceOver = Enum("ImportanceOver", ["step", "window", "average"])
DeferredRule = Enum("DeferredRule", ["accumulate", "replay"])
AccumulateOn = Enum("AccumulateOn", ["gpu", "host"])
Upload = Enum("Upload", ["backward", "step"])
OnReselect = Enum("OnReselect", ["migrate", "reset"])
SelectedMasters = Enum("SelectedMasters", ["float32", "stochastic"])
RingDtype = Enum("RingDtype", ["auto", "float32", "bfloat16"])
BetasPerWindow = Enum("BetasPerWindow", ["none", "first", "both"])
SecondMoment = Enum("SecondMoment", ["mean", "steps"])
Peer = Enum("Peer", ["torchao_offload", "deepspeed_offload", "deepspeed_zenflow"])  # as in engine=


@dataclass
class EngineConfig:
    """Who updates the weights: an `AdamWEngine`, a `ZenFlowEngine`, a `SimulatedEngine` or a `PeerEngine`."""


@dataclass
class AdamWEngine(EngineConfig):
    """torch's fused AdamW on the trainer's device, with fp32 masters where the weights are bf16; or on the host."""

    masters: bool = True  # false: moments and updates in the weights' own bf16
    offload: bool = False  # true: fp32 masters and moments on the host, updated there in every step


@dataclass
class RuleConfig(EngineConfig):
    """What `ZenFlowEngine` and `SimulatedEngine` share: the fields of `zenflow.ZenFlowConfig` that both heed."""

    topk_ratio: int | float | str = 0.1  # 0 and 1 are numbers too
    update_interval: int | str = 4
    select_interval: int | str = 100
    full_warm_up_rounds: int = 4
    overlap_step: bool = True
    stagger: bool = True
    visible_after: int | str = "auto"
    weight_prediction: float = 1.0
    channel_dim: ChannelDim = ChannelDim.column
    importance: Importance = Importance.square
    deferred_rule: DeferredRule = DeferredRule.accumulate
    deferred_lr_scale: int | float | str = "linear"
    min_deferred_numel: int = 4096
    accumulate_on: AccumulateOn = AccumulateOn.gpu
    ring_dtype: RingDtype = RingDtype.auto


@dataclass
class ZenFlowEngine(RuleConfig):
    """The fields of `zenflow.ZenFlowConfig` (meanings there), less `max_grad_norm`, which the optimizer group holds."""

    select_strategy: SelectStrategy = SelectStrategy.step
    steps_per_epoch: int | None = None  # filled in from the data
    importance_over: ImportanceOver = ImportanceOver.step
    importance_decay: float = 0.9
    on_reselect: OnReselect = OnReselect.migrate
    selected_masters: SelectedMasters = SelectedMasters.float32
    rounding_seed: int = 0
    upload: Upload = Upload.backward
    upload_check: bool = True
    backward_passes_per_step: int | None = None
    bucket_bytes: int = 128 * 2**20
    worker_threads: int | str = "auto"
    core_binding: bool | str = "auto"
    pt_reserved_cores_perc: float = 0.25


@dataclass
class SimulatedEngine(RuleConfig):
    """A deferred rule in plain torch on the trainer's device; meanings of its own fields in `simulate.rule.Rule`.

    Select intervals are counted in steps.
    """

    betas_per_window: BetasPerWindow = BetasPerWindow.none
    second_moment: SecondMoment = SecondMoment.mean
    delay_compensation: float = 0.0
    growing_rounds: int = 0


@dataclass
class PeerEngine(EngineConfig):
    """Another project's offload, as its own documentation sets it up (`zenflow.training.peers`)."""

    peer: Peer = Peer.torchao_offload


@dataclass
class DeepSpeedZenFlowEngine(PeerEngine):
    """The `zenflow` block of DeepSpeed's own JSON; intervals are counted in steps."""

    peer: Peer = Peer.deepspeed_zenflow
    topk_ratio: float = 0.1
    update_interval: int = 4
    select_interval: int = 100
    full_warm_up_rounds: int = 0
    overlap_step: bool = True


@dataclass
class ModelConfig:
    """Which weights: those in the folder `path`, or random ones for `config`, or those that `package` ships.

    A path is a Hugging Face folder, or the `model` folder of a run with `save_model`.
    """

    kind: ModelKind = ModelKind.encoder
    path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)  # causal only: what a Hugging Face config.json holds
    package: str | None = None
    subfolder: str = ""  # of the package
    gguf_file: str | None = None  # of the folder; converted once, then cached
    tokenizer: TokenizerKind = TokenizerKind.auto  # auto: the folder's own, and bytes for tiny
    dtype: Dtype = Dtype.auto  # auto: bfloat16 on a GPU, float32 on a CPU
    checkpointing: bool = False  # keep each layer's input alone and compute the rest again in backward
    width: int = 64  # tiny only, like the rest
    layers: int = 2
    heads: int = 4


@dataclass
class DataConfig:
    """Which text. `snippets`, `sms`, `questions`, `glue` and a file with a label field have labels.

    The rest is for language modelling; of `alpaca` the responses alone are learned.
    """

    kind: DataKind = DataKind.snippets
    path: str | None = None
    task: GlueTask | None = None  # glue only
    mismatched: bool = False  # glue's mnli only: hold out dev_mismatched, text of other genres, not dev_matched
    text_field: str = "text"  # of a JSON line
    label_field: str | None = None
    max_length: int = 64  # tokens a sample
    max_characters: int | None = None  # of the training text
    max_bytes: int | None = None  # headers only: of all files together, in the order of their paths
    held_out: float = 0.05  # share, where the kind fixes no number
    evaluate_samples: int = 1000  # of the held-out ones, always the same


@dataclass
class OptimizerConfig:
    """AdamW's settings and the learning rate's course."""

    lr: float = 5e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    schedule: Schedule = Schedule.linear  # after the warm-up
    warmup_steps: int = 10
    final_lr_ratio: float = 0.0  # of lr, at the last step; not for constant


@dataclass
class TrackingConfig:
    """Where the metrics go besides metrics.jsonl in the run's folder."""

    mode: TrackingMode = TrackingMode.disabled  # wandb's
    project: str = "zenflow"
    group: str | None = None  # null: in a sweep its folder's name
    name: str | None = None  # null: the run's folder's; in a sweep with the swept values behind it
    tags: list[str] = field(default_factory=list)  # in a sweep the swept values are added


@dataclass
class TrainConfig:
    """One run. A step is `accumulate` backward passes of `batch_size` samples."""

    name: str = "run"
    seed: int = 0
    device: Device = Device.auto
    threads: int | None = None  # of torch on the CPU; null: torch's choice
    steps: int = 100
    batch_size: int = 32
    accumulate: int = 1
    autocast: bool = False  # bfloat16
    evaluate_every: int | None = None  # steps; always before the first and after the last
    log_every: int | None = None  # steps between two readings of the device; null: 10 on a GPU, 1 on a CPU
    save_model: bool = False  # the final weights in fp32, as the folder `model` in the run's folder: a later model.path
    checkpoint_every: int | None = None  # steps between two checkpoints; null: by the clock, and on a signal
    checkpoint_minutes: float | None = 30  # without checkpoint_every, minutes from one to the next; null: never
    keep_checkpoints: int = 2  # the last ones; older ones are removed
    resume: str | None = None  # a run's folder or one of its checkpoints; auto: the run in this folder, if there is one
    plot: bool = True  # loss.png, if matplotlib is there
    trace: str | None = None  # file.json in the run's folder: what ran where in trace_steps, and a picture beside it
    trace_steps: list[int] = field(default_factory=lambda: [5, 16])  # the first and the last
    variant: str | None = None  # settings as words, which the command line applies last: one value of an ablation
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def plain(value: Any) -> Any:
    """Dataclasses as dicts and enums as their names, for JSON and trackers."""
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return value.name if isinstance(value, Enum) else value


def from_plain(values: dict[str, Any]) -> TrainConfig:
    """What `plain` was given, if that was a run's configuration. InputError names what this version does not know."""
    peer = DeepSpeedZenFlowEngine if "topk_ratio" in values["engine"] else PeerEngine
    known = {"masters": AdamWEngine, "delay_compensation": SimulatedEngine, "peer": peer}
    engine = next((kind for name, kind in known.items() if name in values["engine"]), ZenFlowEngine)
    return _filled(TrainConfig, values, {"engine": engine})


def _filled(kind: type, values: dict[str, Any], chosen: dict[str, type]) -> Any:
    """An instance of a dataclass; `chosen` are the classes of its fields where these are not the annotated ones."""
    kinds = typing.get_type_hints(kind) | chosen
    if strangers := sorted(values.keys() - {item.name for item in dataclasses.fields(kind)}):
        raise InputError(f"{kind.__name__} has no {', '.join(strangers)} here.")
    made = {}
    for name, value in values.items():
        options = [option for option in (kinds[name], *typing.get_args(kinds[name])) if isinstance(option, type)]
        enum = next((option for option in options if issubclass(option, Enum)), None)
        if dataclasses.is_dataclass(kinds[name]):
            value = _filled(kinds[name], value, {})
        elif enum is not None and value is not None:
            if value not in enum.__members__:
                raise InputError(f"{name} is {value!r}; allowed here: {', '.join(enum.__members__)}.")
            value = enum[value]
        made[name] = value
    return kind(**made)
