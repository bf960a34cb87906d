"""Which models of transformers run with their sequence split: a page, made by running them.

    python -m benchmarks.hf_models              # all causal and masked language models, 2 minutes
    python -m benchmarks.hf_models Llama Bert   # those whose class has one of these in its name
    python -m benchmarks.hf_models --write      # and write docs/integrations/huggingface_models.md

Every class is asked what `hf.check_model` asks: is it refused by its configuration, and if not, has
a tiny model of it the same loss and gradients on three ranks as unsplit? Beside it stand what
transformers' own rule says and what ringmaster does, where that is installed (--write needs it).
Each runs in a process of its own, for at most --seconds.

Configurations are the default ones, with the layer types of a published checkpoint where the
default ones have none of these layers.
"""

import json
import logging
import multiprocessing as mp
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from benchmarks.peers import ringmaster_models
from tilewise.arguments import require_range
from tilewise.integrations.transformers.check import refusal
from tilewise.integrations.transformers.labels import is_masked
from tilewise.integrations.transformers.refusals import MODELS
from tilewise_tools.naming import Parser, run_script

PAGE = Path(__file__).parents[1] / "docs" / "integrations" / "huggingface_models.md"
RIGHT, OWN_LOSS, REFUSED, UNKNOWN = "exact", "exact, own loss", "refused", "not known"
# What some default configurations leave open.
OPEN = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
    "indexer_head_dim": 256,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 16,
    "default_language": "en_XX",
    "n_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "topk_group": 1,
    "vocab_size": 128,
}


def _layers_of(others: str, count: int, attention: Sequence[int]) -> dict[str, Any]:
    """Fields of a configuration: layers that attend, and what the others are."""
    types = ["full_attention" if i in attention else others for i in range(count)]
    return {"num_hidden_layers": count, "layer_types": types}


# Layers of published checkpoints that the default configuration lacks.
PUBLISHED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "BambaForCausalLM": ("Bamba-9B", {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}),
    "GraniteMoeHybridForCausalLM": (
        "granite-4.0-h-small",
        _layers_of("linear_attention", 40, attention=(5, 15, 25, 35)),
    ),
    "Lfm2ForCausalLM": ("LFM2-1.2B", _layers_of("conv", 16, attention=(2, 5, 8, 10, 12, 14))),
    "Lfm2MoeForCausalLM": (
        "LFM2-8B-A1B",
        _layers_of("conv", 24, attention=(2, 6, 10, 14, 18, 21)),
    ),
}
REASONS = {
    "carries a state": "a state along the sequence (state space, linear attention, recurrence)",
    "does not (go through|use) transformers'": "attention outside transformers' AttentionInterface",
    r"layers of type (.*) cannot": "layers of type {}",
    "counts positions": "positions counted from padding_idx + 1",
    "mask function (\\w+)": "mask function {}",
    "mask of its own": "a mask of its own",
    r"(\w+)=Tensor cannot be honoured": "attention with {}",
    "cross attention": "cross attention",
    "not the unsplit model": "another result when split",
    "whether they are of an image": "a mask of images beside the text",
}
# What to do about reasons that are none of refusals.MODELS.
INSTEAD = {
    r"(\w+)=Tensor cannot be honoured": "use a model whose attention takes none",
    "mask of its own": "use a model that asks transformers' mask interface",
    "mask function (\\w+)": "use a model with [masks that tilewise reads](huggingface.md)",
    "not the unsplit model": "train it unsplit: the error names the tensor that differs",
    "whether they are of an image": "pass `token_type_ids` of the whole sequence to `hf.shard`",
}


