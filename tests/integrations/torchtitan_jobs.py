"""What a rank does for the tests of torchtitan: its model, FSDP, containers and checkpoints.

torchtitan looks for an accelerator and takes CUDA for granted where there is none; these processes
say that it is the CPU.
"""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule

from subulp.nn import MoR

WORLD = 2
VOCABULARY, LENGTH, STEPS = 64, 8, 2
PRECISION = "extra-bits-8"
MIXTURE = MoR("subtensor-2way", "block-128x128")


def on_cpu() -> None:
    """Before anything else of torchtitan is imported."""
    from torchtitan.tools import utils  # noqa: PLC0415

    utils.device_type, utils.device_module = "cpu", torch.cpu


def spec(layers: int = 2, mixture: bool = False) -> Any:
    """torchtitan's debug model of Llama 3, with few layers and a small vocabulary."""
    from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: PLC0415
    from torchtitan.models.llama3 import model_registry  # noqa: PLC0415

    from subulp.integrations.torchtitan import MixtureConverter  # noqa: PLC0415

    converters = [MixtureConverter.Config(mor=MIXTURE)] if mixture else None
    found = model_registry("debugmodel", converters=converters)
    config = found.model
    config.layers = config.layers[:layers]
    for layer in config.layers:
        # Its default is compiled by Inductor.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.vocab_size = VOCABULARY
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    return found


class Run:
    """What torchtitan's Trainer makes and does, without its devices, data and metrics."""

    def __init__(self, optimizers: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager  # noqa: PLC0415
        from torchtitan.components.optimizer import LRSchedulersContainer  # noqa: PLC0415
        from torchtitan.config import (  # noqa: PLC0415
            CompileConfig,
            ParallelismConfig,
            TrainingConfig,
        )
        from torchtitan.distributed import ParallelDims  # noqa: PLC0415
        from torchtitan.tools.utils import set_default_dtype  # noqa: PLC0415

        made = spec(1, mixture=True)
        torch.manual_seed(0)
        with torch.device("meta"), set_default_dtype(torch.bfloat16):
            model = made.model.build()
        model.verify_module_protocol()
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
        model = made.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(parallelism, distributed.get_world_size()),
            training=TrainingConfig(dtype="bfloat16"),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no sum with a factor, of one in torchtitan.
                module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()
        self.model = model
        self.optimizers = optimizers.build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=8)
        self.parts = CheckpointManager, self.model, self.optimizers, self.schedulers

    def step(self) -> float:
        """One step of the trainer: all ranks' gradients are summed, and divided by all tokens."""
        from torchtitan.components.loss import cross_entropy_loss  # noqa: PLC0415
        from torchtitan.distributed.utils import clip_grad_norm_  # noqa: PLC0415

        self.optimizers.zero_grad()
        tokens = whole_batch()
        own = tokens.chunk(distributed.get_world_size())[distributed.get_rank()]
        loss = cross_entropy_loss(self.model(own[:, :-1]), own[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizers.step()
        self.schedulers.step()
        return float(loss)

    def checkpoints(self, folder: str) -> Any:
        manager, model, optimizers, schedulers = self.parts
        config = manager.Config(enable=True, interval=1)
        return config.build(
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )

    def kept(self) -> dict[str, Any]:
        """All of the model and the optimizers, whole."""
        return {
            name: whole(value)
            for part in (self.model.state_dict(), self.optimizers.state_dict())
            for name, value in part.items()
        }


def whole_batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    # Words that follow from each other, so that there is something to learn.
    first = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
    return (first + 5 * torch.arange(LENGTH + 1)) % VOCABULARY


def whole(value: Any) -> Any:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone() if isinstance(full, Tensor) else copy.deepcopy(full)


def same(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [
        name
        for name, value in one.items()
        if not (
            torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        )
    ]


def resumed(folder: str) -> dict[str, Any]:
    """Train, save by torchtitan's manager, load into a new run, and go on with both."""
    from subulp.integrations.torchtitan import adamw  # noqa: PLC0415

    def make() -> Run:
        return Run(adamw(lr=1e-3, precision=PRECISION, seed=7))

    run = make()
    losses = [run.step() for _ in range(STEPS)]
    manager = run.checkpoints(folder)
    manager.save(STEPS)
    saved = run.kept()
    other = make()
    loader = other.checkpoints(folder)
    loader.load(STEPS)
    seen: dict[str, Any] = {"losses": losses, "loaded": same(saved, other.kept())}
    losses.append(run.step())
    seen["loss again"] = other.step()
    for each in (manager, loader):
        each.close()
    seen["resumed"] = same(run.kept(), other.kept())
    seen["kept"] = run.kept()
    seen["rates"] = run.schedulers.get_metrics()
    seen["types"] = sorted({type(value).__name__ for value in run.optimizers.optimizers[0].state})
    seen["decided"] = {
        name: sorted(layer.mix)
        for name, layer in run.model.named_modules()
        if type(layer).__name__.endswith("MixtureLinear")
    }
    return seen


def main(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    on_cpu()
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=120),
    )
    torch.save(resumed(folder), Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
