"""Lightning's Trainer with a tiny model: fused as unfused, resumed as never stopped."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.core.optimizer import LightningOptimizer

from subulp import diagnostics, optim
from subulp.integrations.lightning import FusedBackwardMixin, FusedHalfPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

BATCHES = 7


def batches():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * BATCHES, 8, generator=generator)
    y = torch.randn(4 * BATCHES, 4, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


class Batches:
    """The same, going on where they were: Lightning keeps such a loader's state."""

    def __init__(self):
        self._batches = list(batches())
        self._next = 0

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        self._next %= len(self)
        while self._next < len(self):
            self._next += 1
            yield self._batches[self._next - 1]

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


class Plain(pl.LightningModule):
    def __init__(self, dtype=torch.bfloat16, make=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        self.make = make or (lambda ps: optim.AdamW(ps, lr=0.01, precision="stochastic", seed=2))
        self.losses = []

    def training_step(self, batch, index):
        x, y = (t.to(self.layers[0].weight.dtype) for t in batch)
        loss = (self.layers(x) - y).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Mixed(FusedBackwardMixin, Plain):
    pass


def fit(module, folder=None, resume=None, epochs=2, **options):
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(module, Batches(), ckpt_path=resume)
    return trainer


def same(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


OPTIONS = [
    {},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 3},
    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mixin_is_unfused(options):
    """Seven batches, three at a time: an epoch's last step has one."""
    modules = [Plain(), Mixed()]
    for module in modules:
        fit(module, **options)
    assert same(*modules)
    assert modules[0].losses == modules[1].losses
    assert len(modules[0].losses) == 2 * BATCHES
    assert modules[1].fused is None
    assert modules[1].trainer.optimizers[0].fused is None


def test_the_norm_is_lightnings_with_several_groups():
    """It clips what the optimizer has, in its order; FP32 shows the last bit."""

    def make(params):
        params = list(params)
        return optim.AdamW([{"params": params[1::2]}, {"params": params[::2]}], precision="fp32")

    modules = [Plain(torch.float32, make), Mixed(torch.float32, make)]
    for module in modules:
        fit(module, gradient_clip_val=0.1)
    assert same(*modules)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_plugin_is_unfused(options):
    modules = [Plain(torch.float32), Plain(torch.float32)]
    fit(modules[0], precision="bf16-true", **options)
    plugin = FusedHalfPrecision()
    fit(modules[1], plugins=[plugin], **options)
    assert modules[1].layers[0].weight.dtype == torch.bfloat16
    assert same(*modules)
    assert plugin.fused is None


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_unfused_clipping_is_torchs(precision):
    """Also where autocast runs: Lightning clips for no optimizer that unscales by itself."""
    ours = Plain(torch.float32, lambda ps: optim.AdamW(ps, lr=0.01, precision="fp32"))
    theirs = Plain(torch.float32, lambda ps: torch.optim.AdamW(ps, lr=0.01))
    for module in (ours, theirs):
        fit(module, precision=precision, gradient_clip_val=0.05)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def resumed_is_never_stopped(new, folder, **options):
    saving = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, monitor=None
    )
    whole = new()
    fit(whole, folder, enable_checkpointing=True, callbacks=[saving], epochs=2, **options)
    stopped = sorted(folder.glob("*.ckpt"), key=lambda p: int(p.stem.partition("=")[2]))
    resumed = new()
    # In the middle of the first epoch, where a step is complete.
    fit(resumed, folder, resume=stopped[0], epochs=2, **options)
    assert len(whole.losses) == 2 * BATCHES
    assert whole.losses[2:] == resumed.losses
    return same(whole, resumed)


@pytest.mark.parametrize("kind", ["plain", "fused", "torch"])
def test_resumed_in_an_epoch_is_never_stopped(tmp_path, kind):
    """torch's AdamW is the control: where it goes on with its bits, so do ours."""
    new = {
        "plain": Plain,
        "fused": Mixed,
        "torch": lambda: Plain(torch.float32, lambda ps: torch.optim.AdamW(ps, lr=0.01)),
    }[kind]
    assert resumed_is_never_stopped(new, tmp_path)


def test_fused_by_hand_is_told():
    """The clipping and accumulation that Trainer does itself."""

    class ByHand(Plain):
        def configure_optimizers(self):
            optimizer = self.make(self.parameters())
            optim.fuse_backward(self, optimizer)
            return optimizer

    with pytest.raises(RuntimeError, match=r"max_norm=0\.5"):
        fit(ByHand(), gradient_clip_val=0.5)
    with pytest.raises(RuntimeError, match=r"clip_value=0\.5"):
        fit(ByHand(), gradient_clip_val=0.5, gradient_clip_algorithm="value")
    with pytest.raises(RuntimeError, match=r"accumulate=2"):
        fit(ByHand(), accumulate_grad_batches=2)


def test_what_trainer_says_is_refused_here():
    with pytest.raises(ValueError, match="max_norm comes from Trainer\\(gradient_clip_val"):
        FusedHalfPrecision(max_norm=1.0)

    class Twice(Mixed):
        fuse_options = {"accumulate": 2}  # noqa: RUF012

    with pytest.raises(ValueError, match="accumulate comes from Trainer"):
        fit(Twice())
    foreign = Mixed(torch.float32, torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"has returned AdamW: one of subulp\.optim"):
        fit(foreign)


def test_manual_optimization_is_refused():
    class Manual(Mixed):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            self.manual_backward(super().training_step(batch, index))

    with pytest.raises(ValueError, match="manual optimization"):
        fit(Manual())


def test_only_scalers_are_told_that_a_step_unscales():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([parameter], precision="fp32")
    assert not _optimizer_handles_unscaling(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert optimizer.skipped_steps == 1


class Clips(Plain):
    """Lightning's way to clip by one's own limit."""

    def configure_gradient_clipping(self, optimizer, *_, **__):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


def test_the_modules_own_clipping_is_refused_unless_it_is_the_steps():
    with pytest.raises(
        RuntimeError, match="clipped by max_norm=None, clip_value=None: let Trainer"
    ):
        fit(Clips(), plugins=[FusedHalfPrecision()])
    modules = [Clips(), Clips()]
    fit(modules[0], precision="bf16-true")
    fit(modules[1], plugins=[FusedHalfPrecision()], gradient_clip_val=0.01)
    assert same(*modules)


class Changes(pl.Callback):
    """Another limit, and more passes a step, from the third step on."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2:
            trainer.gradient_clip_val = 0.02


@pytest.mark.parametrize("kind", ["mixin", "plugin"])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_limit_that_a_callback_changes(kind, limit):
    modules = [Plain(), Mixed() if kind == "mixin" else Plain()]
    plugins = [[], [FusedHalfPrecision()] if kind == "plugin" else []]
    for module, plugin in zip(modules, plugins, strict=True):
        fit(module, plugins=plugin, gradient_clip_val=limit, callbacks=[Changes()])
    assert same(*modules)


@pytest.mark.parametrize("scheduling", [{0: 1, 1: 2}, {0: 4, 1: 2}], ids=str)
def test_more_or_fewer_passes_a_step_from_an_epoch_on(scheduling):
    modules = [Plain(), Mixed()]
    for module in modules:
        fit(module, callbacks=[pl.callbacks.GradientAccumulationScheduler(scheduling)], epochs=3)
    assert same(*modules)


def test_wrappers_of_optimizers_are_not_fused():
    """They pass for subclasses of what they wrap, and what is set on them reaches nobody."""
    model = Plain()
    inner = optim.AdamW(model.parameters(), lr=0.01)
    wrappers = [LightningOptimizer(inner), Fabric(accelerator="cpu").setup(model, inner)[1]]
    for wrapper in wrappers:
        for call in (
            lambda w=wrapper: optim.fuse_backward(model, w),
            lambda w=wrapper: w.change_precision("master"),
            lambda w=wrapper: diagnostics.watch(w),
            lambda w=wrapper: w.import_state_dict(inner.state_dict()),
        ):
            with pytest.raises(
                ValueError, match=r"a wrapper around the one that steps: .*optimizer"
            ):
                call()
        assert wrapper.optimizer is inner


class Inherits(FusedBackwardMixin, Clips):
    """Its own clipping comes after the mixin's."""


def test_clipping_that_a_class_after_the_mixin_has():
    with pytest.raises(RuntimeError, match=r"Pass max_norm=0.01 to fuse_backward"):
        fit(Inherits(), precision="32-true")
    modules = [Clips(), Inherits()]
    fit(modules[0])
    fit(modules[1], gradient_clip_val=0.01)
    assert same(*modules)


class Scales(Plain):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class ScalesFused(FusedBackwardMixin, Scales):
    pass


@pytest.mark.filterwarnings("default::UserWarning")
def test_hooks_before_a_step_that_was_taken_are_told():
    with pytest.warns(UserWarning, match="on_before_optimizer_step of ScalesFused is called after"):
        fit(ScalesFused())
