"""Losses and gradients that are not finite: noticed at their step, named, and survived."""

import dataclasses
import math
import re
from functools import partial

import pytest
import torch

from subulp.lab.compare import compare
from subulp.lab.engine import loop
from subulp.lab.engine.loop import run
from subulp.lab.engine.metrics import Record
from subulp.lab.engine.run_checkpoints import RunCheckpoints
from subulp.lab.engine.run_state import not_finite
from subulp.lab.engine.task import task_of
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.ctr.task import load as load_ctr
from subulp.lab.tasks.lm import task as lm_task
from subulp.lab.tasks.xmc.renee import ReneeClassifier
from subulp.nn import CachedEmbeddingBag, RowTable
from tests.lab.engine.resuming import results
from tests.lab.tasks.ctr.support import SMALL as SMALL_CTR
from tests.lab.tasks.ctr.support import write_clicks

PARAMETER = "blocks.0.mlp.up.weight"


@pytest.fixture
def poison(monkeypatch):
    """Let steps of the language model fail.

    Returns:
        A function of the step, from 1, and the learning rate: what the gradient of one parameter is
        multiplied by, or the loss.
    """

    def install(factor, *, of_loss=False, task=lm_task):
        build = task.build

        def build_poisoned(*arguments):
            work = build(*arguments)
            count = torch.zeros((), dtype=torch.int64)

            def now():
                return factor(int(count), work.optimizer.param_groups[0]["initial_lr"])

            def loss(value):
                count.add_(1)
                clean = work.loss(value)
                return clean * now() if of_loss else clean

            parameter = dict(work.model.named_parameters()).get(PARAMETER)
            if not of_loss:
                parameter.register_hook(lambda grad: grad * now())
            parts = {**work.parts, "count": _Count(count)}
            return dataclasses.replace(work, loss=loss, parts=parts)

        monkeypatch.setattr(task, "build", build_poisoned)

    return install


class _Count:
    def __init__(self, count):
        self._count = count

    def state_dict(self):
        return {"count": self._count}

    def load_state_dict(self, state):
        self._count.copy_(state["count"])


def data_of(config):
    return task_of(config).load(config)


def test_a_gradient_is_named_with_its_step_and_the_last_finite_loss(small, poison):
    poison(lambda step, lr: math.nan if step == 4 else 1)
    config = small(log_every=1)
    records = []
    with pytest.raises(FloatingPointError) as caught:
        run(config, data_of(config), "nearest", 3, records.append)
    message = str(caught.value)
    last = f"{records[-1].loss:.6g}"
    assert re.match(r"precision=nearest, seed=3: step 4 \(loss \d\.\d+\): the gradient of", message)
    assert f"parameter '{PARAMETER}' of group 0" in message
    assert message.endswith(f"the last finite loss was {last}, of step 3")


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_is_noticed_at_its_step_also_where_gradients_are_not_looked_at(
    small, poison, factor
):
    poison(lambda step, lr: factor if step == 5 else 1, of_loss=True)
    config = small(fuse_backward=True)
    with pytest.raises(FloatingPointError, match=r"step 5 \(loss (nan|inf)\): the loss is not fin"):
        run(config, data_of(config), "nearest", 0)


def test_a_first_loss_that_is_not_finite(small, poison):
    poison(lambda step, lr: math.nan, of_loss=True)
    with pytest.raises(FloatingPointError, match="no loss before it was finite"):
        run(small(), data_of(small()), "nearest", 0)


def test_steps_are_skipped_up_to_a_limit_in_a_row(small, poison):
    poison(lambda step, lr: math.inf if step % 3 else 1)
    config = small(nonfinite="skip", max_skips=3, steps=9)
    assert run(config, data_of(config), "nearest", 0).skipped_steps == 6
    with pytest.raises(FloatingPointError, match=r"step 2 .*: 2 steps in a row were skipped"):
        run(dataclasses.replace(config, max_skips=2), data_of(config), "nearest", 0)


def test_the_limit_is_a_hundred_unless_told_otherwise(small, poison, monkeypatch):
    assert loop.MAX_SKIPS == 100
    monkeypatch.setattr(loop, "MAX_SKIPS", 4)
    poison(lambda step, lr: math.inf)
    config = small(nonfinite="skip")
    with pytest.raises(FloatingPointError, match="4 steps in a row were skipped"):
        run(config, data_of(config), "nearest", 0)


# ------------------------------------------------------------------- checkpoints that are finite


@pytest.mark.parametrize("asked", [False, True])
def test_no_checkpoint_holds_what_is_not_finite(small, poison, tmp_path, asked):
    """Fused, gradients are not looked at: the loss of step 5 is finite, and its weights are not."""
    poison(lambda step, lr: math.nan if step == 5 else 1)
    every = {"checkpoint_every": 0 if asked else 1}
    config = small(fuse_backward=True, precision=("nearest",), eval_every=100, **every)
    steps = iter(range(1, 100))

    def trained(config, out):
        checkpoints = RunCheckpoints(out, config, "nearest", 0)
        stop = (lambda: next(steps) == 5) if asked else (lambda: False)
        run(config, data_of(config), "nearest", 0, checkpoints=checkpoints, stop=stop)

    message = r"step 5 \(loss \d.*\): a weight of 'blocks.0.mlp.up.weight' is not finite, so no che"
    with pytest.raises(FloatingPointError, match=message):
        trained(config, tmp_path / "out")
    found = sorted(path.name for path in (tmp_path / "out").rglob("step-*"))
    assert found == ([] if asked else ["step-00000003", "step-00000004"])
    if not asked:
        trained(dataclasses.replace(config, nonfinite="propagate"), tmp_path / "on")
        assert len(list((tmp_path / "on").rglob("step-*"))) == 2


