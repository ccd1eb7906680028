"""The extreme classifier's data, model and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .... import optim
from ....nn import ExtremeClassifier, refine
from ....numerics import E4M3, Format
from ....optim import RowSGD
from ...data.batches import ShuffledBatches
from ...data.digest import digest as digest_of
from ...engine.data_parallel import layers_of, replicated, shard
from ...engine.linear_operands import TORCHAO
from ...engine.metrics import Metric
from ...engine.ranks import ALONE, Ranks
from ...engine.recipe import bytes_of_parameters, decay_groups, rise_and_fall, steps_of
from ...engine.task import Workload
from .config import E4M3_HEAD_FRACTION, XMCConfig
from .encoder import constants_of, prior_weight
from .linear_layers import change_layers, check_torchao
from .metrics import MISSING, PROPENSITIES, RankingMetrics, remove_pairs
from .preprocessing import Batch, Encoder, Preprocessor, make_preprocessor, to_device
from .readers.dataset import BagSplit, TextSplit, XMCData
from .readers.generated import generate
from .readers.load import load_bundled, read_xmc
from .renee import ReneeClassifier
from .sampled import SHORTLISTED, SampledClassifier, ShortlistClassifier, clusters
from .saved_parts import LEFT_OUT, Baseline, Head, describe_head, save_shared
from .storage import RENEE, SAMPLED, SHORTLIST, HeadStorage, parse_precision
from .transformer import TransformerEncoder

METRICS = (
    Metric("P@1", "P@1\n%", "{:.2f}", "P@1", "%", higher_is_better=True),
    Metric("P@3", "P@3\n%", "{:.2f}", "P@3", "%", higher_is_better=True),
    Metric("P@5", "P@5\n%", "{:.2f}", "P@5", "%", higher_is_better=True),
    Metric("PSP@1", "PSP@1\n%", "{:.2f}", "PSP@1", "%", higher_is_better=True),
    Metric("PSP@5", "PSP@5\n%", "{:.2f}", "PSP@5", "%", higher_is_better=True),
    Metric(
        "nDCG@5", "nDCG@5\n%", "{:.2f}", "nDCG@5", "%", versus="difference", higher_is_better=True
    ),
)

COUNTED = "weight of the classifier"

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class XMCText:
    """A data set and what its encoder needs.

    Attributes:
        data: The data set.
        train: Its training part, with the label texts if they train too.
        preprocessor: Makes batches of texts or features, and the encoder that takes them.
    """

    data: XMCData
    train: TextSplit | BagSplit
    preprocessor: Preprocessor[Any]

    def batch(self, part: TextSplit | BagSplit, indices: np.ndarray, device: torch.device) -> Batch:
        """Instances of a part as the encoder takes them."""
        return to_device(self.preprocessor.read(part.source.read(indices)), device)


def load(config: XMCConfig) -> XMCText:
    """The data of ``config``, after a check that every precision is possible."""
    storages = [parse_precision(precision) for precision in config.precision]
    has_products = ExtremeClassifier.has_products
    rows = {"fp8": "FP8 rows", "bf16": "rows of BF16 numbers"}.get(config.products)
    if rows and not any(s and has_products(s.storage, config.products) for s in storages):
        raise ValueError(
            f"products={config.products} multiplies {rows}, and "
            f"precision={','.join(config.precision)} has none: add fp8 to the precisions, or leave "
            "products out"
        )
    if config.scale == "table" and all(s and s.integers for s in storages):
        raise ValueError(
            f"scale=table is for rows of floating-point numbers, and "
            f"precision={','.join(config.precision)} has none: every row of integers has a scale "
            "of its own; leave scale out"
        )
    if TORCHAO in config.linear:
        check_torchao()
    generated = config.generated_labels
    data = read_data(config.data) if generated is None else generate(generated)
    if config.chunks > data.num_labels:
        raise ValueError(
            f"chunks={config.chunks} is above the {data.num_labels} labels of data={data.name}"
        )
    wanted = config.label_texts
    train = data.train
    if wanted or (wanted is None and data.label_texts is not None):
        train = data.with_label_texts()
    if len(train) < config.batch_size:
        raise ValueError(
            f"batch_size={config.batch_size} is above the {len(train)} training instances of "
            f"data={data.name}: give at most as many"
        )
    text = XMCText(data, train, make_preprocessor(config, train))
    if data.train.source.digest == data.test.source.digest:
        raise ValueError(
            f"data={data.name} has the same instances in its training part and its test part: a "
            "model would be tested on what it was trained on; give another test part"
        )
    if config.rising_steps(steps(config, text)) > steps(config, text):
        raise ValueError(
            f"warmup_steps={config.warmup_steps} is above the {steps(config, text)} steps of the "
            "training: give fewer, or a share with --warmup"
        )
    return text


def read_data(folder: Path | None) -> XMCData:
    """The data set in a folder; ``None`` is the bundled one."""
    return load_bundled() if folder is None else read_xmc(folder)


def describe(data: XMCText) -> dict[str, Any]:
    """Name, instances and pairs of each part, labels, and how many labels never train.

    A label that no training instance has is a negative of all of them. It is scored like any other
    label, and its test pairs count in every measure; its own text trains it, where those train.
    """
    train, test = data.train.targets, data.data.test.targets
    unseen = train.counts() == 0
    return {
        "name": data.data.name,
        "train": len(data.train),
        "train_pairs": len(train.indices),
        "test": len(test),
        "test_pairs": len(test.indices),
        "labels": data.data.num_labels,
        "unseen_labels": int(unseen.sum()),
        "unseen_test_pairs": int(unseen[test.indices].sum()),
    }


def steps(config: XMCConfig, data: XMCText) -> int:
    """Whole batches of all epochs, or what was asked for."""
    per_epoch = len(data.train) // config.batch_size
    return steps_of(config.steps, config.epochs_of(per_epoch), per_epoch)


def digest(data: XMCText) -> str:
    """A digest of texts or features, labels, and what reads them."""
    parts = (data.train, data.data.test)
    matrices = [part.targets for part in parts]
    # Pairs that instances do not have count too: predictions of them are left out.
    matrices += [part.filter_pairs for part in parts if part.filter_pairs is not None]
    return digest_of(
        [
            *(part.source.digest for part in parts),
            *(array for matrix in matrices for array in (matrix.indptr, matrix.indices)),
            data.data.label_counts,
            *data.preprocessor.sources(),
        ]
    )


def build_encoder(
    config: XMCConfig, data: XMCText, precision: str, seed: int, device: torch.device
) -> Encoder:
    """The encoder: BF16, or FP32 under ``fp32``, the baselines and ``encoder_precision="fp32"``.

    The initial weights are made in FP32 from the seed alone.
    """
    torch.manual_seed(seed)
    encoder = data.preprocessor.encoder(device)
    if config.gradient_checkpointing:
        assert isinstance(encoder, TransformerEncoder)
        encoder.checkpoint_activations()
    if config.encoder_strategy(precision) != "fp32":
        for parameter in encoder.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return encoder


def build_optimizer(config: XMCConfig, encoder: Encoder, precision: str, seed: int) -> optim.AdamW:
    """The encoder's optimizer, with ``encoder_precision`` for BF16 parameters."""
    return optim.AdamW(
        decay_groups(encoder.named_parameters(prefix="encoder")),
        lr=config.encoder_lr,
        weight_decay=config.encoder_weight_decay,
        precision=config.encoder_strategy(precision),
        nonfinite=config.gradient_policy,
        seed=seed,
    )


