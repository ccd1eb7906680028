"""What the extra-bits paper claims, place by place."""

from __future__ import annotations

from collections.abc import Sequence

from ....diagnostics.memory import CATEGORIES
from .. import fine_tuning, sentence_tasks
from ..check import Check
from ..claim import Claim, published
from ..collage.experiments import LAYOUTS
from . import clipping, exact, forward_error, one_pass, seq2seq, throughput
from .experiments import (
    ALONE,
    AMP,
    BERT,
    BERTS,
    CLICKS,
    CLICKS_8,
    CLICKS_16,
    CLICKS_32,
    COPIED,
    CUT,
    EIGHT,
    ERRORS,
    EXACT,
    FOREACH,
    FULL,
    FUSED,
    GENERATED,
    HOOKS,
    INSIDE,
    KEPT,
    LATE,
    ONE_PASS,
    PEAKS,
    PICTURES,
    RESTORED,
    SENTENCES,
    SHAPED,
    SPEEDS,
    STORAGE,
    THIRTEEN,
    TIMELINES,
    WHOLE,
    WIDE,
)

PAPER = "extra-bits"

_GLUE = dict(zip(("MNLI", "QNLI", "MRPC"), seq2seq.TASKS, strict=True))
_TABLE_2 = {
    "MNLI": (29_930, 26_818, 38_488, 40_054),
    "QNLI": (30_239, 26_826, 11_469, 11_808),
    "MRPC": (29_964, 26_649, 383, 400),
}
"""MB and seconds, not fused and fused."""

_TABLE_3 = {
    WIDE: (0.9464, 4720),
    AMP: (0.9404, 4520),
    THIRTEEN: (0.9410, 3868),
    CUT: (0.9406, 3776),
    ALONE: (0.9379, 3840),
}
_FP8 = {"e5m2+8": 0.9396, "e5m2+4": 0.6553, "e5m2": 0.0878}

_LAYOUT = {"FP32": (32, 8, 23), "BF16": (16, 8, 7), "FP16": (16, 5, 10)}

_DIGITS = (
    "On 1,437 digits of 8 x 8, which stand for CIFAR-10: a network of 16 channels learns them in "
    "minutes."
)


_CODING = (
    "Numbers with extra bits are rounded to nearest, and the bits say what is missing; the paper "
    "cuts numbers off."
)


def _saves(says: str, case: str, than: str, share: float) -> Check:
    """A check of the share of the peak that a loop saves."""
    at_most = round(1 - share, 12)
    return Check(says, "peak bytes per parameter", case, than=than, how="ratio", high=at_most)


def _smaller(says: str, case: str, than: str) -> Check:
    return Check(says, "error after one addition", case, than=than, how="ratio", high=1.0)


_BETTER = "error after 64 additions"

_TABLE_3_PRINTED = published(
    "accuracy",
    {**{name: row[0] for name, row in _TABLE_3.items()}, **_FP8},
    more={"peak MiB": {name: row[1] for name, row in _TABLE_3.items()}},
)

_AS_ACCURATE = (
    # A point: the largest difference that the paper calls none is 0.85.
    *(
        Check(
            f"{name} is as accurate as {WIDE}",
            "accuracy",
            name,
            than=WIDE,
            low=-0.01,
        )
        for name in (AMP, THIRTEEN, CUT, ALONE)
    ),
    Check(f"e5m2+8 is as accurate as {ALONE}", "accuracy", "e5m2+8", than=ALONE, low=-0.01),
    Check("e5m2+4 is behind e5m2+8", "accuracy", "e5m2+4", than="e5m2+8", high=-0.01),
    Check("e5m2 is behind e5m2+4", "accuracy", "e5m2", than="e5m2+4", high=-0.01),
    *(
        Check(
            f"{name} takes less memory than {AMP}",
            "peak MiB",
            name,
            than=AMP,
            how="ratio",
            high=1.0 - 1e-9,
        )
        for name in (THIRTEEN, CUT)
    ),
    Check(
        f"{EIGHT} is as accurate as {WIDE}",
        "accuracy",
        EIGHT,
        than=WIDE,
        low=-0.01,
        role="aside",
    ),
)
"""Of ResNet-18, with the roundings of the paper's Table 3."""

