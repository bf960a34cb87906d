"""What ringmaster does with a model of transformers: a tiny one, split over 2 processes of a CPU.

Its Ulysses over torch's sdpa, which is what it can run without a GPU; its ring, and its layers with
a state, need CUDA kernels.
"""

from __future__ import annotations

import copy
import multiprocessing as mp
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilewise_verify.hf_proof import tiny_model

WORLD_SIZE, NUM_TOKENS = 2, 24
EXACT, WRONG, REFUSED = "exact", "another result", "does not run"
TOLERANCE = 1e-3


def is_here() -> bool:
    """Return whether ringmaster is installed."""
    return find_spec("ringmaster") is not None


def outcome(model_class: type, config: Any, seconds: float) -> str:
    """EXACT, WRONG or REFUSED, of logits; the model's loss and gradients are not looked at."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receive, send = context.Pipe(duplex=False)
        given = model_class, config, f"file://{Path(folder) / 'store'}", send
        ranks = [context.Process(target=_rank, args=(r, *given)) for r in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        send.close()
        found = []
        try:
            while len(found) < WORLD_SIZE and receive.poll(seconds):
                found.append(receive.recv())
        except EOFError:
            pass
        for process in ranks:
            process.kill()
            process.join()
    if len(found) < WORLD_SIZE or REFUSED in found:
        return REFUSED
    return WRONG if WRONG in found else EXACT


def _rank(rank: int, model_class: type, config: Any, store: str, send: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
        send.send(_split(rank, model_class, config))
    except Exception:  # whatever a model's code or ringmaster's raises
        send.send(REFUSED)


def _split(rank: int, model_class: type, config: Any) -> str:
    import ringmaster
    from ringmaster.shard import shard_batch

    whole = tiny_model(model_class, config).eval()
    ids = torch.randint(5, 60, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    model = copy.deepcopy(whole)
    with torch.no_grad():
        want = whole(input_ids=ids).logits
        made = ringmaster.RingmasterConfig(size=WORLD_SIZE, backend=ringmaster.Backend.ULYSSES)
        heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
        runtime = ringmaster.setup(made, num_kv_heads=heads, device_type="cpu", inner_attn="sdpa")
        model.set_attn_implementation(runtime.attn_implementation)
        ringmaster.wire_recurrent_layers(model)
        batch, _ = shard_batch({"input_ids": ids}, cp_rank=rank, cp_size=WORLD_SIZE)
        got = model(**batch).logits
    rows = NUM_TOKENS // WORLD_SIZE
    error = float((got - want[:, rank * rows : (rank + 1) * rows]).abs().max())
    return EXACT if error <= TOLERANCE * max(1.0, float(want.abs().max())) else WRONG
