"""The pictures of docs/parity.md: what wrong splits attend to, read by tw.effective_mask.

python benchmarks/parity_pictures.py
"""

from pathlib import Path

import torch
from torch import Tensor

import tilewise as tw
from tilewise_tools.naming import Parser, run_script

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img" / "parity"
T, RANKS = 48, 4
AT = torch.arange(T)
SHARD = AT * RANKS // T
CAUSAL = tw.Causal()
WINDOW = CAUSAL & tw.Window(8, 0)
PACKED = CAUSAL & tw.Document([0, 20, T])


def dense(mask: tw.masks.Mask) -> Tensor:
    return torch.as_tensor(mask.dense(AT, AT))


SHOWN = {
    "mask_ignored": (dense(tw.Full()), CAUSAL),
    "window_ignored": (dense(CAUSAL), WINDOW),
    "window_per_block": (dense(CAUSAL) & ((AT % 12)[:, None] - AT % 12 <= 8), WINDOW),
    "documents_ignored": (dense(CAUSAL), PACKED),
    "shard_only": (dense(CAUSAL) & (SHARD[:, None] == SHARD), CAUSAL),
}


def main() -> None:
    Parser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for cause, (allowed, asked) in SHOWN.items():

        def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor = allowed) -> Tensor:
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            p = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
            return torch.einsum("hqk,khd->qhd", p, v)

        seen = tw.effective_mask(attend, num_tokens=T, num_heads=1)
        assert seen.causes(asked)[0] == cause, (cause, seen.explain(asked))
        (FOLDER / f"{cause}.svg").write_text(seen.svg(asked))


if __name__ == "__main__":
    run_script(main)
