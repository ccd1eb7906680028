"""What the ranks of test_sharded_head do; each check returns what the test compares."""

from __future__ import annotations

import copy
import io
import itertools
import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from subulp import nn

from . import heads
from .heads import CASES, Case

PLAIN, PRECISE = CASES["e4m3-stochastic"], CASES["precise"]


class Model(torch.nn.Module):
    """An encoder and a head."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(case.dim, case.dim)
        self.head = heads.make(case, **options)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x), rows, cols, loss=True)


class Ranks:
    """This process and the meshes that it is in."""

    def __init__(self, directory: Path) -> None:
        self.rank, self.directory = dist.get_rank(), directory
        self.meshes = {ranks: DeviceMesh("cpu", list(range(ranks))) for ranks in (1, 2, 3, 4)}
        self.grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def inside(self) -> list[tuple[int, DeviceMesh]]:
        return [(ranks, mesh) for ranks, mesh in self.meshes.items() if self.rank < ranks]


def refusal(function: Callable[[], object]) -> str | None:
    """The kind and text of the error that something raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def trainings(ranks: Ranks) -> dict[Any, Any]:
    found = {}
    for name, case in CASES.items():
        for count, mesh in ranks.inside():
            if count == 3 or (count == 1 and name not in ("precise", "e4m3-stochastic")):
                continue
            head = heads.make(case, mesh=mesh)
            first = heads.stored(head)
            steps = heads.train(head, case)
            found[name, count] = {
                "first": first,
                "steps": steps,
                "eval": heads.ask(head, case),
                "last": heads.stored(head),
            }
    return found


def checkpoints(ranks: Ranks) -> dict[Any, Any]:
    """Two ranks train and save; others go on."""
    found = {}
    for name in heads.SAVED:
        case = CASES[name]
        path = ranks.directory / name
        if ranks.rank < 2:
            mesh = ranks.meshes[2]
            head = heads.make(case, mesh=mesh)
            heads.train(head, case, range(2))
            state = {"model": get_model_state_dict(head)}
            dcp.save(state, checkpoint_id=path, process_group=mesh.get_group())
        dist.barrier()
        for count, mesh in ranks.inside():
            head = heads.make(case, mesh=mesh, seed=8)
            state = {"model": head.state_dict()}
            dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
            head.load_state_dict(state["model"])
            found[name, count] = {
                "loaded": heads.stored(head),
                "steps": heads.train(head, case, range(2, 4)),
                "last": heads.stored(head),
            }
    return found


def state_dicts(ranks: Ranks) -> dict[str, Any]:
    mesh, found = ranks.meshes[4], {}
    for name, storage in (("integers", "int8"), ("floats", "bf16")):
        case = Case(counts=True, options={"head_fraction": 0.3, "storage": storage})
        model, other = Model(case, mesh=mesh), Model(case, mesh=mesh, seed=9)
        optimizer = model.head.row_optimizer
        fully_shard(model.encoder, mesh=mesh)
        fully_shard(other.encoder, mesh=mesh)
        full = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=full)
        set_model_state_dict(other, state, options=full)
        alone = heads.make(case, mesh=mesh, seed=9)
        # As a state dict of one process is loaded on every rank.
        alone.load_state_dict(
            {k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")}
        )
        found[name] = {
            "first": heads.stored(model.head),
            "set": heads.stored(other.head),
            "whole": heads.stored(alone),
            "state": {k: v for k, v in state.items() if k.startswith("head.")},
        }
        options = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, options)
        found[name]["group"] = options["param_groups"][0]
    saved = heads.make(PRECISE, mesh=mesh)
    path = ranks.directory / "meta"
    dcp.save(saved.state_dict(), checkpoint_id=path)
    made = heads.make(PRECISE, mesh=mesh, device="meta")
    state = made.state_dict()
    dcp.load(state, checkpoint_id=path)
    made.load_state_dict(state, assign=True)
    emptied = heads.make(PRECISE, mesh=mesh, device="meta")
    emptied.to_empty(device="cpu").load_state_dict(saved.state_dict())
    found["meta"] = [heads.stored(head) for head in (saved, made, emptied)]
    alone = nn.ExtremeClassifier(PRECISE.dim, PRECISE.labels, head_fraction=0.3, seed=1)
    found["one process"] = refusal(lambda: alone.load_state_dict(saved.state_dict()))
    small = nn.ExtremeClassifier(PRECISE.dim, 50, mesh=mesh, seed=1)
    found["other size"] = refusal(lambda: small.load_state_dict(heads.make(PLAIN).state_dict()))
    found["pickle"] = refusal(lambda: torch.save(saved, io.BytesIO()))
    return found


