"""Hugging Face's Trainer, with tiny models: fused as unfused, resumed as never stopped."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from subulp import optim
from subulp.integrations.transformers import FusedBackwardCallback, optimizer_cls_and_kwargs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EXAMPLES = 22  # Batches of 2: an epoch of eleven, which four do not divide.


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 32, (8,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def new_model(dtype=torch.bfloat16, lora=False, tied=True):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=8, tie_word_embeddings=tied
    )
    model = GPT2LMHeadModel(config).to(dtype)
    if not lora:
        return model
    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    # PEFT's own default are adapters in FP32.
    return get_peft_model(model, adapters, autocast_adapter_dtype=lora == "fp32")


def new_trainer(folder, fused, model=None, precision="collage-plus", callback=None, **given):
    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "optim_args": f"precision={precision}, betas=(0.9, 0.95)",
            **given,
        }
    )
    trainer = Trainer(
        model=new_model() if model is None else model,
        args=args,
        train_dataset=Examples(),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, seed=3),
    )
    if fused or callback:
        trainer.add_callback(FusedBackwardCallback(trainer, fuse=fused, **(callback or {})))
    return trainer


def trained_both(folder, lora=False, dtype=torch.bfloat16, **given):
    """Trainings without fusion and with it, one after the other: dropout draws from one source."""
    trainers = []
    for fused in (False, True):
        trainers.append(new_trainer(folder, fused, new_model(dtype, lora), **given))
        trainers[-1].train()
    return trainers


def values(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0, "precision": "stochastic"},
        {"gradient_checkpointing": True, "max_grad_norm": 0.1},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "gradient_accumulation_steps": 2,
        },
        {"precision": "extra-bits-8", "bf16": True},
        {"precision": "fp32", "dtype": torch.float32},
        {"precision": "fp32", "dtype": torch.float32, "bf16": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_fused_is_unfused(tmp_path, given):
    trainers = trained_both(tmp_path, **given)
    assert_same(*map(values, trainers))
    assert logged(trainers[0], "loss") == logged(trainers[1], "loss")
    norms = [logged(trainer, "grad_norm") for trainer in trainers]
    assert len(norms[1]) == trainers[1].state.global_step
    if given.get("max_grad_norm", 1.0):
        assert norms[0] == norms[1]
    else:
        assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    # Everything is as before.
    assert trainers[1].optimizer.optimizer.fused is None
    assert "backward" not in vars(trainers[1].accelerator)


def test_lora(tmp_path):
    before = dict(new_model(lora=True).named_parameters())
    trainers = trained_both(tmp_path, lora=True)
    assert_same(*map(values, trainers))
    after = values(trainers[1])
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("lora" in name for name in moved)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_resumed_is_never_stopped(tmp_path, fused, lora):
    precision = "fp32" if lora else "stochastic"
    given = {"gradient_accumulation_steps": 4, "precision": precision}
    given |= {"save_strategy": "steps", "save_steps": 2}
    lora = lora and "fp32"
    whole = new_trainer(tmp_path, fused, new_model(lora=lora), **given)
    whole.train()
    resumed = new_trainer(tmp_path, fused, new_model(lora=lora), **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == whole.state.global_step == 6
    assert_same(values(whole), values(resumed))
    if fused and lora:
        folder = tmp_path / "checkpoint-6" / "full_precision" / "adapter"
        adapted = PeftModel.from_pretrained(new_model(), folder)
        assert_same(dict(adapted.named_parameters()), values(whole))


def test_adapters_that_peft_loads_in_fp32_are_told(tmp_path):
    """Resuming, it casts narrow adapters to FP32 before the optimizer is made."""
    given = {"save_strategy": "steps", "save_steps": 10}
    new_trainer(tmp_path, False, new_model(lora=True), **given).train()
    resumed = new_trainer(tmp_path, False, new_model(lora=True), **given)
    with pytest.raises(ValueError, match=r"not available for a parameter of dtype torch\.float32"):
        resumed.train(resume_from_checkpoint=True)


def test_logs_and_full_precision_weights(tmp_path):
    given = {"save_strategy": "steps", "save_steps": 5}
    trainer = new_trainer(tmp_path, True, callback={"watch_every": 1}, **given)
    trainer.train()
    quality, lost = logged(trainer, "descent_quality"), logged(trainer, "lost_updates")
    assert len(quality) == len(lost) == trainer.state.global_step
    assert all(0.95 < q < 1.05 for q in quality)
    assert all(0 <= x < 0.02 for x in lost)
    rounded = trained_both(tmp_path, precision="nearest", callback={"watch_every": 1})
    assert logged(rounded[0], "descent_quality") == logged(rounded[1], "descent_quality")
    assert min(logged(rounded[1], "descent_quality")) < 0.9
    assert max(logged(rounded[1], "lost_updates")) > 0.1
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-20" / "full_precision")
    assert saved.dtype == torch.float32
    again = new_trainer(tmp_path, False, **given)
    again.create_optimizer()
    again.optimizer.load_state_dict(torch.load(tmp_path / "checkpoint-20" / "optimizer.pt"))
    narrow = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-20")
    again.model.load_state_dict(narrow.state_dict())
    wide = again.optimizer.full_precision_state_dict(again.model)
    parameters = dict(saved.named_parameters())
    assert all(torch.equal(parameters[name], wide[name]) for name in parameters)
    assert any(not torch.equal(p, p.bfloat16().float()) for p in parameters.values())


def test_clipping_without_the_callback_is_told(tmp_path):
    """A user who fuses by hand under Trainer's own clipping."""
    trainer = new_trainer(tmp_path, False)
    trainer.create_optimizer()
    optim.fuse_backward(trainer.model, trainer.optimizer)
    with pytest.raises(RuntimeError, match=r"max_norm=1\.0"):
        trainer.train()
    trainer = new_trainer(tmp_path, False, gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer.create_optimizer()
    optim.fuse_backward(trainer.model, trainer.optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_"):
        trainer.train()


def test_what_trainer_says_is_refused_here(tmp_path):
    trainer = new_trainer(tmp_path, False)
    for name in ("max_norm", "accumulate", "scaler"):
        with pytest.raises(ValueError, match=f"{name} comes from TrainingArguments"):
            FusedBackwardCallback(trainer, **{name: 1})
    with pytest.raises(ValueError, match="keep_bytes has no effect with fuse=False"):
        FusedBackwardCallback(trainer, fuse=False, keep_bytes=3)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    foreign = Trainer(model=nn.Linear(2, 2), args=args, train_dataset=Examples())
    foreign.create_optimizer()
    with pytest.raises(ValueError, match=r"one of subulp\.optim"):
        FusedBackwardCallback(foreign).on_train_begin(args, foreign.state, foreign.control)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("precision=collage-plus,betas=(0.9,0.95)", {"betas": (0.9, 0.95)}),
        (" precision = collage-plus , betas = [0.9, 0.95] ,", {"betas": [0.9, 0.95]}),
        ("precision=collage-plus,maximize=true,seed=7", {"maximize": True, "seed": 7}),
        ("precision=collage-plus,eps=1e-6,seed=None", {"eps": 1e-6, "seed": None}),
        (None, {"precision": None}),
    ],
)
def test_options_as_text(tmp_path, text, expected):
    args = TrainingArguments(output_dir=str(tmp_path), optim_args=text, learning_rate=0.5)
    kind, options = optimizer_cls_and_kwargs(args)
    assert kind is optim.AdamW
    assert options["lr"] == 0.5
    assert options.get("precision") == expected.pop("precision", "collage-plus")
    assert {name: options[name] for name in expected} == expected
    kind([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], **{"precision": "nearest"} | options)