CLAIMS: Sequence[Claim] = (
    Claim(
        PAPER,
        "Table 1",
        "Bits of float, bfloat16 and half, of their exponents and significands.",
        LAYOUTS,
        published=published(
            "bits",
            {name: row[0] for name, row in _LAYOUT.items()},
            more={
                "exponent bits": {name: row[1] for name, row in _LAYOUT.items()},
                "mantissa bits": {name: row[2] for name, row in _LAYOUT.items()},
            },
        ),
        checks=tuple(
            Check(f"{name}: {value} {quantity}", quantity, name, low=value, high=value)
            for name, row in _LAYOUT.items()
            for quantity, value in zip(("bits", "exponent bits", "mantissa bits"), row, strict=True)
        ),
        shows=("bits", "exponent bits", "mantissa bits"),
        cases=tuple(_LAYOUT),
    ),
    Claim(
        PAPER,
        "Figure 1",
        "Twelve extra bits of 32 numbers take twelve words of 32 bits, all of whose bits are used.",
        STORAGE,
        published=published("words for 32 numbers", {"12 bits": 12, "extra-bits-12": 12}),
        checks=(
            Check("twelve words", "words for 32 numbers", "12 bits", low=12, high=12),
            *(
                Check(
                    f"an optimizer keeps {k} words of {k} bits",
                    "words for 32 numbers",
                    f"extra-bits-{k}",
                    low=k,
                    high=k,
                )
                for k in range(1, 17)
            ),
            *(
                check
                for width in range(1, 18)
                for check in (
                    Check(
                        f"numbers of {width} bits are read as they were written",
                        "numbers changed",
                        f"{width} bits",
                        low=0,
                        high=0,
                    ),
                    Check(
                        f"numbers of {width} bits stand one after the other",
                        "words that are not the long integer's",
                        f"{width} bits",
                        low=0,
                        high=0,
                    ),
                )
            ),
        ),
    ),
    Claim(
        PAPER,
        "Section 1, bytes",
        "At least 6 bytes of a parameter less stay in memory than in mixed precision: parameter, "
        "its copy and its gradient are 10, and 16 bits with as many extra bits are 4.",
        TIMELINES,
        published=published("peak bytes per parameter", {LATE: 10.0, FULL: 4.0}),
        checks=(
            # A layer of 32 is alive with its gradient: 2 / 32 bytes and what waits with it. The
            # states of both are 4 bytes.
            Check(
                "6 bytes less, but for a layer's gradient and its tile",
                "peak bytes per parameter",
                LATE,
                than=FULL,
                low=5.75,
            ),
            Check("no gradients remain", "largest gradients per parameter", FULL, high=0.2),
        ),
        shows=("peak bytes per parameter", "largest gradients per parameter"),
        cases=(LATE, FULL),
        differs="The paper's 10 and 4 bytes; 4 of momentum are in both of ours.",
    ),
    Claim(
        PAPER,
        "Section 3.1, exact",
        "With 16 bits beside BF16 and 13 beside FP16 all of FP32 is kept, also when the float is "
        "rounded stochastically and a further bit says how.",
        EXACT,
        checks=(
            *(
                check
                for name, k, coding in RESTORED
                for case in (exact.case_of(name, k, coding),)
                for check in (
                    Check(f"{case}: every number", exact.LOST, case, low=0, high=0)
                    if (name, k) in (("BF16", 16), ("FP16", 13))
                    else Check(f"{case}: not every number", exact.LOST, case, low=1),
                    Check(
                        f"{case}: bits that are stored",
                        exact.TAIL,
                        case,
                        low=k + (coding == "stochastic"),
                        high=k + (coding == "stochastic"),
                    ),
                )
            ),
            Check(
                "the float is FP32's first half",
                exact.CUT,
                exact.case_of("BF16", 16),
                low=0,
                high=0,
            ),
        ),
        shows=(exact.LOST, exact.TAIL, exact.CUT, "FP32 numbers"),
        differs="Of FP16's normal numbers: it has none above 65,504, and coarser ones below 2^-14.",
    ),
    Claim(
        PAPER,
        "Section 3.1, bytes",
        "The difference instead of an FP32 copy takes at least a third less memory.",
        EXACT,
        checks=tuple(
            Check(
                f"{own[1]} of {own[0]}: a third less than {copied[1]}",
                exact.BYTES,
                ", ".join(own),
                than=", ".join(copied),
                how="ratio",
                high=2 / 3,
            )
            for own, copied in zip(KEPT, COPIED, strict=True)
        ),
        shows=(exact.BYTES,),
    ),
    Claim(
        PAPER,
        "Section 4.1, clipping",
        "Where the step is inside the backward pass, hooks of the parameters clip gradients, and "
        "unscale them.",
        HOOKS,
        checks=(
            *(
                Check(f"{case}: the usual loop's bits", clipping.DIFFERENT, case, low=0, high=0)
                for case in (clipping.VALUE, clipping.SCALE)
            ),
            Check("no gradients stay", clipping.LEFT, "fused", low=0, high=0),
            Check("a tenth is clipped", clipping.CLIPPED, clipping.VALUE, low=0.1, role="premise"),
            Check(
                "clipping changes bits", clipping.DIFFERENT, clipping.NONE, low=1, role="premise"
            ),
            *(
                Check(
                    f"{case}: the usual loop's bits, without a hook",
                    clipping.DIFFERENT,
                    case,
                    low=0,
                    high=0,
                    role="aside",
                )
                for case in (clipping.NORM, clipping.SUM)
            ),
        ),
        differs="The paper rules out what needs all gradients at once, and accumulation: here "
        "max_norm= takes a second pass, and accumulate= a buffer.",
    ),
    Claim(
        PAPER,
        "Section 4, divergence",
        "On the recommendation model 8 extra bits train where FP16 alone diverges.",
        not_run="the paper's Figure 4 has FP16 losing part of the accuracy, as it does here; when "
        "it diverges is not said",
    ),
    Claim(
        PAPER,
        "Section 4, maximum",
        "In theory at most 60 % of the peak can be saved.",
        not_run="the paper does not say of what: of the 10 bytes of section 1 that are no states 4 "
        "stay, which is 60 % less, and that row has them",
    ),
    Claim(
        PAPER,
        "Section 4, stochastic rounding",
        "Stochastic rounding is slower, near FP32's speed.",
        not_run="it is about a GPU's kernels; Figure 6 has its errors",
    ),
    Claim(
        PAPER,
        "Table 3, times",
        "With 8 extra bits training takes 20 minutes, with 13 and stochastic rounding 38, in mixed "
        "precision 24, in FP32 42.",
        not_run="they are a V100's, whose FP16 units a CPU does not have",
    ),
    Claim(
        PAPER,
        "Figure 2",
        "Over three steps of a model of two billion parameters, the peak is 54 % lower than with "
        "torch's mixed precision.",
        TIMELINES,
        checks=(
            _saves("54 %, weight decay, foreach", f"{EIGHT}-decay", FOREACH, 0.54),
            _saves("54 %, backward pass inside autocast", EIGHT, INSIDE, 0.54),
            _saves("54 %, zero_grad() before the backward pass", EIGHT, LATE, 0.54),
        ),
        published=published("peak bytes per parameter", {EIGHT: 0.46, LATE: 1.0}),
        shows=(
            "peak bytes per parameter",
            *(f"{c} at the peak" for c in CATEGORIES),
        ),
        curves=("bytes per parameter",),
        along="moment of the timeline",
        differs="The paper's loop is not given: of torch's, three that keep FP16 copies of all "
        "parameters alive. Its peaks are given here as shares.",
    ),
    Claim(
        PAPER,
        "Figure 3",
        "Operations with extra bits move as many bytes in a second as torch's, and somewhat fewer "
        "where numbers share words.",
        SPEEDS,
        checks=(
            # A tenth less is what a figure without numbers still shows as the same.
            *(
                Check(
                    f"{k} bits as torch's addition",
                    "share of a copy's bandwidth",
                    f"extra-bits-{k}-truncate",
                    than=throughput.TORCH,
                    how="ratio",
                    low=0.9,
                )
                for k in WHOLE
            ),
            Check(
                "others move less",
                "share of a copy's bandwidth",
                "other bits",
                than="8 and 16 bits",
                how="ratio",
                high=1.0 - 1e-9,
            ),
        ),
        shows=("share of a copy's bandwidth", "seconds"),
        differs="On a CPU, against a copy of the same machine by turns; the paper's on an A100, "
        "against its printed bandwidth. The operation is a whole step of SGD.",
    ),
    Claim(
        PAPER,
        "Figure 4",
        "Of a DLRM in FP16, 8 extra bits give FP32's AUC; FP16 alone loses part of it.",
        CLICKS,
        checks=(
            # A figure without numbers: a tenth of a point of AUC is what it would not show.
            Check(f"{EIGHT} reaches FP32", "AUC", CLICKS_8, than=CLICKS_32, low=-0.001, high=0.001),
            Check("FP16 alone is behind FP32", "AUC", CLICKS_16, than=CLICKS_32, high=-1e-12),
            Check(f"FP16 alone is behind {EIGHT}", "AUC", CLICKS_16, than=CLICKS_8, high=-1e-12),
        ),
        shows=("AUC", "log loss", "accuracy"),
        curves=("training loss", "AUC"),
        differs="Tables are small, and examples are generated instead of Criteo's: clicks depend "
        "on pairs of categories. Parameters and gradients are in FP16, activations in FP32. "
        f"{_CODING}",
    ),
    Claim(
        PAPER,
        "Figure 5",
        "A DCGAN in BF16 is better with 8 extra bits than without, and no faster than in FP32.",
        GENERATED,
        checks=(
            *(
                Check(
                    f"{precision} is better than BF16 alone",
                    "Fréchet distance of pixels",
                    precision,
                    than=ALONE,
                    how="ratio",
                    high=1.0 - 1e-9,
                )
                for precision in (EIGHT, CUT)
            ),
            *(
                Check(
                    f"{precision} is no faster than FP32",
                    "seconds of a step",
                    precision,
                    than=WIDE,
                    how="ratio",
                    low=1.0,
                )
                for precision in (EIGHT, CUT)
            ),
        ),
        differs="On digits of 8 x 8, judged by their pixels, instead of bedrooms of LSUN and the "
        "scores of an Inception network; on a CPU, and with another rate and fewer numbers to draw "
        "from. Extra bits to nearest, our default, and cut off, as the paper has them.",
    ),
    Claim(
        PAPER,
        "Section 3.2",
        "With the step inside the backward pass, gradients never stay, and nothing else changes.",
        FUSED,
        checks=(
            Check("the same bits", "weights that differ", "fused", low=0, high=0),
            Check("no gradients stay", "gradients left", "fused", low=0, high=0),
            Check(
                "all gradients are alive otherwise",
                "largest gradients over all",
                "not fused",
                low=1.0 - 1e-9,
            ),
            Check(
                "fewer are alive",
                "largest gradients over all",
                "fused",
                than="not fused",
                how="ratio",
                high=1.0 - 1e-9,
            ),
        ),
        differs="Of the DCGAN's two networks, whose generator's pass does not step the other one.",
    ),
    Claim(
        PAPER,
        "Figure 6",
        "After one addition, 8 extra bits that are cut are worse than FP16 alone; after many, cut "
        "or stochastic ones are better. Stochastic rounding is more accurate than cutting.",
        ERRORS,
        checks=tuple(
            check
            for name in forward_error.FORMATS
            for check in (
                _smaller(
                    f"{name} alone beats {name}+8 truncate after one addition",
                    name,
                    f"{name}+8 truncate",
                ),
                _smaller(
                    f"{name}+8 stochastic beats {name}+8 truncate after one addition",
                    f"{name}+8 stochastic",
                    f"{name}+8 truncate",
                ),
                *(
                    Check(
                        f"{name}+8 {coding} beats {name} alone after 64",
                        _BETTER,
                        f"{name}+8 {coding}",
                        than=name,
                        how="ratio",
                        # "Significantly": by more than half, whatever the chance of the draw.
                        high=0.5,
                    )
                    for coding in ("truncate", "stochastic")
                ),
                Check(
                    f"{name}+8 stochastic beats {name}+8 truncate after 64",
                    _BETTER,
                    f"{name}+8 stochastic",
                    than=f"{name}+8 truncate",
                    how="ratio",
                    high=1.0 - 1e-9,
                ),
            )
        ),
        curves=("error by condition number",),
        along="condition number",
        differs="Errors are in units of the format's round-off; BF16 and other numbers of bits are "
        "ours.",
    ),
    Claim(
        PAPER,
        "Table 2",
        "Fusing saves 11 % of the peak of fine-tuning T5, and takes 3 to 4 % longer.",
        SENTENCES,
        published=published(
            "peak MiB",
            {
                f"{_GLUE[task]}, {way}": value
                for task, row in _TABLE_2.items()
                for way, value in ((seq2seq.FREED, row[0]), (seq2seq.FUSED, row[1]))
            },
            more={
                "time beside not fused": {
                    f"{_GLUE[task]}, {seq2seq.FUSED}": row[3] / row[2]
                    for task, row in _TABLE_2.items()
                }
            },
        ),
        checks=tuple(
            check
            for task in _GLUE.values()
            for check in (
                Check(
                    f"{task}: the same bits",
                    "weights that differ",
                    f"{task}, {seq2seq.FUSED}",
                    low=0,
                    high=0,
                ),
                # Three quarters of the paper's share, as of Collage's peaks.
                *(
                    Check(
                        f"{task}: at least 8 % lower than {way}",
                        "peak MiB",
                        f"{task}, {seq2seq.FUSED}",
                        than=f"{task}, {way}",
                        how="ratio",
                        high=1 - 0.75 * 0.11,
                    )
                    for way in (seq2seq.FREED, seq2seq.KEPT)
                ),
                Check(
                    f"{task}: at most 5 % longer",
                    "time beside not fused",
                    f"{task}, {seq2seq.FUSED}",
                    high=1.05,
                ),
            )
        ),
        differs="Generated tasks instead of GLUE's, drawn weights instead of flan-t5-large's. The "
        "3.1 GB that the paper saves are all gradients of 780 million FP32 parameters: its loop "
        "keeps them through the forward pass, and one that frees them has less to save.",
    ),
    Claim(
        PAPER,
        "Table 3",
        "Of ResNet-18, 16 bits with or without extra bits are as accurate as FP32 and mixed "
        "precision; E5M2 needs 8 extra bits. Extra bits take less memory than mixed precision.",
        PICTURES,
        published=_TABLE_3_PRINTED,
        checks=_AS_ACCURATE,
        shows=("accuracy", "val loss", "peak MiB", "bytes per parameter", "training loss"),
        curves=("training loss", "accuracy"),
        differs=f"{_DIGITS} Live tensors on a CPU; times are not compared.",
    ),
    Claim(
        PAPER,
        "Table 3, colour",
        "The same of colour pictures of 32 x 32 in ten classes.",
        SHAPED,
        published=_TABLE_3_PRINTED,
        checks=_AS_ACCURATE,
        shows=("accuracy", "val loss", "peak MiB", "bytes per parameter", "training loss"),
        curves=("training loss", "accuracy"),
        differs="The pictures are drawn: figures with two to six lobes, filled or rings, whose "
        "number of lobes and kind is the class. Live tensors on a CPU; times are not compared.",
    ),
    Claim(
        PAPER,
        "Appendix A, GLUE",
        "BERT-base is fine-tuned on GLUE; by section 4, performance is that of FP32, with less "
        "memory.",
        BERTS,
        checks=(
            # A point, as of Table 3.
            *(
                Check(
                    f"{name} is as good as {WIDE}",
                    fine_tuning.AVERAGE,
                    f"{BERT} {name}",
                    than=f"{BERT} {WIDE}",
                    low=-0.01,
                )
                for name in (CUT, EIGHT)
            ),
            *(
                Check(
                    f"{name} takes less memory than {WIDE}",
                    fine_tuning.PEAK,
                    f"{BERT} {name}",
                    than=f"{BERT} {WIDE}",
                    how="ratio",
                    high=1.0 - 1e-9,
                )
                for name in (CUT, EIGHT)
            ),
            Check(
                "pre-training helps",
                fine_tuning.AVERAGE,
                f"{BERT} {WIDE}",
                than=f"{BERT} {fine_tuning.UNTRAINED}",
                low=0.0,
                role="premise",
            ),
            Check(
                f"{ALONE} is behind {EIGHT}",
                fine_tuning.AVERAGE,
                f"{BERT} {ALONE}",
                than=f"{BERT} {EIGHT}",
                high=0.0,
                role="aside",
            ),
        ),
        shows=(fine_tuning.AVERAGE, *sentence_tasks.TASKS, fine_tuning.PEAK),
        differs="The paper prints no numbers of it. A small BERT, pre-trained here on Shakespeare, "
        "and five tasks made of lines of it, in the kinds of CoLA (two), SST-2, MRPC and MNLI. "
        "Parameters are in BF16, 8 extra bits beside them, the step inside the backward pass; "
        "live tensors on a CPU.",
    ),
    Claim(
        PAPER,
        "Abstract, memory",
        "The peak is up to 25 % lower; 20 to 25 % in real training, section 4 says of ResNet-18.",
        PEAKS,
        published=published("peak MiB", {name: row[1] for name, row in _TABLE_3.items()}),
        checks=(
            Check(
                f"{CUT} saves at least 20 % of {WIDE}",
                "peak MiB",
                CUT,
                than=WIDE,
                how="ratio",
                high=0.8,
            ),
            Check(
                f"{CUT} saves at least 16 % of {AMP}",
                "peak MiB",
                CUT,
                than=AMP,
                how="ratio",
                high=0.84,
            ),
        ),
        shows=("peak MiB",),
        differs="Than what is not said: by the paper's Table 3 it is 20 % lower than FP32's, and "
        "16 % than mixed precision's. Live tensors on a CPU; the pictures are drawn, in CIFAR-10's "
        "shape.",
    ),
    Claim(
        PAPER,
        "Abstract, speed",
        "Training is 15 % faster, of ResNet-18 16 %.",
        not_run="it is about a GPU's FP16 units: a CPU computes FP16 by converting it",
    ),
    Claim(
        PAPER,
        "Section 4, fused optimizer",
        "Training is 2 to 10 % faster with one launch for all parameters than with one for each.",
        ONE_PASS,
        checks=(
            Check(
                "one for each takes 2 % longer",
                one_pass.SECONDS,
                one_pass.EACH,
                than=one_pass.TOGETHER,
                how="ratio",
                low=1.02,
            ),
            Check(
                "of the optimizer's part, one for each takes longer",
                one_pass.OF_STEP,
                one_pass.EACH,
                than=one_pass.TOGETHER,
                how="ratio",
                low=1.0 + 1e-9,
                role="aside",
            ),
            Check(
                "the same bits", "weights that differ", one_pass.EACH, low=0, high=0, role="premise"
            ),
        ),
        differs="On a CPU: a pass is a call and no launch; with one optimizer for each parameter. "
        "Numbers with 8 extra bits are cut off, as in the paper.",
    ),
)
