"""The classifier over many labels, against a dense one with torch's loss and optimizer."""

import math

import pytest
import torch
import torch.nn.functional as F

from subulp import nn, optim
from subulp.diagnostics.memory import track_memory

B, D, L = 12, 20, 211
STORAGES = ["fp32", "bf16", "fp16", "e4m3", (4, 3), "int8", "int4"]


def make(storage="fp32", *, lr=0.5, weight_decay=0.0, seed=3, labels=L, **options):
    head = nn.ExtremeClassifier(D, labels, storage=storage, seed=seed, **options)
    return head, optim.RowSGD(head, lr=lr, weight_decay=weight_decay)


def batch(seed=0, labels=L):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, generator=generator)
    pairs = torch.randperm(B * labels, generator=generator)[:50]
    return x, pairs // labels, pairs % labels


def weights(head):
    return head.weight(torch.arange(head.num_labels))


def dense_loss(weight, x, rows, cols, reduction="mean"):
    y = torch.zeros(len(x), len(weight))
    y[rows, cols] = 1
    total = F.binary_cross_entropy_with_logits(x @ weight.t(), y, reduction="sum")
    return total / len(x) if reduction == "mean" else total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunks", [1, 8, L])
def test_fp32_rows_train_as_a_linear_layer_with_sgd(reduction, chunks):
    head, opt = make(chunks=chunks, reduction=reduction, weight_decay=0.01, lr=0.05)
    weight = weights(head).clone().requires_grad_()
    reference = torch.optim.SGD([weight], lr=0.05, weight_decay=0.01)
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 5) for o in (opt, reference)]
    for step in range(5):
        x, rows, cols = batch(step)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss = head(ours, rows, cols, loss=True)
        (2 * loss).backward()
        expected = dense_loss(weight, theirs, rows, cols, reduction)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        # A factor on the loss reaches the encoder.
        torch.testing.assert_close(ours.grad, 2 * theirs.grad, rtol=1e-4, atol=1e-6)
        for o in (opt, reference):
            o.step()
            o.zero_grad()
        for s in schedulers:
            s.step()
        torch.testing.assert_close(weights(head), weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_narrow_rows_follow_the_dense_ones(storage):
    """Stochastic rounding adds noise and no drift: the losses stay together."""
    head, _ = make(storage, lr=0.1)
    weight = weights(head).clone()
    for step in range(30):
        x, rows, cols = batch(step % 3)
        head(x, rows, cols)
        w = weight.requires_grad_()
        dense_loss(w, x, rows, cols).backward()
        weight = (w - 0.1 * w.grad).detach()
    x, rows, cols = batch(0)
    with torch.no_grad():
        ours, theirs = head(x, rows, cols), dense_loss(weight, x, rows, cols)
    start = dense_loss(weights(make(storage)[0]), x, rows, cols)
    assert theirs < 0.85 * start
    assert ours.item() == pytest.approx(theirs.item(), rel=0.05)


@pytest.mark.parametrize("storage", ["int8", "int4", "int2"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_rows_of_integers_lower_the_loss(storage, rounding):
    head, _ = make(storage, lr=0.5, rounding=rounding, head_fraction=0.2)
    head.set_label_counts(torch.bincount(batch()[2], minlength=L))
    start = head.eval()(*batch()).item()
    head.train()
    for _ in range(30):
        head(*batch())
    assert head.eval()(*batch()).item() < 0.85 * start
    scores, labels = head.topk(batch()[0], 5)
    dense = torch.einsum("bd,bkd->bk", batch()[0], head.table.decode(0, L)[head.row_of[labels]])
    torch.testing.assert_close(scores, dense)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rows_of_integers_cost_their_bits_and_eight_bytes_a_row(bits):
    head, _ = make(f"int{bits}")
    assert head.table.nbytes() == {"codes": L * D * bits // 8, "quantisation": 8 * L}
    x, rows, cols = batch()
    head(x, rows, cols)
    refined = nn.refine(head, [(x, rows, cols)], storage=f"int{bits}", epochs=2)
    assert refined.table.codes.shape == head.table.codes.shape
    assert refined.eval()(x, rows, cols) < head.eval()(x, rows, cols)


def test_pairs_in_any_order_and_repeated_are_the_same_targets():
    x, rows, cols = batch()
    results = []
    for variant in range(3):
        head, _ = make("e4m3")
        r, c = rows, cols
        if variant == 1:
            order = torch.randperm(len(r))
            r, c = r[order].int(), c[order].int()
        if variant == 2:
            r, c = torch.cat([r, r[:9]]), torch.cat([c, c[:9]])
        loss = head(x, r, c, loss=True)
        results.append((loss.item(), weights(head)))
    for loss, w in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(w, results[0][1])


def test_no_labels_at_all_are_all_negatives():
    head, _ = make()
    x, _, _ = batch()
    none = torch.zeros(0, dtype=torch.int64)
    expected = dense_loss(weights(head), x, none, none)
    assert head(x, none, none, loss=True).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_is_nan_unless_asked_for():
    head, _ = make()
    assert math.isnan(head(*batch()).item())
    head.eval()
    before = weights(head)
    loss = head(*batch())
    assert loss.item() == pytest.approx(dense_loss(before, *batch()).item(), rel=1e-5)
    assert torch.equal(weights(head), before)


@pytest.mark.parametrize("storage", ["e4m3", "int8", "int4", "int2"])
def test_chunks_change_no_random_bit(storage):
    """One instance of two dyadic numbers: no sum depends on its order."""
    x = torch.zeros(1, D)
    x[0, [2, 9]] = torch.tensor([1.0, -0.5])
    none = torch.zeros(0, dtype=torch.int64)
    results = []
    for chunks in (1, 2, 7, L):
        head, _ = make(storage, chunks=chunks, dropout=0.2)
        for _ in range(2):
            head(x, none, none)
        results.append(weights(head))
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize(("storage", "lr"), [("bf16", 1e-4), ("e4m3", 2e-3), ("int8", 2e-4)])
def test_frequent_labels_keep_what_rounding_takes(storage, lr):
    """Updates far below an ulp: with a remainder they add up, nearest rounding alone loses them."""
    counts = torch.randint(100, (L,), generator=torch.Generator().manual_seed(0))
    head, _ = make(
        storage, head_fraction=0.2, label_counts=counts, rounding="nearest", lr=lr, seed=0
    )
    frequent = torch.argsort(counts, descending=True, stable=True)[: math.ceil(0.2 * L)]
    rest = torch.ones(L, dtype=torch.bool)
    rest[frequent] = False
    before = weights(head).clone()
    plain, _ = make("fp32", lr=lr, seed=0)
    plain.table.store(0, before)
    x, rows, cols = batch()
    for _ in range(20):
        head(x, rows, cols)
        plain(x, rows, cols)
    moved, exact = weights(head) - before, weights(plain) - before
    error = (moved - exact)[frequent].norm() / exact[frequent].norm()
    # The remainder rounds too, and products see weights without it.
    assert error < 0.05
    assert (moved - exact)[rest].norm() > 0.5 * exact[rest].norm()


def test_remainders_cost_two_bytes_a_weight_of_the_head():
    counts = torch.arange(L)
    head, _ = make("e4m3", head_fraction=0.2, label_counts=counts)
    assert head.table.nbytes() == {"codes": L * D, "remainder": 2 * math.ceil(0.2 * L) * D}
    # The most frequent labels are the last ones; label numbers stay what they were.
    other, _ = make("e4m3")
    assert torch.equal(weights(head), weights(other))


def test_counts_may_come_later_and_must_come():
    x, rows, cols = batch()
    late, _ = make("e4m3", head_fraction=0.3)
    with pytest.raises(RuntimeError, match="head_fraction needs the labels' training counts"):
        late(x, rows, cols)
    counts = torch.randint(9, (L,))
    late.set_label_counts(counts)
    early, _ = make("e4m3", head_fraction=0.3, label_counts=counts)
    for head in (late, early):
        head(x, rows, cols)
    assert torch.equal(weights(late), weights(early))
    with pytest.raises(ValueError, match=r"label_counts has shape \(3,\)"):
        late.set_label_counts(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("slice_rows", [7, 1000])
@pytest.mark.parametrize("k", [1, 5, L])
@pytest.mark.parametrize("permuted", [False, True])
def test_topk_is_that_of_all_scores(k, slice_rows, permuted, monkeypatch):
    monkeypatch.setattr("subulp.nn.row_table._SLICE", slice_rows * D)
    options = {"head_fraction": 0.3, "label_counts": torch.randint(9, (L,))} if permuted else {}
    head, _ = make("e4m3", products="fp32", **options)
    # Rows of zeros and repeated rows: many equal scores.
    w = weights(head)
    w[50:150] = 0
    w[20:40] = w[0:20]
    head.table.store(0, w if head.label_of is None else w[head.label_of])
    x, _, _ = batch()
    scores, labels = head.topk(x, k)
    stored = head.table.decode(0, L)
    dense = x @ (stored if head.row_of is None else stored[head.row_of]).t()
    expected = dense.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(scores, expected.values[:, :k])
    # Scores equal but for the products' last bits may swap.
    torch.testing.assert_close(dense.gather(1, labels).sort(1).values, scores.sort(1).values)
    assert (labels.sort(1).values.diff(dim=1) > 0).all()


def test_equal_scores_go_to_the_lower_label_however_labels_are_cut():
    head, _ = make("fp32")
    head.table.codes.zero_()
    for rows in (1, 10, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("subulp.nn.row_table._SLICE", rows * D)
            assert head.topk(batch()[0], 4)[1].tolist() == [[0, 1, 2, 3]] * B


def test_equal_scores_go_to_the_lower_label_where_frequent_ones_come_first():
    head, _ = make("e4m3", head_fraction=0.3, label_counts=torch.arange(L))
    head.table.codes.zero_()
    # The 64 precise rows end with a slice, or inside one.
    for rows in (1, 16, 10, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("subulp.nn.row_table._SLICE", rows * D)
            assert head.topk(batch()[0], 4)[1].tolist() == [[0, 1, 2, 3]] * B


@pytest.mark.parametrize("head_fraction", [0.0, 0.3, 1.0])
def test_equal_bf16_scores_go_to_the_lower_label(head_fraction):
    counts = torch.randint(9, (L,), generator=torch.Generator().manual_seed(0))
    head, _ = make("e4m3", products="fp8", head_fraction=head_fraction, label_counts=counts)
    x, _, _ = batch()
    stored = head.table.decode(0, L)
    stored = stored if head.row_of is None else stored[head.row_of]
    scores = (x.to(torch.float8_e4m3fn).float() @ stored.t()).bfloat16().float()
    expected = scores.sort(dim=1, descending=True, stable=True)
    found = head.topk(x, L)
    assert (expected.values.diff(dim=1) == 0).any()
    assert torch.equal(found[0], expected.values)
    assert torch.equal(found[1], expected.indices)


@pytest.mark.parametrize("storage", ["e4m3", "int4"])
def test_a_resumed_run_is_that_of_one_never_stopped(storage):
    straight, _ = make(storage, lr=0.1, dropout=0.1)
    for step in range(4):
        straight(*batch(step))
    stopped, opt = make(storage, lr=0.1, dropout=0.1)
    for step in range(2):
        stopped(*batch(step))
    saved = (stopped.state_dict(), opt.state_dict())
    resumed, opt = make(storage, lr=0.9, dropout=0.1, seed=3)
    resumed.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    for step in (2, 3):
        resumed(*batch(step))
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_embeddings_get_narrow_gradients(dtype):
    head, _ = make("e4m3")
    x, rows, cols = batch()
    x = x.to(dtype).requires_grad_()
    head(x, rows, cols).backward()
    assert x.grad.dtype == dtype
    assert x.grad.abs().sum() > 0


def test_memory_is_the_rows_and_a_tile():
    """No gradient, copy or momentum of the rows, no logits of all labels."""
    labels, dim, size = 40_000, 64, 32
    head = nn.ExtremeClassifier(dim, labels, chunks=8, seed=0)
    opt = optim.RowSGD(head, lr=0.1)
    x = torch.randn(size, dim, requires_grad=True)
    pairs = torch.randint(labels, (100,))
    with track_memory(head, opt) as memory:
        head(x, pairs % size, pairs).backward()
    assert memory.peak_bytes["weights"] == labels * dim
    assert memory.peak_bytes["states"] == memory.peak_bytes["gradients"] == 0
    chunk = -(-labels // 8)
    tile = 2 * 4 * chunk * dim + 4 * chunk * size
    assert memory.peak_bytes["activations"] <= tile + 64 * 1024


@pytest.mark.parametrize(
    ("scale", "expected"), [(None, 1.0), ("table", 0.5), (0.25, 0.25)], ids=str
)
def test_scales_are_powers_of_two(scale, expected):
    head, _ = make("e4m3", scale=scale)
    # sqrt(6 / (20 + 211)) = 0.161: stored up to 0.32.
    assert head.table.scale == expected
    bound = math.sqrt(6 / (D + L))
    assert weights(head).abs().max() <= bound * 17 / 16
    assert weights(head).std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_a_table_scale_keeps_small_initial_weights():
    """ELMO's 670K labels: without a scale a third of the weights start at zero in E4M3."""
    zero_share = []
    for scale in (None, "table"):
        table = nn.ExtremeClassifier(768, 4000, scale=scale, seed=0).table
        table.fill_uniform(math.sqrt(6 / (768 + 670_091)) if scale is None else 0.003)
        zero_share.append((table.decode(0, 4000) == 0).float().mean().item())
    assert zero_share[0] == pytest.approx(0.33, abs=0.01)
    assert zero_share[1] < 0.05


def test_the_rows_move_without_backward():
    head, _ = make()
    before = weights(head)
    head(*batch())
    assert not torch.equal(weights(head), before)


def test_without_gradients_nothing_moves():
    head, _ = make()
    before = weights(head)
    with torch.no_grad():
        head(*batch())
    assert torch.equal(weights(head), before)


def refused(head, error, message, x=None, rows=None, cols=None):
    good = batch()
    before = weights(head)
    arguments = [g if a is None else a for a, g in zip((x, rows, cols), good, strict=True)]
    with pytest.raises(error, match=message):
        head(*arguments)
    assert torch.equal(weights(head), before)


def test_bad_batches_are_refused_and_nothing_is_updated():
    head, _ = make("e4m3")
    x, rows, cols = batch()
    bad = x.clone()
    bad[3, 4] = math.nan
    refused(head, FloatingPointError, "embeddings .* NaN or infinite", x=bad)
    refused(head, ValueError, r"label_cols have values from 211 to 211", cols=cols.clone().fill_(L))
    refused(head, ValueError, r"label_cols have values from -1", cols=cols - cols.max() - 1)
    refused(head, ValueError, r"label_rows have values", rows=rows + B)
    refused(head, ValueError, "label_cols have dtype torch.float32", cols=cols.float())
    refused(head, ValueError, "label_rows and label_cols have shapes", cols=cols[:-1])
    refused(head, ValueError, r"embeddings have shape \(12, 19\)", x=x[:, 1:])
    refused(head, ValueError, "dtype torch.int64: expected floating-point", x=x.long())
    alone = nn.ExtremeClassifier(D, L)
    refused(alone, RuntimeError, r"make one with optim.RowSGD\(head, lr=\)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": L + 1}, "chunks=212 is out of range: from 1 to the 211 labels"),
        ({"chunks": 0}, "chunks=0 is out of range"),
        ({"storage": "int3"}, "storage='int3' is unknown"),
        ({"storage": (9, 3)}, "exponent_bits=9 is out of range"),
        ({"head_fraction": 1.5}, "head_fraction=1.5 is out of range"),
        ({"dropout": 1.0}, "dropout=1.0 is out of range"),
        ({"rounding": "up"}, "rounding='up' is unknown"),
        ({"reduction": "max"}, "reduction='max' is unknown"),
        ({"scale": 0.3}, "scale=0.3 is not a power of two"),
        ({"labels": 0}, "must be at least 1"),
        ({"storage": "int8", "scale": "table"}, "scale='table' does not go with storage='int8'"),
        ({"storage": "int4", "scale": 0.5}, "scale=0.5 does not go with storage='int4'"),
        ({"storage": "int2", "products": "fp8"}, "products='fp8' multiplies rows in E4M3"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_topk_out_of_range():
    head, _ = make()
    for k in (0, L + 1):
        with pytest.raises(ValueError, match=f"k={k} is out of range"):
            head.topk(batch()[0], k)


def test_the_seed_follows_torch():
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(weights(nn.ExtremeClassifier(D, L, storage="fp32")))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_dict_brings_the_precise_labels_with_it(device):
    counts = torch.arange(L)
    trained, _ = make("e4m3", head_fraction=0.3, label_counts=counts)
    fresh = nn.ExtremeClassifier(D, L, head_fraction=0.3, seed=9, device=device)
    fresh.load_state_dict(trained.state_dict(), assign=device == "meta")
    everything = torch.arange(L)
    assert torch.equal(fresh.weight(everything), weights(trained))
    assert torch.equal(fresh.label_of, trained.label_of)
    # Which labels are precise is known now: it trains.
    optim.RowSGD(fresh, lr=0.1)
    assert torch.isfinite(fresh(*batch(), loss=True))
