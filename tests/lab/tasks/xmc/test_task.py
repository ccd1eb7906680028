"""The extreme classifier's task: every storage trains, is judged and is counted."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from subulp.lab.engine.loop import run
from subulp.lab.tasks.xmc.config import XMCConfig
from subulp.lab.tasks.xmc.encoder import CONSTANTS, OUTPUT_NORM, BagEncoder, Bags
from subulp.lab.tasks.xmc.renee import ReneeClassifier
from subulp.lab.tasks.xmc.storage import parse_precision
from subulp.lab.tasks.xmc.task import (
    METRICS,
    build_baseline,
    build_encoder,
    build_head,
    build_optimizer,
    digest,
    evaluate,
    load,
    steps,
)
from subulp.nn import ExtremeClassifier

CPU = torch.device("cpu")
SMALL = {"width": 16, "epochs": 2, "batch_size": 8, "watch_every": 4, "device": "cpu", "chunks": 3}
WORDS = ("red", "green", "blue", "old", "new", "big", "small", "round")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts of two words, labelled by them: eight labels, and one that no text has."""
    path = tmp_path_factory.mktemp("xmc")
    generator = np.random.default_rng(0)
    for part, count in (("trn", 64), ("tst", 20)):
        pairs = np.array([generator.choice(8, 2, replace=False) for _ in range(count)])
        texts = [f"{WORDS[a]} {WORDS[b]} thing" for a, b in pairs]
        (path / f"{part}_X.txt").write_text("\n".join(texts) + "\n")
        rows = [f"{min(p)}:1 {max(p)}:1" for p in pairs]
        (path / f"{part}_X_Y.txt").write_text("\n".join([f"{count} 9", *rows]) + "\n")
    (path / "Y.txt").write_text("\n".join([*WORDS, "never seen"]) + "\n")
    return path


@pytest.fixture
def config(folder):
    return XMCConfig(**SMALL, data=folder)


def timeless(summary):
    return dataclasses.replace(summary, seconds_per_step=0.0, seconds_per_epoch=0.0)


@pytest.mark.parametrize(
    ("precision", "bytes_"),
    [
        ("fp32", 4),
        ("renee", 14),
        ("sampled", 4),
        # Of nine labels and one cluster: 32 weights of it, and the numbers of its labels.
        ("shortlist", 4 + (4 * 32 + 8 * 9) / (9 * 32)),
        ("bf16", 2),
        ("fp16", 2),
        # Two of nine labels have a remainder in BF16.
        ("fp8", 1 + 2 * 2 / 9),
        ("fp8+nearest", 1 + 2 * 2 / 9),
        ("e3m4", 1),
        ("e5m2", 1),
        # A row of 16 numbers and 16 constants has a scale and a bias, eight bytes.
        ("int8", 1 + 8 / 32),
        ("int4", 0.5 + 8 / 32),
        ("int2", 0.25 + 8 / 32),
        ("int8+nearest", 1 + 8 / 32),
    ],
)
def test_every_precision_trains_and_is_counted(config, precision, bytes_):
    # Eighteen steps are few; with a layer the loss falls in rows of two bits too.
    config = dataclasses.replace(config, precision=(precision,), layers=1)
    records = []
    summary = run(config, load(config), precision, 0, records.append)
    assert {m.name for m in METRICS} <= set(summary.metrics)
    assert summary.bytes_per_parameter["total"] == bytes_
    assert summary.simulated == (precision in ("e3m4", "e5m2"))
    assert all(np.isfinite(r.loss) for r in records)
    assert records[-1].loss < records[0].loss


def test_it_learns_the_words(config):
    config = dataclasses.replace(config, epochs=40, dropout=0.0, precision=("fp8",))
    assert run(config, load(config), "fp8", 0).metrics["P@1"] > 90


def test_the_same_arguments_give_the_same_numbers(config):
    data = load(config)
    results = [timeless(run(config, data, "fp8", seed)) for seed in (3, 3, 4)]
    assert results[0] == results[1]
    assert results[0].metrics != results[2].metrics


@pytest.mark.parametrize("max_norm", [None, 1e-2])
@pytest.mark.parametrize("precision", ["fp8", "renee", "fp32"])
def test_fused_runs_are_the_same(config, precision, max_norm):
    """With a second backward pass too, in which the classifier does not step again."""
    config = dataclasses.replace(config, precision=(precision,), max_norm=max_norm)
    data = load(config)
    fused = dataclasses.replace(config, fuse_backward=True)
    plain, other = run(config, data, precision, 0), run(fused, data, precision, 0)
    assert (plain.metrics, plain.train_loss) == (other.metrics, other.train_loss)


