"""The image classifier: storage, initial weights, simulation, fused runs."""

import dataclasses
import math
import re
from fractions import Fraction

import pytest
import torch

from subulp.lab.engine.loop import run
from subulp.lab.tasks.image.config import ImageConfig
from subulp.lab.tasks.image.resnet import ResNet18
from subulp.lab.tasks.image.simulated import SimulatedSGD, simulated_bits
from subulp.lab.tasks.image.task import METRICS, build_model, evaluate, load, parameter_dtype, steps

CPU = torch.device("cpu")
SMALL = {"width": 4, "epochs": 2, "batch_size": 16, "watch_every": 3, "device": "cpu"}


def timeless(summary):
    empty = dict.fromkeys(summary.peak_bytes, 0)
    return dataclasses.replace(
        summary,
        seconds_per_step=0.0,
        seconds_per_epoch=0.0,
        peak_bytes=empty,
        category_peak_bytes=empty,
    )


def test_it_is_resnet_18():
    model = ResNet18(3, 10)
    # He et al.'s count for CIFAR-10, with batch normalisation and a 3 x 3 stem.
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert sum(m.kernel_size == (3, 3) for m in convolutions) + 1 == 18
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("precision", "dtype", "stored", "bytes_"),
    [
        ("fp32", "fp16", torch.float32, 12),
        ("amp", "fp16", torch.float32, 12),
        ("extra-bits-13", "fp16", torch.float16, 4 + 13 / 8 + 4),
        ("extra-bits-8", "fp16", torch.float16, 9),
        ("nearest", "fp16", torch.float16, 6),
        ("extra-bits-16", "bf16", torch.bfloat16, 10),
        ("extra-bits-4", "bf16", torch.bfloat16, 8.5),
        ("e5m2+8", "fp16", torch.float16, 1 + 2 + 4 + 1),
        ("e5m2+4", "fp16", torch.float16, 1 + 2 + 4 + 0.5),
    ],
)
def test_every_label_trains_in_its_storage(digits, precision, dtype, stored, bytes_):
    config = ImageConfig(**SMALL, precision=(precision,), dtype=dtype)
    model, _ = build_model(config, digits, precision, 0, CPU)
    assert {p.dtype for p in model.parameters()} == {stored}
    summary = run(config, digits, precision, 0)
    # Packed words round a tensor's extra bits up to whole groups.
    assert summary.bytes_per_parameter["total"] == pytest.approx(bytes_, rel=0.02)
    assert set(summary.metrics) == {m.name for m in METRICS}
    assert 0 <= summary.metrics["accuracy"] <= 1
    assert summary.simulated == precision.startswith("e5m2")


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("precision", ["amp", "extra-bits-8-stochastic", "collage-plus", "e5m2+8"])
def test_a_fused_run_gives_the_same_numbers(digits, precision, max_norm):
    config = ImageConfig(**SMALL, precision=(precision,), max_norm=max_norm)
    fused = dataclasses.replace(config, fuse_backward=True)
    plain, other = run(config, digits, precision, 0), run(fused, digits, precision, 0)
    # What the optimizer's rounding loses is measured inside the backward pass too.
    assert timeless(plain) == timeless(other)


@pytest.mark.parametrize(
    ("precision", "limits"),
    [
        ("fp32", {}),
        ("amp", {}),
        ("extra-bits-8", {}),
        ("nearest", {}),
        ("amp", {"max_norm": 0.5}),
        ("fp32", {"max_norm": 0.5}),
    ],
)
def test_a_grad_scaler_gives_the_same_numbers_fused_or_not(digits, precision, limits):
    """A scale of 2**16 overflows FP16 at first: those steps are left out whole."""
    config = ImageConfig(**SMALL, precision=(precision,), grad_scaler=True, log_every=1, **limits)
    records, summaries = [], []
    for fuse in (False, True):
        seen = []
        changed = dataclasses.replace(config, fuse_backward=fuse)
        summaries.append(run(changed, digits, precision, 0, seen.append))
        records.append([(r.loss, r.metrics) for r in seen])
    assert records[0] == records[1]
    skipped = summaries[0].skipped_steps
    assert skipped == summaries[1].skipped_steps
    assert (skipped > 0) == (precision != "fp32")