def build_head(
    config: XMCConfig,
    data: XMCText,
    storage: HeadStorage,
    dim: int,
    seed: int,
    ranks: Ranks = ALONE,
) -> ExtremeClassifier:
    """The classifier of a storage; where it has constants, every label starts equally rare."""
    count, constants = data.data.num_labels, constants_of(config.output_layer)
    takes = ExtremeClassifier.has_products(storage.storage, config.products)
    fraction = config.head_fraction
    if fraction is None:
        fraction = E4M3_HEAD_FRACTION if storage.storage == E4M3.name else 0.0
    head = ExtremeClassifier(
        dim,
        count,
        storage=storage.storage,
        chunks=config.chunks,
        head_fraction=fraction,
        label_counts=torch.from_numpy(data.data.label_counts) if fraction else None,
        dropout=config.weight_dropout,
        rounding=storage.rounding,
        scale="table" if config.scale == "table" and not storage.integers else None,
        reduction="sum",
        products=config.products if takes else "auto",
        seed=seed,
        mesh=ranks.mesh,
    )
    if constants:
        head.table.fill_columns(dim - constants, prior_weight(_share(data, count)))
    return head


def build_baseline(
    config: XMCConfig,
    data: XMCText,
    precision: str,
    encoder: Encoder,
    seed: int,
    ranks: Ranks = ALONE,
) -> Baseline:
    """The classifier of a baseline.

    Where it has constants, every label that an instance meets starts equally rare.
    """
    count, dim = data.data.num_labels, encoder.dim
    constants = slice(dim - constants_of(config.output_layer), None)
    if precision == RENEE:
        renee = ReneeClassifier(dim, count, seed, ranks.mesh)
        renee.own_weight[:, constants] = prior_weight(_share(data, count))
        return renee
    if precision == SAMPLED:
        sampled = SampledClassifier(dim, count, seed)
        met = sampled.negatives + config.batch_size
        sampled.weight[:, constants] = prior_weight(_share(data, met))
        return sampled
    members = clusters(_label_vectors(data, encoder))
    shortlist = ShortlistClassifier(dim, count, seed, members)
    met = min(len(members), SHORTLISTED) * members.shape[1]
    shortlist.weight[:, constants] = prior_weight(_share(data, met))
    shortlist.cluster_weight[:, constants] = prior_weight(_share(data, len(members)))
    return shortlist


