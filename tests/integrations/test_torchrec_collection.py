"""Our EmbeddingBagCollection against TorchRec's: the same lookups, weights and DLRM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from subulp import optim

from . import pages

ROWS = {"users": 1200, "shops": 1031}
SHARED = {"users": ["user", "friend"], "shops": ["shop", "user"]}
"""A feature of two tables, and two features of one."""
APART = {"users": ["user", "friend"], "shops": ["shop"]}
DIM = 8


def configs(features: dict[str, list[str]] = SHARED, **options: Any) -> list[Any]:
    from torchrec import EmbeddingBagConfig  # noqa: PLC0415

    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=list(features[name]),
            **options,
        )
        for name, rows in ROWS.items()
    ]


def theirs(is_weighted: bool = False, **options: Any) -> Any:
    from torchrec import EmbeddingBagCollection  # noqa: PLC0415

    torch.manual_seed(1)
    return EmbeddingBagCollection(configs(**options), is_weighted)


def ours(of: Any, **options: Any) -> Any:
    from subulp.integrations.torchrec import CachedEmbeddingBagCollection  # noqa: PLC0415

    return CachedEmbeddingBagCollection.from_embedding_bag_collection(of, seed=3, **options)


def batch(step: int, *, weighted: bool = False, keys: str = "shop user other friend") -> Any:
    """Features in another order than the tables', and one that no table has."""
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415

    generator = torch.Generator().manual_seed(step)
    names = keys.split()
    lengths = torch.randint(0, 4, (len(names), 5), generator=generator)
    values = torch.randint(0, 1031, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(names, values, weights, lengths=lengths.flatten())


def pooling(kind: str) -> dict[str, Any]:
    from torchrec.modules.embedding_configs import PoolingType  # noqa: PLC0415

    return {"pooling": PoolingType[kind]}


@pytest.mark.parametrize("kind", ["SUM", "MEAN"])
def test_lookups_are_torchrecs(kind):
    """Of FP32 rows, up to the order of sums of three."""
    reference = theirs(**pooling(kind))
    made = ours(reference, storage="fp32").eval()
    found, expected = made(batch(0)), reference(batch(0))
    assert found.keys() == expected.keys() == ["user@users", "friend", "shop", "user@shops"]
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-7)
    assert made.embedding_bag_configs() == reference.embedding_bag_configs()
    assert (made.is_weighted(), made.device) == (reference.is_weighted(), reference.device)


def test_weighted_lookups_are_torchrecs():
    reference = theirs(is_weighted=True)
    made = ours(reference, storage="fp32").eval()
    features = batch(0, weighted=True)
    torch.testing.assert_close(
        made(features).values(), reference(features).values(), rtol=1e-6, atol=1e-7
    )
    # Weights that nobody asked for are left alone, as by TorchRec.
    plain = ours(theirs(), storage="fp32").eval()
    assert torch.equal(plain(features).values(), plain(batch(0)).values())


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int4"])
def test_weights_go_there_and_back(storage):
    """Rows that are of the storage's numbers come back bit for bit, again and again."""
    made = ours(theirs(), storage=storage)
    first = made.to_embedding_bag_collection()
    again = ours(first, storage=storage).to_embedding_bag_collection()
    for name, bag in first.embedding_bags.items():
        if storage in ("fp32", "bf16"):
            assert torch.equal(again.embedding_bags[name].weight, bag.weight)
    if storage == "fp32":
        for name, bag in theirs().embedding_bags.items():
            assert torch.equal(first.embedding_bags[name].weight, bag.weight)
    with torch.no_grad():
        for t, bag in enumerate(first.embedding_bags.values()):
            rows = made.bags.tables[t].weight_slice(0, bag.num_embeddings)
            assert torch.equal(bag.weight, rows)


def test_cached_rows_are_written_too():
    made = ours(theirs(), storage="int8", cache_fraction=0.05, ways=4)
    optim.RowAdagrad(made.bags, lr=0.1)
    before = made.to_embedding_bag_collection()
    made(batch(0)).values().sum().backward()
    after = made.to_embedding_bag_collection()
    looked_up = torch.unique(batch(0, keys="shop user other friend")["shop"].values())
    moved = (after.embedding_bags["shops"].weight != before.embedding_bags["shops"].weight).any(1)
    assert bool(moved[looked_up].all())
    made.eval()
    torch.testing.assert_close(
        made(batch(0)).values(), after(batch(0)).values(), rtol=1e-6, atol=1e-7
    )