TEMPLATE = """\
# Models of transformers

All {num_models} causal and masked language models of transformers {version}, made by
`python -m benchmarks.hf_models --write`, with their default configurations and, where these lack
layers that published checkpoints have ({published}), with the layer types of such a
checkpoint. Your configuration may be another; [`check_model`](huggingface.md) asks for yours.

- **tilewise**: what [`hf.check_model`](huggingface.md) says. "exact": a tiny model of the class and
  configuration has the same loss and the same gradients on three ranks as unsplit; with layers that
  carry a state or choose keys, on packed documents, as these have when run apart. "exact, own
  loss": all but its own loss, which is the mean over a rank's labels: call it without labels,
  compute the loss from the logits, `check_model(model, loss=False)`.
- **transformers**: whether its rule `supports_context_parallel`, which accelerate and TRL ask, lets
  the model be split at all. It says nothing of what then comes out.
- **ringmaster**: what ringmaster {ringmaster} does with logits of a tiny model on 2 ranks of a CPU,
  by its Ulysses over torch's sdpa. Its ring, its layers with a state and its sinks need CUDA
  kernels, so this speaks of a CPU alone. It is made for causal models; others were not tried.

| | tilewise | transformers' rule | ringmaster |
|---|---|---|---|
| models split, of {num_models} | {num_right} | {num_ruled} | {num_ringmaster} |
| of the {num_refused_by_rule} that transformers' rule refuses | {right_of_refused} | | \
{ringmaster_of_refused} |
| another result, in silence | 0 | not known | {num_wrong} |

| model | layers | tilewise | transformers | ringmaster |
|---|---|---|---|---|
{rows}

## Why models are refused

All that a Trainer refuses, kinds of models too, is in [one table](trainers.md#what-is-refused).

| for | what to do | models |
|---|---|---|
{refused}

No tiny model of these runs here, so `check_model` refuses them, and says why:

| model | why |
|---|---|
{unknown}
"""


class Row(NamedTuple):
    """How one class did, and why it is refused.

    Args:
        layers: types of its layers.
        ruled: whether transformers' rule lets it be split; None: it cannot be asked.
        ringmaster: an outcome of ringmaster_models; empty: not tried.
    """

    model: str
    outcome: str
    reason: str = ""
    layers: str = ""
    ruled: bool | None = None
    ringmaster: str = ""


def classes() -> Iterator[tuple[type, type]]:
    """Configuration and model classes, causal language models first, each model once."""
    configs: dict[type, type] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING):
        for config_class, found in mapping.items():
            for model_class in found if isinstance(found, tuple) else (found,):
                own = getattr(model_class, "config_class", None) is config_class
                of_text = own and not config_class.sub_configs  # Qwen3.5 has another with images
                if of_text or model_class not in configs:
                    configs[model_class] = config_class
    for model_class, config_class in configs.items():
        yield config_class, model_class


def configuration(config_class: type, name: str) -> Any:
    """The default configuration of a class, with a published checkpoint's layers if it has some."""
    config = config_class(**PUBLISHED[name][1] if name in PUBLISHED else {})
    for part in (config, config.get_text_config(decoder=True)):
        for field, value in OPEN.items():
            if field in vars(part) and vars(part)[field] is None:
                setattr(part, field, value)
    return config


def row(config_class: type, model_class: Any) -> Row:
    """Ask for one class, in this process."""
    name = model_class.__name__
    try:
        config = configuration(config_class, name)
        reason = refusal(model_class, config)
    except Exception as error:  # of a default configuration
        return Row(name, UNKNOWN, f"its default configuration is not whole: {error}")
    ruled = _ruled(model_class, config)
    outcome = RIGHT
    if reason is not None:
        outcome = OWN_LOSS if "loss=False" in reason else REFUSED
        if "no tiny model" in reason:
            outcome = UNKNOWN
            reason = re.sub(r".*can be split \((.*)\); check_model.*", r"\1", reason)
    return Row(name, outcome, reason or "", _layers(config), ruled)


def _ruled(model_class: Any, config: Any) -> bool | None:
    """transformers' rule for a class and a configuration; None: it raises (Musicgen)."""
    stands_for = SimpleNamespace(
        config=config, _supports_context_parallel=model_class._supports_context_parallel
    )
    try:
        return transformers.PreTrainedModel.supports_context_parallel.fget(stands_for)  # pyright: ignore
    except ValueError:
        return None


def _layers(config: Any) -> str:
    """The types of a model's layers, as its configuration names them."""
    text = config.get_text_config(decoder=True)
    types = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if not types and getattr(text, "sliding_window", None) is not None:
        types = ["sliding_attention"]
    return ", ".join(name.removesuffix("_attention") for name in types)