def test_options_for_sgd(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), optim_args="momentum=0.9")
    kind, options = optimizer_cls_and_kwargs(args, optim.SGD, precision="kahan")
    assert options == {"lr": args.learning_rate, "momentum": 0.9, "precision": "kahan"}
    kind([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precison=nearest", "AdamW has no option 'precison'; it has .*precision"),
        ("precision", "'precision' does not begin with name=value"),
        ("seed=1,seed=2", "'seed' is there twice"),
        ("betas=(0.9", "does not begin with name=value"),
        ("seed=,eps=1", "does not begin with name=value"),
    ],
)
def test_wrong_options(tmp_path, text, message):
    args = TrainingArguments(output_dir=str(tmp_path), optim_args=text)
    with pytest.raises(ValueError, match=message):
        optimizer_cls_and_kwargs(args)
    with pytest.raises(ValueError, match=r"optimizer is AdamW: pass a class of subulp\.optim"):
        optimizer_cls_and_kwargs(args, torch.optim.AdamW)


def test_logs_are_json(tmp_path):
    trainer = new_trainer(tmp_path, True, callback={"watch_every": 4}, max_grad_norm=0.0)
    trainer.train()
    assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history
    assert all(math.isfinite(norm) for norm in logged(trainer, "grad_norm"))


class _Limits(TrainerCallback):
    def __init__(self, limit):
        self.limit = limit

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            args.max_grad_norm = self.limit


@pytest.mark.parametrize(("first", "then"), [(1.0, 0.01), (0.0, 0.01), (0.01, 0.0)])
def test_a_limit_that_a_callback_changes(tmp_path, first, then):
    trainers = []
    for fused in (False, True):
        trainers.append(new_trainer(tmp_path, fused, max_grad_norm=first))
        trainers[-1].add_callback(_Limits(then))
        trainers[-1].train()
    assert_same(*map(values, trainers))


class _Clips(TrainerCallback):
    def __init__(self, trainer, limit):
        self.trainer, self.limit = trainer, limit

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.model
        self.trainer.accelerator.clip_grad_norm_(model.parameters(), self.limit)


@pytest.mark.filterwarnings("ignore:on_pre_optimizer_step of _Clips")
@pytest.mark.parametrize("own", [0.0, 1.0])
def test_clipping_by_somebody_elses_limit_is_refused(tmp_path, own):
    trainer = new_trainer(tmp_path, True, max_grad_norm=own)
    trainer.add_callback(_Clips(trainer, 1e-3))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(max_norm=0.001, .* have stepped"):
        trainer.train()


class _Passes(TrainerCallback):
    def __init__(self, passes):
        self.passes = passes

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            args.gradient_accumulation_steps = self.passes


@pytest.mark.parametrize(("first", "then"), [(1, 2), (4, 2)])
def test_an_accumulation_that_a_callback_changes(tmp_path, first, then):
    trainers = []
    for fused in (False, True):
        trainers.append(new_trainer(tmp_path, fused, gradient_accumulation_steps=first))
        trainers[-1].add_callback(_Passes(then))
        trainers[-1].train()
    assert_same(*map(values, trainers))


@pytest.mark.filterwarnings("default::UserWarning")
def test_hooks_before_a_step_that_was_taken_are_told(tmp_path):
    trainer = new_trainer(tmp_path, True, max_grad_norm=1.0)
    trainer.add_callback(_Clips(trainer, 1.0))
    with pytest.warns(
        UserWarning, match="on_pre_optimizer_step of _Clips is called after the step"
    ):
        trainer.train()
