"""torchtitan's containers, schedulers, FSDP and checkpoints with our optimizers and mixtures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

from subulp import nn, optim

from . import pages
from . import torchtitan_jobs as jobs


@pytest.fixture(scope="module", autouse=True)
def cpu() -> None:
    jobs.on_cpu()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks have seen."""
    folder = tmp_path_factory.mktemp("torchtitan")
    spawn(jobs.main, (str(folder),), jobs.WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(jobs.WORLD)]


def test_fsdp_ranks_resume_from_torchtitans_checkpoint_bit_for_bit(found):
    for one in found:
        assert one["types"] == ["DTensor"]
        assert one["loaded"] == []
        assert one["resumed"] == []
        assert one["losses"][-1] == one["loss again"]
        assert one["losses"][-1] < one["losses"][0]
        assert one["rates"] == {"lr/AdamW": pytest.approx(1e-3 * 5 / 6)}


def test_the_ranks_have_the_state_of_the_whole(found):
    one, other = (rank["kept"] for rank in found)
    assert jobs.same(one, other) == []
    weight = "layers.0.feed_forward.w1.weight"
    assert one[weight].dtype == torch.bfloat16
    states = {name.rpartition(".")[2] for name in one if name.startswith(f"state.{weight}.")}
    assert states == {"step", "exp_avg", "exp_avg_sq", "signed_bits"}
    assert one[f"param_groups.{weight}.precision"] == jobs.PRECISION


def test_a_model_with_mixtures_decides_under_fsdp(found):
    layer = ("attention.qkv_linear.wqkv", "attention.wo", *(f"feed_forward.w{i}" for i in "123"))
    for one in found:
        assert sorted(one["decided"]) == sorted(f"layers.0.{name}" for name in layer)
        assert all("output gradient" in roles for roles in one["decided"].values())


# --------------------------------------------------------------------------------- in one process


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def train(model: torch.nn.Module, optimizer: Any, schedulers: Any = (), first: int = 0) -> None:
    for number in range(first, first + 4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def groups(**options: Any) -> Any:
    from torchtitan.components.optimizer import ParamGroupConfig  # noqa: PLC0415

    from subulp.integrations.torchtitan import LowPrecisionOptimizers  # noqa: PLC0415

    return LowPrecisionOptimizers.Config(
        param_groups=[
            ParamGroupConfig(
                pattern="bias",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0, "precision": "master"},
            ),
            ParamGroupConfig(
                pattern="^0",
                optimizer_name="SGD",
                optimizer_kwargs={"lr": 1e-2, "momentum": 0.9, "precision": "kahan"},
            ),
            ParamGroupConfig(
                pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, **options}
            ),
        ]
    )


@pytest.mark.parametrize("precision", ["nearest", "collage-plus", "stochastic", "extra-bits-11"])
def test_the_container_steps_as_the_optimizers_alone(precision):
    theirs, ours = model(), model()
    container = groups(precision=precision, seed=3).build(model_parts=[theirs])
    named = dict(ours.named_parameters())
    adam = optim.AdamW(
        [
            {
                "params": [(n, named[n]) for n in ("0.bias", "2.bias")],
                "weight_decay": 0.0,
                "precision": "master",
            },
            {"params": [("2.weight", named["2.weight"])], "precision": precision, "seed": 3},
        ],
        lr=1e-2,
    )
    sgd = optim.SGD([("0.weight", named["0.weight"])], lr=1e-2, momentum=0.9, precision="kahan")
    train(theirs, container)
    for number in range(4):
        # The same gradients, which two optimizers share.
        both = type("Both", (), {})()
        both.zero_grad = lambda: [each.zero_grad() for each in (adam, sgd)]
        both.step = lambda: [each.step() for each in (adam, sgd)]
        if number == 0:
            train(ours, both)
    assert all(map(torch.equal, theirs.parameters(), ours.parameters()))
    assert [type(each).__name__ for each in container] == ["AdamW", "SGD"]


