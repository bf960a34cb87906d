"""One GRPO step on real text: prompts that answers share are computed once, split over all ranks.

    torchrun --nproc-per-node 4 examples/grpo_tree.py

Prompts are beginnings of definitions of Python's standard library, answers what follows there and
in other definitions. An answer's reward is the share of its bytes that the prompt's own text has at
that place; advantages are rewards normalised over a prompt's answers. Prompts and answers are one
tw.Tree. Policy, old policy and reference run over the tree; tree.log_probs gives every rank the
log-probabilities of all answers. The loss is clipped and has a KL term, as in DeepSeekMath (2024).
At the end every rank computes the step from the separate sequences with dense attention, and loss
and gradient must agree to rounding. The model is train_lm's. Plain python is one rank.
"""

import argparse
import copy
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import tilewise as tw
from tilewise_tools import demo

try:
    from examples import train_lm
except ModuleNotFoundError:  # run as a script: the path has this folder, not the one above it
    import train_lm

CLIP, KL_WEIGHT = 0.2, 0.04
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Rollouts:
    """Answers to prompts, the answers to one prompt side by side.

    Attributes:
        sequences: bytes of prompt and answer.
        prompt_lengths, advantages: of each sequence.
    """

    sequences: list[list[int]]
    prompt_lengths: list[int]
    advantages: list[float]


def rollouts(prompts: int, answers: int, length: int, seed: int) -> Rollouts:
    rng = np.random.default_rng(seed)
    texts = [text for text in demo.documents() if len(text) >= 2 * length]
    found = Rollouts([], [], [])
    for _ in range(prompts):
        own, *others = (list(texts[i]) for i in rng.choice(len(texts), answers, replace=False))
        rewards = []
        for text in (own, *others):
            answer = text[length : length + int(rng.integers(length // 4, length))]
            found.sequences.append([*own[:length], *answer])
            found.prompt_lengths.append(length)
            same = [a == b for a, b in zip(answer, own[length:], strict=False)]
            rewards.append(sum(same) / len(answer))
        spread = np.std(rewards) + 1e-6
        found.advantages.extend(((np.array(rewards) - np.mean(rewards)) / spread).tolist())
    return found


def grpo_loss(
    new: list[Tensor], old: list[Tensor], reference: list[Tensor], batch: Rollouts
) -> Tensor:
    """Mean over sequences of the mean over their answer's tokens."""
    losses = []
    for i, (advantage, prompt) in enumerate(
        zip(batch.advantages, batch.prompt_lengths, strict=True)
    ):
        # the first value is of the second token
        policy, before, ref = (x[i][prompt - 1 :] for x in (new, old, reference))
        ratio = (policy - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        kl = (ref - policy).exp() - (ref - policy) - 1
        losses.append((KL_WEIGHT * kl - gain).mean())
    return torch.stack(losses).mean()


def models(seed: int) -> tuple[train_lm.Llama, train_lm.Llama, train_lm.Llama]:
    """Policy, the policy that answered (a little earlier) and the reference, in fp64."""
    torch.manual_seed(seed)
    policy = train_lm.Llama(train_lm.Config()).double()
    others = copy.deepcopy(policy), copy.deepcopy(policy)
    for model in others:
        for p in model.parameters():
            p.data += 0.002 * torch.randn_like(p)
            p.requires_grad_(False)
    return policy, *others


class OverTree:
    """All sequences as one tree, split over the ranks."""

    def __init__(self, batch: Rollouts) -> None:
        self.tree = tw.Tree.from_sequences(batch.sequences)
        mask, num_tokens = self.tree.mask, self.tree.num_tokens
        layout = tw.balanced(mask, num_tokens, train_lm.ranks()[1], chunk=8)
        self.cp = tw.ContextParallel(
            num_tokens=num_tokens, mask=mask, layout=layout, strategy=tw.needed(mask, layout)
        )

    def log_probs(self, model: train_lm.Llama) -> list[Tensor]:
        tokens, position_ids = self.tree.shard(self.cp)
        logits = model(tokens, position_ids, self.cp.attention)
        return self.tree.log_probs(logits, self.cp)

    def sum_gradients(self, model: train_lm.Llama) -> None:
        """The loss of all log-probabilities counts once: what ranks have of it adds up."""
        for p in model.parameters():
            if dist.is_initialized():
                dist.all_reduce(p.grad)


class Apart:
    """Every sequence by itself in this process, with torch's own attention."""

    def __init__(self, batch: Rollouts) -> None:
        self.sequences = [torch.tensor(sequence) for sequence in batch.sequences]

    def log_probs(self, model: train_lm.Llama) -> list[Tensor]:
        values = []
        for tokens in self.sequences:
            attention = train_lm.Whole().attention(tw.Causal(), len(tokens))
            logits = model(tokens, torch.arange(len(tokens)), attention)
            values.append(logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
        return values

    def sum_gradients(self, model: train_lm.Llama) -> None:
        """Nothing is split."""


def step(way: OverTree | Apart, batch: Rollouts, args: argparse.Namespace) -> tuple[float, Tensor]:
    """One step of the policy: its loss, and the gradient of all parameters."""
    policy, old, reference = models(args.seed)
    optimizer = torch.optim.SGD(policy.parameters(), lr=args.learning_rate)
    loss = grpo_loss(*map(way.log_probs, (policy, old, reference)), batch)
    loss.backward()
    way.sum_gradients(policy)
    optimizer.step()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in policy.parameters()])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--length", type=int, default=120, help="of a prompt; answers are shorter")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    """One step over the tree, one over the separate sequences; the largest difference."""
    args = arguments(argv)
    console = Console(quiet=train_lm.ranks()[0] != 0)
    batch = rollouts(args.prompts, args.answers, args.length, args.seed)
    way = OverTree(batch)
    console.print(
        f"{way.tree}: {way.tree.num_tokens / way.tree.num_tokens_apart:.0%} of the tokens"
    )
    loss, gradient = step(way, batch, args)
    console.print(f"loss {loss:.6f} on {train_lm.ranks()[1]} ranks")
    wanted, reference = step(Apart(batch), batch, args)
    difference = float((gradient - reference).abs().max() / reference.abs().max())
    difference = max(difference, abs(loss - wanted))
    console.print(f"largest difference to separate sequences, loss and gradient: {difference:.1e}")
    if not difference <= TOLERANCE:
        raise SystemExit(f"tree and separate sequences differ by {difference}: over {TOLERANCE}")
    return difference


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
