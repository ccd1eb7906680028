"""What ranks do for the tests of sharded tables: the same steps on meshes of one to four ranks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from subulp import nn, optim
from subulp.numerics.int_rows import ROW_FORMATS

WORLD = 4
STEPS = 4
STORAGES = tuple(ROW_FORMATS)
FEATURES = [*range(len(STORAGES) + 2), 3, 0]
# Examples of each of four readers; one has none.
READERS = [3, 0, 2, 4]
SPLITS = {1: [9], 2: [3, 6], 3: [3, 2, 4], 4: READERS}
RULES = ("sgd", "rowwise", "adagrad")
RUNS = [("rows", rule) for rule in RULES] + [("columns", rule) for rule in RULES]
RUNS += [("default", "rowwise"), ("tables", "sgd")]
DIMS = [8, 5, 16, 9, 12, 20, 7]


def tables(rounding: str = "stochastic") -> list[nn.EmbeddingTable]:
    """A table of each storage, of all policies and kinds of caches; two without a cache."""
    made = []
    for i, storage in enumerate(STORAGES):
        policy, ways = (("lfu", 4), ("lru", 4), ("lru", 1), ("lfu", 1))[i % 4]
        rows, share = 1100 + 37 * i, (0.02, 0.03, 0.01)[i % 3]
        hash = "mixed" if i == 6 else "modulo"
        made.append(nn.EmbeddingTable(rows, DIMS[i], storage, share, policy, ways, rounding, hash))
    made.append(nn.EmbeddingTable(1500, 6, "int8", 0.0, rounding=rounding))
    # Fewer rows than ranks, kept in FP32.
    return [*made, nn.EmbeddingTable(3, 4)]


def plan(name: str) -> list[Any] | None:
    count = len(STORAGES)
    if name == "default":
        return None
    if name == "rows":
        # A mixing hash does not go with split rows.
        return [nn.RowWise()] * (count - 1) + [nn.TableWise(), nn.RowWise(), nn.RowWise()]
    if name == "tables":
        return [nn.TableWise()] * (count + 2)
    return [nn.ColumnWise(3), nn.ColumnWise(2)] * 3 + [nn.ColumnWise(1), *[nn.ColumnWise(2)] * 2]


class Batch:
    """The lookups of a step, and the gradient; of all examples or of a range of them."""

    def __init__(self, step: int, *, longest: int = 4) -> None:
        generator = torch.Generator().manual_seed(step)
        sizes = [table.num_embeddings for table in tables()]
        count = sum(READERS)
        self.lengths = torch.randint(
            0, longest + 1, (len(FEATURES), count), generator=generator, dtype=torch.int64
        )
        self.rows, self.weights = [], []
        for f, table in enumerate(FEATURES):
            found = int(self.lengths[f].sum())
            drawn = torch.rand(found, generator=generator, dtype=torch.float32) ** 3
            self.rows.append((drawn * sizes[table]).long())
            self.weights.append(torch.randn(found, generator=generator, dtype=torch.float32))
        width = sum(tables()[t].embedding_dim for t in FEATURES)
        self.grad = torch.randn(count, width, generator=generator, dtype=torch.float32)

    def of(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ends = [torch.cat((n.new_zeros(1), n.cumsum(0))).tolist() for n in self.lengths]
        cuts = [slice(end[first], end[last]) for end in ends]
        rows = torch.cat([r[cut] for r, cut in zip(self.rows, cuts, strict=True)])
        weights = torch.cat([w[cut] for w, cut in zip(self.weights, cuts, strict=True)])
        return rows, self.lengths[:, first:last].flatten(), weights, self.grad[first:last]


def optimizer_of(rule: str, module: Any) -> optim.RowSGD | optim.RowAdagrad:
    if rule == "sgd":
        return optim.RowSGD(module, lr=0.3, weight_decay=0.01)
    return optim.RowAdagrad(module, lr=0.1, rowwise=rule == "rowwise")


def examples(ranks: int, rank: int) -> tuple[int, int]:
    sizes = SPLITS[ranks]
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


def train(
    bags: Any, ranks: int, rank: int, steps: range, *, weighted: bool = True
) -> dict[str, Tensor]:
    """The outputs and the gradients of weights of some steps."""
    first, last = examples(ranks, rank)
    seen = {}
    for step in steps:
        rows, lengths, weights, grad = Batch(step).of(first, last)
        weights.requires_grad_(weighted)
        out = bags(rows, lengths, per_sample_weights=weights if weighted else None)
        out.backward(grad)
        seen[f"out {step}"] = out.detach()
        if weighted:
            seen[f"weights {step}"] = weights.grad
    return seen


def state_of(bags: Any, optimizer: Any) -> dict[str, Tensor]:
    """All rows and sums, whole, and what was counted on this rank."""
    seen = {f"rows {i}": bags.weight_fp32(i) for i in range(len(tables()))}
    return {**seen, "evicted": bags.evicted.clone(), "statistics": bags.statistics.clone()}


def sharded(mesh: DeviceMesh | None, rounding: str, planned: str, **options: Any) -> Any:
    return nn.ShardedCachedEmbeddingBags(
        tables(rounding), mesh, plan(planned), features=FEATURES, seed=5, **options
    )


def equal_steps(mesh: DeviceMesh, ranks: int, rank: int) -> dict[str, dict[str, Tensor]]:
    """Trained tables for every rule and plan."""
    seen = {}
    for planned, rule in RUNS:
        rounding = "nearest" if rule == "adagrad" else "stochastic"
        mode = "mean" if rule == "rowwise" else "sum"
        bags = sharded(mesh, rounding, planned, mode=mode)
        optimizer = optimizer_of(rule, bags)
        outputs = train(bags, ranks, rank, range(STEPS), weighted=mode == "sum")
        seen[f"{planned} {rule}"] = outputs | state_of(bags, optimizer)
    for wire in ("bf16", "fp16"):
        bags = sharded(mesh, "stochastic", "rows", wire=wire)
        optimizer = optimizer_of("rowwise", bags)
        outputs = train(bags, ranks, rank, range(STEPS))
        seen[wire] = outputs | state_of(bags, optimizer)
    return seen


def checkpoints(
    mesh: DeviceMesh | None, ranks: int, rank: int, folder: Path, *, save: bool = False
) -> dict[str, dict[str, Tensor]]:
    """Three steps, saved; or what these ranks make of them."""
    seen = {}
    group = None if mesh is None else mesh.get_group()
    for planned in ("rows", "columns", "tables"):
        path = str(folder / planned)
        bags = sharded(mesh, "stochastic", planned)
        optimizer = optimizer_of("rowwise", bags)
        state = {"bags": bags, "optimizer": optimizer}
        if save:
            train(bags, ranks, rank, range(3))
            checkpoint.save(state, checkpoint_id=path, process_group=group)
            continue
        with torch.no_grad():
            bags.load_weights(0, torch.ones(tables()[0].num_embeddings, DIMS[0]))
        alone = mesh is None
        checkpoint.load(state, checkpoint_id=path, process_group=group, no_dist=alone)
        outputs = train(bags, ranks, rank, range(3, STEPS))
        seen[planned] = outputs | state_of(bags, optimizer)
    return seen


def whole_model(mesh: DeviceMesh, ranks: int, rank: int) -> dict[str, Any]:
    """Tables beside dense layers: DCP's state of the model, and DDP around both."""
    config = [nn.EmbeddingTable(1200, 4, "int8", 0.05, ways=4)] * 3

    def made() -> torch.nn.ModuleDict:
        bags = nn.ShardedCachedEmbeddingBags(config, mesh, [nn.TableWise(), *[nn.RowWise()] * 2])
        return torch.nn.ModuleDict({"dense": torch.nn.Linear(12, 1), "bags": bags})

    values, lengths = torch.arange(6) * 100 + rank, torch.ones(6, dtype=torch.int64)
    torch.manual_seed(1)
    model, other = made(), made()
    optimizers = [optim.RowAdagrad(m["bags"], lr=0.1) for m in (model, other)]
    model["dense"](model["bags"](values, lengths)).sum().backward()
    saved = copy.deepcopy(get_model_state_dict(model))
    set_model_state_dict(other, saved)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for m in (model, other):
        m["dense"](m["bags"](values, lengths)).sum().backward()
    rows = [[m["bags"].weight_fp32(t) for t in range(3)] for m in (model, other)]
    seen: dict[str, Any] = {"set": all(map(torch.equal, *rows))}
    group = mesh.get_group()
    with caught(seen, "ddp"):
        torch.nn.parallel.DistributedDataParallel(other, process_group=group)
    if rank > 0:
        other["bags"].mark.zero_()
    with caught(seen, "overwritten"):
        other["bags"](values, lengths)
    return seen


