"""The classifier over a mesh: real ranks of gloo against one process, bit for bit."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from filelock import FileLock
from torch import multiprocessing

from .mesh import checks, heads
from .mesh.heads import CASES

WORLD = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What four ranks have found, started once for all tests of all workers of pytest-xdist."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory = directory / "sharded_head"
    directory.mkdir(exist_ok=True)
    with FileLock(directory / "lock"), pytest.MonkeyPatch.context() as patch:
        if not all((directory / f"{rank}.pt").exists() for rank in range(WORLD)):
            (directory / "rendezvous").unlink(missing_ok=True)
            patch.setenv("OMP_NUM_THREADS", "1")
            # One import of torch for all ranks.
            multiprocessing.set_forkserver_preload([checks.__name__])
            multiprocessing.start_processes(
                checks.main, (WORLD, directory), WORLD, start_method="forkserver"
            )
    load = {"weights_only": False}
    return directory, [torch.load(directory / f"{rank}.pt", **load) for rank in range(WORLD)]


@pytest.fixture(autouse=True)
def one_thread():
    """As each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def of(found, check: str, name: Any, ranks: int = WORLD) -> list[Any]:
    return [theirs[check][name] for theirs in found[1][:ranks]]


def assert_same_rows(parts, whole) -> None:
    """The rows of all ranks together are those of one process."""
    codes = torch.full_like(whole["codes"], 99)
    for part in parts:
        place = 0
        for first, count in part["runs"]:
            codes[first : first + count] = part["codes"][place : place + count]
            place += count
        assert place == len(part["codes"])
        assert (part["steps"], part["seed"]) == (whole["steps"], whole["seed"])
    assert torch.equal(codes, whole["codes"])
    if whole["remainder"] is not None:
        assert torch.equal(torch.cat([part["remainder"] for part in parts]), whole["remainder"])


def same_loss(a, b) -> bool:
    return torch.equal(a, b) or bool(a.isnan() and b.isnan())


def assert_same_steps(parts, whole, dtype=torch.float32) -> None:
    """Equal losses, and gradients that differ by the order of their sums."""
    for i, step in enumerate(whole):
        assert all(same_loss(part[i]["loss"], step["loss"]) for part in parts)
        # Every rank has its own part of the gradient, times the number of ranks.
        grad = torch.cat([part[i]["grad"] for part in parts]).double() / len(parts)
        exact = step["grad"].double()
        error = (grad - exact).norm() / exact.norm().clamp(min=1e-30)
        assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process(found, name):
    case = CASES[name]
    head = heads.make(case)
    first = heads.stored(head)
    steps, asked, last = heads.train(head, case), heads.ask(head, case), heads.stored(head)
    for ranks in (1, 2, 4):
        if (name, ranks) not in found[1][0]["trainings"]:
            continue
        parts = of(found, "trainings", (name, ranks), ranks)
        assert_same_rows([part["first"] for part in parts], first)
        assert_same_steps([part["steps"] for part in parts], steps, case.dtype)
        assert_same_rows([part["last"] for part in parts], last)
        evals = [part["eval"] for part in parts]
        assert_same_steps([[e] for e in evals], [asked], case.dtype)
        for key in ("scores", "labels"):
            assert torch.equal(torch.cat([e[key] for e in evals]), asked[key])
        assert all(torch.equal(e["plain"], asked["plain"]) for e in evals)
        weight = head.weight(torch.arange(case.labels).flip(0))
        for rank, part in enumerate(evals):
            assert torch.equal(part["weight"], weight[rank : case.labels : 3])
        few = [heads.part(case, 9, rank, ranks)[0][:2] for rank in range(ranks)]
        scores, labels = head.topk(torch.cat(few), case.labels)
        assert torch.equal(torch.cat([e["every label"] for e in evals]), labels)
        assert torch.equal(torch.cat([e["every score"] for e in evals]), scores)


