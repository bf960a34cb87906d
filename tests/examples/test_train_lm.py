"""The training example: split training is unsplit training, and it learns."""

import json
from pathlib import Path

import pytest
import torch
from processes.launcher import run_processes

from examples import train_lm

SMALL = ["--num-tokens", "257", "--steps", "4"]


def train_and_compare(rank: int, folder: str, strategy: str) -> None:
    out, save = Path(folder), Path(folder) / "model.pt"
    args = [*SMALL, "--out", str(out), "--save", str(save), "--strategy", strategy]
    train_lm.main(args)


OTHER = pytest.param("ulysses(2, inner=ring(1))", marks=pytest.mark.slow)


@pytest.mark.parametrize("strategy", ["auto", OTHER])
def test_split_training_equals_unsplit_training(strategy: str, tmp_path: Path):
    run_processes(2, train_and_compare, str(tmp_path), strategy)
    written = json.loads((tmp_path / "losses.json").read_text())
    assert written["num_ranks"] == 2
    assert len(written["split"]) == len(written["whole"]) == 4
    assert written["split"] == pytest.approx(written["whole"], rel=1e-12)
    assert written["largest_parameter_difference"] < 1e-9
    assert written["split"][-1] < written["split"][0]
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    saved = torch.load(tmp_path / "model.pt")
    model = train_lm.Llama(train_lm.Config(**saved["config"]))
    model.load_state_dict(saved["model"])


class ForgetsToSum(train_lm.Split):
    """As Split, but each rank keeps its own share of the gradients."""

    def __init__(self, num_tokens: int, strategy: str) -> None:
        super().__init__(num_tokens, strategy)
        self.sum_gradients = lambda model: None


def train_without_sums(rank: int) -> float:
    args = train_lm.arguments(SMALL)
    _, split = train_lm.train(ForgetsToSum(args.num_tokens, "auto"), args, lambda loss: None)
    _, whole = train_lm.train(train_lm.Whole(), args, lambda loss: None)
    return max(abs(a - b) / b for a, b in zip(split, whole, strict=True))


def test_the_comparison_notices_gradients_that_are_not_summed():
    assert min(run_processes(2, train_without_sums)) > 1e-6


def test_one_rank_needs_no_group(tmp_path: Path):
    train_lm.main(["--num-tokens", "130", "--steps", "2", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "losses.json").read_text())
    assert written["num_ranks"] == 1
    assert written["largest_relative_loss_difference"] < 1e-12


def test_labels_stay_within_their_documents():
    batch = next(train_lm.batches(600, seed=3))
    ends = batch.labels == -100
    assert torch.equal(batch.labels[:-1][~ends[:-1]], batch.tokens[1:][~ends[:-1]])
    starts = batch.position_ids == 0
    assert ends[-1] and torch.equal(starts[1:], ends[:-1])


def canonical_losses(rank: int, strategy: str) -> tuple[list[float], float]:
    """The losses, and a sum of all parameters after the last step."""
    args = train_lm.arguments(["--num-tokens", "300", "--steps", "3", "--dtype", "float32"])
    way = train_lm.Split(args.num_tokens, strategy, reduction="canonical")
    model, losses = train_lm.train(way, args, lambda loss: None)
    return losses, float(sum(p.detach().double().sum() for p in model.parameters()))


def test_a_canonical_reduction_trains_to_the_same_bits_on_any_number_of_ranks():
    alone = canonical_losses(0, "auto")
    assert alone[0][-1] < alone[0][0]
    for n, strategy in ((2, "ulysses(2)"), (3, "ring(3)")):
        assert run_processes(n, canonical_losses, strategy) == [alone] * n
