"""What ranks do for the tests of Accelerate: DDP and FSDP2, on CPUs.

Accelerate shards where there is an accelerator alone; :func:`shard_on_cpu` tells it otherwise, and
its own code does the rest.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

WORLD, STEPS = 2, 3


class Model(torch.nn.Module):
    """Two blocks, each a unit of FSDP2, and layers around them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(6, 10)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(10, 10) for _ in range(2))
        self.outer = torch.nn.Linear(10, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x.to(self.inner.weight.dtype))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.outer(x)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 6, generator=generator), torch.randn(96, 3, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    from accelerate.state import PartialState  # noqa: PLC0415
    from accelerate.utils import DistributedType  # noqa: PLC0415

    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    # The states of the process and of the Accelerator: each new view of the one copies the other.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def made(kind: str, mixed_precision: str = "no", accumulate: int = 1) -> Any:
    """An ``Accelerator``, as a fresh process makes one."""
    from accelerate import Accelerator  # noqa: PLC0415
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415
    from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: PLC0415

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate
    )
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            cpu_ram_efficient_loading=False,
            reshard_after_forward=True,
            state_dict_type="SHARDED_STATE_DICT",
        )
        shard_on_cpu(accelerator, plugin)
    return accelerator


class Run:
    """A loop of Accelerate's: accumulation, clipping, a schedule."""

    def __init__(
        self, kind: str, precision: str, mixed_precision: str = "no", accumulate: int = 2
    ) -> None:
        from subulp import optim  # noqa: PLC0415
        from subulp.integrations.accelerate import prepare  # noqa: PLC0415

        self.accelerator = made(kind, mixed_precision, accumulate)
        model = Model()
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2, precision=precision, seed=5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.model, self.optimizer, self.loader, self.schedule = prepare(
            self.accelerator, model, optimizer, batches(), schedule
        )

    def train(self, first: int, last: int) -> list[float]:
        """Batches from one number to another."""
        losses = []
        for number, (x, y) in enumerate(self.loader):
            if not first <= number < last:
                continue
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x).float() - y).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def kept(self) -> dict[str, Any]:
        """Parameters and states, whole."""
        plain = self.accelerator.unwrap_model(self.model)
        found = {name: whole(p) for name, p in plain.named_parameters()}
        for index, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": whole(value) for name, value in states.items()}
        return found


def whole(value: Any) -> Any:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone() if isinstance(full, Tensor) else full


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(other[n])) for n, v in one.items()
    )


def resumed(kind: str, precision: str, folder: str) -> dict[str, Any]:
    """Train, save, train on; and load into another run, and train on there."""
    run = Run(kind, precision)
    losses = run.train(0, 2 * STEPS)
    run.accelerator.save_state(folder)
    losses += run.train(2 * STEPS, 3 * STEPS)
    expected, rate = run.kept(), run.optimizer.param_groups[0]["lr"]
    other = Run(kind, precision)
    other.accelerator.load_state(folder)
    again = other.train(2 * STEPS, 3 * STEPS)
    return {
        "losses": losses,
        "again": again,
        "kept": expected,
        "same": same(expected, other.kept()),
        "rates": (rate, other.optimizer.param_groups[0]["lr"]),
        "kinds": sorted({type(p).__name__ for p in other.optimizer.optimizer.state}),
        "model": type(run.model).__name__,
    }


def refusals() -> dict[str, str]:
    """What the check says of pairs that would train otherwise than meant."""
    from subulp import optim  # noqa: PLC0415
    from subulp.integrations.accelerate import check, prepare  # noqa: PLC0415

    found: dict[str, str] = {}

    def note(name: str, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except ValueError as error:
            found[name] = str(error)

    def pair(dtype: torch.dtype = torch.bfloat16) -> Any:
        model = Model(dtype)
        return model, optim.AdamW(model.parameters())

    accelerator = made("fsdp2", "bf16")
    note("upcast before", prepare, accelerator, *pair())
    model, optimizer = accelerator.prepare(*pair())
    note("upcast after", check, accelerator, model, optimizer)
    note("fp32 is meant", prepare, accelerator, *pair(torch.float32))

    accelerator = made("fsdp2")
    model, optimizer = pair()
    optim.fuse_backward(model, optimizer)
    note("fused before fsdp2", prepare, accelerator, model, optimizer)
    model, optimizer = pair()
    model(torch.zeros(2, 6)).sum().backward()
    optimizer.step()
    note("states before fsdp2", prepare, accelerator, model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    note("states lost", check, accelerator, model, optimizer)

    accelerator = made("ddp")
    model, optimizer = prepare(accelerator, *pair())
    optim.fuse_backward(accelerator.unwrap_model(model), optimizer.optimizer)
    note("fused under ddp", check, accelerator, model, optimizer)
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    note("not sharded", prepare, made("ddp"), *pair())
    del os.environ["ACCELERATE_USE_FSDP"]
    return found


def fused() -> dict[str, Any]:
    """The fused step under FSDP2 has the bits of the step after the backward pass."""
    from subulp import optim  # noqa: PLC0415
    from subulp.integrations.accelerate import check  # noqa: PLC0415

    found = []
    for fuse in (False, True):
        run = Run("fsdp2", "collage-plus", accumulate=1)
        if fuse:
            optim.fuse_backward(run.model, run.optimizer.optimizer)
            check(run.accelerator, run.model, run.optimizer)
        for number, (x, y) in enumerate(run.loader):
            if number == STEPS:
                break
            loss = (run.model(x).float() - y).square().mean()
            run.accelerator.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
        found.append(run.kept())
    return {"same": same(*found)}


def main(rank: int, folder: str, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    found: dict[str, Any] = {
        f"{kind} {precision}": resumed(kind, precision, f"{folder}/{kind}-{precision}")
        for kind, precision in (("ddp", "stochastic"), ("fsdp2", "extra-bits-8"))
    }
    found["refusals"] = refusals()
    found["fused"] = fused()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
