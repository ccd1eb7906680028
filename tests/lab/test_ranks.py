"""Comparisons that several ranks make together: one run, whatever shares it."""

import dataclasses
import json

import pytest
import torch

from subulp.lab.cli import main
from subulp.lab.compare import compare, resume
from subulp.lab.engine.run_directory import read_ranks
from subulp.lab.tasks.ctr.config import CTRConfig
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.xmc.config import XMCConfig
from tests.lab.ranked import error_of, gradients, linear_problem, timeless, trained
from tests.lab.tasks.ctr.support import SMALL as CTR
from tests.lab.tasks.ctr.support import write_clicks

TASKS = ("lm", "image", "ctr", "xmc")


@pytest.fixture(scope="module")
def configs(small, tmp_path_factory):
    """A comparison of each task, small and on sizes that no number of ranks divides."""
    folder = tmp_path_factory.mktemp("data")
    labels = folder / "labels"
    labels.mkdir()
    for part, count in (("train", 97), ("test", 25)):
        lines = [
            f"{i % 13} {3 * (i % 13)}:2.5 {3 * (i % 13) + 1}:2 {39 + i % 5}:0.5"
            for i in range(count)
        ]
        (labels / f"{part}.txt").write_text("\n".join([f"{count} 44 13", *lines]) + "\n")
    clicks = write_clicks(folder)
    every = {"checkpoint_every": 2}
    return {
        "lm": small(
            precision=("stochastic", "extra-bits-3"), batch_size=7, dropout=0.1, context=9, **every
        ),
        "image": ImageConfig(
            precision=("extra-bits-8", "amp"),
            width=4,
            steps=5,
            batch_size=16,
            watch_every=3,
            device="cpu",
            **every,
        ),
        "ctr": CTRConfig(
            **CTR,
            data=clicks,
            precision=("int4",),
            rounding=("stochastic",),
            cache_fraction=(0.02,),
            ways=(2,),
            row_optimizer="sgd",
            row_lr=1.0,
            steps=6,
            **every,
        ),
        "xmc": XMCConfig(
            data=labels,
            precision=("fp8", "bf16", "renee"),
            width=8,
            # fully_shard divides a layer by itself.
            layers=1,
            steps=6,
            batch_size=7,
            chunks=3,
            head_fraction=0.2,
            device="cpu",
            watch_every=3,
            **every,
        ),
    }


@pytest.fixture(scope="module")
def on_two(configs, ranks, tmp_path_factory):
    """What two ranks find, and where; each comparison is trained once."""
    found = {}

    def of(task):
        if task not in found:
            out = tmp_path_factory.mktemp(task) / "run"
            first, second = ranks.run(2, trained, configs[task], out)
            assert first == second
            found[task] = first, out
        return found[task]

    return of


def changed(config, **fields):
    return dataclasses.replace(config, **fields)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [2, 3])
def test_gradients_are_those_of_the_whole_batch(ranks, parallel, dtype, count):
    """Also of parts of different sizes; optimizers of Adam's kind would hide a factor."""
    model, x, y = linear_problem(dtype)
    (model(x) - y).float().square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    for found in ranks.run(count, gradients, parallel, dtype):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            # A rank's part is rounded to BF16 before it is sent.
            unit = 2**-7 if dtype == torch.bfloat16 else 2**-20
            assert (mine - theirs).abs().max() <= unit * theirs.abs().max()


