"""A small DCGAN on the bundled digits: two optimizers, one of which a handle pauses.

"Memory Efficient Mixed Precision Optimizers", section 3.2 and Figure 5. Pictures are judged by the
Fréchet distance of their pixels, each set taken for a normal distribution.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .... import optim
from ....diagnostics import track_memory
from ...tasks.image.images import load_images
from ..found import Found, Observation

LATENT, LR = 32, 5e-4
"""Numbers that a picture is drawn from, and Adam's rate: these suit digits of 8 x 8."""

_BETA1, _JUDGED = 0.64, 1024


def _generator(width: int, latent: int) -> nn.Sequential:
    """From ``(batch, latent, 1, 1)`` to pictures ``(batch, 1, 8, 8)``, each pixel from -1 to 1."""
    return nn.Sequential(
        nn.ConvTranspose2d(latent, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False),
        nn.Tanh(),
    )


def _discriminator(width: int) -> nn.Sequential:
    """From pictures to logits ``(batch, 1, 1, 1)``."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4, bias=False),
    )


@dataclass
class Pair:
    """Two networks in training.

    Attributes:
        generator: Makes pictures.
        discriminator: Tells them from real ones.
        steps: Their optimizers.
        judged: What fuses the discriminator's step, if it is fused.
        dtype: Of parameters and activations.
    """

    generator: nn.Sequential
    discriminator: nn.Sequential
    steps: tuple[optim.Adam, optim.Adam]
    judged: optim.FusedBackward | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        precision: str,
        width: int,
        seed: int,
        *,
        fused: bool,
        lr: float = LR,
        latent: int = LATENT,
    ) -> Pair:
        """Networks whose first weights the seed alone decides."""
        torch.manual_seed(seed)
        networks = _generator(width, latent), _discriminator(width)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        for network in networks:
            for module in network.modules():
                if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                    nn.init.normal_(module.weight, std=0.02)
            network.to(dtype)
        made, told = (
            optim.Adam(n.parameters(), lr=lr, betas=(_BETA1, 0.999), precision=precision, seed=seed)
            for n in networks
        )
        judged = None
        if fused:
            optim.fuse_backward(networks[0], made)
            judged = optim.fuse_backward(networks[1], told)
        return cls(*networks, (made, told), judged, dtype)

    def step(self, real: Tensor, drawn: Tensor) -> None:
        """The discriminator's step, and then the generator's through the discriminator."""
        real, drawn = real.to(self.dtype), drawn.to(self.dtype)
        made, told = self.steps
        fake = self.generator(drawn)
        self._told(real, fake.detach()).backward()  # type: ignore[no-untyped-call]
        told.step()
        told.zero_grad()
        with self.judged.paused() if self.judged is not None else nullcontext():
            F.softplus(-self.discriminator(fake).float()).mean().backward()  # type: ignore[no-untyped-call]
        made.step()
        made.zero_grad()
        # What the generator's loss left in the discriminator.
        for p in self.discriminator.parameters():
            p.grad = None

    def _told(self, real: Tensor, fake: Tensor) -> Tensor:
        wrong = F.softplus(-self.discriminator(real).float())
        return (wrong + F.softplus(self.discriminator(fake).float())).mean()

    def parameters(self) -> list[Tensor]:
        """Those of both networks."""
        return [*self.generator.parameters(), *self.discriminator.parameters()]


def _pictures() -> Tensor:
    """The digits, FP32 ``(count, 1, 8, 8)`` from -1 to 1."""
    images = load_images("digits")
    pictures = images.train * images.deviation + images.mean
    return 2 * (pictures - pictures.min()) / (pictures.max() - pictures.min()) - 1


def _inputs(
    pictures: Tensor, steps: int, batch: int, seed: int, latent: int = LATENT
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            pictures[torch.randint(len(pictures), (batch,), generator=generator)],
            torch.randn(batch, latent, 1, 1, generator=generator),
        )
        for _ in range(steps)
    ]


def quality(
    precisions: list[str],
    width: int,
    steps: int,
    batch: int,
    seeds: list[int],
    lr: float = LR,
    latent: int = LATENT,
) -> Found:
    """Fréchet distances of pixels, and seconds of a step, precisions by turns.

    Args:
        precisions: Of Adam; under ``"fp32"`` the networks are in FP32, else in BF16.
        width: Channels of the last hidden layer.
        steps: Of both networks.
        batch: Pictures.
        seeds: Of weights and inputs.
        lr: Of both optimizers (default: :data:`LR`).
        latent: Numbers that a picture is drawn from (default: :data:`LATENT`).
    """
    pictures = _pictures()
    found = []
    for seed in seeds:
        pairs = {
            name: Pair.of(name, width, seed, fused=False, lr=lr, latent=latent)
            for name in precisions
        }
        seconds: dict[str, list[float]] = {name: [] for name in precisions}
        for real, drawn in _inputs(pictures, steps, batch, seed, latent):
            for name, pair in pairs.items():
                begin = time.perf_counter()
                pair.step(real, drawn)
                seconds[name].append(time.perf_counter() - begin)
        drawn = torch.randn(_JUDGED, latent, 1, 1, generator=torch.Generator().manual_seed(0))
        for name, pair in pairs.items():
            with torch.no_grad():
                fake = pair.generator(drawn.to(pair.dtype)).float()
            distance = frechet(pictures.flatten(1), fake.flatten(1))
            found.append(Observation(name, "Fréchet distance of pixels", distance, seed))
            found.append(
                Observation(name, "seconds of a step", statistics.median(seconds[name]), seed)
            )
    return Found(tuple(found))


def frechet(a: Tensor, b: Tensor) -> float:
    """Squared Fréchet distance of normal distributions with the moments of two sets of vectors.

    Args:
        a: FP32 ``(count, dim)``.
        b: The same of another count.
    """
    a, b = a.double(), b.double()
    covariance, other = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    means = (a.mean(0) - b.mean(0)).square().sum()
    return float(means + covariance.trace() + other.trace() - 2 * cross)


def fused(precision: str, width: int, steps: int, batch: int) -> Found:
    """The step inside the backward pass against the step after it: bits, and gradients alive.

    Args:
        precision: Of Adam.
        width: Channels of the last hidden layer.
        steps: Of both networks.
        batch: Pictures.
    """
    inputs = _inputs(_pictures(), steps, batch, 0)
    found, weights = [], []
    for case in ("not fused", "fused"):
        pair = Pair.of(precision, width, 0, fused=case == "fused")
        for real, drawn in inputs[:-1]:
            pair.step(real, drawn)
        with track_memory(pair.discriminator, pair.steps[1]) as memory:
            pair.step(*inputs[-1])
        size = sum(p.nbytes for p in pair.discriminator.parameters())
        left = sum(p.grad is not None for p in pair.parameters())
        found += [
            Observation(
                case,
                "largest gradients over all",
                memory.category_peak_bytes["gradients"] / size,
            ),
            Observation(case, "gradients left", left),
        ]
        weights.append(torch.cat([p.detach().flatten() for p in pair.parameters()]))
    differing = int((weights[0] != weights[1]).sum())
    return Found((*found, Observation("fused", "weights that differ", differing)))
