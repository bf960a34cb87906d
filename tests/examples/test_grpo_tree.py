"""The GRPO example: a step over the tree is that over the separate sequences."""

import pytest
from processes.launcher import run_processes

from examples import grpo_tree

SMALL = ["--length", "40", "--answers", "3", "--prompts", "1"]


def on_rank(rank: int) -> float:
    return grpo_tree.main(SMALL)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_over_the_tree_is_that_over_the_sequences(num_ranks: int):
    found = [grpo_tree.main(SMALL)] if num_ranks == 1 else run_processes(num_ranks, on_rank)
    assert max(found) < 1e-12


def test_answers_share_their_prompt_and_advantages_are_normalised():
    batch = grpo_tree.rollouts(2, 4, 40, seed=1)
    tree = grpo_tree.OverTree(batch).tree
    assert tree.num_tokens <= tree.num_tokens_apart - 2 * 3 * 40
    for first in (0, 4):
        assert len({tuple(s[:40]) for s in batch.sequences[first : first + 4]}) == 1
        assert sum(batch.advantages[first : first + 4]) == pytest.approx(0)
        assert max(batch.advantages[first : first + 4]) > 0.5
