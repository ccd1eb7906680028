"""Rows that are cast, damaged, given views of memory, or used where torch works behind them."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from subulp import nn as subulp_nn
from subulp import numerics, optim

SET_LATER = [
    ("rounding", "kahan", "rounding='kahan' is unknown: use 'nearest' or 'stochastic'"),
    ("rounding", "collage-plus", "rounding='collage-plus' is unknown"),
    ("reduction", "average", "reduction='average' is unknown"),
    ("products", None, "products=None is unknown"),
    ("products", "fp8", "products='fp8' multiplies rows in E4M3"),
    ("dropout", 1.0, "dropout=1.0 is out of range"),
    ("chunks", 0, "chunks=0 is out of range"),
    ("chunks", -3, "chunks=-3 is out of range"),
]

ROWS, COLUMNS = torch.tensor([0, 1, 2]), torch.tensor([3, 7, 9])


def head(storage: str = "fp32", labels: int = 20, **options: Any) -> subulp_nn.ExtremeClassifier:
    made = subulp_nn.ExtremeClassifier(8, labels, storage=storage, seed=0, **options)
    optim.RowSGD(made, lr=0.1)
    return made


def table(storage: str = "fp32", **options: Any) -> subulp_nn.CachedEmbeddingBag:
    made = subulp_nn.CachedEmbeddingBag(30, 4, storage, seed=0, **options)
    optim.RowSGD(made, lr=0.1)
    return made


def embeddings(count: int = 4) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------------------- numbers


def test_embeddings_that_fp32_cannot_hold_are_refused() -> None:
    made = head()
    before = made.weight(torch.arange(20))
    with pytest.raises(FloatingPointError, match=r"not finite|NaN or infinite"):
        made(torch.full((4, 8), 1e39, dtype=torch.float64), ROWS, COLUMNS)
    assert torch.equal(before, made.weight(torch.arange(20)))
    assert made.steps == 0


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_autocast_changes_no_prediction(products: str) -> None:
    made = head("bf16", products=products).eval()
    x = embeddings()
    scores, labels = made.topk(x, 5)
    with torch.autocast("cpu", torch.bfloat16):
        other, theirs = made.topk(x, 5)
    assert torch.equal(scores, other)
    assert torch.equal(labels, theirs)


@pytest.mark.parametrize(
    ("count", "dtype"), [(300, torch.uint8), (300, torch.int8), (40_000, torch.int16)]
)
def test_narrow_labels_are_refined_like_wide_ones(count: int, dtype: torch.dtype) -> None:
    made, labels = head(labels=count), torch.tensor([3, 100, 127])
    wide, narrow = (
        subulp_nn.refine(made, [(embeddings(), ROWS, labels.to(d))], lr=1.0)
        for d in (torch.int64, dtype)
    )
    everything = torch.arange(count)
    assert torch.equal(wide.weight(everything), narrow.weight(everything))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_narrow_labels_name_rows(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1, 2, 3])
    made = head(labels=4, chunks=2)
    assert torch.equal(made.weight(labels.to(dtype)), made.weight(labels))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_what_is_no_label_is_refused(dtype: torch.dtype) -> None:
    made = head(labels=4, chunks=2)
    labels = torch.tensor([0, 1, 1, 0]).to(dtype)
    with pytest.raises(ValueError, match=r"labels have dtype .*: expected integers"):
        made.weight(labels)
    with pytest.raises(ValueError, match=r"labels of a batch have dtype .*: expected integers"):
        subulp_nn.refine(made, [(embeddings(), torch.arange(4), labels)])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64, torch.float32, torch.bool])
def test_indices_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="label_cols have dtype"):
        head()(embeddings(), ROWS, COLUMNS.to(dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 2.5}, "chunks=2.5 is not a whole number"),
        ({"scale": 2.0**200}, "scale=.* is out of range"),
        ({"scale": 2.0**-140}, "scale=.* is out of range"),
    ],
)
def test_options_of_a_head(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head("e4m3", **options)


# -------------------------------------------------------------------------------- casts, states


@pytest.mark.parametrize("cast", [torch.float32, torch.float16])
def test_rows_that_were_cast_behind_their_table_are_refused(cast: torch.dtype) -> None:
    bag, classifier = table("bf16", cache_fraction=0.0), head("bf16")
    values, offsets = torch.tensor([1, 2]), torch.tensor([0])
    for _ in range(2):
        bag(values, offsets).sum().backward()
        classifier(embeddings(), ROWS, COLUMNS)
    for p in (*bag.parameters(), *classifier.parameters()):
        p.data = p.data.to(cast)
    with pytest.raises(RuntimeError, match=r"rows of .* are stored in torch.bfloat16"):
        bag(values, offsets)
    with pytest.raises(RuntimeError, match=r"rows of .* are stored in torch.bfloat16"):
        classifier(embeddings(), ROWS, COLUMNS)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_negative_counts_are_refused(policy: str) -> None:
    bag = table(policy=policy, cache_fraction=0.3, ways=2)
    saved = bag.state_dict()
    name = "tables.0.counts" if policy == "lfu" else "tables.0.stamps"
    saved[name] = saved[name] - 100
    with pytest.raises(RuntimeError, match=f"{name} has a negative entry"):
        table(policy=policy, cache_fraction=0.3, ways=2).load_state_dict(saved)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers with gaps between them."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["head", "table"])
def test_views_that_are_assigned_train_as_copies_do(kind: str) -> None:
    def make() -> Any:
        if kind == "table":
            return table("int8", cache_fraction=0.3, ways=2)
        return head("e4m3", head_fraction=0.3, label_counts=torch.arange(20))

    def train(module: Any) -> None:
        if kind == "table":
            module(torch.tensor([1, 2, 2]), torch.tensor([0])).square().sum().backward()
        else:
            module(embeddings(), ROWS, COLUMNS)

    source, plain, viewing = make(), make(), make()
    train(source)
    saved = source.state_dict()
    plain.load_state_dict(saved, assign=True)
    gaps = {
        k: v if "extra" in k or v.dtype == torch.uint8 else strided(v) for k, v in saved.items()
    }
    viewing.load_state_dict(gaps, assign=True)
    for _ in range(2):
        train(plain)
        train(viewing)
    mine, its = plain.state_dict(), viewing.state_dict()
    assert all(torch.equal(bits(mine[k]), bits(its[k])) for k in mine)


def test_a_computed_weight_is_not_converted_back() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    subulp_nn.convert_to_mor(model, subulp_nn.MoR(), quiet=True)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match="computed by a parametrization: remove it"):
        subulp_nn.convert_from_mor(model)
    model(torch.randn(2, 16))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert subulp_nn.convert_from_mor(model) == ["0"]


def test_batch_norm_leaves_meta() -> None:
    made = subulp_nn.BatchNorm2d(4, device="meta").to(torch.bfloat16).to_empty(device="cpu")
    assert made.running_mean.dtype == torch.float32
    assert made.running_mean.device.type == "cpu"
    assert made.weight.dtype == torch.bfloat16


def test_an_embedding_of_a_given_table() -> None:
    weight = torch.randn(5, 3).to(torch.bfloat16)
    made = subulp_nn.Embedding.from_pretrained(weight)
    assert torch.equal(made(torch.tensor([4, 0])), weight[[4, 0]].float())
    assert not made.weight.requires_grad
    assert made.num_embeddings == 5
    assert subulp_nn.Embedding.from_pretrained(weight, freeze=False).weight.requires_grad
    with pytest.raises(TypeError, match="no option 'padding_idx'"):
        subulp_nn.Embedding.from_pretrained(weight, padding_idx=0)
    with pytest.raises(ValueError, match="expected a matrix"):
        subulp_nn.Embedding.from_pretrained(weight[0])


# ------------------------------------------------------------------------------ behind the scenes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_backward_passes_update_rows() -> None:
    """Dynamo traces the backward passes of functions in Python too."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        bag, top = table("int8"), nn.Linear(4, 1)

        def train(values: Tensor, offsets: Tensor, bag: Any = bag, top: Any = top) -> None:
            top(bag(values, offsets)).sum().backward()

        if compiled:
            torch._dynamo.reset()
            torch._dynamo.config.compiled_autograd = True
            train = torch.compile(train, backend="eager")
        try:
            for _ in range(3):
                train(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
        finally:
            torch._dynamo.config.compiled_autograd = False
            torch._dynamo.reset()
        assert bag.steps == 3
        found.append([bag.weight_fp32(), top.weight.grad])
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)


