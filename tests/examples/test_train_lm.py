"""The training example: split training is unsplit training, and it learns."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from processes.launcher import run_processes

from examples import train_lm
from tilewise.transport.processes import run_ranks

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
    split = train_lm.train(ForgetsToSum(args.num_tokens, "auto"), args, lambda *_: None)
    whole = train_lm.train(train_lm.Whole(), args, lambda *_: None)
    return max(abs(a - b) / b for a, b in zip(split.losses, whole.losses, strict=True))


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


SHORT = "--num-tokens", "300", "--dtype", "float32"


def canonical_run(rank: int, *options: str) -> tuple[list[float], str]:
    """The losses, and a digest of all parameters after the last step."""
    args = train_lm.arguments([*options])
    way = train_lm.Split(args.num_tokens, args.strategy, reduction="canonical")
    run = train_lm.train(way, args, lambda *_: None)
    if args.save and rank == 0:
        run.save(args)
    parameters = [p.detach().numpy().tobytes() for p in run.model.parameters()]
    return run.losses, sha256(b"".join(parameters)).hexdigest()


def test_a_canonical_reduction_trains_to_the_same_bits_also_if_other_ranks_go_on(tmp_path: Path):
    path, steps = str(tmp_path / "run.pt"), ("--steps", "3")
    losses, digest = canonical_run(0, *SHORT, *steps)
    assert losses[-1] < losses[0]
    begin = *SHORT, "--strategy", "ulysses(2)", "--steps", "2", "--save", path
    assert [run[0] for run in run_processes(2, canonical_run, *begin)] == [losses[:2]] * 2
    go_on = *SHORT, "--strategy", "all_gather(3)", *steps, "--resume", path
    assert run_processes(3, canonical_run, *go_on) == [(losses, digest)] * 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_canonical_steps_have_the_same_bits_at_1_2_4_and_8_ranks_and_after_a_resume(
    tmp_path: Path,
):
    options = "--dtype", "float32", "--num-tokens", "509"

    def run(world_size: int, *more: str) -> list[tuple[list[float], str]]:
        return run_ranks(world_size, canonical_run, *options, *more, timeout_seconds=1200.0)

    alone = canonical_run(0, *options)
    assert len(alone[0]) == 60
    for n in (2, 4, 8):
        assert run(n) == [alone] * n, n
    for before, after in ((2, 4), (4, 1)):
        path = str(tmp_path / f"{before}.pt")
        run(before, "--steps", "25", "--save", path)
        assert run(after, "--resume", path) == [alone] * after


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--num-tokens", "301"), r"--num-tokens \(301\) was 300"),
        (("--steps", "1"), r"--steps \(1\) must be at least 2"),
        (("--resume", "nowhere.pt"), "no run at nowhere.pt"),
    ],
)
def test_a_run_goes_on_only_as_it_began(change: tuple[str, str], message: str, tmp_path: Path):
    path = tmp_path / "run.pt"
    args = train_lm.arguments([*SHORT, "--steps", "2", "--save", str(path)])
    model = train_lm.Llama(train_lm.Config())
    train_lm.Trained(model, torch.optim.AdamW(model.parameters()), [3.0, 2.0]).save(args)
    options = [*SHORT, "--resume", str(path), *change]
    with pytest.raises(SystemExit, match=message):
        train_lm.train(train_lm.Whole(), train_lm.arguments(options), lambda *_: None)
