"""Which models of transformers run with their sequence split: a page, made by running them.

    python -m benchmarks.hf_models              # all causal and masked language models, 2 minutes
    python -m benchmarks.hf_models Llama Bert   # those whose class has one of these in its name
    python -m benchmarks.hf_models --write      # and write docs/integrations/huggingface_models.md

Every class is asked what `hf.check_model` asks, with its default configuration: is it refused by
its configuration, and if not, has a tiny model of it the same loss and gradients on three ranks as
unsplit? Each runs in a process of its own, for at most --seconds.
"""

import argparse
import json
import logging
import multiprocessing as mp
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from tilewise.integrations.hf_check import refusal

PAGE = Path(__file__).parents[1] / "docs" / "integrations" / "huggingface_models.md"
RIGHT, OWN_LOSS, REFUSED, UNKNOWN = "right", "right but for its loss", "refused", "not known"
# What some default configurations leave open.
OPEN = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "topk_group": 1,
    "vocab_size": 128,
}
REASONS = {
    "carries a state": "a state along the sequence (state space, linear attention, recurrence)",
    "does not (go through|use) transformers'": "attention outside transformers' AttentionInterface",
    r"layers of type (.*) cannot": "layers of type {}",
    "counts positions": "positions counted from padding_idx + 1",
    "mask function (\\w+)": "mask function {}",
    "mask of its own": "a mask of its own",
    "cross attention": "cross attention",
    "not the unsplit model": "another result when split",
}


TEMPLATE = """\
# Models of transformers

All {num_models} causal and masked language models of transformers {version} with their default
configurations, made by `python -m benchmarks.hf_models --write`. Each was asked what
[`hf.check_model`](huggingface.md) asks: is it refused by its configuration, and if not, has a tiny
model of it the same loss and the same gradients on three ranks as unsplit? Your configuration may
differ from the default one; `check_model` asks for yours.

**Right** ({num_right}): {right}

**Right but for their own loss** ({num_own_loss}): these take the mean over a rank's own labels.
Call them without labels, compute the loss from the logits: `check_model(model, loss=False)`.
{own_loss}

**Refused** ({num_refused}):

| for | models |
|---|---|
{refused}

**Not known** ({num_unknown}): no tiny model of the default configuration runs here.
`check_model` refuses them, and says why.

| model | why |
|---|---|
{unknown}
"""


class Row(NamedTuple):
    """How one class did, and why it is refused."""

    model: str
    outcome: str
    reason: str = ""


def classes() -> Iterator[tuple[type, type]]:
    """Configuration and model classes, causal language models first, each model once."""
    seen = set()
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING):
        for config_class, found in mapping.items():
            for model_class in found if isinstance(found, tuple) else (found,):
                if model_class not in seen:
                    seen.add(model_class)
                    yield config_class, model_class


def row(config_class: type, model_class: Any) -> Row:
    """Ask for one class, in this process."""
    name = model_class.__name__
    try:
        config = config_class()
        for part in (config, config.get_text_config(decoder=True)):
            for field, value in OPEN.items():
                if field in vars(part) and vars(part)[field] is None:
                    setattr(part, field, value)
        reason = refusal(model_class, config)
    except Exception as error:  # of a default configuration
        return Row(name, UNKNOWN, f"its default configuration is not whole: {error}")
    if reason is None:
        return Row(name, RIGHT)
    if "no tiny model" in reason:
        return Row(name, UNKNOWN, re.sub(r".*can be split \((.*)\); check_model.*", r"\1", reason))
    return Row(name, OWN_LOSS if "loss=False" in reason else REFUSED, reason)


def row_apart(config_class: type, model_class: type, seconds: float) -> Row:
    """Ask in a process of its own, which may crash or take too long."""
    context = mp.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(row(config_class, model_class)))
    process.start()
    send.close()
    try:
        if receive.poll(seconds):
            return receive.recv()
        return Row(model_class.__name__, UNKNOWN, f"took more than {seconds:g} s")
    except EOFError:
        return Row(model_class.__name__, UNKNOWN, "its process died")
    finally:
        process.kill()
        process.join()


def short(reason: str) -> str:
    """A reason without what is of one model only."""
    for pattern, words in REASONS.items():
        if found := re.search(pattern, reason):
            return words.format(*found.groups())
    return reason


def page(rows: Sequence[Row]) -> str:
    """The rows as a page of the documentation."""
    by_outcome: Mapping[str, list[Row]] = defaultdict(list)
    by_reason: Mapping[str, list[str]] = defaultdict(list)
    for one in sorted(rows):
        by_outcome[one.outcome].append(one)
        if one.outcome == REFUSED:
            by_reason[short(one.reason)].append(one.model)
    right, own_loss, unknown = (by_outcome[outcome] for outcome in (RIGHT, OWN_LOSS, UNKNOWN))
    refused = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return TEMPLATE.format(
        num_models=len(rows),
        version=transformers.__version__,
        num_right=len(right),
        right=_names(right),
        num_own_loss=len(own_loss),
        own_loss=_names(own_loss),
        num_refused=len(by_outcome[REFUSED]),
        refused="\n".join(f"| {reason} | {', '.join(models)} |" for reason, models in refused),
        num_unknown=len(unknown),
        unknown="\n".join(f"| {one.model} | {one.reason.split(chr(10))[0]} |" for one in unknown),
    )


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(one.model for one in rows) + "."


def main(argv: list[str] | None = None) -> None:
    """Ask for all classes, print a line for each, and write the page if told to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of class names; none: all classes")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one class")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for pair in classes():
        if not options.names or any(x.lower() in pair[1].__name__.lower() for x in options.names):
            rows.append(row_apart(*pair, options.seconds))
            if not options.json:
                print(*rows[-1], sep="\t", flush=True)
    if options.json:
        print(json.dumps([one._asdict() for one in rows]))
    if options.write:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