def test_storages_start_from_the_same_weights(config):
    data = load(config)
    heads = {p: build_head(config, data, parse_precision(p), 20, 0) for p in ("fp32", "fp8")}
    encoder = SimpleNamespace(dim=20)
    renee = build_baseline(config, data, "renee", encoder, 0)
    everything = torch.arange(9)
    wide = heads["fp32"].weight(everything)
    assert torch.equal(renee.weight, wide)
    narrow, bare = heads["fp8"].weight(everything), wide.to(torch.float8_e4m3fn).float()
    drawn = slice(0, 4)
    assert torch.equal(narrow[:, drawn], bare[:, drawn])
    precise = (narrow != bare).any(dim=1)
    # What E4M3 lacks of a frequent label's constants, its remainder in BF16 has.
    assert precise.sum() == 2
    assert torch.equal(narrow[~precise], bare[~precise])
    torch.testing.assert_close(narrow[precise, 4:], wide[precise, 4:], rtol=2**-11, atol=0)
    encoders = [build_encoder(config, data, p, 0, CPU) for p in ("fp32", "bf16")]
    for a, b in zip(*(e.parameters() for e in encoders), strict=True):
        assert torch.equal(a.bfloat16(), b)


@pytest.mark.parametrize("precision", ["fp32", "fp8", "renee", "sampled", "shortlist"])
def test_the_plain_output_layer_has_no_constants(config, precision):
    config = dataclasses.replace(config, precision=(precision,))
    plain = dataclasses.replace(config, output_layer="plain")
    data = load(plain)
    encoder = build_encoder(plain, data, precision, 0, CPU)
    assert encoder.dim == data.preprocessor.sizes()[0] == config.width
    assert sum(p.numel() for p in encoder.parameters()) == data.preprocessor.sizes()[1]
    storage = parse_precision(precision)
    if storage is None:
        head = build_baseline(plain, data, precision, encoder, 0)
        rows = head.weight
    else:
        head = build_head(plain, data, storage, encoder.dim, 0)
        rows = head.weight(torch.arange(9))
    assert rows.shape[1] == config.width
    assert rows.std(0).min() > 0, "no column is a constant"
    result = run(plain, data, precision, 0)
    assert result.metrics != run(config, load(config), precision, 0).metrics


@pytest.mark.parametrize("precision", ["fp32", "renee", "fp8", "fp16", "int8"])
def test_every_label_begins_as_rare_as_labels_are(config, precision):
    data = load(config)
    head = (
        build_baseline(config, data, precision, SimpleNamespace(dim=20), 0)
        if precision == "renee"
        else build_head(config, data, parse_precision(precision), 20, 0)
    )
    share = len(data.train.targets.indices) / (len(data.train) * data.data.num_labels)
    # Constants alone; their narrow weights are off by a sixteenth at most.
    x = torch.cat([torch.zeros(1, 20 - CONSTANTS), torch.ones(1, CONSTANTS)], 1)
    scores, _ = head.topk(x, data.data.num_labels)
    expected = math.log(share / (1 - share))
    torch.testing.assert_close(scores, torch.full_like(scores, expected), rtol=0.063, atol=0)
    assert share == pytest.approx(torch.sigmoid(torch.tensor(expected)).item())


def test_a_scale_is_for_the_storages_that_have_none_of_their_own(config):
    config = dataclasses.replace(config, precision=("fp8", "int8"), scale="table")
    data = load(config)
    scales = [
        build_head(config, data, parse_precision(p), 200, 0).table.scale for p in config.precision
    ]
    assert scales[0] != 1.0
    assert scales[1] == 1.0