def refusals(ranks: Ranks) -> dict[str, Any]:
    mesh, found = ranks.meshes[4], {}
    found["two dimensions"] = refusal(lambda: heads.make(PLAIN, mesh=ranks.grid))
    # By the mesh's own constructor, which all ranks call.
    turned = DeviceMesh("cpu", [3, 2, 1, 0])
    found["turned"] = refusal(lambda: heads.make(PLAIN, mesh=turned))
    found["refine"] = refusal(lambda: nn.refine(heads.make(PLAIN, mesh=mesh), []))
    found["no mesh"] = refusal(lambda: heads.make(PLAIN, mesh=[0, 1]))
    if ranks.rank > 1:
        found["not in it"] = refusal(lambda: heads.make(PLAIN, mesh=ranks.meshes[2]))
    found["no sharding"] = refusal(lambda: heads.train(heads.make(PLAIN), PLAIN))
    found["other sizes"] = refusal(
        lambda: nn.ExtremeClassifier(4, 50 + (ranks.rank == 2), seed=0, mesh=mesh)
    )
    found["bad on one"] = refusal(
        lambda: nn.ExtremeClassifier(4, 50, chunks=0 if ranks.rank == 2 else 2, mesh=mesh)
    )
    found["other counts"] = refusal(
        lambda: nn.ExtremeClassifier(
            4, 50, head_fraction=0.5, label_counts=torch.arange(50) * (ranks.rank + 1), mesh=mesh
        )
    )
    model = Model(PRECISE, mesh=mesh)
    before = heads.stored(model.head)
    found["ddp"] = refusal(lambda: DistributedDataParallel(model))
    states = itertools.chain(model.named_parameters(), model.named_buffers())
    names = [name for name, _ in states if name.startswith("head.")]
    model._ddp_params_and_buffers_to_ignore = [n for n in names if "remainder" not in n]
    found["ddp, remainder"] = refusal(lambda: DistributedDataParallel(model))
    model._ddp_params_and_buffers_to_ignore = names
    parallel = DistributedDataParallel(model)
    found["ddp, ignored"] = before, heads.stored(model.head)
    parallel(*heads.part(PRECISE, 0, ranks.rank, 4)).backward()
    found["fsdp"] = refusal(lambda: fully_shard(Model(PRECISE, mesh=mesh), mesh=mesh))
    model = Model(PRECISE, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.head.parameters()))
    model(*heads.part(PRECISE, 0, ranks.rank, 4)).backward()
    plain = Model(PRECISE, mesh=mesh)
    plain(*heads.part(PRECISE, 0, ranks.rank, 4)).backward()
    found["trained"] = [heads.stored(m.head) for m in (plain, parallel.module, model)]
    return found


def errors(ranks: Ranks) -> dict[str, Any]:
    """What one rank does wrong is an error on all, and nothing is updated."""
    mesh, found = ranks.meshes[4], {}
    head = heads.make(PLAIN, mesh=mesh)
    before = heads.stored(head)
    x, rows, cols = heads.part(PLAIN, 0, ranks.rank, 4)
    bad = ranks.rank == 2

    def forward(**changes: Any) -> Callable[[], torch.Tensor]:
        given = {"x": x, "rows": rows, "cols": cols, "loss": False, **(changes if bad else {})}
        return lambda: head(given["x"], given["rows"], given["cols"], loss=given["loss"])

    nan = x.clone()
    nan[:1] = float("nan")
    found["nan"] = refusal(forward(x=nan))
    found["index"] = refusal(forward(cols=cols + 1000))
    found["shape"] = refusal(forward(x=x[:, 1:]))
    found["dtype of labels"] = refusal(forward(rows=rows.float()))
    found["dtype"] = refusal(forward(x=x.bfloat16()))
    found["loss"] = refusal(forward(loss=True))
    found["DTensor"] = refusal(forward(x=as_dtensor(x, mesh)))
    head.train(not bad)
    found["eval"] = refusal(forward())
    head.train().table.requires_grad_(not bad)
    found["frozen"] = refusal(forward())
    head.table.requires_grad_(True)
    group = head.row_optimizer.param_groups[0]
    group["lr"] = 0.25 if bad else 0.5
    found["lr"] = refusal(forward())
    group["lr"] = -1.0 if bad else 0.5
    found["bad lr"] = refusal(forward())
    group["lr"] = 0.5
    head.steps += bad
    found["steps"] = refusal(forward())
    head.steps -= bad
    found["k"] = refusal(lambda: head.topk(x, 3 if bad else 4))
    found["no k"] = refusal(lambda: head.topk(x, 0 if bad else 4))
    found["label"] = refusal(lambda: head.weight(torch.tensor([1000 if bad else 3])))
    found["no label"] = refusal(lambda: head.weight(torch.tensor([1.5]) if bad else cols))
    found["counts"] = refusal(lambda: head.set_label_counts(torch.zeros(5 if bad else 211)))
    found["no tensor"] = refusal(forward(x=None))
    found["unchanged"] = before, heads.stored(head)
    none = torch.zeros(0, dtype=torch.int64)
    empty = heads.make(PLAIN, mesh=mesh)
    found["nothing at all"] = empty(x[:0], none, none, loss=True), heads.stored(empty)
    found["afterwards"] = heads.train(head, PLAIN), heads.stored(head)
    return found


