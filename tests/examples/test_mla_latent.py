"""The example of latents: split and unsplit DeepSeek-V3 have the same losses."""

import pytest

import tilewise as tw

pytest.importorskip("transformers")
from examples import mla_latent


def test_split_training_has_the_losses_of_unsplit_training():
    args = mla_latent.arguments(["--num-tokens", "33", "--steps", "3"])
    found = tw.loopback(3, lambda rank, group: mla_latent.run(rank, group, args))
    for split, whole in found:
        assert split == pytest.approx(whole, rel=1e-7) and split[-1] < split[0]
        assert split == found[0][0]