def test_label_texts_train_where_there_are_any(config, folder):
    assert len(load(config).train) == 64 + 9
    assert len(load(dataclasses.replace(config, label_texts=False)).train) == 64
    assert steps(config, load(config)) == 2 * (73 // 8)


def test_renee_is_the_dense_gradient_with_momentum():
    """Two steps in FP32 beside it, up to FP16's rounding of operands and logits."""
    torch.manual_seed(0)
    head = ReneeClassifier(12, 30, 0)

    class Options:
        def groups_of(self, tables):
            return [{"lr": 0.1, "weight_decay": 0.01} for _ in tables]

    head.row_optimizer = Options()
    weight, momentum = head.weight.clone(), torch.zeros(30, 12)
    rows, cols = torch.tensor([0, 1, 1, 3]), torch.tensor([5, 7, 29, 0])
    for _ in range(2):
        x = torch.randn(4, 12, requires_grad=True)
        loss = head(x, rows, cols, loss=True)
        loss.backward()
        y = torch.zeros(4, 30)
        y[rows, cols] = 1
        z = x.detach() @ weight.t()
        expected = torch.nn.functional.binary_cross_entropy_with_logits(z, y, reduction="sum")
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
        g = z.sigmoid() - y
        torch.testing.assert_close(x.grad, g @ weight, rtol=0.02, atol=0.01)
        momentum = 0.9 * momentum + 0.1 * (g.t() @ x.detach() + 0.01 * weight)
        weight = weight - 0.1 * momentum
        torch.testing.assert_close(head.weight.detach(), weight, rtol=0.01, atol=1e-4)


def test_renee_leaves_out_a_step_that_overflows_and_halves_the_factor(monkeypatch):
    monkeypatch.setattr("subulp.lab.tasks.xmc.renee.GROWTH_INTERVAL", 3)
    head = ReneeClassifier(4, 3, 0)

    class Options:
        def groups_of(self, tables):
            return [{"lr": 0.1, "weight_decay": 0.0} for _ in tables]

    head.row_optimizer = Options()
    head.loss_scale.fill_(2.0**17)
    none = torch.zeros(0, dtype=torch.int64)
    scales = []
    for _ in range(6):
        before = head.weight.clone()
        x = torch.ones(2, 4, requires_grad=True)
        head(x, none, none).backward()
        left_out = torch.equal(head.weight, before)
        assert left_out == torch.equal(x.grad, torch.zeros(2, 4))
        scales.append((left_out, head.loss_scale.log2().item()))
    # Two rows of 0.5 each overflow at 65504; after three steps in turn the factor doubles.
    assert scales == [(True, 16), (True, 15), (False, 15), (False, 15), (False, 16), (True, 15)]


@pytest.mark.parametrize("fuse_backward", [False, True])
def test_steps_that_renees_scaler_leaves_out_are_counted_and_limited(
    config, monkeypatch, fuse_backward
):
    monkeypatch.setattr("subulp.lab.tasks.xmc.renee.INITIAL_LOSS_SCALE", 2.0**24)
    changes = {"precision": ("renee",), "fuse_backward": fuse_backward, "log_every": 1}
    # With a layer all that is skipped is skipped before the first step that is not.
    config = dataclasses.replace(config, **changes, layers=1)
    records = []
    skipped = run(config, load(config), "renee", 0, records.append).skipped_steps
    assert 3 < skipped < len(records)
    counts = [record.skipped_steps for record in records]
    assert counts == [min(step, skipped) for step in range(1, len(records) + 1)]
    enough = dataclasses.replace(config, max_skips=skipped + 1)
    assert run(enough, load(config), "renee", 0).skipped_steps == skipped
    with pytest.raises(FloatingPointError, match=r"step 3 .*: 3 steps in a row were skipped"):
        run(dataclasses.replace(config, max_skips=3), load(config), "renee", 0)
    with pytest.raises(ValueError, match="max_skips=3 has no effect"):
        dataclasses.replace(config, precision=("fp32",), max_skips=3)


def test_the_encoder_gives_a_sane_norm_and_constants():
    torch.manual_seed(0)
    encoder = BagEncoder(50, 3, 16, 2, 0.0)
    bags = Bags(
        torch.tensor([3, 4, 3, 7]),
        torch.tensor([0, 3, 3, 4]),
        torch.tensor([1.0, 2.0, 1.0, 1.0]),
        torch.tensor([0, 1, 2, 0]),
    )
    x = encoder(bags)
    assert x.shape == (3, 16 + CONSTANTS)
    assert torch.equal(x[:, 16:], torch.ones(3, CONSTANTS))
    norms = x[[0, 2], :16].norm(dim=1)
    torch.testing.assert_close(norms, torch.full((2,), OUTPUT_NORM), rtol=0.01, atol=0)
    # An empty text is as good as any other to the classifier.
    assert torch.isfinite(x[1]).all()
    # Terms count as often as they stand, in any order; a factor on all weights is lost in the norm.
    order = torch.tensor([1, 2, 0, 3])
    again = Bags(bags.ids[order], bags.offsets, 5 * bags.weights[order], bags.places[order])
    torch.testing.assert_close(encoder(again), x)
    # Where a term stands changes nothing at first; then the network has learned what it means.
    moved = bags._replace(places=torch.tensor([1, 0, 2, 0]))
    assert torch.equal(encoder(moved), x)
    torch.nn.init.normal_(encoder.place_gate)
    assert not torch.equal(encoder(moved)[0], encoder(bags)[0])
    torch.nn.init.zeros_(encoder.place_gate)
    torch.nn.init.normal_(encoder.place_factor)
    assert not torch.equal(encoder(moved)[0], encoder(bags)[0])
    torch.nn.init.zeros_(encoder.place_factor)
    torch.nn.init.normal_(encoder.gate)
    assert not torch.equal(encoder(bags)[0], x[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": ("fp9",)}, "precision='fp9' is unknown: use fp32"),
        ({"precision": ("renee+nearest",)}, "is unknown"),
        ({"precision": ("fp32+nearest",)}, "FP32 rows are not rounded; give fp32"),
        ({"precision": ("fp8+stochastic",)}, "is unknown"),
        (
            {"precision": ("int8", "int4+nearest"), "scale": "table"},
            "scale=table is for rows of floating-point numbers, and precision=int8,int4",
        ),
        ({"chunks": 10}, "chunks=10 is above the 9 labels"),
        ({"batch_size": 74}, "batch_size=74 is above the 73 training instances"),
    ],
)
def test_bad_input(config, changes, message):
    with pytest.raises(ValueError, match=message):
        load(dataclasses.replace(config, **changes))


def test_a_folder_that_is_missing(config, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(dataclasses.replace(config, data=tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 0), ("epochs", 0), ("dropout", 1.0), ("head_lr", -1.0), ("head_fraction", 2.0)],
)
def test_fields_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} is out of range"):
        XMCConfig(**{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_precision": "collage"}, "encoder_precision=collage: .*unknown"),
        ({"encoder_precision": "amp"}, "encoder_precision=amp: "),
        (
            {"encoder_precision": "nearest", "precision": ("fp32", "renee")},
            "encoder_precision=nearest has no effect on precision=fp32,renee",
        ),
        (
            {"encoder_precision": "fp32", "linear": ("mor-2way",)},
            "encoder_precision=fp32 and linear=mor-2way contradict each other",
        ),
    ],
)
def test_strategies_that_no_encoder_can_have(options, message):
    with pytest.raises(ValueError, match=message):
        XMCConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_fraction": 0.2}, "head_fraction=0.2 has no effect on precision=sampled,renee"),
        ({"scale": "table"}, "scale=table has no effect on precision=sampled,renee, whose rows"),
        ({"refine_lr": 0.1}, "refine_lr=0.1 has no effect without refine_epochs"),
    ],
)
def test_what_would_change_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        XMCConfig(precision=("sampled", "renee"), **options)
    name = next(iter(options))
    more = {"refine_epochs": 1} if name == "refine_lr" else {}
    config = XMCConfig(precision=("fp8",), **options, **more)
    assert getattr(config, name) == options[name]