def test_fp32_steps_as_torchtitans_own_container():
    """Up to the last bits: ``torch.optim`` rounds its intermediate results elsewhere."""
    from torchtitan.components.optimizer import default_adamw  # noqa: PLC0415

    from subulp.integrations.torchtitan import adamw  # noqa: PLC0415

    ours, theirs = model(torch.float32), model(torch.float32)
    train(ours, adamw(lr=1e-2).build(model_parts=[ours]))
    train(theirs, default_adamw(lr=1e-2, fused=False).build(model_parts=[theirs]))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:To get the last")
@pytest.mark.parametrize("precision", ["collage-light", "extra-bits-8", "stochastic", "master"])
def test_flat_state_goes_through_a_checkpoint_and_on(tmp_path, precision):
    """Saved and loaded by ``torch.distributed.checkpoint``, before or after the first step."""
    from torch.distributed import checkpoint  # noqa: PLC0415
    from torchtitan.components.optimizer import LRSchedulersContainer  # noqa: PLC0415

    def make() -> tuple[torch.nn.Module, Any, Any]:
        made = model()
        optimizers = groups(precision=precision, seed=3).build(model_parts=[made])
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        return made, optimizers, schedule.build(optimizers=optimizers, training_steps=9)

    trained, optimizers, schedulers = make()
    train(trained, optimizers, [schedulers])
    state = {"model": trained, "optimizer": optimizers, "schedulers": schedulers}
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    other, others, their_schedulers = make()
    loaded = {"model": other, "optimizer": others, "schedulers": their_schedulers}
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert jobs.same(optimizers.state_dict(), others.state_dict()) == []
    assert [g["lr"] for o in optimizers for g in o.param_groups] == [
        g["lr"] for o in others for g in o.param_groups
    ]
    train(trained, optimizers, [schedulers], first=4)
    train(other, others, [their_schedulers], first=4)
    assert all(map(torch.equal, trained.parameters(), other.parameters()))
    assert jobs.same(optimizers.state_dict(), others.state_dict()) == []


def test_reading_the_state_before_the_first_step_changes_nothing():
    one, other = model(), model()
    read = groups(precision="stochastic", seed=1).build(model_parts=[one])
    plain = groups(precision="stochastic", seed=1).build(model_parts=[other])
    assert "state.2.weight.exp_avg" in read.state_dict()
    train(one, read)
    train(other, plain)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_stages_of_a_pipeline_draw_as_the_whole():
    whole, apart = model(), model()
    stages = [torch.nn.Sequential(), torch.nn.Sequential()]
    for stage, name in zip(stages, "02", strict=True):
        stage.add_module(name, apart.get_submodule(name))
    options = {"precision": "stochastic", "seed": 9}
    from subulp.integrations.torchtitan import adamw  # noqa: PLC0415

    train(whole, adamw(lr=1e-2, **options).build(model_parts=[whole]))
    container = adamw(lr=1e-2, **options).build(model_parts=stages)
    assert len(container) == 2
    train(apart, container)
    assert all(map(torch.equal, whole.parameters(), apart.parameters()))


def test_what_would_be_ignored_is_refused():
    from torchtitan.components.optimizer import ParamGroupConfig  # noqa: PLC0415

    from subulp.integrations.torchtitan import LowPrecisionOptimizers, adamw  # noqa: PLC0415

    def build(name: str = "AdamW", **options: Any) -> None:
        group = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=options)
        LowPrecisionOptimizers.Config(param_groups=[group]).build(model_parts=[model()])

    with pytest.raises(ValueError, match="optimizer_name='DistMuon' is not one of subulp's"):
        build("DistMuon")
    with pytest.raises(TypeError, match="AdamW has no argument 'precison'"):
        build(lr=1e-3, precison="kahan")
    with pytest.raises(ValueError, match="precision='half' is unknown"):
        build(precision="half")
    with pytest.raises(ValueError, match="amsgrad=True is not available"):
        build(amsgrad=True)
    build(fused=False, foreach=None)
    config = adamw()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match="'fused_opt_states_bf16' has no effect"):
        config.build(model_parts=[model()])
    with pytest.raises(ValueError, match="matched no parameters"):
        groups().build(model_parts=[torch.nn.Linear(2, 2)])


