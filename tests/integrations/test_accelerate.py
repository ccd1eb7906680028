"""Accelerate trains with our optimizers: alone, under DDP and FSDP2; and what is refused."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

from subulp import optim
from subulp.integrations.accelerate import check, prepare

from . import accelerate_jobs as jobs
from . import pages


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks have seen."""
    folder = tmp_path_factory.mktemp("accelerate")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn(jobs.main, (str(folder), port), jobs.WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(jobs.WORLD)]


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> Iterator[None]:
    """No process group, and no state of Accelerate's left for other tests."""
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415

    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


CASES = {
    "ddp stochastic": ("DistributedDataParallel", "Parameter"),
    "fsdp2 extra-bits-8": ("FSDPModel", "DTensor"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_resume_from_accelerates_checkpoint_bit_for_bit(found, case):
    for one in (rank[case] for rank in found):
        assert (one["model"], one["kinds"]) == (CASES[case][0], [CASES[case][1]])
        assert one["same"] is True
        assert one["losses"][-len(one["again"]) :] == one["again"]
        assert one["rates"][0] == one["rates"][1] < 1e-2


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_agree(found, case):
    one, other = (rank[case]["kept"] for rank in found)
    assert jobs.same(one, other)
    assert one["inner.weight"].dtype == torch.bfloat16


def test_fused_under_fsdp2_has_the_bits_of_the_step_after(found):
    assert [rank["fused"]["same"] for rank in found] == [True, True]


def test_what_would_train_otherwise_is_refused(found):
    expected = {
        "upcast before": "8 parameters are narrow, inner.weight for one in torch.bfloat16",
        "upcast after": "group 0 has precision='auto' and 8 parameters in FP32",
        "fused before fsdp2": "prepare first, then optim.fuse_backward",
        "states before fsdp2": "the optimizer has states, and FSDP2 replaces the parameters",
        "states lost": "states of 8 parameters that prepare() has replaced",
        "fused under ddp": "DistributedDataParallel reduces gradients after they have stepped",
        "not sharded": "FSDP was asked for, and distributed_type is MULTI_CPU",
    }
    for one in (rank["refusals"] for rank in found):
        assert one.keys() == expected.keys()
        assert [name for name, text in expected.items() if text not in one[name]] == []


# --------------------------------------------------------------------------------- in one process


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_one_process_has_the_bits_of_a_plain_loop(mixed_precision):
    run = jobs.Run("plain", "collage-plus", mixed_precision, accumulate=3)
    losses = run.train(0, 6)
    model = jobs.Model()
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-2, precision="collage-plus", seed=5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    expected = []
    for number, (x, y) in zip(range(6), jobs.batches(), strict=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            out = model(x)
        loss = (out.float() - y).square().mean()
        expected.append(loss.item())
        (loss / 3).backward()
        if number % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert losses == expected
    kept = run.kept()
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("precision", ["collage-plus", "stochastic", "extra-bits-8", "master"])
def test_one_process_resumes_bit_for_bit(tmp_path, precision):
    one = jobs.resumed("plain", precision, str(tmp_path))
    assert one["same"] is True
    assert one["losses"][-len(one["again"]) :] == one["again"]
    assert one["rates"][0] == one["rates"][1]


def test_preparing_leaves_no_states():
    """Accelerate loads the empty state dict that it has just read."""
    run = jobs.Run("plain", "collage-plus")
    assert not run.optimizer.optimizer.state
    assert len(run.optimizer.optimizer.state_dict()["state"]) == 0


def pair() -> tuple[torch.nn.Module, optim.AdamW]:
    model = jobs.Model()
    return model, optim.AdamW(model.parameters())


def test_another_models_parameters_are_refused():
    accelerator = jobs.made("plain")
    model, optimizer = pair()
    with pytest.raises(ValueError, match="8 of the optimizer's 8 parameters are not the model's"):
        prepare(accelerator, copy.deepcopy(model), optimizer)
    prepared = accelerator.prepare(model, optimizer)
    check(accelerator, *prepared)
    with pytest.raises(ValueError, match="8 of the optimizer's 8 parameters are not the model's"):
        check(accelerator, jobs.Model(), optimizer)


def test_another_optimizer_is_refused_by_the_check_alone():
    accelerator = jobs.made("plain")
    model = jobs.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(accelerator, model, optimizer)
    with pytest.raises(ValueError, match=r"optimizer is SGD: pass one of subulp\.optim"):
        check(accelerator, model, optimizer)


def test_accumulation_with_a_fused_step_is_refused():
    accelerator = jobs.made("plain", accumulate=4)
    model, optimizer = pair()
    optim.fuse_backward(model, optimizer)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4 waits for"):
        prepare(accelerator, model, optimizer)
    optimizer.fused.remove()
    prepare(accelerator, model, optimizer)


def test_a_scaler_with_a_fused_step_is_refused():
    accelerator = jobs.made("plain")
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model, optimizer = pair()
    optim.fuse_backward(model, optimizer)
    with pytest.raises(ValueError, match=r"accelerator\.scaler scales the loss"):
        check(accelerator, model, optimizer)


def test_who_steps_copies_of_the_weights_is_refused():
    from accelerate.utils import (  # noqa: PLC0415
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

    accelerator = jobs.made("plain")
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(ValueError, match="DEEPSPEED, which keeps FP32 copies of the weights"):
        prepare(accelerator, *pair())
    accelerator = jobs.made("plain")
    jobs.shard_on_cpu(accelerator, FullyShardedDataParallelPlugin(fsdp_version=1))
    with pytest.raises(ValueError, match="fsdp_version is 1, whose flat parameters"):
        check(accelerator, *pair())


def test_what_is_prepared_comes_back_in_order():
    accelerator = jobs.made("plain")
    model, optimizer = pair()
    loader, prepared, other = prepare(accelerator, jobs.batches(), optimizer, model)
    assert prepared.optimizer is optimizer
    assert other is model
    assert len(loader) == len(jobs.batches())
    assert prepare(accelerator, jobs.Model()) is not None


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    pages.run("accelerate.md")