def test_rows_are_balanced(found):
    """Both kinds of rows, those with a remainder and those without."""
    parts = of(found, "trainings", ("precise", 4))
    sizes = [[count for _, count in part["first"]["runs"]] for part in parts]
    assert sizes == [[16, 37], [16, 37], [16, 37], [16, 36]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", heads.SAVED)
def test_others_go_on_where_two_ranks_stopped(found, name):
    case = CASES[name]
    never_stopped = heads.make(case)
    heads.train(never_stopped, case, range(2))
    saved = heads.stored(never_stopped)
    steps = heads.train(never_stopped, case, range(2, 4))
    for ranks in (1, 2, 3, 4):
        parts = of(found, "checkpoints", (name, ranks), ranks)
        assert_same_rows([part["loaded"] for part in parts], saved)
        assert_same_steps([part["steps"] for part in parts], steps)
        assert_same_rows([part["last"] for part in parts], heads.stored(never_stopped))
    alone = heads.make(case, seed=8)
    state = {"model": alone.state_dict()}
    dcp.load(state, checkpoint_id=found[0] / name, no_dist=True)
    alone.load_state_dict(state["model"])
    assert_same_rows([heads.stored(alone)], saved)
    heads.train(alone, case, range(2, 4))
    assert_same_rows([heads.stored(alone)], heads.stored(never_stopped))


@pytest.mark.parametrize("name", ["integers", "floats"])
def test_state_dicts_of_torch_distributed(found, name):
    parts = of(found, "state_dicts", name)
    storage = {"integers": "int8", "floats": "bf16"}[name]
    case = heads.Case(counts=True, options={"head_fraction": 0.3, "storage": storage})
    whole = heads.make(case)
    for key in ("first", "set", "whole"):
        assert_same_rows([part[key] for part in parts], heads.stored(whole))
    expected = whole.state_dict()
    for part in parts:
        assert part["group"]["params"] == ["head.table.codes"]
        assert part["state"].keys() == {f"head.{key}" for key in expected}
        for key, value in expected.items():
            assert torch.equal(part["state"][f"head.{key}"], value)


def test_rows_on_meta_come_from_state_dicts(found):
    parts = of(found, "state_dicts", "meta")
    whole = heads.stored(heads.make(checks.PRECISE))
    for which in range(3):
        assert_same_rows([part[which] for part in parts], whole)


@pytest.mark.parametrize(
    ("check", "name", "text"),
    [
        ("state_dicts", "one process", "codes is a DTensor, and these rows are on no mesh"),
        ("state_dicts", "other size", r"the whole table, over 4 ranks, has \(50, 20\)"),
        ("state_dicts", "pickle", "TypeError: .* torch.distributed.checkpoint"),
        ("refusals", "two dimensions", r"ValueError: mesh has 2 dimensions.*'pp', 'tp'"),
        ("refusals", "no mesh", "TypeError: mesh is list: pass a DeviceMesh"),
        ("refusals", "turned", r"ValueError: mesh has the ranks \[3, 2, 1, 0\]"),
        ("refusals", "refine", "ValueError: head shares its labels with 4 ranks"),
        ("refusals", "no sharding", "RuntimeError: ExtremeClassifier .* mesh="),
        ("refusals", "other sizes", "ValueError: num_labels is 50 on rank 0 .* 51 on rank 2"),
        ("refusals", "bad on one", "ValueError: (chunks=0|rank 2 of the mesh)"),
        ("refusals", "other counts", "ValueError: label_counts is"),
        ("refusals", "ddp", "RuntimeError: .*DistributedDataParallel would overwrite"),
        ("refusals", "ddp, remainder", "RuntimeError: .*DistributedDataParallel would overwrite"),
        ("refusals", "fsdp", "RuntimeError: .*ignored_params="),
        ("errors", "nan", "FloatingPointError: (embeddings of shape|rank 2)"),
        ("errors", "index", "ValueError: (label_cols have values|rank 2)"),
        ("errors", "shape", r"ValueError: (embeddings have shape \(4, 19\)|rank 2)"),
        ("errors", "dtype of labels", "ValueError: (label_rows have dtype|rank 2)"),
        ("errors", "dtype", "ValueError: the embeddings' dtype .* is 0 on rank 0 .* 1 on rank 2"),
        ("errors", "DTensor", "TypeError: (embeddings is a DTensor|rank 2)"),
        ("errors", "no tensor", "TypeError: (embeddings is a NoneType|rank 2)"),
        ("errors", "loss", "ValueError: loss= is 0 on rank 0 of the mesh and 1 on rank 2"),
        ("errors", "eval", r"ValueError: train\(\) with gradients"),
        ("errors", "frozen", r"ValueError: train\(\) with gradients"),
        ("errors", "lr", "ValueError: lr is 0.5 on rank 0 of the mesh and 0.25 on rank 2"),
        ("errors", "bad lr", "ValueError: (lr=-1.0|rank 2)"),
        ("errors", "steps", "ValueError: the number of updates is 0 on rank 0"),
        ("errors", "k", "ValueError: k is 4 on rank 0 of the mesh and 3 on rank 2"),
        ("errors", "no k", "ValueError: (k=0|rank 2)"),
        ("errors", "label", "IndexError: (labels from 1000|rank 2)"),
        ("errors", "no label", "ValueError: (labels have dtype torch.float32|rank 2)"),
        ("errors", "counts", "ValueError: (label_counts has shape|rank 2)"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(found, check, name, text):
    for message in of(found, check, name):
        assert message is not None
        assert re.search(text, message), message


def test_a_process_outside_of_the_mesh_is_told(found):
    for message in [theirs["refusals"]["not in it"] for theirs in found[1][2:]]:
        assert "is not in the mesh" in message


def test_errors_update_nothing_and_the_next_step_is_as_ever(found):
    for before, after in of(found, "errors", "unchanged"):
        assert torch.equal(before["codes"], after["codes"])
        assert before["steps"] == after["steps"] == 0
    head = heads.make(checks.PLAIN)
    steps = heads.train(head, checks.PLAIN)
    parts = of(found, "errors", "afterwards")
    assert_same_steps([part[0] for part in parts], steps)
    assert_same_rows([part[1] for part in parts], heads.stored(head))


def test_a_batch_of_nothing_is_one_in_one_process_too(found):
    head = heads.make(checks.PLAIN)
    none = torch.zeros(0, dtype=torch.int64)
    loss = head(torch.zeros(0, checks.PLAIN.dim), none, none, loss=True)
    parts = of(found, "errors", "nothing at all")
    assert all(torch.equal(part[0], loss) for part in parts)
    assert_same_rows([part[1] for part in parts], heads.stored(head))


def test_wrapped_models_leave_the_head_alone(found):
    for before, after in of(found, "refusals", "ddp, ignored"):
        assert torch.equal(before["codes"], after["codes"])
    for plain, *wrapped in of(found, "refusals", "trained"):
        assert plain["steps"] == 1
        for rows in wrapped:
            assert torch.equal(rows["codes"], plain["codes"])
            assert torch.equal(rows["remainder"], plain["remainder"])


@pytest.mark.parametrize("how", ["ddp", "fsdp", "sum"])
def test_the_encoder_gets_the_gradient_of_the_whole_batch(found, how):
    model = checks.Model(checks.PLAIN)
    model(*heads.batch(checks.PLAIN, 0)).backward()
    for grad in of(found, "encoders", how):
        torch.testing.assert_close(grad, model.encoder.weight.grad, rtol=1e-5, atol=1e-6)


def test_all_ranks_take_the_seed_of_the_first(found):
    torch.manual_seed(100)
    expected = int(torch.randint(2**32, (), dtype=torch.int64))
    assert of(found, "others", "seed") == [expected] * WORLD


def test_a_part_of_a_larger_mesh_trains_alone(found):
    head = heads.make(checks.PLAIN)
    steps, last = heads.train(head, checks.PLAIN), heads.stored(head)
    parts = of(found, "others", "sub-mesh")
    for row in (parts[:2], parts[2:]):
        assert_same_steps([part[0] for part in row], steps)
        assert_same_rows([part[1] for part in row], last)


@pytest.mark.parametrize("which", [0, 1])
def test_copies_train_alike(found, which):
    head = heads.make(checks.PRECISE)
    steps, last = heads.train(head, checks.PRECISE), heads.stored(head)
    parts = [both[which] for both in of(found, "others", "copies")]
    assert_same_steps([part[0] for part in parts], steps)
    assert_same_rows([part[1] for part in parts], last)


def test_frozen_rows_stay(found):
    parts = of(found, "others", "frozen")
    for before, _, after in parts:
        assert torch.equal(before["codes"], after["codes"])
    head = heads.make(checks.PLAIN).requires_grad_(False)
    assert_same_steps([part[1] for part in parts], heads.train(head, checks.PLAIN))


def test_counts_that_come_later_move_rows_between_ranks(found):
    head = heads.make(checks.PRECISE)
    heads.train(head, checks.PRECISE)
    head.set_label_counts(heads.other_counts())
    steps, last = heads.train(head, checks.PRECISE), heads.stored(head)
    parts = of(found, "others", "new counts")
    assert_same_steps([part[0] for part in parts], steps)
    assert_same_rows([part[1] for part in parts], last)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_head_steps_once(found, reentrant):
    head = heads.make(checks.PLAIN)
    x, rows, cols = heads.batch(checks.PLAIN, 0)
    x.requires_grad_()
    head(x, rows, cols).backward()
    parts = of(found, "others", ("checkpoint", reentrant))
    assert_same_rows([part[1] for part in parts], heads.stored(head))
    torch.testing.assert_close(torch.cat([part[0] for part in parts]) / WORLD, x.grad)


@pytest.mark.parametrize("name", heads.IN_REFERENCE)
def test_plain_pytorch_trains_as_one_process(found, name, monkeypatch):
    monkeypatch.setenv("SUBULP_BACKEND", "reference")
    head = heads.make(CASES[name])
    steps, last = heads.train(head, CASES[name]), heads.stored(head)
    parts = of(found, "others", ("reference", name))
    assert_same_steps([part[0] for part in parts], steps)
    assert_same_rows([part[1] for part in parts], last)


def test_the_default_dtype_changes_nothing(found):
    head = heads.make(checks.PLAIN)
    heads.train(head, checks.PLAIN)
    assert_same_rows([part[1] for part in of(found, "others", "float64")], heads.stored(head))
