"""TRL's async GRPO on rollouts that are given, without a server, on the CPU."""

from __future__ import annotations

import queue
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from support.hf_models import VOCABULARY
from torch import Tensor

GROUP = 4  # samples of a prompt


class Rollouts:
    """A rollout worker whose samples are drawn before training begins.

    Args:
        shared: tokens that the samples of a prompt begin with; 0: they have none in common.
        longest: tokens that a sample may have behind them.
    """

    def __init__(self, shared: int, groups: int = 24, longest: int = 14) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        make = torch.Generator().manual_seed(13)

        def words(count: int) -> list[int]:
            return torch.randint(4, VOCABULARY, (count,), generator=make).tolist()

        for group in range(groups):
            prompt, turn = words(shared), words(shared // 2)
            for number in range(GROUP):
                # A second turn is common to half of a group's samples.
                before = prompt + turn * (number % 2)
                length = int(torch.randint(2, longest, (), generator=make))
                self.rollout_buffer.put(self._sample(before, words(length), group, number))

    def _sample(self, before: list[int], behind: list[int], group: int, number: int) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        tokens = before + behind
        mask = [0] * max(len(before), 1) + [1] * len(tokens[max(len(before), 1) :])
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(tokens),
            completion_mask=np.array(mask),
            old_log_probs=np.full(len(tokens), -3.9, np.float32),
            advantage=(-1.5, 0.7, 1.1, -0.3)[number],
            model_version=1000,  # never stale
            group_id=group,
            metrics={"reward": float(number)},
        )

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("more samples are wanted than there are")


class NoTransfer:
    """A weight_transfer to no server."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class PathAttention:
    """Stands for the flash-attn kernel that TRL's tree_attention loads, which is for GPUs alone."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *_: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        """Each segment of queries is the end of its keys: [tokens, heads, head_dim]."""
        assert causal
        out = []
        for rows, path in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
            queries, keys, values = q[slice(*rows)], k[slice(*path)], v[slice(*path)]
            key = torch.arange(len(keys))
            query = key[len(keys) - len(queries) :, None]
            seen = (key <= query) & ((key >= query - window_size[0]) | (window_size[0] < 0))
            heads = (x.transpose(0, 1)[None] for x in (queries, keys, values))
            part = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            out.append(part[0].transpose(0, 1))
        return torch.cat(out)


def async_grpo(
    model: Any, folder: str, tokenizer: Any, given: dict[str, Any], shared: int, split: bool
) -> Any:
    """The trainer; the one that is not split gets a stand-in for its kernel.

    Args:
        shared: as Rollouts take it.
    """
    from datasets import Dataset
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for a GPU's name
    async_grpo_trainer.compute_flops_per_token = lambda *_: 0.0  # it does not know Mixtral's fields
    if not split:
        packing._flash_attn = PathAttention
    path = f"{folder}/model-{split}"
    model.save_pretrained(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the first process alone writes
    budget = {"token_budget": 0, "per_device_train_batch_size": GROUP, "num_generations": GROUP}
    return AsyncGRPOTrainer(
        path,
        args=AsyncGRPOConfig(folder, **budget | given),
        train_dataset=Dataset.from_dict({"prompt": ["w4"] * 8}),
        processing_class=tokenizer,
        rollout_worker=Rollouts(shared),
        weight_transfer=NoTransfer(),
    )
