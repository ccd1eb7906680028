"""Parameters and gradients of any dense layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from subulp.numerics import extra_bits
from subulp.optim.components import in_layout_of, is_dense, repack, storage_view

from .support import BF16, SOME, Case, Run, assert_same, cases, gradient, patterns, same_bits

SHAPE = (3, 5, 2, 4)
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "mixed": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
}


def without_random_bits(optimizers: list[str]) -> list:
    """Random bits follow the memory, so other layouts have other ones."""
    return [case for case in cases(optimizers) if not case.values[0].stochastic]


def pair(case: Case, layout: str) -> tuple[Run, Run]:
    """A run in another layout, and one whose contiguous parameter has the same memory."""
    (p,) = case.fresh([SHAPE]).params
    strided = nn.Parameter(LAYOUTS[layout](p.detach()))
    assert not strided.is_contiguous()
    memory = nn.Parameter(storage_view(strided.detach(), strided).clone())
    assert memory.is_contiguous()
    return Run([strided], case.make([strided])), Run([memory], case.make([memory]))


def train(strided: Run, memory: Run, steps: range) -> None:
    for t in steps:
        (p,), (q,) = strided.params, memory.params
        grad = gradient(p, t, 0)
        p.grad = grad
        q.grad = storage_view(in_layout_of(grad, p), p).clone()
        strided.optimizer.step()
        memory.optimizer.step()


def in_memory_order(run: Run) -> dict[str, Tensor]:
    """Bits of a run, tensors of the parameter's shape in the order of their memory."""
    (p,) = run.params
    return {n: storage_view(x, p) if x.shape == p.shape else x for n, x in run.bits().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", cases(SOME))
def test_elements_are_taken_in_storage_order(case, layout):
    """Gradients arrive row-major, and all bits, random ones too, are those of the memory."""
    strided, memory = pair(case, layout)
    stride = strided.params[0].stride()
    train(strided, memory, range(1, 4))
    assert strided.params[0].stride() == stride
    assert_same(in_memory_order(strided), memory)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", without_random_bits(["adamw"]))
def test_layout_does_not_change_values(case, layout):
    run, contiguous = pair(case, layout)[0], case.fresh([SHAPE]).train()
    run.train()
    expected = contiguous.bits()
    for name, value in run.bits().items():
        if not name.startswith(("extra_bits", "signed_bits")):
            assert same_bits(value, expected[name]), name
    (p,), (q,) = run.params, contiguous.params
    assert same_bits(run.optimizer.wide_value(p), contiguous.optimizer.wide_value(q))


@pytest.mark.parametrize("case", cases(SOME))
def test_gradients_of_other_layouts(case):
    shape = (6, 4)
    makers = {
        "transposed": lambda g: g.t().contiguous().t(),
        "every second": lambda g: torch.stack((g, g), dim=-1).flatten(1)[:, ::2],
        "expanded": lambda g: g[:1, :1].expand(shape),
        "offset": lambda g: torch.cat((g, g)).flatten()[3:27].view(shape),
    }
    for name, make in makers.items():
        run = case.fresh([shape]).train(2, make)
        expected = case.fresh([shape]).train(2, lambda g, make=make: make(g).contiguous())
        for key, value in expected.bits().items():
            assert same_bits(run.bits()[key], value), f"{key} with {name} gradients"


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_finiteness_of_strided_gradients(policy):
    """What lies between the elements in memory does not count."""
    run = Case("adamw", "collage-plus", BF16).fresh([(6, 4)], nonfinite=policy)
    bad = torch.full((6, 8), torch.nan, dtype=BF16)
    bad[:, ::2] = 1.0
    run.train(1, lambda g: bad[:, ::2])
    assert run.optimizer.state[run.params[0]]["step"] == 1


@pytest.mark.parametrize("case", without_random_bits(["adamw", "sgd-momentum"]))
def test_memory_format_changed_in_training(case):
    """``model.to(memory_format=...)`` between two steps changes no value."""
    run, expected = case.fresh([SHAPE]).train(2), case.fresh([SHAPE]).train(4)
    (p,) = run.params
    p.data = LAYOUTS["channels-last"](p.data)
    run.train(2)
    assert same_bits(p, expected.params[0])
    assert same_bits(run.optimizer.wide_value(p), expected.optimizer.wide_value(expected.params[0]))


@pytest.mark.parametrize("case", cases(SOME))
@pytest.mark.parametrize("layouts", [("mixed", None), (None, "transposed")], ids=str)
def test_state_dict_crosses_layouts(case, layouts):
    """Saved from one memory layout and loaded into another: the same wide values and states."""
    saved, loaded = (pair(case, layout)[0] if layout else case.fresh([SHAPE]) for layout in layouts)
    saved.train(2)
    (p,), (q,) = saved.params, loaded.params
    q.data.copy_(p.data)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    loaded.t = saved.t
    assert same_bits(loaded.optimizer.wide_value(q), saved.optimizer.wide_value(p))
    if not case.stochastic:
        assert same_bits(loaded.train(2).params[0], saved.train(2).params[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 6)[:, ::2],
        lambda: torch.zeros(4, 6)[:, :3],
        lambda: torch.zeros(1, 3).expand(4, 3),
        lambda: torch.zeros(12).as_strided((3, 4), (2, 1)),
    ],
    ids=["steps", "columns", "expanded", "overlapping"],
)
def test_parameters_with_gaps_are_refused(make):
    with pytest.raises(ValueError, match=r"parameter 0 has strides \(.*use a contiguous parameter"):
        Case("adamw", "fp32", torch.float32).make([nn.Parameter(make())])


def test_dense_layouts_are_recognised():
    x = torch.zeros(2, 3, 4)
    for dims in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        assert is_dense(x.permute(dims))
    assert is_dense(torch.zeros(()))
    assert is_dense(torch.zeros(0, 3).t())
    assert is_dense(torch.zeros(12).as_strided((3, 1, 4), (1, 77, 3)))
    assert not is_dense(x[:, ::2])


def test_repacked_tails_follow_their_elements():
    values = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    before, after = torch.zeros(2, 3, 4), torch.zeros(4, 2, 3).permute(1, 2, 0)
    words = extra_bits.pack(values, 5)
    moved = extra_bits.unpack(repack(words, 5, before, after), 24, 5)
    assert torch.equal(moved.view(4, 2, 3).permute(1, 2, 0), values)
    assert torch.equal(patterns(repack(repack(words, 5, before, after), 5, after, before)), words)