@pytest.mark.parametrize(
    ("precision", "fraction"),
    [("fp8", 0.2), ("e4m3+nearest", 0.2), ("bf16", 0.0), ("fp32", 0.0), ("e5m2", 0.0)],
)
def test_rows_in_e4m3_have_remainders_unless_told_otherwise(config, precision, fraction):
    data, storage = load(config), parse_precision(precision)
    assert config.encoder_precision == "collage-plus"
    assert build_head(config, data, storage, 20, 0).head_fraction == fraction
    for given in (0.0, 0.5):
        chosen = dataclasses.replace(config, head_fraction=given)
        assert build_head(chosen, data, storage, 20, 0).head_fraction == given


@pytest.mark.parametrize(
    ("per_epoch", "epochs"),
    [(2_298, 4), (577, 4), (500, 4), (499, 5), (256, 8), (125, 16), (8, 16), (0, 16)],
)
def test_small_sets_are_passed_over_more_often(per_epoch, epochs):
    assert XMCConfig().epochs_of(per_epoch) == epochs
    assert XMCConfig(epochs=3).epochs_of(per_epoch) == 3
    assert XMCConfig(steps=30).epochs_of(per_epoch) is None


def test_steps_are_those_of_the_passes(config):
    data = load(config)
    per_epoch = len(data.train) // config.batch_size
    assert steps(config, data) == 2 * per_epoch
    assert steps(dataclasses.replace(config, epochs=None), data) == 16 * per_epoch
    assert steps(dataclasses.replace(config, epochs=None, steps=5), data) == 5