@contextlib.contextmanager
def caught(seen: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
        seen[name] = "nothing"
    except Exception as error:
        seen[name] = f"{type(error).__name__}: {error}"


def faults(mesh: DeviceMesh, ranks: int, rank: int) -> dict[str, str]:
    """The error of every rank when one does something wrong, or the ranks differ."""
    seen: dict[str, str] = {}
    bags = sharded(mesh, "stochastic", "rows")
    rows, lengths, weights, grad = Batch(0).of(*examples(ranks, rank))
    before = [bags.weight_fp32(i) for i in range(3)]
    with caught(seen, "no optimizer"):
        bags(rows, lengths).backward(grad)
    optimizer = optimizer_of("rowwise", bags)
    last = rank == ranks - 1
    wrong = rows.clone()
    if last:
        wrong[-1] = 10**6
    with caught(seen, "row"):
        bags(wrong, lengths)
    with caught(seen, "negative row"):
        bags(-1 - rows if last else rows, lengths)
    with caught(seen, "lengths"):
        bags(rows, lengths[1:] if last else lengths)
    with caught(seen, "dtype"):
        bags(rows.float() if last else rows, lengths)
    with caught(seen, "weights"):
        bags(rows, lengths, per_sample_weights=weights if last else None)
    with caught(seen, "gradient"):
        bags(rows, lengths).backward(grad * torch.nan if last else grad)
    with caught(seen, "factors"):
        factors = torch.full_like(weights, torch.inf) if last else weights
        bags(rows, lengths, per_sample_weights=factors).backward(grad)
    with caught(seen, "eval"):
        (bags.eval() if last else bags)(rows, lengths)
    bags.train()
    with caught(seen, "rate"):
        optimizer.param_groups[0]["lr"] = 0.2 if last else 0.1
        bags(rows, lengths).backward(grad)
    optimizer.param_groups[0]["lr"] = 0.1
    # Of a table that is not the first: those before it have to stay as they are too.
    of_table = optimizer.state[optimizer.param_groups[0]["params"][-1]]
    sums = of_table["sum"]
    with caught(seen, "sums"):
        of_table["sum"] = torch.zeros(len(sums) + 1) if last else sums
        bags(rows, lengths).backward(grad)
    of_table["sum"] = sums
    with caught(seen, "no such table"):
        bags.weight_fp32(len(tables()))
    with caught(seen, "no such table to load"):
        bags.load_weights(-1 - len(tables()), torch.zeros(1, 4))
    whole = bags.weight_fp32(len(tables()) - 1)
    seen["from the end"] = str(torch.equal(bags.weight_fp32(-1), whole) and bool(whole.any()))
    with caught(seen, "backward passes in another order"):
        sums = [bags(rows, lengths).sum() for _ in range(2)]
        for one in reversed(sums) if last else sums:
            one.backward()
    scaled = sharded(mesh, "stochastic", "rows")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 if last else 4.0)
    optim.RowAdagrad(scaled, scaler=scaler)
    with caught(seen, "scale"):
        scaler.scale(scaled(rows, lengths).sum()).backward()
    with caught(seen, "another module"):
        (sharded(mesh, "stochastic", "rows"), scaled)[last](rows, lengths)
    with caught(seen, "frozen"):
        bags.tables[0].requires_grad_(not last)
        bags(rows, lengths)
    bags.requires_grad_(True)
    with caught(seen, "arguments"):
        nn.ShardedCachedEmbeddingBags(tables(), mesh, mode="mean" if last else "sum")
    with caught(seen, "seeds"):
        nn.ShardedCachedEmbeddingBags(tables(), mesh, seed=1 if last else 2)
    with caught(seen, "rows asked for"):
        bags.weight_fp32(0, rank, rank + 2)
    with caught(seen, "no such rows"):
        bags.weight_fp32(0, 0, 10**6)
    same = all(torch.equal(bags.weight_fp32(i), b) for i, b in enumerate(before))
    seen["rows"] = f"{'unchanged' if same else 'changed'}, {bags.steps} steps"
    with caught(seen, "afterwards"):
        bags(rows, lengths).backward(grad)
    return seen