def test_steps_are_those_of_torchs_row_sums():
    """FP32 rows and Adagrad by element, against ``torch.optim`` over TorchRec's own tables."""
    reference = theirs()
    made = ours(reference, storage="fp32", cache_fraction=0.0)
    optim.RowAdagrad(made.bags, lr=0.1, rowwise=False)
    adagrad = torch.optim.Adagrad(reference.parameters(), lr=0.1, eps=1e-8)
    weight = torch.randn(4 * DIM, generator=torch.Generator().manual_seed(5))
    for step in range(3):
        adagrad.zero_grad()
        for each in (made, reference):
            (each(batch(step)).values() @ weight).square().sum().backward()
        adagrad.step()
    stepped = made.to_embedding_bag_collection()
    for name, bag in reference.embedding_bags.items():
        torch.testing.assert_close(
            stepped.embedding_bags[name].weight, bag.weight, rtol=1e-5, atol=1e-5
        )


def apart() -> Any:
    """DLRM's features are those of one table each."""
    return theirs(features=APART)


def dlrm(sparse: Any) -> Any:
    from torchrec.models.dlrm import DLRM  # noqa: PLC0415

    torch.manual_seed(2)
    return DLRM(sparse, 3, [16, DIM], [16, 1])


def learn(model: Any, optimizers: list[Any], steps: int) -> list[float]:
    losses = []
    dense = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    for _ in range(steps):
        for each in optimizers:
            each.zero_grad()
        logits: Tensor = model(dense, batch(4)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("storage", ["fp32", "int4"])
def test_torchrecs_dlrm_runs_with_ours(storage):
    made = ours(apart(), storage=storage)
    model = dlrm(made)
    rows = optim.RowAdagrad(made.bags, lr=0.3)
    dense = [*model.dense_arch.parameters(), *model.over_arch.parameters()]
    losses = learn(model, [torch.optim.Adam(dense, lr=0.01), rows], 30)
    assert losses[-1] < 0.2 * losses[0]
    reference = dlrm(apart())
    with torch.no_grad():
        first = reference(torch.zeros(5, 3), batch(0))
        fresh = dlrm(ours(apart(), storage="fp32")).eval()(torch.zeros(5, 3), batch(0))
    torch.testing.assert_close(first, fresh, rtol=1e-5, atol=1e-6)
    # What has no gradient is no parameter of the dense layers' optimizer.
    assert not [n for n, p in model.sparse_arch.named_parameters() if p.grad is not None]


def test_a_state_dict_goes_on_bit_for_bit():
    def make() -> tuple[Any, Any, Any]:
        made = ours(apart(), storage="int8", cache_fraction=0.05, ways=4)
        model = dlrm(made)
        rows = optim.RowAdagrad(made.bags, lr=0.05)
        return model, rows, optim.AdamW(model.dense_arch.parameters(), lr=1e-2)

    model, rows, dense = make()
    learn(model, [rows, dense], 3)
    other, their_rows, their_dense = make()
    other.load_state_dict(model.state_dict())
    their_rows.load_state_dict(rows.state_dict())
    their_dense.load_state_dict(dense.state_dict())
    assert learn(model, [rows, dense], 3) == learn(other, [their_rows, their_dense], 3)


def test_the_tables_own_initial_rows_are_kept():
    from torchrec import EmbeddingBagConfig  # noqa: PLC0415

    from subulp.integrations.torchrec import CachedEmbeddingBagCollection  # noqa: PLC0415

    def table(name: str, **options: Any) -> Any:
        return EmbeddingBagConfig(
            name=name, num_embeddings=1100, embedding_dim=4, feature_names=[name], **options
        )

    given = [
        table("ones", init_fn=torch.nn.init.ones_),
        table("narrow", weight_init_min=0.5, weight_init_max=0.75),
        table("plain"),
    ]
    made = CachedEmbeddingBagCollection(given, storage="bf16", seed=0)
    weights = {n: b.weight for n, b in made.to_embedding_bag_collection().embedding_bags.items()}
    assert torch.equal(weights["ones"], torch.ones(1100, 4))
    assert bool(((weights["narrow"] >= 0.5) & (weights["narrow"] <= 0.75)).all())
    assert float(weights["plain"].detach().abs().max()) <= 1.01 * 1100**-0.5


def test_on_meta_nothing_is_allocated():
    from torchrec import EmbeddingBagCollection  # noqa: PLC0415

    made = ours(EmbeddingBagCollection(configs(), device=torch.device("meta")), storage="int4")
    assert made.device.type == "meta"
    assert all(tensor.is_meta for tensor in made.bags.state_dict().values() if tensor.dim() > 1)


def test_options_by_table():
    made = ours(theirs(), storage="int8", options_of={"shops": {"storage": "int2"}})
    assert [t.config.storage for t in made.bags.tables] == ["int8", "int2"]


def test_what_does_not_fit_is_refused():
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415

    made = ours(theirs())
    with pytest.raises(ValueError, match=r"the features \['friend'\] are missing"):
        made(batch(0, keys="shop user"))
    with pytest.raises(ValueError, match=r"options_of names \['shop'\]: the tables are"):
        ours(theirs(), options_of={"shop": {}})
    with pytest.raises(ValueError, match="storage='int3' is unknown"):
        ours(theirs(), storage="int3")
    values, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])
    inverse = (["user", "friend", "shop"], torch.zeros(3, 2, dtype=torch.int64))
    repeated = KeyedJaggedTensor(
        ["user", "friend", "shop"], values, lengths=lengths, inverse_indices=inverse
    )
    with pytest.raises(ValueError, match="inverse indices, which say how to repeat"):
        made(repeated)
    several = KeyedJaggedTensor(
        ["user", "friend", "shop"],
        torch.arange(4),
        lengths=torch.ones(4, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1], [1]],
    )
    with pytest.raises(ValueError, match="batches of different sizes"):
        made(several)
    weighted = ours(theirs(is_weighted=True))
    with pytest.raises(ValueError, match="is_weighted=True, and the batch has no weights"):
        weighted(batch(0))
    twice = [configs()[0], configs()[0]]
    from subulp.integrations.torchrec import CachedEmbeddingBagCollection  # noqa: PLC0415

    with pytest.raises(ValueError, match=r"tables share the names \['users'\]"):
        CachedEmbeddingBagCollection(twice)