def _share(data: XMCText, met: int) -> float:
    """Of the labels that an instance meets, how many are its own."""
    pairs = max(len(data.train.targets.indices), 1)
    return min(pairs / (len(data.train) * met), 0.5)


@torch.no_grad()
def _label_vectors(data: XMCText, encoder: Encoder) -> Tensor:
    """Of each label the sum of its instances' vectors, by an encoder that is not trained yet.

    A bag encoder's are random projections of what the instances have in common.
    """
    device = next(encoder.parameters()).device
    width = encoder.output.width
    found = torch.zeros(data.data.num_labels, width)
    training = encoder.training
    encoder.eval()
    for start in range(0, len(data.train), EVALUATION_BATCH):
        chosen = np.arange(start, min(start + EVALUATION_BATCH, len(data.train)))
        vectors = encoder(data.batch(data.train, chosen, device))[:, :width].float().cpu()
        rows, cols = map(torch.from_numpy, data.train.pairs(chosen))
        found.index_add_(0, cols, vectors[rows])
    encoder.train(training)
    return found


def build(
    config: XMCConfig,
    data: XMCText,
    variant: str,
    seed: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Workload:
    """A run of one variant and seed."""
    run = config.grid[variant]
    storage = parse_precision(run.precision)
    encoder = build_encoder(config, data, run.precision, seed, device)
    mix = change_layers(encoder, run, device)
    shard(encoder, ranks, layers_of(encoder))
    optimizer = build_optimizer(config, encoder, run.precision, seed)
    head: Head = (
        build_baseline(config, data, run.precision, encoder, seed, ranks)
        if storage is None
        else build_head(config, data, storage, encoder.dim, seed, ranks)
    ).to(device)
    rows = RowSGD(head, lr=config.head_lr, weight_decay=config.head_weight_decay)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    batches = ShuffledBatches(len(data.train), config.batch_size, seed)
    total = steps(config, data)
    rising = config.rising_steps(total)
    encode = replicated(encoder, ranks, fused=config.fuse_backward)
    own = ranks.part(config.batch_size)

    def loss(value: bool) -> Tensor:
        chosen = batches.draw().numpy()[own]
        instances, labels = (torch.from_numpy(a).to(device) for a in data.train.pairs(chosen))
        batch = data.batch(data.train, chosen, device)
        # On several ranks too, the head's loss is that of the whole batch.
        summed: Tensor = head(encode(batch), instances, labels, loss=value)
        # The rows step by the sum, the encoder and what is reported by the mean.
        return summed / config.batch_size

    described = {"head": describe_head(head), "encoder": run.settings()}

    def finish() -> dict[str, float]:
        nonlocal head
        head = model["head"] = refined(config, data, model, storage, seed)
        described["head"] = describe_head(head)
        return evaluate(config, data, model, ranks)

    return Workload(
        model,
        optimizer,
        total,
        config.eval_epochs * (len(data.train) // config.batch_size),
        lambda step: rise_and_fall(step, total, rising=rising, final=config.final_lr),
        loss,
        lambda: evaluate(config, data, model, ranks),
        # The rounding of the encoder's products is part of what is measured.
        described,
        save_shared=lambda folder: save_shared(folder, data.preprocessor, data.data.label_texts),
        left_out=LEFT_OUT,
        rows=rows,
        bytes_per_parameter=lambda: head_bytes(head, ranks),
        simulated=storage is not None and storage.simulated,
        parameters=sum(p.numel() for p in encoder.parameters()) + head.num_labels * encoder.dim,
        steps_per_epoch=len(data.train) // config.batch_size,
        mix=mix,
        inner_skips=(
            (lambda: int(head.get_buffer("skipped_steps"))) if run.precision == RENEE else None
        ),
        finish=finish if config.refine_epochs else None,
        parts={"batches": batches},
    )


def least_memory(config: XMCConfig, data: XMCText, variant: str) -> int:
    """Rows of the classifier, parameters of the encoder, and the logits of a chunk."""
    precision = config.grid[variant].precision
    storage = parse_precision(precision)
    dim, parameters = data.preprocessor.sizes()
    labels = data.data.num_labels
    if precision in (SAMPLED, SHORTLIST):
        head, chunk = labels * dim * 4, 0
    elif storage is None:
        # FP32 weights and momentum, an FP16 copy, and logits and the gradient in both.
        head, chunk = labels * dim * 16, labels
    else:
        head, chunk = labels * dim * storage.bits // 8, -(-labels // config.chunks)
    strategy = config.encoder_strategy(precision)
    encoder = bytes_of_parameters(
        optim.AdamW,
        torch.float32 if strategy == "fp32" else torch.bfloat16,
        parameters,
        precision=strategy,
    )
    return head + encoder + 2 * config.batch_size * chunk


def head_bytes(head: Head, ranks: Ranks = ALONE) -> dict[str, float]:
    """Bytes that training keeps of one weight of the classifier."""
    if isinstance(head, SampledClassifier):
        kept = {"parameter": 4.0}
    elif isinstance(head, ShortlistClassifier):
        weights = head.weight.numel()
        kept = {
            "parameter": 4.0,
            "clusters": (4 * head.cluster_weight.numel() + head.members.nbytes) / weights,
        }
    elif isinstance(head, ReneeClassifier):
        kept = {"parameter": 4.0, "fp16 copy": 2.0, "gradient": 4.0, "momentum": 4.0}
    else:
        storage = head.table.storage
        weights = head.num_labels * head.table.dim
        found = ranks.gather(head.table.nbytes())
        sizes = {name: sum(each[name] for each in found) for name in found[0]}
        kept = {"parameter": sizes.pop("codes") / weights}
        if isinstance(storage, Format) and storage.dtype is None:
            kept["parameter"] = (1 + storage.exponent_bits + storage.mantissa_bits) / 8
        kept |= {name: size / weights for name, size in sizes.items()}
    return {**kept, "total": sum(kept.values())}


def refined(
    config: XMCConfig,
    data: XMCText,
    model: nn.ModuleDict,
    storage: HeadStorage | None,
    seed: int,
) -> ExtremeClassifier:
    """The classifier after its passes in FP32, on the vectors of the encoder as it is."""
    head = model["head"]
    assert storage is not None
    assert isinstance(head, ExtremeClassifier)
    training = model.training
    model.eval()
    found = refine(
        head,
        _Vectors(config, data, model["encoder"], seed),
        storage="fp32" if storage.bits == 32 else "bf16",
        epochs=config.refine_epochs,
        lr=config.refine_lr,
        weight_decay=config.head_weight_decay,
    )
    model.train(training)
    return found.train(training)


@dataclass(frozen=True)
class _Vectors:
    """Batches of vectors, their instances and labels: the same ones in the same order each time."""

    config: XMCConfig
    data: XMCText
    encoder: nn.Module
    seed: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size, train = self.config.batch_size, self.data.train
        order = np.random.default_rng(self.seed).permutation(len(train))
        device = next(self.encoder.parameters()).device
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            with torch.no_grad():
                vectors = self.encoder(self.data.batch(train, chosen, device))
            rows, cols = (torch.from_numpy(a).to(device) for a in train.pairs(chosen))
            yield vectors, rows, cols


def check_ranks(config: XMCConfig, ranks: Ranks) -> None:
    """Refuse what one process alone can do."""
    for name in (SAMPLED, SHORTLIST):
        if name in config.precision and ranks.several:
            raise ValueError(
                f"precision={name} is for one process, and there are {ranks.count} ranks: leave it "
                "out"
            )
    if config.refine_epochs and ranks.several:
        raise ValueError(
            f"refine_epochs={config.refine_epochs} is for one process, and there are {ranks.count} "
            "ranks: leave it out"
        )


@torch.no_grad()
def evaluate(
    config: XMCConfig, data: XMCText, model: nn.ModuleDict, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Every measure of the test part, in percent."""
    encoder, head = model["encoder"], model["head"]
    assert isinstance(head, Head)
    test = data.data.test
    measures = RankingMetrics(
        data.data.label_counts, len(data.data.train), PROPENSITIES[config.propensity]
    )
    device = next(encoder.parameters()).device

    def ranked(chosen: np.ndarray) -> np.ndarray | None:
        x = encoder(data.batch(test, chosen, device))
        return _ranking(data.data, head.topk, x, chosen, measures.longest)

    def batches() -> Iterator[np.ndarray]:
        for start in range(0, len(test), EVALUATION_BATCH):
            yield np.arange(start, min(start + EVALUATION_BATCH, len(test)))

    training, known = model.training, True
    model.eval()
    for chosen, best in zip(batches(), ranks.each(ranked, batches()), strict=True):
        if best is not None:
            top = best
        else:
            known, top = False, np.full((len(chosen), measures.longest), MISSING)
        measures.update(top, *test.pairs(chosen))
    model.train(training)
    found = measures.result()
    return found if known else dict.fromkeys(found, math.nan)


def _ranking(
    data: XMCData,
    topk: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    x: Tensor,
    chosen: np.ndarray,
    k: int,
) -> np.ndarray | None:
    """The k best labels of a batch without those that its filter pairs name; ``None`` if scores are
    not finite, which have no order.
    """
    filtered, most = data.test.filter_pairs, 0
    if filtered is not None:
        rows, cols = filtered.pairs(chosen)
        most = int(np.bincount(rows, minlength=1).max()) if len(rows) else 0
    scores, labels = topk(x, min(k + most, data.num_labels))
    if not bool(scores.isfinite().all()):
        return None
    top = labels.cpu().numpy()
    if filtered is not None:
        top = remove_pairs(top, rows, cols, data.num_labels)[:, :k]
    missing = max(0, k - top.shape[1])
    return np.pad(top, ((0, 0), (0, missing)), constant_values=MISSING)
