"""``torch.export`` of evaluated modules, and ``torch.compile`` of those that train."""

from __future__ import annotations

import copy

import pytest
import torch

from subulp import nn, optim

IDS = torch.tensor([3, 1, 2])


def head(**options):
    return nn.ExtremeClassifier(16, 50, seed=1, **options)


class Top(torch.nn.Module):
    """What predicts: the best labels."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.topk(x, 3)


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


CASES = {
    "linear bf16": lambda: (nn.Linear(16, 8).bfloat16(), x(3, 16)),
    "linear e4m3": lambda: (nn.Linear(16, 8).to(torch.float8_e4m3fn), x(3, 16)),
    "conv": lambda: (nn.Conv2d(3, 4, 3).bfloat16(), x(1, 3, 8, 8)),
    "embedding": lambda: (nn.Embedding(50, 8).bfloat16(), IDS),
    "layer norm": lambda: (nn.LayerNorm(16).bfloat16(), x(3, 16)),
    "batch norm": lambda: (nn.BatchNorm2d(3).bfloat16(), x(2, 3, 4, 4)),
    "bag": lambda: (nn.CachedEmbeddingBag(99, 8, "int4", 0.1), IDS, torch.tensor([0, 1])),
    "bag mean": lambda: (nn.CachedEmbeddingBag(99, 8, mode="mean"), IDS.view(1, 3)),
    "bag none": lambda: (nn.CachedEmbeddingBag(99, 8, "e4m3", mode=None), IDS),
    "bags": lambda: (
        nn.CachedEmbeddingBags([nn.EmbeddingTable(99, 8), nn.EmbeddingTable(2000, 4)]),
        IDS,
        torch.tensor([1, 2]),
    ),
    "head": lambda: (head(), x(3, 16), torch.tensor([0, 1]), torch.tensor([3, 4])),
    "head int4": lambda: (head(storage="int4"), x(3, 16), IDS - 1, IDS),
    "head simulated": lambda: (head(storage=(4, 2), scale=0.5), x(3, 16), IDS - 1, IDS),
    "head precise": lambda: (
        head(head_fraction=0.3, label_counts=torch.arange(50), reduction="sum"),
        *(x(3, 16), IDS - 1, IDS),
    ),
    "best labels": lambda: (Top(head(head_fraction=0.3, label_counts=torch.arange(50))), x(3, 16)),
    "best labels fp8": lambda: (Top(head(products="fp8", scale="table")), x(3, 16)),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_exported_module_computes_the_same(case, strict):
    module, *arguments = CASES[case]()
    module.eval()
    if case.startswith("bag "):
        module.table.load(x(99, 8))
    program = torch.export.export(module, tuple(arguments), strict=strict).module()
    found, expected = program(*arguments), module(*arguments)
    if isinstance(expected, tuple):
        assert torch.equal(found[1], expected[1])
        found, expected = found[0], expected[0]
    if case.startswith("linear"):
        # One product instead of tiles.
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_an_exported_bag_takes_other_sizes_and_checks_them():
    bag = nn.CachedEmbeddingBag(99, 8, "int4", 0.1).eval()
    sizes = {"input": {0: torch.export.Dim("count")}, "offsets": {0: torch.export.Dim("bags")}}
    arguments = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 2, 2])
    program = torch.export.export(bag, arguments, dynamic_shapes=sizes).module()
    other = torch.arange(10), torch.tensor([0, 3, 3, 9, 10])
    assert torch.equal(program(*other), bag(*other))
    with pytest.raises(IndexError, match="row number 99"):
        program(torch.tensor([1, 2, 99, 0]), torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match="decrease"):
        program(torch.tensor([1, 2, 3, 0]), torch.tensor([0, 2, 1]))


@pytest.mark.parametrize("case", ["bag", "bags", "head", "best labels"])
def test_what_updates_itself_is_not_exported(case):
    module, *arguments = CASES[case]()
    with pytest.raises(RuntimeError, match=r"in train\(\): its rows update themselves"):
        torch.export.export(module.train(), tuple(arguments))


@pytest.mark.parametrize("storage", ["e4m3", "int8"])
def test_a_compiled_head_is_an_eager_one(storage):
    module = head(storage=storage, dropout=0.1)
    optim.RowSGD(module, lr=0.5)
    twin, _ = copy.deepcopy((module, module.row_optimizer))
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        results = []
        for run in (compiled, twin):
            inputs = x(3, 16).requires_grad_()
            loss = run(inputs, IDS - 1, IDS, loss=True)
            loss.backward()
            results.append((loss, inputs.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(module.table.decode(0, 50), twin.table.decode(0, 50))
    best = torch.compile(Top(module), backend="aot_eager")(x(3, 16))
    assert torch.equal(best[1], module.topk(x(3, 16), 3)[1])
