"""MoRLinear against its definition: products of decoded operands, with float64 as the judge."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from subulp import nn, optim
from subulp.diagnostics import track_memory
from subulp.nn import MoR, MoRLinear, convert_to_mor, mor_linear
from subulp.nn.mor_linear import mor_linear_op
from subulp.numerics import E4M3, E5M2, mixture, simulated
from subulp.numerics.mixture import RECIPES, Entry, Recipe
from subulp.ops import bf16_product


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PARTITIONS = ("tensor", "channel", "subchannel-128", "subchannel-32", "block-128x128")
WAYS = [MoR(g, p) for g, p in itertools.product(RECIPES, PARTITIONS)]


def name_of(mor: MoR) -> str:
    return f"{mor.recipe.name}-{mor.partition}"


def problem(dtype=torch.float32, rows=(3, 50), k=140, n=132, seed=0):
    """Operands that have blocks of every type."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, k, generator=generator)
    x[..., 128:] *= (3 * torch.randn(k - 128, generator=generator)).exp2()
    x[0] *= (20 * torch.randn(rows[-1], 1, generator=generator)).exp2()
    weight = torch.randn(n, k, generator=generator) * 0.1
    weight[5:9] *= (14 * torch.randn(4, k, generator=generator)).exp2()
    bias = torch.randn(n, generator=generator)
    grad_y = torch.randn(*rows, n, generator=generator) * 1e-4
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)] + [grad_y.to(dtype)]


def quantised(mor: MoR, matrix: torch.Tensor) -> torch.Tensor:
    found, _ = mixture.encode(
        matrix,
        mor.recipe,
        mor.partition,
        scaling=mor.scaling,
        group=mor.group,
        threshold=mor.threshold,
    )
    return mixture.decode(found)


def definition(mor: MoR, x, weight, bias, grad_y, dtype):
    """The three products and the bias's gradient, summed in ``dtype``."""
    rows, grads = x.detach().flatten(0, -2), grad_y.flatten(0, -2)
    q = {
        "x": quantised(mor.of("input"), rows),
        "w": quantised(mor.of("weight"), weight.detach()),
        "dy": quantised(mor.of("output gradient"), grads),
        "wt": quantised(mor.of("weight"), weight.detach().t()),
        "xt": quantised(mor.of("input"), rows.t()),
        "dyt": quantised(mor.of("output gradient"), grads.t()),
    }
    q = {name: t.to(dtype) for name, t in q.items()}
    y = q["x"] @ q["w"].t() + bias.detach().to(dtype)
    grad_x, grad_weight = q["dy"] @ q["wt"].t(), q["dyt"] @ q["xt"].t()
    return [y.view(grad_y.shape), grad_x.view(x.shape), grad_weight, grads.to(dtype).sum(0)]


BY_ROLE = [
    MoR(mixture.ALWAYS_E4M3, roles={"output gradient": MoR(mixture.ALWAYS_E5M2)}),
    MoR("tensor", "channel", roles={"weight": MoR("subtensor-2way")}),
    MoR("subtensor-3way", roles={"input": MoR("tensor", "subchannel-32")}),
    MoR(
        "tensor",
        roles={
            "weight": MoR("subtensor-3way", "channel", scaling="e8m0"),
            "output gradient": MoR("tensor", threshold=0.01),
        },
    ),
]
"""Configurations with others for some operands, of both kinds of partitions."""


@pytest.mark.parametrize("mor", WAYS, ids=name_of)
def test_all_three_products_are_of_quantised_operands(mor):
    x, weight, bias, grad_y = problem()
    y = mor_linear(x, weight, bias, mor=mor)
    y.backward(grad_y)
    exact = definition(mor, x, weight, bias, grad_y, torch.float64)
    naive = definition(mor, x, weight, bias, grad_y, torch.float32)
    for mine, one, other in zip((y, x.grad, weight.grad, bias.grad), exact, naive, strict=True):
        error = (other.double() - one).abs().max()
        assert (mine.double() - one).abs().max() <= error + 1e-6 * one.abs().max()


