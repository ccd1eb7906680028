"""What the extra-bits paper's claims are measured by."""

import importlib.util

import pytest
import torch

from subulp.lab.reproduce.extra_bits import (
    adversarial,
    forward_error,
    one_pass,
    seq2seq,
    storage,
    throughput,
)
from subulp.numerics import extra_bits

SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}


def test_packing_is_compared_with_another_reading(monkeypatch):
    right = storage.packing([12], 3)
    assert right.values("12 bits", "words for 32 numbers") == {None: 12}
    assert right.values("12 bits", "words that are not the long integer's") == {None: 0}
    pack = extra_bits.pack
    monkeypatch.setattr(extra_bits, "pack", lambda tails, width: pack(tails, width).flip(0))
    wrong = storage.packing([12], 3)
    assert wrong.values("12 bits", "words that are not the long integer's")[None] > 0
    assert wrong.values("12 bits", "numbers changed")[None] > 0


@pytest.mark.parametrize("k", [1, 8, 13])
def test_an_optimizer_keeps_as_many_words_as_bits(k):
    found = storage.kept_words([f"extra-bits-{k}"], 64)
    assert found.values(f"extra-bits-{k}", "words for 32 numbers") == {None: k}


def test_errors_differ_by_seed_and_a_format_alone_is_found_once():
    found = forward_error.errors([4, 8], 200, [0, 1])
    errors = found.values("fp16+8", "error after one addition")
    assert len(set(errors.values())) == 2
    cases = [o.case for o in found.observations if o.quantity == "error after one addition"]
    assert cases.count("fp16") == 2
    # What the model sees is never more than one number of the format away.
    assert all(value < 2 for value in errors.values())


def test_shares_are_of_the_copy():
    found = throughput.additions(["nearest", "extra-bits-8"], "float16", 4096, 2)
    quantity = "share of a copy's bandwidth"
    assert found.values(throughput.COPY, quantity) == {None: 1.0}
    one = throughput.means(found, {"both": ["nearest", "extra-bits-8"], "none": ["absent"]})
    (mean,) = one
    values = [found.values(case, quantity)[None] for case in ("nearest", "extra-bits-8")]
    assert mean.value == pytest.approx(sum(values) / 2)


def test_one_pass_has_the_bits_of_one_for_each():
    found = one_pass.turns("extra-bits-8-truncate", 2, 4, 2, [0, 1])
    assert found.values(one_pass.EACH, "weights that differ") == {0: 0, 1: 0}
    for case in (one_pass.TOGETHER, one_pass.EACH):
        whole, own = (found.values(case, q) for q in (one_pass.SECONDS, one_pass.OF_STEP))
        assert all(0 < own[seed] < whole[seed] for seed in (0, 1))


def test_a_fused_gan_has_the_bits_of_the_other():
    found = adversarial.fused("extra-bits-8", 4, 3, 4)
    assert found.values("fused", "weights that differ") == {None: 0}
    assert found.values("fused", "gradients left") == {None: 0}


def test_the_generators_pass_steps_the_discriminator_unless_it_is_paused():
    pair = adversarial.Pair.of("extra-bits-8", 4, 0, fused=True)
    real, drawn = torch.rand(4, 1, 8, 8), torch.randn(4, adversarial.LATENT, 1, 1)
    pair.step(real, drawn)
    before = [p.clone() for p in pair.discriminator.parameters()]
    pair.discriminator(pair.generator(drawn.bfloat16())).float().mean().backward()
    after = pair.discriminator.parameters()
    assert any(bool((a != b).any()) for a, b in zip(before, after, strict=True))


def test_frechet_distances_of_known_distributions():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1000, 3, generator=generator)
    assert adversarial.frechet(a, a) == pytest.approx(0, abs=1e-9)
    assert adversarial.frechet(a, a + 2) == pytest.approx(12, rel=1e-5)
    # Of one standard deviation and of three: (3 - 1)^2 for each number.
    spread = float(torch.cov(a.T).trace())
    assert adversarial.frechet(a, 3 * (a - a.mean(0)) + a.mean(0)) == pytest.approx(
        4 * spread, rel=1e-5
    )


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
def test_a_fused_t5_has_the_bits_of_the_other():
    found = seq2seq.fine_tuned(["paraphrases"], {**SIZES, "num_heads": 2}, 2, 16, 3)
    assert found.values("paraphrases, fused", "weights that differ") == {None: 0}
    peaks = [found.values(f"paraphrases, {way}", "peak MiB")[None] for way in seq2seq.WAYS]
    # So few gradients wait for each other, and those of the first pass are kept.
    assert peaks[2] <= peaks[0] < peaks[1]


def test_without_transformers_its_table_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="extra-bits-table2 needs transformers: pip install"):
        seq2seq.fine_tuned(["paraphrases"], {**SIZES, "num_heads": 2}, 2, 16, 3)


def test_the_answers_of_the_tasks():
    a, b = torch.tensor([[8, 20], [9, 21]]), torch.tensor([[8, 8], [8, 9]])
    assert seq2seq.TASKS["three answers"](a, b).tolist() == [1, 2]
    assert seq2seq.TASKS["an answer in a text"](a, b).tolist() == [1, 1]
    assert seq2seq.TASKS["paraphrases"](a, b).tolist() == [1, 0]
