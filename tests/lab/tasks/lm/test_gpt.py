import pytest
import torch

from subulp.lab.tasks.lm.gpt import GPT, Shape

SHAPE = Shape(vocabulary=11, context=8, width=16, layers=2, heads=2)


def model(shape=SHAPE, seed=0):
    torch.manual_seed(seed)
    return GPT(shape)


def test_a_position_sees_only_what_came_before():
    gpt = model().eval()
    ids = torch.randint(11, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    a, b = gpt(ids), gpt(changed)
    assert a.shape == (2, 8, 11)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=0)
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_the_first_loss_is_that_of_a_guess():
    loss = model().loss(torch.randint(11, (4, 8)), torch.randint(11, (4, 8)))
    torch.testing.assert_close(loss.item(), torch.tensor(11.0).log().item(), rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_narrow_parameters_compute_like_their_decoded_values(dtype):
    narrow = model().to(dtype)
    wide = model()
    wide.load_state_dict({k: v.float() for k, v in narrow.state_dict().items()})
    ids, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    a, b = narrow.loss(ids, targets), wide.loss(ids, targets)
    torch.testing.assert_close(a, b)
    a.backward()
    assert {p.grad.dtype for p in narrow.parameters()} == {dtype}


def test_a_tied_head_shares_the_table():
    gpt = model(Shape(11, 8, 16, 1, 2, tie_head=True)).to(torch.bfloat16)
    assert gpt.head.weight is gpt.tokens.weight
    gpt.loss(torch.randint(11, (2, 8)), torch.randint(11, (2, 8))).backward()
    assert gpt.tokens.weight.grad is not None


def test_residual_projections_start_smaller_the_deeper_the_model():
    gpt = model(Shape(11, 8, 64, 8, 2))
    torch.testing.assert_close(
        gpt.blocks[0].mlp.down.weight.std().item(), 0.02 / 4, rtol=0.05, atol=0
    )
    torch.testing.assert_close(gpt.blocks[0].mlp.up.weight.std().item(), 0.02, rtol=0.05, atol=0)
