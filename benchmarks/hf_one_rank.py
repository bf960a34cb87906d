"""Training steps of a transformers model on one rank: tilewise's attention beside the stock one.

    python -m benchmarks.hf_one_rank                     # 1024 and 4096 tokens, 5 rounds
    python -m benchmarks.hf_one_rank --tokens 8192

A Llama of two layers with grouped queries in fp32. Processor time of a step, the smallest of all
rounds, and the largest memory of a process that did nothing else; each way runs in processes of its
own, in turn. Where nothing is split, ParallelismConfig(cp_size=1) leaves the model as it is.
"""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tilewise as tw
from tilewise.integrations import hf
from tilewise.transport.processes import run_ranks
from tilewise_tools.naming import Parser, run_script, whole_number

WAYS = ("sdpa", "tilewise")
STEPS = 3


class Measured(NamedTuple):
    """Seconds of processor time of a step, and bytes of memory at most."""

    seconds: float
    peak_bytes: int


def measure(rank: int, way: str, num_tokens: int) -> Measured:
    """One way in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, max_position_embeddings=num_tokens)
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    ids = torch.randint(0, 256, (1, num_tokens))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if way == "tilewise":
        cp = tw.ContextParallel(num_tokens=num_tokens, mask=tw.Causal())
        model, inputs = hf.parallelize(model, cp), hf.shard(cp, ids, labels=ids)
    seconds = []
    for _ in range(1 + STEPS):
        start = time.process_time()
        model(**inputs).loss.backward()
        seconds.append(time.process_time() - start)
    return Measured(min(seconds[1:]), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main(argv: list[str] | None = None) -> None:
    """Print a row for each number of tokens."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=whole_number, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=whole_number, default=5)
    options = parser.parse_args(argv)
    print("tokens  sdpa ms  tilewise ms  ratio  sdpa MB  tilewise MB")
    for num_tokens in options.tokens:
        best = dict.fromkeys(WAYS, Measured(float("inf"), 0))
        for _ in range(options.rounds):
            for way in WAYS:
                (found,) = run_ranks(1, measure, way, num_tokens)
                seconds = min(best[way].seconds, found.seconds)
                best[way] = Measured(seconds, max(best[way].peak_bytes, found.peak_bytes))
        stock, ours = (best[way] for way in WAYS)
        print(
            f"{num_tokens:6}  {1e3 * stock.seconds:7.0f}  {1e3 * ours.seconds:11.0f}  "
            f"{ours.seconds / stock.seconds:5.2f}  {stock.peak_bytes / 1e6:7.0f}  "
            f"{ours.peak_bytes / 1e6:11.0f}",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