# --------------------------------------------------------------------------------------- mixtures


def convert(**options: Any) -> Any:
    from subulp.integrations.torchtitan import MixtureConverter  # noqa: PLC0415

    config = jobs.spec().model
    return MixtureConverter.Config(mor=jobs.MIXTURE, **options).build().convert(config)


def kinds(config: Any) -> dict[str, str]:
    with torch.device("meta"):
        made = config.build()
    made.verify_module_protocol()
    return {
        name: type(module).__name__
        for name, module in made.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def mixed(found: dict[str, str]) -> set[str]:
    return {name for name, kind in found.items() if kind == "MixtureLinear"}


def test_a_converted_layer_has_the_bits_of_ours():
    from torchtitan.models.common.linear import Linear  # noqa: PLC0415

    from subulp.integrations.torchtitan import MixtureConverter  # noqa: PLC0415

    config = Linear.Config(
        in_features=130,
        out_features=6,
        bias=True,
        param_init={"weight": torch.nn.init.ones_, "bias": torch.nn.init.zeros_},
    )
    layer = MixtureConverter.Config(mor=jobs.MIXTURE).build().convert(config).build()
    layer.init_states()
    assert torch.equal(layer.weight, torch.ones(6, 130))
    ours = nn.MoRLinear(130, 6, mor=jobs.MIXTURE)
    torch.nn.init.normal_(ours.weight)
    layer.load_state_dict(ours.state_dict())
    x = torch.randn(4, 130)
    results = []
    for each in (layer, ours):
        y = each(x)
        y.square().sum().backward()
        results.append((y, each.weight.grad, each.bias.grad))
    assert all(map(torch.equal, *results))


def test_heads_and_named_layers_stay():
    found = kinds(convert())
    assert found.pop("lm_head") == "Linear"
    assert set(found.values()) == {"MixtureLinear"}
    assert kinds(convert(heads=True))["lm_head"] == "MixtureLinear"
    found = kinds(convert(first=1, filter_fqns=["wqkv"]))
    mixed = {name for name, kind in found.items() if kind == "MixtureLinear"}
    assert mixed == {
        f"layers.1.{n}" for n in ("attention.wo", *(f"feed_forward.w{i}" for i in "123"))
    }
    found = kinds(convert(last=1))
    assert all(
        (kind == "MixtureLinear") == name.startswith("layers.0.") for name, kind in found.items()
    )


def test_lora_comes_after():
    from torchtitan.components.lora import LoRAConverter  # noqa: PLC0415

    from subulp.integrations.torchtitan import MixtureConverter  # noqa: PLC0415

    lora = LoRAConverter.Config(rank=2, target_modules=["wo"]).build()
    found = kinds(lora.convert(convert()))
    assert found["layers.0.attention.wo"] == "LoRAMixtureLinear"
    with pytest.raises(ValueError, match="other converters come after this one"):
        MixtureConverter.Config(mor=jobs.MIXTURE).build().convert(lora.convert(jobs.spec().model))


def test_what_cannot_be_mixed_is_refused():
    class Tensors:
        tp_enabled = True

    with pytest.raises(ValueError, match=re.escape("first=-1 is out of range")):
        convert(first=-1)
    with pytest.raises(ValueError, match="'wqv', which no linear layer has in its name"):
        convert(filter_fqns=["wqv"])
    with pytest.raises(ValueError, match="none of 11 linear layers is to be converted"):
        convert(first=2)
    with torch.device("meta"):
        layer = convert().build().get_submodule("layers.0.attention.wo")
    with pytest.raises(ValueError, match="tensor_parallel_degree > 1 divides the operands"):
        layer.parallelize(Tensors())


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    pages.run("torchtitan.md")


@pytest.mark.parametrize("names", ["w1", [""], [1], None])
def test_parts_of_names_are_a_list(names):
    """The letters of a text are in nearly all names."""
    from subulp.integrations.torchtitan import MixtureConverter  # noqa: PLC0415

    with pytest.raises(ValueError, match=r"filter_fqns=.* is no list of parts of names"):
        MixtureConverter.Config(mor=jobs.MIXTURE, filter_fqns=names).build()
