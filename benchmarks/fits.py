"""What `tilewise fits` says of a training step beside what torch's CPU allocator measures.

    python -m benchmarks.fits              # three models at four lengths: a minute
    python -m benchmarks.fits --ranks 2

Measured is the most that is allocated at once in two steps of forward, backward and AdamW under
`hf.parallelize`, the model's making included, in a process for each rank. torch's profiler sees
every allocation of its CPU allocator, those inside kernels too; it does not see the interpreter,
libraries, or what gloo itself allocates.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilewise as tw
from benchmarks.docs_tables import lines_of
from tilewise.transport.processes import run_ranks
from tilewise_tools.bench.environment import peak_bytes
from tilewise_tools.fits.longest import memory_of
from tilewise_tools.fits.model import checkpointed, decoder_layers, read_config
from tilewise_tools.fits.setting import Setting
from tilewise_tools.naming import Parser, run_script, some_of, whole_number

LENGTHS = (256, 512, 1024, 2048)
TIMEOUT_SECONDS = 240.0
SMALL = MappingProxyType(
    {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
    }
)
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {**SMALL, "num_key_value_heads": 2},
        "qwen2": {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True},
        "gpt_neox": {**SMALL, "intermediate_size": 1024},
    }
)
"""Fields of configurations by model_type: grouped heads; biases and tied embeddings; an MLP of two
matrices, with q, k and v of one."""


def write_config(fields: Mapping[str, Any], kind: str, folder: Path) -> Path:
    """Write the config.json of a model."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **fields).save_pretrained(folder)
    return folder / "config.json"


def measured_bytes(config: Any, setting: Setting, num_tokens: int) -> int:
    """Return the most bytes that torch held at once on a rank."""
    args = config, setting, num_tokens  # in new processes: no plan has its workspace yet
    return max(
        run_ranks(setting.dp * setting.cp, _rank_bytes, *args, timeout_seconds=TIMEOUT_SECONDS)
    )


def _rank_bytes(_: int, config: Any, setting: Setting, num_tokens: int) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return peak_bytes(lambda: _train(config, setting, num_tokens), "cpu")


def _train(config: Any, setting: Setting, num_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    from tilewise.integrations import hf

    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype)).train()
    mesh = init_device_mesh("cpu", (setting.dp, setting.cp), mesh_dim_names=("dp", "cp"))
    cp = tw.ContextParallel(
        mesh["cp"], num_tokens=num_tokens, mask=tw.Causal(), strategy=setting.plan or "auto"
    )
    hf.parallelize(model, cp)
    if setting.checkpointing:
        checkpointed(model)
    if setting.dp > 1:
        for part in (*decoder_layers(model), model):
            fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.arange(num_tokens)[None] % config.vocab_size
    words = hf.shard(cp, tokens, labels=tokens)
    parameters = {x.data_ptr() for x in model.parameters()} if setting.dp == 1 else set()

    def pack(x: Tensor) -> Any:
        """A copy outside of torch's memory, for what autograd keeps beside parameters."""
        if x.untyped_storage().data_ptr() in parameters:
            return x
        return np.array(x.detach().numpy(), copy=True)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.from_numpy(packed).clone()

    for _ in range(2):
        if "activations" in setting.offload:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = model(**words, use_cache=False).loss
        else:
            loss = model(**words, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(ranks: int, models: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the table: model, checkpointing, tokens, predicted and measured MB, their ratio."""
    machine = tw.Machine.preset("cpu-gloo")
    for kind in models:
        with tempfile.TemporaryDirectory() as folder:
            config = read_config(write_config(MODELS[kind], kind, Path(folder)))
        for checkpointing in (False, True):
            setting = Setting(machine, ranks, dtype="float32", checkpointing=checkpointing)
            for num_tokens in LENGTHS:
                said = memory_of(config, setting, num_tokens).peak.num_bytes
                seen = measured_bytes(config, setting, num_tokens)
                figures = (
                    f"{said / 1e6:.2f}",
                    f"{seen / 1e6:.2f}",
                    f"{100 * (said / seen - 1):+.2f} %",
                )
                yield kind, "yes" if checkpointing else "no", str(num_tokens), *figures


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=whole_number, default=1)
    parser.add_argument("--models", type=some_of(MODELS), default=",".join(MODELS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    header = "model", "checkpointing", "tokens", "`tilewise fits`, MB", "measured, MB", "difference"
    sys.stdout.write("\n".join(lines_of(header, ())) + "\n")
    for row in rows(options.ranks, options.models):
        sys.stdout.write(lines_of(header, [row])[-1] + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run_script(main, world_size="--ranks")