def test_threads_share_a_kept_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them clears what another has just found."""
    layer = subulp_nn.MoRLinear(64, 64).eval()
    x = torch.randn(2, 64)
    expected = layer(x).detach()
    failures: list[BaseException] = []

    def run(grad: bool) -> None:
        try:
            for _ in range(150):
                with torch.set_grad_enabled(grad):
                    assert torch.equal(layer(x).detach(), expected)
                layer.kept.clear()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(bool(i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_order_of_labels_that_was_averaged_is_refused() -> None:
    """The mean of a number with itself, cut to an integer, may be another one."""
    made = head("bf16", head_fraction=0.3, label_counts=torch.arange(20))
    average = torch.optim.swa_utils.AveragedModel(
        made, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for _ in range(3):
        made(embeddings(), ROWS, COLUMNS)
        average.update_parameters(made)
    with pytest.raises(RuntimeError, match="no longer number the labels' rows both ways"):
        average.module.eval().topk(embeddings())
    with pytest.raises(RuntimeError, match="no longer number the labels' rows both ways"):
        average.module(embeddings(), torch.arange(20) % 4, torch.arange(20))
    made.topk(embeddings())


# ------------------------------------------------------------------- rows that are replaced


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _arguments(made: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(made, subulp_nn.ExtremeClassifier):
        return embeddings().requires_grad_(), ROWS, COLUMNS
    return (torch.tensor([[1, 2], [3, 4]]),)


_REPLACED = "have been replaced by another tensor, whose updates would be lost"


@pytest.mark.parametrize("how", ["prune", "parametrize", "weight_norm"])
@pytest.mark.parametrize("make", [head, table])
def test_rows_that_others_compute_are_refused(make: Any, how: str) -> None:
    """Their updates would have gone to a tensor that the next step makes anew."""
    made = make()
    ((name, _),) = made.named_parameters()
    part = made.get_submodule(name.rpartition(".")[0])
    if how == "prune":
        prune.l1_unstructured(part, "codes", amount=0.5)
    elif how == "parametrize":
        nn.utils.parametrize.register_parametrization(part, "codes", _Doubled())
    else:
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(part, "codes")
    with pytest.raises(RuntimeError, match=_REPLACED):
        made(*_arguments(made))


@pytest.mark.parametrize("make", [head, table])
def test_functional_call_does_not_train_other_rows(make: Any) -> None:
    made = make()
    ((name, rows),) = made.named_parameters()
    before = rows.clone()
    with pytest.raises(RuntimeError, match=_REPLACED):
        torch.func.functional_call(made, {name: rows.clone()}, _arguments(made))
    assert torch.equal(rows, before)
    made(*_arguments(made)).sum().backward()
    assert not torch.equal(rows, before)


def test_functional_call_may_try_other_rows_in_evaluation() -> None:
    made = table(cache_fraction=0.0).eval()
    ((name, rows),) = made.named_parameters()
    own = made(*_arguments(made))
    tried = torch.func.functional_call(made, {name: 2 * rows.detach()}, _arguments(made))
    assert torch.equal(tried, 2 * own)
    assert torch.equal(made(*_arguments(made)), own)


# ------------------------------------------------------------------- arguments of wrong kinds


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: subulp_nn.ExtremeClassifier(8.5, 20), "dim=8.5 is not a whole number"),
        (lambda: subulp_nn.ExtremeClassifier(None, 20), "dim=None is not a whole number"),
        (lambda: subulp_nn.ExtremeClassifier(8, float("inf")), "num_labels=inf is not a whole"),
        (lambda: subulp_nn.ExtremeClassifier(True, 20), "dim=True is not a whole number"),
        (lambda: subulp_nn.ExtremeClassifier(8, 20, dropout="x"), "dropout='x' is not a number"),
        (lambda: subulp_nn.ExtremeClassifier(8, 20, seed=1.5), "seed=1.5 is out of range: a whole"),
        (lambda: subulp_nn.CachedEmbeddingBag(30, 4, seed=True), "seed=True is out of range: a"),
        (
            lambda: subulp_nn.ExtremeClassifier(8, 9, head_fraction=0.5, label_counts=[1]),
            "label_counts is a list: pass a tensor of integers",
        ),
        (lambda: subulp_nn.EmbeddingTable(float("nan"), 4), "num_embeddings=nan is not a whole"),
        (lambda: subulp_nn.EmbeddingTable(4, 2.5), "embedding_dim=2.5 is not a whole number"),
        (lambda: numerics.simulated(4, 1.5), "mantissa_bits=1.5 is not a whole number"),
        (lambda: optim.AveragedModel(nn.Linear(2, 2), seed=1.5), "seed=1.5 is out of range"),
        (lambda: optim.RowSGD({}, lr=0.1), "a group is of modules with rows, and has"),
    ],
)
def test_arguments_of_wrong_kinds_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numpys_whole_numbers_are_whole() -> None:
    made = subulp_nn.ExtremeClassifier(np.int64(8), np.int32(20), seed=np.int64(3))
    other = subulp_nn.ExtremeClassifier(8, 20, seed=3)
    labels = torch.arange(20)
    assert torch.equal(made.weight(labels), other.weight(labels))


@pytest.mark.parametrize("kind", [optim.RowSGD, optim.RowAdagrad])
def test_hooks_before_steps_that_rows_take_themselves_are_refused(kind: Any) -> None:
    made = subulp_nn.CachedEmbeddingBag(30, 4, seed=0)
    with pytest.raises(RuntimeError, match=f"register_step_pre_hook of {kind.__name__}, whose"):
        kind(made, lr=0.1).register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(("name", "value", "message"), SET_LATER)
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_options_of_a_head_set_later(storage: str, name: str, value: Any, message: str) -> None:
    made = head(storage)
    before, good = made.weight(torch.arange(20)), getattr(made, name)
    setattr(made, name, value)
    for use in (lambda: made(embeddings(), ROWS, COLUMNS), lambda: made.topk(embeddings())):
        with pytest.raises(ValueError, match=re.escape(message)):
            use()
    assert torch.equal(made.weight(torch.arange(20)), before)
    assert made.steps == 0
    setattr(made, name, good)
    made(embeddings(), ROWS, COLUMNS)
    assert made.steps == 1


def test_chunks_of_a_head_set_later_count() -> None:
    first, second = head("e4m3"), head("e4m3", chunks=3)
    first.chunks = 3
    for made in (first, second):
        made(embeddings(), ROWS, COLUMNS)
    assert torch.equal(first.weight(torch.arange(20)), second.weight(torch.arange(20)))


@pytest.mark.parametrize("mode", ["max", "avg", "MEAN", None])
def test_modes_of_bags_set_later(mode: Any) -> None:
    bag = table()
    bags = subulp_nn.CachedEmbeddingBags([subulp_nn.EmbeddingTable(9, 4)], seed=0)
    one, several = torch.tensor([1, 2]), {"lengths": torch.tensor([2])}
    if mode is not None:
        bag.mode = mode
        with pytest.raises(ValueError, match=f"mode='{mode}' is unknown"):
            bag(one, torch.tensor([0]))
    bags.mode = mode
    with pytest.raises(ValueError, match=r"mode=.* is unknown: use 'sum' or 'mean'"):
        bags(one, **several)


def test_a_refused_step_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made, twin = head("e4m3"), head("e4m3")
    monkeypatch.setenv("SUBULP_ISA", "foo")
    with pytest.raises(ValueError, match="SUBULP_ISA"):
        made(embeddings(), ROWS, COLUMNS)
    monkeypatch.delenv("SUBULP_ISA")
    for each in (made, twin):
        each(embeddings(), ROWS, COLUMNS)
    assert made.steps == 1
    assert torch.equal(made.weight(torch.arange(20)), twin.weight(torch.arange(20)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_predictions_refuse_what_training_does(dtype: torch.dtype) -> None:
    made, given = head(), torch.ones(4, 8).to(dtype)
    for use in (lambda: made(given, ROWS, COLUMNS), lambda: made.topk(given)):
        with pytest.raises(ValueError, match=f"dtype {dtype}"):
            use()


@pytest.mark.parametrize("number", [1e39, float("nan"), float("inf")])
def test_logits_of_embeddings_that_are_not_finite_are_nan(number: float) -> None:
    scores, _ = head().topk(torch.full((4, 8), number, dtype=torch.float64))
    assert bool(scores.isnan().all())


@pytest.mark.parametrize("reentrant", [False, True])
def test_embeddings_edited_in_a_checkpoint_after_the_head(reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        encoder, made = nn.Linear(8, 8), head()

        def both(x: Tensor, encoder: Any = encoder, made: Any = made) -> Tensor:
            e = encoder(x)
            loss = made(e, ROWS, COLUMNS)
            return loss + e.mul_(0).sum()

        x = embeddings().requires_grad_()
        out = checkpoint(both, x, use_reentrant=reentrant) if checkpointed else both(x)
        out.backward(torch.ones(()))
        found.append((encoder.weight.grad, made.weight(torch.arange(20))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_frozen_table_beside_one_that_no_feature_names() -> None:
    tables = [subulp_nn.EmbeddingTable(20, 4), subulp_nn.EmbeddingTable(20, 4)]
    bags = subulp_nn.CachedEmbeddingBags(tables, 0, features=[0], seed=1)
    optim.RowSGD(bags, lr=0.1)
    bags.tables[0].requires_grad_(False)
    dense, before = nn.Linear(4, 1), bags.weight_fp32(0)
    dense(bags(torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))).sum().backward()
    assert dense.weight.grad is not None
    assert torch.equal(bags.weight_fp32(0), before)
    assert bags.steps == 0


@pytest.mark.parametrize(("policy", "ways"), [("lru", 4), ("lru", 1), ("lfu", 4)])
def test_time_stamps_end(policy: Any, ways: int) -> None:
    bag = table("int8", cache_fraction=0.2, policy=policy, ways=ways)
    before, bag.steps = bag.weight_fp32(), 2**31 - 1

    def step() -> None:
        bag(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()

    if (policy, ways) == ("lru", 4):
        with pytest.raises(RuntimeError, match="time stamps end at 2147483647 updates"):
            step()
        assert torch.equal(bag.weight_fp32(), before)
    else:
        step()
        assert bag.steps == 2**31


# -------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", ["config", "part", "sets", "ways"])
def test_what_a_table_was_made_by_cannot_be_set(name: str) -> None:
    """The tensors stay as they are: another policy went on with the first one's counts."""
    made = table("int8", cache_fraction=0.5)
    other = table("int8", cache_fraction=0.5, policy="lru")
    with pytest.raises(AttributeError, match=rf"{name} of a table cannot be set: .* load_weights"):
        setattr(made.table, name, getattr(other.table, name))
    copied = copy.deepcopy(pickle.loads(pickle.dumps(made)))
    assert copied.table.config == made.table.config != other.table.config