def others(mesh: DeviceMesh, ranks: int, rank: int) -> dict[str, Any]:
    """What else one can do with such tables."""
    seen: dict[str, Any] = {}
    torch.manual_seed(100 + rank)
    drawn = nn.ShardedCachedEmbeddingBags(tables(), mesh)
    seen["seed"] = drawn.seed
    bags = sharded(mesh, "stochastic", "rows")
    optimizer = optimizer_of("rowwise", bags)
    twin, _ = copy.deepcopy((bags, optimizer))
    train(bags, ranks, rank, range(2))
    train(twin, ranks, rank, range(2))
    seen["twin"] = all(torch.equal(bags.weight_fp32(i), twin.weight_fp32(i)) for i in range(9))
    rows, lengths, weights, grad = Batch(7).of(*examples(ranks, rank))
    first = bags.weight_fp32(0)
    weights.requires_grad_()
    out = bags(rows, lengths, per_sample_weights=weights)
    torch.autograd.grad(out.sum(), weights, retain_graph=True)
    seen["weights alone"] = bags.steps == 2 and torch.equal(bags.weight_fp32(0), first)
    bags.tables[0].requires_grad_(False)
    bags(rows, lengths).backward(grad)
    seen["frozen"] = bags.steps == 3 and torch.equal(bags.weight_fp32(0), first)
    with torch.no_grad():
        seen["empty"] = tuple(bags(rows[:0], lengths[:0]).shape)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = sharded(mesh, "stochastic", "rows")
    optimizer = optim.RowSGD(scaled, lr=0.1, scaler=scaler)
    plain = sharded(mesh, "stochastic", "rows")
    optim.RowSGD(plain, lr=0.1)
    plain(rows, lengths).backward(grad)
    scaler.scale((scaled(rows, lengths) * grad).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    seen["scaled"] = all(torch.equal(plain.weight_fp32(i), scaled.weight_fp32(i)) for i in range(9))
    bad = grad * torch.inf if rank == ranks - 1 else grad
    scaler.scale((scaled(rows, lengths) * bad).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    seen["overflow"] = (scaled.steps, scaler.get_scale())
    seen |= whole_model(mesh, ranks, rank)
    return seen


def main(rank: int, folder: str) -> None:
    """What a process does: everything, on every mesh that it is in."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=120),
    )
    meshes: dict[int, Any] = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, WORLD + 1)}
    found: dict[Any, Any] = {}
    for n in (2, 1, 3, 4):
        if rank < n:
            if n != 3:
                found["steps", n] = equal_steps(meshes[n], n, rank)
                found["faults", n] = faults(meshes[n], n, rank)
                found["others", n] = others(meshes[n], n, rank)
            if n == 2:
                checkpoints(meshes[n], n, rank, Path(folder), save=True)
            mesh = meshes[n] if n > 1 else None
            found["checkpoint", n] = checkpoints(mesh, n, rank, Path(folder))
        distributed.barrier()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found["meshes"] = {}
    with caught(found["meshes"], "square"):
        sharded(square, "nearest", "rows")
    with caught(found["meshes"], "slice"):
        sharded(square["b"], "nearest", "rows")
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