@pytest.mark.parametrize("precision", ["nearest", "e5m2+8"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_gradients_that_are_scaled_are_clipped_inside_the_backward_pass_alone(
    digits, precision, dtype
):
    given = {**SMALL, "dtype": dtype, "grad_scaler": True, "max_norm": 0.5}
    with pytest.raises(ValueError, match=rf"grad_scaler and precision={re.escape(precision)}: t"):
        ImageConfig(**given, precision=("fp32", precision))
    fused = ImageConfig(**given, precision=(precision,), fuse_backward=True)
    assert run(fused, digits, precision, 0).skipped_steps < steps(fused, digits)


def test_the_same_arguments_give_the_same_numbers(digits):
    config = ImageConfig(**SMALL)
    results = [timeless(run(config, digits, "extra-bits-8-stochastic", 3)) for _ in range(2)]
    assert results[0] == results[1]
    assert timeless(run(config, digits, "extra-bits-8-stochastic", 4)) != results[0]


def test_all_precisions_start_from_the_same_weights(digits):
    config = ImageConfig(**SMALL)
    starts = {}
    for precision in ("fp32", "amp", "extra-bits-13", "nearest"):
        model, optimizer = build_model(config, digits, precision, 0, CPU)
        starts[precision] = optimizer.full_precision_state_dict(model)
    for name, value in starts["fp32"].items():
        if not value.is_floating_point():
            continue
        assert torch.equal(starts["amp"][name], value)
        if "running" not in name:
            assert torch.equal(starts["nearest"][name], value.half().float())
        torch.testing.assert_close(starts["extra-bits-13"][name], value, rtol=2**-23, atol=1e-10)


def test_only_kernels_and_matrices_decay(digits):
    model, optimizer = build_model(
        ImageConfig(**SMALL, weight_decay=0.25), digits, "nearest", 0, CPU
    )
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for p in model.parameters():
        assert decay[id(p)] == (0.25 if p.dim() > 1 else 0.0)


def test_amp_keeps_the_gradients_of_fp32_and_the_activations_of_fp16(digits):
    config = ImageConfig(**SMALL)
    wide, amp = (run(config, digits, p, 0) for p in ("fp32", "amp"))
    assert amp.metrics != wide.metrics
    assert amp.bytes_per_parameter == wide.bytes_per_parameter


def e5m2_cut(value, bits):
    """The definition in exact rationals: a finite value cut toward zero to 2 + k mantissa bits."""
    x = Fraction(value)
    if x == 0:
        return 0.0
    exponent = max(-14, _log2(abs(x)))
    step = Fraction(2) ** (exponent - 2 - bits)
    return float(int(x / step) * step)


def _log2(x):
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


@pytest.mark.parametrize("bits", [4, 8])
def test_the_simulation_holds_the_bits_that_it_claims(bits):
    torch.manual_seed(0)
    p = torch.nn.Parameter((torch.randn(200) * 10 ** torch.empty(200).uniform_(-4, 1)).half())
    optimizer = SimulatedSGD([p], bits, lr=0.1, momentum=0.9)
    model = torch.nn.Module()
    model.p = p
    optimizer.load_full_precision_state_dict(model, {"p": p.detach().float()})
    for _ in range(3):
        before = optimizer.wide_value(p).clone()
        p.grad = torch.randn(200).half()
        optimizer.step()
        velocity = optimizer.state[p]["momentum_buffer"]
        exact = before - 0.1 * velocity
        wide = optimizer.wide_value(p)
        for x, y, head in zip(exact.tolist(), wide.tolist(), p.tolist(), strict=True):
            assert y == e5m2_cut(x, bits)
            assert head == e5m2_cut(y, 0)
            assert torch.tensor(head).to(torch.float8_e5m2).item() == head


def test_without_extra_bits_it_rounds_to_nearest():
    p = torch.nn.Parameter(torch.tensor([1.0, 1.25, -3.0]).half())
    optimizer = SimulatedSGD([p], 0, lr=1.0)
    p.grad = torch.tensor([-0.125, -0.1251, 0.3]).half()
    optimizer.step()
    assert p.tolist() == [1.0, 1.5, -3.5]
    assert "extra_bits" not in optimizer.bytes_per_parameter()


def test_names_of_the_simulation():
    names = ("e5m2", "e5m2+4", "e5m2+16", "nearest", "e5m2+x")
    assert [simulated_bits(p) for p in names] == [0, 4, 16, None, None]
    with pytest.raises(ValueError, match="k=17 is out of range"):
        simulated_bits("e5m2+17")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": ("fp17",)}, "precision='fp17' is unknown"),
        ({"precision": ("extra-bits-17",)}, "k=17 is out of range"),
        ({"data": "imagenet"}, "data=imagenet is unknown"),
        ({"batch_size": 2000}, "batch_size=2000 is above the 1438 training pictures"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        load(ImageConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width=0 is out of range"),
        ({"epochs": 0}, "epochs=0 is out of range"),
        ({"momentum": 1.0}, "momentum=1.0 is out of range"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov=True needs momentum"),
        ({"lr": -1.0}, r"lr=-1.0 is out of range"),
        ({"watch_every": 1}, "watch_every=1 is out of range"),
    ],
)
def test_fields_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**changes)


def test_a_strategy_has_the_dtype_that_was_asked_for():
    assert parameter_dtype("extra-bits-4", "bf16") == torch.bfloat16
    assert parameter_dtype("e5m2+4", "bf16") == torch.float16


def test_steps_are_whole_batches(digits):
    assert steps(ImageConfig(**{**SMALL, "batch_size": 20}), digits) == 4


def test_it_learns():
    config = ImageConfig(precision=("extra-bits-8",), width=8, epochs=4)
    summary = run(config, load(config), "extra-bits-8", 0)
    assert summary.metrics["accuracy"] > 0.8


def test_scores_that_are_not_finite_are_of_no_class():
    pictures, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.long)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    batches = [(pictures[:2], labels[:2]), (pictures[2:], labels[2:])]
    assert 0.0 <= evaluate(net, net, batches)["accuracy"] <= 1.0
    # Of one batch alone.
    found = evaluate(
        net, lambda x: net(x) * (math.nan if x.sum() > 0 else 1), [*batches, (pictures + 1, labels)]
    )
    assert math.isnan(found["accuracy"])
