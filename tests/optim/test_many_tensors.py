"""A step over many tensors looks at them together: each must count as it would alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subulp import optim
from subulp.ops.kinds import Remembered
from subulp.ops.step import job, repeat

from .support import BF16, E4M3, FP16, FP32, gradient, same_bits

PRECISIONS = [("collage-plus", BF16), ("master", FP16), ("extra-bits-5", BF16), ("fp32", FP32)]
Edit = Callable[[optim.AdamW, Tensor], Any]
STEPS = (2, 4)
"""After so many steps kinds are known, and the step itself."""


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (2, 3, 4, 5), (40,), (), (0, 3), (600,)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], t: int) -> None:
    for i, p in enumerate(params):
        p.grad = gradient(p, t, i)


def no_gradient(optimizer: optim.AdamW, p: Tensor) -> None:
    p.grad = None


def frozen(optimizer: optim.AdamW, p: Tensor) -> None:
    p.requires_grad_(False)
    p.grad = None


def wide_gradient(optimizer: optim.AdamW, p: Tensor) -> None:
    p.grad_dtype = None
    p.grad = p.grad.float() * 1.01


def gradient_in_another_layout(optimizer: optim.AdamW, p: Tensor) -> None:
    p.grad = channels_last(p.grad)


def swapped(optimizer: optim.AdamW, p: Tensor) -> None:
    p.data = p.data * 0.5


def swapped_for_another_layout(optimizer: optim.AdamW, p: Tensor) -> None:
    p.data = channels_last(p.data)


def state_replaced(optimizer: optim.AdamW, p: Tensor) -> None:
    state = optimizer.state[p]
    state["exp_avg"] = state["exp_avg"] * 2


def state_in_another_layout(optimizer: optim.AdamW, p: Tensor) -> None:
    state = optimizer.state[p]
    state["exp_avg_sq"] = channels_last(state["exp_avg_sq"])


def state_written(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"].mul_(3)


def state_removed(optimizer: optim.AdamW, p: Tensor) -> None:
    del optimizer.state[p]


def moment_removed(optimizer: optim.AdamW, p: Tensor) -> None:
    del optimizer.state[p]["exp_avg"]


def counter_written(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["step"].fill_(9)


def loaded(optimizer: optim.AdamW, p: Tensor) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(saved)


def rate_changed(optimizer: optim.AdamW, p: Tensor) -> None:
    for group in optimizer.param_groups:
        group.update(lr=0.3, betas=(0.5, 0.7), weight_decay=0.2)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


EDITS = (
    no_gradient,
    frozen,
    wide_gradient,
    gradient_in_another_layout,
    swapped,
    swapped_for_another_layout,
    state_replaced,
    state_in_another_layout,
    state_written,
    state_removed,
    moment_removed,
    counter_written,
    loaded,
    rate_changed,
)


def trained(
    precision: str, dtype: torch.dtype, edit: Edit | None, before: int, *, together: bool
) -> list[Tensor]:
    """All tensors after some steps, an edit of the second parameter, and two steps more."""
    params = parameters(dtype)
    groups = [{"params": params}] if together else [{"params": [p]} for p in params]
    optimizer = optim.AdamW(groups, lr=0.1, precision=precision, seed=1)
    for t in range(1, before + 3):
        give_gradients(params, t)
        if t == before + 1 and edit is not None:
            edit(optimizer, params[1])
        optimizer.step()
    states = [optimizer.state[p] for p in params]
    stored = [state[name].flatten() for state in states for name in sorted(state)]
    return [p.detach().flatten() for p in params] + stored


@pytest.mark.parametrize("before", STEPS)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize(("precision", "dtype"), PRECISIONS)
def test_an_edit_counts_as_it_would_alone(
    precision: str, dtype: torch.dtype, edit: Edit, before: int
) -> None:
    apart = trained(precision, dtype, edit, before, together=False)
    together = trained(precision, dtype, edit, before, together=True)
    assert all(same_bits(a, b) for a, b in zip(apart, together, strict=True))
    # Layouts and equal loads aside, an edit changes what comes out.
    if "layout" not in edit.__name__:
        unedited = trained(precision, dtype, None, before, together=True)
        assert not all(same_bits(a, b) for a, b in zip(together, unedited, strict=True))


def test_parameters_and_groups_may_join() -> None:
    results = []
    for together in (False, True):
        params = parameters(BF16)
        first = [{"params": params[:3]}] if together else [{"params": [p]} for p in params[:3]]
        optimizer = optim.AdamW(first, lr=0.1, seed=1)
        give_gradients(params, 1)
        optimizer.step()
        for group in [params[3:]] if together else [[p] for p in params[3:]]:
            optimizer.add_param_group({"params": group})
        give_gradients(params, 2)
        optimizer.step()
        # A copy steps its own tensors, and only those.
        before = [p.detach().clone() for p in params]
        twin = copy.deepcopy(optimizer)
        twins = [p for group in twin.param_groups for p in group["params"]]
        give_gradients(twins, 3)
        twin.step()
        assert all(same_bits(p.detach(), q) for p, q in zip(params, before, strict=True))
        results.append([p.detach() for p in twins])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------------------- refusals


def gradient_freed(optimizer: optim.AdamW, p: Tensor) -> None:
    p.grad.untyped_storage().resize_(0)


def parameter_freed(optimizer: optim.AdamW, p: Tensor) -> None:
    p.untyped_storage().resize_(0)


def state_freed(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["exp_avg_sq"].untyped_storage().resize_(0)


def largest_gradient_freed(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["gradient_amax"].untyped_storage().resize_(0)


def counter_freed(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["step"].untyped_storage().resize_(0)


def parameter_shortened(optimizer: optim.AdamW, p: Tensor) -> None:
    p.untyped_storage().resize_(p.untyped_storage().nbytes() // 2)


def parameter_behind_its_storage(optimizer: optim.AdamW, p: Tensor) -> None:
    """Which is as large as the parameter."""
    p.data = torch.cat([p.data.flatten()] * 2)[p.numel() :].view_as(p)
    p.untyped_storage().resize_(p.nbytes)


def gradient_sparse(optimizer: optim.AdamW, p: Tensor) -> None:
    p.grad = p.grad.to_sparse()


def gradient_negated(optimizer: optim.AdamW, p: Tensor) -> None:
    p.grad = torch._neg_view(p.grad)


def state_of_another_dtype(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].double()


def state_of_another_dtype_in_place(optimizer: optim.AdamW, p: Tensor) -> None:
    state = optimizer.state[p]["exp_avg"]
    state.data = state.data.view(torch.int16)


def state_of_another_shape(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"].resize_(3)


def state_on_another_device(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].to("meta")


def state_scattered(optimizer: optim.AdamW, p: Tensor) -> None:
    optimizer.state[p]["parameter_low"] = torch.zeros(2 * p.numel(), dtype=BF16)[::2]


REFUSED = {
    gradient_freed: (ValueError, "grads has a tensor of shape .* without memory"),
    parameter_freed: (ValueError, "params has a tensor of shape .* without memory"),
    state_freed: (ValueError, "the slow states has a tensor of shape .* without memory"),
    largest_gradient_freed: (ValueError, r"amaxes has a tensor of shape \(\) .* without memory"),
    counter_freed: (ValueError, r"the step counters has a tensor of shape \(\) .* without memory"),
    parameter_shortened: (ValueError, "params of shape .* reaches beyond its storage"),
    parameter_behind_its_storage: (ValueError, "params of shape .* reaches beyond its storage"),
    gradient_sparse: (ValueError, "gradient of parameter 2 of group [01] has layout"),
    gradient_negated: (ValueError, "grads has a tensor that is a negated view"),
    state_of_another_dtype: (ValueError, r"exp_avgs\[2\] is torch.float64 on cpu"),
    state_of_another_dtype_in_place: (ValueError, r"exp_avgs\[2\] is torch.int16 on cpu"),
    state_of_another_shape: (ValueError, r"exp_avgs\[2\] has shape \(3,\)"),
    state_on_another_device: (ValueError, r"exp_avgs\[2\] is torch.bfloat16 on meta"),
}


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("steps", STEPS)
def test_one_damaged_tensor_is_found_among_many(steps: int, groups: int, damage: Edit) -> None:
    """Nothing is updated, not in the groups before it either."""
    params = parameters(E4M3 if damage is largest_gradient_freed else BF16)
    parts = [params] if groups == 1 else [params[3:], params[:3]]
    optimizer = optim.AdamW([{"params": part} for part in parts], lr=0.1, seed=1)
    for t in range(1, steps + 1):
        give_gradients(params, t)
        optimizer.step()
    give_gradients(params, steps + 1)
    damage(optimizer, params[2])
    others = [p for i, p in enumerate(params) if i != 2]
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in others])
    error, message = REFUSED[damage]
    with pytest.raises(error, match=message):
        optimizer.step()
    for p, (value, state) in zip(others, before, strict=True):
        assert same_bits(p.detach(), value)
        assert all(same_bits(optimizer.state[p][name], old) for name, old in state.items())


def test_a_scattered_state_is_gathered() -> None:
    params = parameters(BF16)
    optimizer = optim.AdamW(params, lr=0.1, seed=1)
    give_gradients(params, 1)
    optimizer.step()
    state_scattered(optimizer, params[2])
    optimizer.step()
    assert optimizer.state[params[2]]["parameter_low"].is_contiguous()
    assert optimizer.state[params[2]]["step"] == 2


def test_kinds_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above edit between steps is remembered there, and not read anew."""
    read = []
    checks = job._check_tensors

    def spy(role: str, *rest: Any) -> None:
        read.append(role)
        checks(role, *rest)

    monkeypatch.setattr(job, "_check_tensors", spy)
    # A parameter of a test before, now freed, may have had this one's identity and its kinds.
    monkeypatch.setattr(job, "_checked", Remembered())
    monkeypatch.setattr(repeat, "_known", Remembered())
    params = parameters(BF16)
    optimizer = optim.AdamW(params, lr=0.1, seed=1)
    roles = ["params", "grads", "exp_avgs", "exp_avg_sqs", "extras", "exp_avg_sq_lows"]
    # The first step makes the states, in views of the parameters.
    for t, expected in ((1, roles), (2, roles), (3, []), (4, [])):
        give_gradients(params, t)
        optimizer.step()
        assert read == expected
        read.clear()
    give_gradients(params, 5)
    wide_gradient(optimizer, params[1])
    optimizer.step()
    assert read == 2 * roles, "a gradient of another dtype has a bucket of its own"
