"""Which models of transformers run with their sequence split: a table, made by running them.

    python -m benchmarks.hf_models              # all causal and masked language models
    python -m benchmarks.hf_models Llama Bert   # those whose class has one of these in its name

Every class is asked `hf.refusal`, which is what `hf.check_model` asks: is it refused by its
configuration, and if not, does a tiny model of it (random weights, its class's default
configuration) give the same loss and the same gradients on three ranks as unsplit? Classes are
run in processes of their own, --jobs at a time, each for at most --seconds.
"""

import argparse
import logging
import multiprocessing as mp
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "integrations" / "huggingface_models.md"
# What default configurations leave open.
OPEN = {"num_experts_per_tok": 2, "head_dim": 16, "n_routed_experts": 4, "pad_token_id": 0, "vocab_size": 128}


class Row(NamedTuple):
    """One class: how it went and, where it is refused, why."""

    model: str
    outcome: str
    reason: str