WRONG = {
    "fewer values than lengths say": (
        {"keys": ["b", "a"], "lengths": torch.tensor([2, 2, 2, 2])},
        "the bags have 8 row numbers, and there are 6",
    ),
    "very few": (
        {"keys": ["b", "a"], "lengths": torch.tensor([2, 2, 2, 10**8])},
        "and there are 6",
    ),
    "values left over": (
        {"keys": ["a", "b"], "lengths": torch.tensor([1, 1, 1, 1])},
        "the bags have 4 row numbers, and there are 6",
    ),
    "negative": ({"keys": ["b", "a"], "lengths": torch.tensor([-1, 3, 2, 2])}, "down to -1"),
    "offsets that begin later": (
        {"keys": ["a", "b"], "offsets": torch.tensor([2, 3, 4, 5, 6])},
        "offsets begin at 2: expected 0",
    ),
    "weights": (
        {"keys": ["b", "a"], "lengths": torch.tensor([2, 2, 1, 1]), "weights": torch.ones(5)},
        "there are 5 weights for 6 row numbers",
    ),
    "a key twice": (
        {"keys": ["a", "a", "b"], "lengths": torch.ones(6, dtype=torch.int64)},
        r"the features \['a'\] are there twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_batches_that_do_not_fit_their_values_are_refused(name):
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: PLC0415

    tables = [EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4) for n in "ab"]
    made = ours(EmbeddingBagCollection(tables))
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        made(KeyedJaggedTensor(values=torch.arange(6), **given))


def test_an_evaluated_collection_is_exported():
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415

    made = ours(theirs()).eval()

    class OfTensors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            # Not in the tables' order.
            return self.made(
                KeyedJaggedTensor(["shop", "user", "friend"], values, lengths=lengths)
            ).values()

    arguments = torch.arange(6), torch.ones(6, dtype=torch.int64)
    program = torch.export.export(OfTensors(), arguments)
    assert torch.equal(program.module()(*arguments), OfTensors()(*arguments))


def test_keys_of_one_batch_size_may_say_so():
    from torchrec import KeyedJaggedTensor  # noqa: PLC0415

    reference = theirs()
    plain = KeyedJaggedTensor(
        ["user", "friend", "shop"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int64)
    )
    by_key = KeyedJaggedTensor(
        *(plain.keys(), plain.values()),
        lengths=plain.lengths(),
        stride_per_key_per_rank=[[2], [2], [2]],
    )
    made = ours(reference).eval()
    assert torch.equal(made(by_key).values(), made(plain).values())


def test_frozen_tables_and_evaluation_are_taken_over():
    reference = theirs()
    reference.embedding_bags["users"].weight.requires_grad_(False)
    made = ours(reference)
    assert [rows.frozen for rows in made.bags.row_parameters] == [True, False]
    assert made.training
    assert not ours(reference.eval()).training


def test_a_collection_that_leaves_meta_begins_as_its_tables_say():
    from subulp.integrations.torchrec import CachedEmbeddingBagCollection  # noqa: PLC0415

    made = CachedEmbeddingBagCollection(
        configs(init_fn=torch.nn.init.ones_), device=torch.device("meta"), seed=0
    )
    made.to_empty(device="cpu").reset_parameters()
    assert all(bool(made.bags.weight_fp32(t).eq(1).all()) for t in range(2))


def test_a_collection_is_made_without_torchs_random_numbers():
    made = ours(theirs())
    before = torch.get_rng_state()
    made.to_embedding_bag_collection()
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_options_name_their_table():
    with pytest.raises(ValueError, match=r"options_of\['users'\] has no option 'foo'"):
        ours(theirs(), options_of={"users": {"foo": 1}})
    with pytest.raises(ValueError, match="CachedEmbeddingBagCollection has no option 'foo'"):
        ours(theirs(), foo=1)


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    pages.run("torchrec.md")