def row_apart(config_class: type, model_class: type, seconds: float) -> Row:
    """Ask in a process of its own, which may crash or take too long."""
    context = mp.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(row(config_class, model_class)))
    process.start()
    send.close()
    try:
        if receive.poll(seconds):
            return _with_ringmaster(receive.recv(), config_class, model_class, seconds)
        return Row(model_class.__name__, UNKNOWN, f"took more than {seconds:g} s")
    except EOFError:
        return Row(model_class.__name__, UNKNOWN, "its process died")
    finally:
        process.kill()
        process.join()


def _with_ringmaster(one: Row, config_class: type, model_class: type, seconds: float) -> Row:
    if not ringmaster_models.is_here() or one.ruled is None or is_masked(model_class):
        return one
    config = configuration(config_class, one.model)
    return one._replace(ringmaster=ringmaster_models.outcome(model_class, config, seconds))


def short(reason: str) -> str:
    """A reason without what is of one model only."""
    for pattern, words in REASONS.items():
        if found := re.search(pattern, reason):
            return words.format(*found.groups())
    return reason


def instead(reason: str) -> str:
    """What to do about a model that is refused for a reason."""
    for pattern in REASONS:
        if re.search(pattern, reason):
            rows = (one.instead for one in MODELS if re.search(pattern, one.message))
            return next(rows, None) or INSTEAD[pattern]
    raise ValueError(f"no words say what to do about {reason!r}; add it to REASONS")


def page(rows: Sequence[Row]) -> str:
    """The rows as a page of the documentation."""
    rows = sorted(rows)
    by_reason: Mapping[tuple[str, str], list[str]] = defaultdict(list)
    for one in rows:
        if one.outcome == REFUSED:
            by_reason[short(one.reason), instead(one.reason)].append(one.model)
    refused = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    right = {one.model for one in rows if one.outcome in (RIGHT, OWN_LOSS)}
    theirs = {one.model for one in rows if one.ringmaster == ringmaster_models.EXACT}
    ruled_out = {one.model for one in rows if one.ruled is False}
    checkpoints = [f"{model}: {checkpoint}" for model, (checkpoint, _) in PUBLISHED.items()]
    return TEMPLATE.format(
        num_models=len(rows),
        version=transformers.__version__,
        ringmaster=version("axolotl-ringmaster"),
        published="; ".join(checkpoints),
        num_right=len(right),
        num_ruled=sum(one.ruled is True for one in rows),
        num_ringmaster=len(theirs),
        num_refused_by_rule=len(ruled_out),
        right_of_refused=len(right & ruled_out),
        ringmaster_of_refused=len(theirs & ruled_out),
        num_wrong=sum(one.ringmaster == ringmaster_models.WRONG for one in rows),
        rows="\n".join(map(_line, rows)),
        refused="\n".join(
            f"| {' | '.join(why)} | {', '.join(models)} |" for why, models in refused
        ),
        unknown="\n".join(
            f"| {one.model} | {one.reason.split(chr(10))[0]} |"
            for one in rows
            if one.outcome == UNKNOWN
        ),
    )


def _line(one: Row) -> str:
    ruled = {True: "splits", False: "refuses", None: ""}[one.ruled]
    return f"| {one.model} | {one.layers} | {one.outcome} | {ruled} | {one.ringmaster} |"


def main(argv: list[str] | None = None) -> None:
    """Ask for all classes, print a line for each, and write the page if told to."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of class names; none: all classes")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one class")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    require_range("--seconds", options.seconds, 1, 24 * 3600)
    if options.write and not ringmaster_models.is_here():
        parser.error("--write needs ringmaster: pip install --no-deps axolotl-ringmaster einops")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for pair in classes():
        if not options.names or any(x.lower() in pair[1].__name__.lower() for x in options.names):
            rows.append(row_apart(*pair, options.seconds))
            if not options.json:
                print(*rows[-1], sep="\t", flush=True)
    if not rows:
        parser.error(f"no class has {' or '.join(options.names)} in its name; leave names out")
    if options.json:
        print(json.dumps([one._asdict() for one in rows]))
    if options.write:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    run_script(main)