@pytest.mark.parametrize(
    "mor",
    [
        MoR("subtensor-3way", "subchannel-32", scaling="amax"),
        MoR("subtensor-2way", "channel", scaling="e8m0"),
        MoR("subtensor-3way", "subchannel-32", group=(1, None)),
        MoR("tensor", (16, 16), threshold=0.9),
        *BY_ROLE,
    ],
    ids=name_of,
)
def test_other_scales(mor):
    x, weight, bias, grad_y = problem()
    y = mor_linear(x, weight, bias, mor=mor)
    y.backward(grad_y)
    exact = definition(mor, x, weight, bias, grad_y, torch.float64)
    for mine, one in zip((y, x.grad, weight.grad), exact, strict=False):
        torch.testing.assert_close(mine.double(), one, rtol=0, atol=float(1e-5 * one.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(dtype, monkeypatch):
    # Those round operands that one mantissa does not scale.
    monkeypatch.setattr(bf16_product, "units_at", lambda device: False)
    x, weight, bias, grad_y = problem()
    with torch.no_grad():
        x[0] = x[1]
        weight[5:9] = weight[:4]
    x, weight, bias = (t.detach().to(dtype).requires_grad_() for t in (x, weight, bias))
    mor = MoR("subtensor-3way", "subchannel-32")
    y = mor_linear(x, weight, bias, mor=mor)
    y.backward((1e4 * grad_y).to(dtype))
    assert {t.dtype for t in (y, x.grad, weight.grad, bias.grad)} == {dtype}
    expected = definition(mor, x, weight, bias, (1e4 * grad_y).to(dtype), torch.float32)
    for mine, one in zip((y, x.grad, weight.grad, bias.grad), expected, strict=True):
        torch.testing.assert_close(mine, one.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_operands_keep_all_bits_of_their_dtype(dtype):
    """What no FP8 format suits is multiplied as it is: FP16 is not cut to BF16."""
    x, weight, _, _ = problem()
    x = x.detach()[1:].to(dtype)
    x[..., 0, 0] = torch.inf
    weight = weight.detach().to(dtype)
    weight[0, 0] = torch.inf
    layer = MoRLinear(140, 132, bias=False, mor=MoR("tensor", "tensor"), dtype=dtype)
    layer.weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        y = layer(x)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert layer.mix["input"].sole == layer.mix["weight"].sole == name
    exact = F.linear(x.float(), weight.float()).to(dtype)
    assert torch.equal(y.isfinite(), exact.isfinite())
    torch.testing.assert_close(y, exact, equal_nan=True)


def test_saved_activations_are_narrow():
    """A byte an element where FP32 activations take four, and two where BF16 is chosen."""
    saved = []

    def pack(t):
        saved.append(t)
        return t

    weight = torch.randn(64, 256, requires_grad=True)
    x = torch.randn(512, 256)
    mixed = x.clone()
    mixed[:128, :128] *= (30 * torch.randn(128, 128)).exp2()
    for partition, blocks in (("block-128x128", 8), ("tensor", 1), ("channel", 256)):
        for values, wide in ((x, 0), (mixed, 128 * 128)):
            saved.clear()
            mor = MoR("subtensor-3way", partition)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = mor_linear(values, weight, mor=mor)
            nbytes = sum(t.nbytes for t in saved if t.data_ptr() != weight.data_ptr())
            if partition == "block-128x128" or wide == 0:
                # A type and an exponent a block, a mantissa.
                assert nbytes == values.numel() + wide + 2 * blocks + 4
            assert nbytes < 2.02 * values.numel()
            del y


def test_only_the_needed_gradients_are_computed():
    x, weight, bias, grad_y = problem()
    seen = []
    note = lambda role, _: seen.append(role)  # noqa: E731
    mor = MoR("subtensor-2way", "channel")
    mor_linear(x.detach(), weight, bias, mor=mor, note=note).backward(grad_y)
    assert x.grad is None
    first = ["input", "weight", "input transposed"]
    assert seen == [*first, "output gradient transposed"]
    seen.clear()
    weight.requires_grad_(False)
    mor_linear(x, weight, None, mor=mor, note=note).backward(grad_y)
    assert seen == ["input", "weight", "output gradient", "weight transposed"]
    seen.clear()
    with torch.no_grad():
        mor_linear(x, weight, None, mor=mor, note=note)
    assert seen == ["input", "weight"]


def test_squares_are_quantised_once_for_both_directions():
    x, weight, bias, grad_y = problem()
    seen = []
    note = lambda role, _: seen.append(role)  # noqa: E731
    mor_linear(x, weight, bias, mor=MoR("subtensor-3way"), note=note).backward(grad_y)
    assert seen == ["input", "weight", "output gradient"]


def test_an_empty_batch():
    layer = MoRLinear(4, 3)
    y = layer(torch.empty(0, 4))
    y.sum().backward()
    assert y.shape == (0, 3)
    assert not layer.weight.grad.any()


def test_a_single_vector():
    layer = MoRLinear(40, 3)
    assert layer(torch.randn(40)).shape == (3,)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.GELU(), nn.Linear(40, 40), torch.nn.Linear(40, 5)
    )


def converted(m: torch.nn.Module, mor: MoR, **options) -> torch.nn.Module:
    convert_to_mor(m, mor, quiet=True, **options)
    return m


def test_conversion_keeps_objects_parameters_and_ties():
    m = model()
    m.append(torch.nn.Linear(40, 20, bias=False))
    m[4].weight = torch.nn.Parameter(m[0].weight.detach().t().clone())
    m[2].weight = m[2].weight
    tied = torch.nn.Linear(40, 40)
    tied.weight = m[2].weight
    m.append(tied)
    m.append(m[2])
    before = [*m], dict(m.named_parameters(remove_duplicate=False))
    called = []
    m[0].register_forward_hook(lambda *_: called.append(1))
    convert_to_mor(m, MoR("subtensor-2way"), quiet=True)
    assert [*m] == before[0]
    after = dict(m.named_parameters(remove_duplicate=False))
    assert all(after[name] is p for name, p in before[1].items())
    assert [isinstance(layer, MoRLinear) for layer in m] == [True, False] + [True] * 5
    assert m[6] is m[2]
    assert m[5].weight is m[2].weight
    m[0](torch.randn(2, 20))
    assert called == [1]
    assert "granularity=subtensor-2way" in repr(m[0])


def test_a_filter_chooses_layers():
    m = converted(model(), MoR(), filter=lambda name, module: module.out_features > 5)
    assert [isinstance(layer, MoRLinear) for layer in m] == [True, False, True, False]
    assert isinstance(converted(torch.nn.Linear(3, 3), MoR()), MoRLinear)


def test_a_state_dict_knows_that_it_is_of_a_mixture():
    m = model()
    c = converted(copy.deepcopy(m), MoR(threshold=0.03))
    # Weights trained without mixtures can be loaded; not the other way round, unless it is said.
    c.load_state_dict(m.state_dict())
    buffer = io.BytesIO()
    torch.save(c.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    c.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*_extra_state"):
        m.load_state_dict(saved)
    m.load_state_dict(saved, strict=False)
    with pytest.raises(ValueError, match=r"is of a layer with MoR\(.*threshold=0\.03"):
        converted(model(), MoR()).load_state_dict(saved)
    recipe = Recipe("mine", (Entry(simulated(3, 4), mixture.below_threshold(simulated(3, 4))),))
    c[0].mor = MoR(recipe, (4, 8), scaling="amax", metric="underflow")
    other = converted(model(), MoR(threshold=0.03))
    other[0].mor = MoR(recipe, (4, 8), scaling="amax", metric="underflow")
    other.load_state_dict(c.state_dict())


@pytest.mark.parametrize(
    "state", [{"a": 1}, torch.zeros(3, dtype=torch.uint8), torch.zeros(3), torch.tensor([255, 7])]
)
def test_what_is_no_representation_is_refused(state):
    layer = MoRLinear(4, 3)
    saved = layer.state_dict() | {"_extra_state": state}
    with pytest.raises(ValueError, match=r"is no (configuration|representation)"):
        layer.load_state_dict(saved)


def test_copies_are_layers_of_their_own():
    m = converted(model(), MoR("subtensor-2way"))
    m[0].observers = (lambda *_: None,)
    x = torch.randn(7, 20)
    for again in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        again.load_state_dict(m.state_dict())
        assert again[0].mor == m[0].mor
        assert again[0].observers == ()
        before = m[0].mix
        assert torch.equal(again(x), m(x))
        again(2 * x)
        assert m[0].mix is before
        assert again[0].mix["input"].amax == 2 * m[0].mix["input"].amax
    assert len(m[0].observers) == 1


def run(m, x, forward=None):
    m.zero_grad()
    y = (forward or m)(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in m.parameters())]


def test_checkpointed_layers_decide_the_same():
    m = converted(model(), MoR("subtensor-3way", "subchannel-32"))
    x = torch.randn(9, 20, requires_grad=True)
    plain = run(m, x)
    mixes = [copy.copy(layer.mix) for layer in m if isinstance(layer, MoRLinear)]
    again = run(m, x, lambda v: checkpoint(m, v, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert mixes == [layer.mix for layer in m if isinstance(layer, MoRLinear)]


def test_operands_are_represented_by_their_role():
    e5m2 = MoR(mixture.ALWAYS_E5M2, "channel")
    mor = MoR(mixture.ALWAYS_E4M3, roles={"output gradient": e5m2})
    assert mor.of("output gradient") == e5m2
    assert mor.of("input") == mor.of("weight") == MoR(mixture.ALWAYS_E4M3)
    m = converted(model(), mor)
    # The first layer's input needs no gradient.
    layer = [each for each in m if isinstance(each, MoRLinear)][-1]
    run(m, torch.randn(9, 20))
    in_e5m2 = {role for role, found in layer.mix.items() if "e5m2" in found.names}
    assert in_e5m2 == {"output gradient", "output gradient transposed"}
    assert "output gradient: granularity=e5m2, partition=channel" in repr(layer)
    # The order in which roles are named does not matter, nor does a copy differ.
    roles = {"weight": MoR("tensor"), "input": MoR("subtensor-2way")}
    one, other = MoR(roles=roles), MoR(roles=dict(reversed(roles.items())))
    assert one == other
    assert hash(one) == hash(other)
    for same in (pickle.loads(pickle.dumps(mor)), MoR.from_text(mor.text), copy.deepcopy(mor)):
        assert same == mor
    assert "roles" not in MoR().to_dict()


def test_a_state_dict_knows_the_roles():
    mor = MoR(roles={"output gradient": MoR("subtensor-3way")})
    saved = converted(model(), mor).state_dict()
    converted(model(), mor).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"is of a layer with MoR\(.*output gradient"):
        converted(model(), MoR()).load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mor", BY_ROLE, ids=name_of)
def test_compiled_models_know_roles(mor):
    m, x = converted(model(), mor), torch.randn(9, 20)
    torch._dynamo.reset()
    compiled = run(m, x, torch.compile(m, backend="aot_eager", fullgraph=True))
    for a, b in zip(run(m, x), compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_models_compute_the_same_bits():
    m = converted(model(), MoR("subtensor-3way", "subchannel-32"))
    x = torch.randn(9, 20)
    x[0, 3] = torch.inf
    x[3] *= (30 * torch.randn(20)).exp2()
    torch._dynamo.reset()
    whole = torch.compile(m, backend="aot_eager", fullgraph=True)
    for values in (torch.randn(9, 20), x, torch.randn(3, 20)):
        compiled = run(m, values, whole)
        mixes = [dict(layer.mix) for layer in m if isinstance(layer, MoRLinear)]
        for layer in m:
            if isinstance(layer, MoRLinear):
                layer.mix.clear()
        for a, b in zip(run(m, values), compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        again = [layer.mix for layer in m if isinstance(layer, MoRLinear)]
        assert mixes == again
        assert "output gradient transposed" in mixes[0]
    with torch.no_grad():
        assert torch.equal(whole(values), m(values))


def test_a_copy_of_a_compiled_layer_notes_its_own_decisions():
    m = converted(torch.nn.Sequential(torch.nn.Linear(8, 8)), MoR())
    torch._dynamo.reset()
    whole = torch.compile(m, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8)
    whole(x)
    again = copy.deepcopy(m)
    torch.compile(again, backend="aot_eager", fullgraph=True)(2 * x)
    assert again[0].mix["input"].amax == 2 * m[0].mix["input"].amax
    m[0].mor = MoR("subtensor-3way")
    whole(x)
    assert len(m[0].mix["input"].names) == 3


def test_autocast_casts_like_torch(monkeypatch):
    monkeypatch.setattr(bf16_product, "units_at", lambda device: False)
    torch.manual_seed(0)
    layer = MoRLinear(33, 20, mor=MoR("subtensor-3way", "channel"))
    x = torch.randn(4, 33)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    narrow = [quantised(layer.mor, t.detach().bfloat16()) for t in (x, layer.weight)]
    torch.testing.assert_close(y, F.linear(*narrow, layer.bias.detach()).bfloat16())
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "mor", [MoR("subtensor-3way", "subchannel-32"), MoR("tensor", scaling="amax")], ids=name_of
)
def test_opcheck(mor, save):
    x, weight, bias, _ = problem(rows=(2, 9))
    arguments = x, weight if save else weight.detach(), bias, mor.text, "", save
    torch.library.opcheck(mor_linear_op, arguments)


def test_a_layer_with_something_else_for_its_representation():
    layer = MoRLinear(4, 3)
    layer.mor = "tensor"
    with pytest.raises(ValueError, match="mor='tensor' is not a configuration"):
        layer(torch.zeros(2, 4))


def test_the_meta_device_has_shapes():
    layer = MoRLinear(20, 5, device="meta")
    assert layer(torch.empty(3, 20, device="meta")).shape == (3, 5)
    with pytest.raises(ValueError, match="weight is on meta and x on cpu"):
        layer(torch.zeros(3, 20))
    with pytest.raises(ValueError, match="x is on the meta device"):
        MoR().encode(layer.weight)
    plain = MoRLinear(20, 5)
    x = torch.randn(3, 20)
    expected = run(plain, x)
    with torch.device("meta"):
        found = run(plain, x)
        saved = plain.state_dict()
    assert all(map(torch.equal, found, expected))
    plain.load_state_dict(saved)


def test_a_dtensor_is_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "device_mesh", "a mesh", raising=False)
    with pytest.raises(ValueError, match=r"x is a DTensor.*full_tensor"):
        MoRLinear(20, 5)(torch.randn(3, 20))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype):
    x, weight, bias, grad_y = problem()
    for mor in (MoR("subtensor-3way", "subchannel-32"), MoR("tensor", scaling="e8m0")):
        results = []
        for default in (torch.float32, dtype):
            layer = MoRLinear(140, 132, mor=mor, dtype=torch.float32)
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            torch.set_default_dtype(default)
            try:
                y = layer(x)
                y.backward(grad_y)
                state = layer.get_extra_state()
            finally:
                torch.set_default_dtype(torch.float32)
            grads = x.grad, layer.weight.grad, layer.bias.grad
            results.append([y.detach(), *grads, state])
            x.grad = None
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def loss_with_outliers(mor: MoR | None) -> float:
    """Of the other rows after 150 steps, over the first one, where some rows span 2^20."""
    generator = torch.Generator().manual_seed(0)
    x, wanted = torch.randn(256, 32, generator=generator), torch.randn(16, 32, generator=generator)
    wanted[:4] *= 2.0**20
    layer = torch.nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(0.1 * torch.randn(16, 32, generator=generator))
        layer.weight[:4] = wanted[:4]
    if mor is not None:
        convert_to_mor(layer, mor, quiet=True)
    # The layer after it, for which all outputs are of one size.
    scale = torch.ones(16)
    scale[:4] = 2.0**-20
    target = x @ wanted.t() * scale
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(150):
        loss = (layer(x) * scale - target)[:, 4:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] / losses[0]


def test_outliers_drown_a_tensor_in_e4m3_and_no_mixture():
    assert loss_with_outliers(None) < 1e-4
    assert loss_with_outliers(MoR(mixture.ALWAYS_E4M3, "tensor")) > 1
    for granularity in RECIPES:
        assert loss_with_outliers(MoR(granularity, "tensor")) < 1e-2


def test_always_e4m3_takes_no_threshold_and_leaves_infinities_alone():
    with pytest.raises(ValueError, match=r"threshold=0\.1 has no effect on granularity='e4m3'"):
        MoR(mixture.ALWAYS_E4M3, threshold=0.1)
    x = torch.randn(8, 64)
    x[0, ::2] *= 2.0**-40
    for values, kind in ((x, "e4m3"), (x / 0, "bf16")):
        found, summary = MoR(mixture.ALWAYS_E4M3, "channel").encode(values)
        expected, other = mixture.encode(values, mixture.ALWAYS_E4M3, "channel")
        assert summary.sole == other.sole == kind
        assert torch.equal(found.codes, expected.codes)


def test_a_step_holds_a_byte_of_an_activation():
    """Eight layers on a batch: what is alive at the peak, beyond weights and gradients."""
    peaks = {}
    for name, mor in (("plain", None), ("mixture", MoR("subtensor-2way"))):
        torch.manual_seed(0)
        m = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        if mor is not None:
            convert_to_mor(m, mor, quiet=True)
        memory = track_memory(m, torch.optim.SGD(m.parameters(), lr=0.1))
        x = torch.randn(1024, 256)
        with memory:
            m(x).square().mean().backward()
        peaks[name] = memory.category_peak_bytes["activations"]
    # Eight inputs of a megabyte; seven of them are activations, of which three bytes in four go.
    saved = 7 * 3 * 1024 * 256
    assert peaks["plain"] >= 8 * 4 * 1024 * 256
    assert peaks["plain"] - peaks["mixture"] > saved // 2


def test_a_new_type_reaches_the_layer():
    e3m4 = simulated(3, 4)
    recipe = Recipe(
        "with-e3m4",
        (
            Entry(e3m4, mixture.better_than(e3m4, E4M3)),
            Entry(E4M3, mixture.no_worse_than(E4M3, E5M2)),
        ),
    )
    x, weight, bias, grad_y = problem()
    layer = MoRLinear(140, 132, mor=MoR(recipe, "subchannel-32"))
    layer.weight, layer.bias = (
        torch.nn.Parameter(weight.detach()),
        torch.nn.Parameter(bias.detach()),
    )
    y = layer(x)
    y.backward(grad_y)
    assert layer.mix["input"].names == ("e3m4", "e4m3", "bf16")
    assert all(layer.mix["input"].elements)
    exact = definition(layer.mor, x, weight, bias, grad_y, torch.float64)
    atol = float(1e-5 * exact[0].abs().max())
    torch.testing.assert_close(y.double(), exact[0], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"granularity": "block"}, "granularity='block' is unknown"),
        ({"partition": "row"}, "partition='row' is unknown"),
        ({"partition": (0, 4)}, r"partition=\(0, 4\) cannot apply"),
        ({"partition": (4, -1)}, r"partition=\(4, -1\) cannot apply"),
        ({"threshold": 0.0}, "threshold=0.0 is out of range"),
        ({"threshold": 1.0}, "threshold=1.0 is out of range"),
        ({"threshold": float("nan")}, "threshold=nan is out of range"),
        ({"granularity": "subtensor-2way", "threshold": 0.1}, "threshold=0.1 has no effect"),
        ({"scaling": "fp32"}, "scaling='fp32' is unknown"),
        ({"scaling": "amax", "group": (128, 128)}, "has no effect on scaling='amax'"),
        ({"group": (100, 128)}, "a group consists of whole blocks"),
        ({"partition": "channel", "group": (8, 64)}, "a group consists of whole blocks"),
        ({"metric": "energy"}, "metric='energy' is unknown"),
        ({"roles": {"gradient": MoR()}}, "roles has 'gradient', which is no role: use 'input'"),
        ({"roles": {"input": "tensor"}}, r"roles\['input'\]='tensor' is not a configuration"),
        ({"roles": 5}, "roles=5 is no mapping of roles to nn.MoR"),
        ({"roles": {"input": MoR(roles={"input": MoR()})}}, "has roles of its own"),
    ],
    ids=str,
)
def test_bad_configurations_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        MoR(**arguments)