def test_an_encoder_in_fp32_leaves_the_strategy_as_it_was():
    """The configuration of such runs is that of versions whose encoders were all under kahan."""
    for precision in (("fp32",), ("renee", "fp32")):
        assert XMCConfig(precision=precision).encoder_precision == "kahan"
    assert XMCConfig(precision=("fp32", "bf16")).encoder_precision == "collage-plus"


@pytest.mark.parametrize("strategy", ["collage-plus", "extra-bits-8", "fp32"])
def test_the_encoder_has_the_strategy_that_was_asked_for(config, strategy):
    """Of the narrow rows: with rows in FP32 the encoder is in FP32 whatever the others' is."""
    chosen = dataclasses.replace(config, encoder_precision=strategy)
    data = load(chosen)
    for precision, expected in {"fp8": strategy, "fp32": "fp32"}.items():
        encoder = build_encoder(chosen, data, precision, 0, CPU)
        optimizer = build_optimizer(chosen, encoder, precision, 0)
        dtype = torch.float32 if expected == "fp32" else torch.bfloat16
        assert {p.dtype for p in encoder.parameters()} == {dtype}
        assert {group["precision"] for group in optimizer.param_groups} == {expected}


def test_filter_pairs_are_struck_from_rankings(config, folder, tmp_path):
    """A pair that the data set leaves out can neither help nor harm."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    lines = (folder / "tst_X_Y.txt").read_text().splitlines()[1:]
    first = [line.split()[0].split(":")[0] for line in lines]
    pairs = [f"{i} {label}" for i, label in enumerate(first)]
    (tmp_path / "tst_filter_labels.txt").write_text("\n".join(pairs) + "\n")
    options = {"epochs": 40, "dropout": 0.0, "precision": ("fp32",)}
    filtered = dataclasses.replace(config, data=tmp_path, **options)
    metrics = run(filtered, load(filtered), "fp32", 0).metrics
    # One label is left of each text, and it is found.
    assert metrics["P@1"] > 85
    assert metrics["P@3"] < 34


def test_filter_pairs_are_part_of_the_data(config, folder, tmp_path):
    """Also of labels that no instance has: predictions of them are left out."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    other = dataclasses.replace(config, data=tmp_path)
    before = digest(load(other))
    assert before == digest(load(config))
    held = {
        int(pair.split(":")[0])
        for pair in (folder / "tst_X_Y.txt").read_text().splitlines()[1].split()
    }
    free = min(set(range(load(config).data.num_labels)) - held)
    (tmp_path / "tst_filter_labels.txt").write_text(f"0 {free}\n")
    assert digest(load(other)) != before


def test_fewer_labels_than_the_longest_ranking(config, tmp_path):
    """Two labels: places 3 to 5 are nobody's."""
    for part, times in (("trn", 2), ("tst", 1)):
        texts = [" ".join([word] * times) for word in ("red", "blue")] * 10
        (tmp_path / f"{part}_X.txt").write_text("\n".join(texts) + "\n")
        (tmp_path / f"{part}_X_Y.txt").write_text("20 2\n" + "0:1\n1:1\n" * 10)
    pairs = "".join(f"{i} 0\n" for i in range(20))
    options = {"data": tmp_path, "epochs": 20, "chunks": 1, "dropout": 0.0}
    small = dataclasses.replace(config, **options)
    metrics = run(small, load(small), "fp32", 0).metrics
    assert metrics["P@1"] == 100
    assert metrics["P@5"] == pytest.approx(20)
    (tmp_path / "tst_filter_labels.txt").write_text(pairs)
    metrics = run(small, load(small), "fp32", 0).metrics
    assert metrics["P@1"] == 50


def test_the_head_is_the_papers(config):
    head = build_head(config, load(config), parse_precision("fp8"), 20, 0)
    assert isinstance(head, ExtremeClassifier)
    assert (head.rounding, head.reduction, head.table.scale) == ("stochastic", "sum", 1.0)


def test_scores_that_are_not_finite_have_no_ranking(config):
    """Of NaN some labels come first all the same."""
    data, storage = load(config), parse_precision("fp32")
    encoder = build_encoder(config, data, "fp32", 0, CPU)
    head = build_head(config, data, storage, encoder.dim, 0)
    model = torch.nn.ModuleDict({"encoder": encoder, "head": head})
    known = evaluate(config, data, model)
    assert all(map(math.isfinite, known.values()))
    encoder.terms.weight.data[:] = math.nan
    found = evaluate(config, data, model)
    assert found.keys() == known.keys()
    assert all(map(math.isnan, found.values()))