def as_dtensor(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)


def encoders(ranks: Ranks) -> dict[str, Any]:
    """The encoder's gradient, averaged or summed up over the ranks, is that of the whole batch."""
    mesh, found = ranks.meshes[4], {}
    given = heads.part(PLAIN, 0, ranks.rank, 4)
    model = Model(PLAIN, mesh=mesh)
    parallel = DistributedDataParallel(model.encoder)
    model.head(parallel(given[0]), *given[1:]).backward()
    found["ddp"] = model.encoder.weight.grad
    model = Model(PLAIN, mesh=mesh)
    fully_shard(model.encoder, mesh=mesh)
    model(*given).backward()
    found["fsdp"] = model.encoder.weight.grad.full_tensor()
    model = Model(PLAIN, mesh=mesh, encoder_gradients="sum")
    model(*given).backward()
    dist.all_reduce(model.encoder.weight.grad)
    found["sum"] = model.encoder.weight.grad
    return found


def others(ranks: Ranks) -> dict[str, Any]:
    mesh, found = ranks.meshes[4], {}
    torch.manual_seed(100 + ranks.rank)
    found["seed"] = nn.ExtremeClassifier(4, 50, mesh=mesh).seed
    # Each row of a grid has a head of its own, as in a stage of a pipeline.
    along = heads.make(PLAIN, mesh=ranks.grid["tp"])
    found["sub-mesh"] = heads.train(along, PLAIN), heads.stored(along)
    head = heads.make(PRECISE, mesh=mesh)
    twin = copy.deepcopy(head)
    assert twin.row_optimizer is not head.row_optimizer
    found["copies"] = [(heads.train(h, PRECISE), heads.stored(h)) for h in (head, twin)]
    frozen = heads.make(PLAIN, mesh=mesh).requires_grad_(False)
    found["frozen"] = heads.stored(frozen), heads.train(frozen, PLAIN), heads.stored(frozen)
    # Counts that come later move trained rows from rank to rank.
    head = heads.make(PRECISE, mesh=mesh)
    heads.train(head, PRECISE)
    head.set_label_counts(heads.other_counts())
    found["new counts"] = heads.train(head, PRECISE), heads.stored(head)
    for reentrant in (False, True):
        head = heads.make(PLAIN, mesh=mesh)
        x, rows, cols = heads.part(PLAIN, 0, ranks.rank, 4)
        x.requires_grad_()
        checkpoint(head, x, rows, cols, use_reentrant=reentrant).backward()
        found["checkpoint", reentrant] = x.grad, heads.stored(head)
    os.environ["SUBULP_BACKEND"] = "reference"
    for name in heads.IN_REFERENCE:
        head = heads.make(CASES[name], mesh=mesh)
        found["reference", name] = heads.train(head, CASES[name]), heads.stored(head)
    del os.environ["SUBULP_BACKEND"]
    torch.set_default_dtype(torch.float64)
    try:
        head = heads.make(PLAIN, mesh=mesh)
        found["float64"] = heads.train(head, PLAIN), heads.stored(head)
    finally:
        torch.set_default_dtype(torch.float32)
    return found


CHECKS = (trainings, checkpoints, state_dicts, refusals, errors, encoders, others)


def main(rank: int, world: int, directory: Path) -> None:
    """Run all checks, and leave what they found in the directory."""
    # torch.distributed.checkpoint warns of itself.
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    ranks = Ranks(directory)
    found = {}
    for check in CHECKS:
        began = time.perf_counter()
        found[check.__name__] = check(ranks)
        if not rank:
            print(f"{check.__name__}: {time.perf_counter() - began:.1f} s", flush=True)
    torch.save(found, directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