def check_close(found, expected):
    """Compare summaries of the same training that was rounded in another order."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.02)
        for name, value in mine["metrics"].items():
            # A drop below a baseline needs a baseline.
            expected = theirs["metrics"][name]
            assert value == (None if expected is None else pytest.approx(expected, rel=0.02)), name
        for name in ("parameters", "steps", "settings", "precision"):
            assert mine[name] == theirs[name]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_however_ranks_share_parameters_and_step_the_run_is_the_same(
    configs, ranks, on_two, tmp_path, task, parallel
):
    config = changed(configs[task], fuse_backward=True)
    found, _ = ranks.run(2, trained, config, tmp_path / "run", parallel)
    for mine, theirs in zip(found, on_two(task)[0], strict=True):
        for name in ("metrics", "train_loss", "steps", "parameters", "ranks"):
            assert mine[name] == theirs[name], name
        # Sums over parameters are added up shard by shard.
        for name in ("effective_descent_quality", "descent_share", "lost_arithmetic"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-12)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("task", ["lm", "image"])
def test_the_norm_that_is_limited_is_that_of_all_ranks(configs, ranks, tmp_path, task, parallel):
    config = changed(configs[task], max_norm=0.1)
    plain, fused = (
        ranks.run(2, trained, changed(config, fuse_backward=fuse), tmp_path / f"{fuse}", parallel)
        for fuse in (False, True)
    )
    assert plain[0] == plain[1]
    free = trained(changed(config, max_norm=None), tmp_path / "free")
    for one, mine, theirs in zip(free, plain[0], fused[0], strict=True):
        assert mine["train_loss"] != one["train_loss"]
        for name in ("metrics", "train_loss", "steps"):
            assert mine[name] == theirs[name], name


@pytest.fixture(scope="module")
def alone(configs, tmp_path_factory):
    """What one process finds, where nothing is drawn at random; each is trained once."""
    found = {}

    def of(task):
        if task not in found:
            config = configs[task]
            config = config if task == "ctr" else changed(config, dropout=0.0)
            out = tmp_path_factory.mktemp(task) / "run"
            summaries = compare(config, out=out, jobs=1).summaries
            found[task] = config, [timeless(summary) for summary in summaries]
        return found[task]

    return of


@pytest.mark.parametrize("task", ["lm", "ctr", "xmc"])
@pytest.mark.parametrize("count", [3, 4])
def test_other_numbers_of_ranks_differ_by_rounding(ranks, alone, tmp_path, task, count):
    """Batches that do not divide are weighted by their parts."""
    config, expected = alone(task)
    found = ranks.run(count, trained, config, tmp_path / "run")
    assert all(each == found[0] for each in found)
    assert all(summary["ranks"] == count for summary in found[0])
    check_close(found[0], expected)


@pytest.mark.parametrize("task", TASKS)
def test_what_ranks_have_trained_is_a_model_like_any_other(on_two, task, capsys):
    summaries, out = on_two(task)
    assert main(["evaluate", str(out), "--json"]) == 0
    models = {m["precision"]: m for m in json.loads(capsys.readouterr().out)["runs"]}
    expected = {s["variant"] or s["precision"]: s["metrics"] for s in summaries}
    assert models.keys() == expected.keys()
    for name, model in models.items():
        # What training alone has is not part of a model.
        known = expected[name].keys() & model.keys() - {"hit_rate", "compression"}
        assert known
        assert {k: model[k] for k in known} == {k: expected[name][k] for k in known}


@pytest.mark.parametrize(
    ("task", "parallel"), [("lm", "fsdp"), ("image", "ddp"), ("ctr", "fsdp"), ("xmc", "ddp")]
)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    configs, ranks, on_two, tmp_path, task, parallel
):
    out = tmp_path / "run"
    # A request that one rank gets, whichever it is, stops all at the same step.
    stop = (1, 3) if parallel == "ddp" else (0, 4)
    assert ranks.run(2, trained, configs[task], out, parallel, stop=stop) == [None, None]
    assert read_ranks(out) == (2, parallel)
    found, _ = ranks.run(2, trained, configs[task], out, again=True)
    for mine, theirs in zip(found, on_two(task)[0], strict=True):
        assert mine["metrics"] == theirs["metrics"]
        assert mine["train_loss"] == theirs["train_loss"]


@pytest.mark.parametrize("task", ["lm", "ctr", "xmc"])
def test_other_ranks_go_on_from_a_checkpoint(ranks, alone, tmp_path, task):
    """From one process to four ranks, from those to three, and to one process again."""
    config, expected = alone(task)
    out = tmp_path / "run"
    assert trained(config, out, stop=(0, 2)) is None
    assert ranks.run(4, trained, config, out, "fsdp", stop=(2, 1), again=True) == [None] * 4
    assert ranks.run(3, trained, config, out, "ddp", stop=(1, 1), again=True) == [None] * 3
    found = resume(out, jobs=1)
    check_close([timeless(summary) for summary in found.summaries], expected)


def test_a_rollback_is_decided_by_all(configs, ranks, tmp_path):
    config = changed(configs["lm"], nonfinite="rollback", precision=("stochastic",))
    found = ranks.run(2, trained, config, tmp_path / "run", "fsdp", poison=(1, 5))
    assert found[0] == found[1]
    assert found[0][0]["rollbacks"] == 1


def test_a_loss_that_is_infinite_on_one_rank_ends_all(configs, ranks, tmp_path):
    config = changed(configs["lm"], precision=("stochastic",))
    with pytest.raises(AssertionError) as raised:
        ranks.run(2, trained, config, tmp_path / "run", poison=(1, 5))
    text = str(raised.value)
    assert text.count("FloatingPointError: precision=stochastic, seed=0: step 5") == 2


def test_refusals(configs, ranks, tmp_path):
    def errors(config, count=2, **named):
        found = ranks.run(count, error_of, config, tmp_path / "run", **named)
        assert len(set(found)) == 1
        return found[0]

    lm, image = configs["lm"], configs["image"]
    assert errors(lm, jobs=2).startswith("jobs=2 and 2 ranks contradict each other")
    assert errors(changed(lm, batch_size=1)).startswith("batch_size=1 is below the number of ranks")
    assert errors(changed(image, batch_size=7), 4).startswith("batch_size=7 leaves a rank fewer")
    fp8 = changed(lm, dtype="e4m3", precision=("stochastic",))
    assert errors(fp8, parallel="fsdp").startswith("dtype=e4m3 and parallel=fsdp contradict")
    simulated = changed(image, precision=("e5m2+4",))
    assert errors(simulated, parallel="fsdp").startswith("precision=e5m2+4 is simulated on whole")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="parallel=fsdp has no effect on one process"):
        compare(lm, out=tmp_path / "run", parallel="fsdp")


def test_ranks_need_the_same_data(configs, ranks, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} red bottles\n" for i in range(200)))
    found = ranks.run(2, error_of, configs["lm"], tmp_path / "run", on_rank={1: {"data": other}})
    assert all(text.startswith("the data differs between ranks: rank 1 has") for text in found)
