"""State dicts of bitsandbytes, torchao and torch-optimi go on in any precision."""

from __future__ import annotations

import bitsandbytes as bnb
import bitsandbytes.functional
import optimi
import pytest
import torch
import torchao.optim as ao
from torch import nn

from subulp import optim

from .support import BF16, FP16, FP32, Run, parameters, same_bits

TOLERANCE = 1e-6
# One that is stored in 8 bits, and one that is too small for it.
SHAPES = [(64, 128), (5,)]
ADAMS = {"lr": 1e-3, "weight_decay": 0.1}
MOMENTUM = {"lr": 0.1, "momentum": 0.9}
# Makes the other optimizer, and ours.
LIBRARIES = {
    "bitsandbytes AdamW": (lambda p: bnb.optim.AdamW(p, **ADAMS), optim.AdamW),
    "bitsandbytes AdamW8bit": (lambda p: bnb.optim.AdamW8bit(p, **ADAMS), optim.AdamW),
    "bitsandbytes Adam": (lambda p: bnb.optim.Adam(p, **ADAMS), optim.AdamW),
    "bitsandbytes Adam8bit": (lambda p: bnb.optim.Adam8bit(p, **ADAMS), optim.AdamW),
    "bitsandbytes Adam8bit undecayed": (bnb.optim.Adam8bit, optim.Adam),
    "bitsandbytes SGD decayed": (
        lambda p: bnb.optim.SGD(p, weight_decay=0.1, **MOMENTUM),
        optim.SGD,
    ),
    "bitsandbytes SGD": (lambda p: bnb.optim.SGD(p, **MOMENTUM), optim.SGD),
    "bitsandbytes SGD8bit": (lambda p: bnb.optim.SGD8bit(p, **MOMENTUM), optim.SGD),
    "torchao AdamW8bit": (lambda p: ao.AdamW8bit(p, **ADAMS), optim.AdamW),
    "torchao AdamW4bit": (lambda p: ao.AdamW4bit(p, **ADAMS), optim.AdamW),
    "torchao AdamWFp8": (lambda p: ao.AdamWFp8(p, **ADAMS), optim.AdamW),
    "optimi AdamW": (lambda p: optimi.AdamW(p, **ADAMS), optim.AdamW),
    "optimi Adam": (lambda p: optimi.Adam(p, **ADAMS), optim.Adam),
    "optimi SGD": (lambda p: optimi.SGD(p, **MOMENTUM), optim.SGD),
    "optimi SGD damped": (lambda p: optimi.SGD(p, dampening=True, **MOMENTUM), optim.SGD),
}


def both(name: str, dtype=FP32, **options) -> tuple[Run, Run]:
    """The other library's after three steps, and ours, which has imported it."""
    theirs, ours = LIBRARIES[name]
    params = parameters(dtype, SHAPES)
    run = Run(params, theirs(params)).train(3)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = Run(twins, ours(twins, **options), run.t)
    other.optimizer.import_state_dict(run.optimizer.state_dict())
    return run, other


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_next_step_is_theirs(name):
    """Steps decode a state before they round it again, so that one step is the same."""
    theirs, ours = both(name)
    before = [p.detach().clone() for p in ours.params]
    theirs.train(1)
    ours.train(1)
    for p, q, start in zip(ours.params, theirs.params, before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=TOLERANCE)
        assert (p - start).abs().max() > 1e-4


def test_codes_of_bitsandbytes_are_decoded_as_there():
    theirs, ours = both("bitsandbytes AdamW8bit")
    state = theirs.optimizer.state[theirs.params[0]]
    for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        expected = bitsandbytes.functional.dequantize_blockwise(
            state[f"state{number}"],
            absmax=state[f"absmax{number}"],
            code=state[f"qmap{number}"],
            blocksize=256,
        )
        assert same_bits(ours.optimizer.state[ours.params[0]][name], expected)


def test_tensors_of_torchao_dequantize_themselves():
    theirs, ours = both("torchao AdamW8bit")
    for name in ("exp_avg", "exp_avg_sq"):
        expected = theirs.optimizer.state[theirs.params[0]][name].dequantize()
        assert same_bits(ours.optimizer.state[ours.params[0]][name], expected)


@pytest.mark.parametrize("precision", ["kahan", "master", "collage-plus", "extra-bits-16"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_compensations_of_optimi_are_kept(dtype, precision):
    theirs, ours = both("optimi AdamW", dtype, precision=precision)
    for p, q in zip(theirs.params, ours.params, strict=True):
        exact = p.detach().double() + theirs.optimizer.state[p]["kahan_comp"].double()
        assert (exact != p.double()).any()
        error = (ours.optimizer.wide_value(q).double() - exact).abs()
        # A compensation above half an ulp belongs to no rounding to nearest, and counts as zero.
        believed = (exact - p.double()).abs() <= p.double().abs() * torch.finfo(dtype).eps / 4
        assert believed.float().mean() > 0.5
        assert error[believed].le(p.detach().double().abs()[believed] * 2.0**-15).all()


def test_wrong_ones_are_refused():
    params = parameters(FP32, SHAPES)
    decayed = Run(params, optimi.AdamW(params, lr=1e-3, decouple_lr=True, weight_decay=1e-4))
    lion = Run(params, bnb.optim.Lion(params, lr=1e-3))
    rms = Run(params, bnb.optim.RMSprop(params, lr=1e-3))
    cases = [
        (decayed, optim.AdamW(params), "decouple_lr=True"),
        (
            Run(params, bnb.optim.Adam(params, **ADAMS)),
            optim.Adam(params),
            "decoupled from the gradient, unlike subulp's Adam",
        ),
        (lion, optim.AdamW(params), "another algorithm than AdamW"),
        (lion, optim.SGD(params, momentum=0.9), "another algorithm than SGD"),
        (Run(params, optimi.Adan(params, lr=1e-3)), optim.AdamW(params), "prev_grad.*another"),
        (Run(params, bnb.optim.LAMB(params, lr=1e-3)), optim.AdamW(params), "norms of updates"),
        (rms, optim.SGD(params, momentum=0.9), "another algorithm than SGD"),
        (Run(params, optimi.SGD(params, **MOMENTUM)), optim.AdamW(params), "another algorithm"),
    ]
    for run, ours, message in cases:
        given = run.train(1).optimizer.state_dict()
        with pytest.raises(ValueError, match=message):
            ours.import_state_dict(given)
        assert not ours.state