def test_bad_conversions_are_named():
    m = model()
    with pytest.raises(ValueError, match="none of the 3 linear layers is to be converted: '0'"):
        convert_to_mor(m, MoR(), filter=lambda *_: False)
    with pytest.raises(ValueError, match="GELU has no linear layer to convert"):
        convert_to_mor(torch.nn.GELU(), MoR())
    with pytest.raises(ValueError, match=r"pass a subulp\.nn\.MoR"):
        convert_to_mor(m, "subtensor-2way")
    with pytest.raises(ValueError, match=r"pass a subulp\.nn\.MoR"):
        MoRLinear(3, 3, True, "tensor")
    convert_to_mor(m, MoR(), filter=lambda name, _: name == "2", quiet=True)
    with pytest.raises(ValueError, match="layer '2' is converted already"):
        convert_to_mor(m, MoR())
    assert type(m[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), "x has dtype"),
        (torch.zeros(2, 4, dtype=torch.float64), "x has dtype"),
        (torch.zeros(2, 5), r"x of shape \(2, 5\)"),
    ],
)
def test_bad_inputs_are_named(x, message):
    with pytest.raises(ValueError, match=message):
        MoRLinear(4, 3)(x)


def test_full_precision_weights_of_a_plain_model_can_be_loaded():
    plain, mixed = model().to(torch.bfloat16), converted(model().to(torch.bfloat16), MoR())
    first, second = (optim.AdamW(m.parameters(), precision="collage-plus") for m in (plain, mixed))
    weights = first.full_precision_state_dict(plain)
    second.load_full_precision_state_dict(mixed, weights)
    found = second.full_precision_state_dict(mixed)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    # Those of a mixture know it.
    assert "0._extra_state" in found
    with pytest.raises(ValueError, match=r"has unexpected \['0\._extra_state'"):
        first.load_full_precision_state_dict(plain, found)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_graph_refuses_gradients_in_another_dtype(name):
    """AOTAutograd rounds them to the parameter's, without a word."""
    torch.manual_seed(0)
    layer, x = MoRLinear(64, 32, mor=MoR("tensor")).bfloat16(), torch.randn(9, 64)
    getattr(layer, name).grad_dtype = torch.float32
    layer(x).sum().backward()
    layer.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=f"{name} has grad_dtype torch.float32, and a graph"):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("mor", [False, 0, [], {}])
def test_what_is_no_representation_is_not_the_default(mor):
    with pytest.raises((TypeError, ValueError), match="mor"):
        MoRLinear(8, 8, mor=mor)
