"""Heat maps of what mixtures of representations decided."""

from __future__ import annotations

import pytest
import torch
from matplotlib.image import imread

from subulp import diagnostics
from subulp.lab.report.mixture_plot import plot_mix
from subulp.nn import MoR, convert_to_mor


def test_the_heat_map_is_readable_without_colour(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    convert_to_mor(model, MoR("subtensor-3way", "channel"))
    model(torch.randn(32, 64)).square().mean().backward()
    mix = diagnostics.representation_mix(model)
    plot_mix(mix, tmp_path / "mix.png")
    image = imread(tmp_path / "mix.png")
    assert image.shape[0] > 300
    assert image.shape[1] > 1000
    # Greys only: the three channels are one.
    assert (image[..., 0] == image[..., 1]).all()
    assert (image[..., 0] == image[..., 2]).all()
    plot_mix(mix.operands[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()


def test_nothing_to_show():
    with pytest.raises(ValueError, match="mix is empty"):
        plot_mix([], "none.png")