def _renee(value):
    head = ReneeClassifier(4, 3, 0)
    head.weight.data[2, 1] = value
    return head


def _linear(value):
    layer = torch.nn.Linear(4, 3).to(torch.bfloat16)
    layer.bias.data[2] = value
    return layer


def _rows(storage, value):
    table = RowTable(3, 4, storage, precise_rows=1 if storage == "e4m3" else 0)
    if isinstance(value, float):
        table.store(0, torch.full((3, 4), value))
    return table


def _remainder(value):
    table = RowTable(3, 4, "bf16", precise_rows=2)
    table.remainder[1, 3] = value
    return table


def _cache(value):
    bag = CachedEmbeddingBag(64, 4, storage="int4", cache_fraction=0.5)
    bag.tables[0].cache[3, 1] = value
    return bag


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_renee, "model.weight"),
        (_linear, "model.bias"),
        (_remainder, "model"),
        (_cache, "model.tables.0.cache"),
        (partial(_rows, "int8"), "model"),
        (partial(_rows, "int2"), "model"),
        (partial(_rows, "e4m3"), "model"),
        (partial(_rows, (4, 3)), "model"),
    ],
)
def test_a_weight_of_any_kind_is_found(make, name, value):
    assert not_finite(torch.nn.ModuleDict({"model": make(1.0)})) is None
    assert not_finite(torch.nn.ModuleDict({"model": make(value)})) == name


# ------------------------------------------------------------------------------------- going back


def too_fast(step, lr):
    """Step 7 survives only half the learning rate, and step 9 a quarter of it."""
    return math.nan if (step == 7 and lr > 6e-4) or (step == 9 and lr > 3e-4) else 1


def going_back(small, **changes):
    changes = {
        "nonfinite": "rollback",
        "checkpoint_every": 4,
        "steps": 12,
        "log_every": 1,
    } | changes
    return small(**changes, eval_every=100)


@pytest.mark.parametrize("fuse_backward", [False, True])
def test_a_run_goes_back_with_smaller_steps(small, poison, tmp_path, fuse_backward):
    config = going_back(small, fuse_backward=fuse_backward, precision=("nearest",), warmup=0.0)
    clean = compare(config, out=tmp_path / "clean", jobs=1)
    poison(too_fast)
    found = compare(config, out=tmp_path / "out", jobs=1)
    assert found.summaries[0].rollbacks == 2
    assert clean.summaries[0].rollbacks == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [int(re.search(r'"step": (\d+)', line)[1]) for line in lines]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 12]
    # The second time it had come as far as a checkpoint with half the rate.
    by_step = {record.step: record for record in found.records}
    assert [record.step for record in found.records] == list(range(1, 13))
    for step, factor, rollbacks in ((4, 1, None), (7, 0.5, 1), (9, 0.25, 2), (12, 0.25, 2)):
        expected = factor * next(r.lr for r in clean.records if r.step == step)
        assert by_step[step].lr == pytest.approx(expected, rel=1e-12)
        assert by_step[step].rollbacks == rollbacks
    assert math.isfinite(found.summaries[0].metrics["val_loss"])


def test_without_a_checkpoint_it_goes_back_to_the_start(small, poison, tmp_path):
    config = going_back(small, checkpoint_every=1000, precision=("nearest",))
    poison(lambda step, lr: math.nan if step == 3 and lr > 6e-4 else 1)
    found = compare(config, out=tmp_path / "out", jobs=1)
    assert found.summaries[0].rollbacks == 1
    # The first steps are logged anew, with half the rate.
    assert all(record.rollbacks == 1 for record in found.records)


def test_it_gives_up_after_a_limit(small, poison, tmp_path):
    poison(lambda step, lr: math.nan if step == 7 else 1)
    config = going_back(small, max_rollbacks=2, precision=("nearest",))
    with pytest.raises(FloatingPointError, match=r"step 7 .* it had rolled back 2 times$"):
        compare(config, out=tmp_path / "out", jobs=1)
    # What was before it is still there.
    names = [p.name for p in (tmp_path / "out" / "checkpoints" / "nearest-seed-0").iterdir()]
    assert names == ["step-00000004"]


@pytest.mark.parametrize("every", [4, 5])
def test_a_run_that_goes_back_can_be_stopped_anywhere(small, poison, tmp_path, every):
    poison(too_fast)
    config = going_back(small, checkpoint_every=every, dropout=0.1)
    data = data_of(config)
    whole = results(tmp_path / "whole", config, data, "nearest")
    assert results(tmp_path / "resumed", config, data, "nearest", stopping=True) == whole
    assert "rollbacks=2" in whole[0]


def test_tables_go_back_too(tmp_path, poison):
    """Their rows have moved inside the backward pass that failed."""
    from subulp.lab.tasks.ctr import task  # noqa: PLC0415

    poison(lambda step, lr: math.nan if step == 6 and lr > 6e-4 else 1, of_loss=True, task=task)
    changes = {"precision": ("int8",), "nonfinite": "rollback", "checkpoint_every": 4}
    config = CTRConfig(**SMALL_CTR, data=write_clicks(tmp_path), **changes)
    data = load_ctr(config)
    variant = "int8 stochastic lfu 5%"
    whole = results(tmp_path / "whole", config, data, variant)
    assert results(tmp_path / "resumed", config, data, variant, stopping=True) == whole
    assert "rollbacks=1" in whole[0]


def test_a_record_of_a_run_that_never_went_back_says_nothing_of_it():
    assert Record("fp32", 0, 1, 1.0, 0.1, 0.1).rollbacks is None
