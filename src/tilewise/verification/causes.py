"""The closed list of causes, and the table that leads from facts to them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
"""Numbers and names that were found, by what they are; absent, 0 and None: not found."""

CAUSES = MappingProxyType(
    {
        "mask_ignored": "The mask is thrown away: pairs that it forbids are attended.",
        "window_ignored": "The window is not applied; the rest of the mask is.",
        "window_per_block": "The window is counted inside a block, not over the sequence.",
        "documents_ignored": "Packed documents see each other.",
        "sink_dropped": "The sink takes no weight.",
        "softcap_dropped": "Scores are not capped.",
        "scale_wrong": "Scores are multiplied by another number.",
        "shard_only": "A rank attends to its own shard alone.",
        "counted_twice": "Keys, or whole rows, are counted more than once.",
        "gqa_shifted": "Query heads read the keys or values of another KV head.",
        "heads_missing": "Some heads are computed by no rank.",
        "dq_wrong": "The gradient of q is wrong.",
        "dk_wrong": "The gradient of k is wrong.",
        "dv_wrong": "The gradient of v is wrong.",
        "lse_gradient_lost": "Partial results are merged by log-sum-exps that get no gradient.",
        "positions_wrong": "Positions do not go with the tokens.",
        "labels_shifted": "Labels are shifted after they were split: borders predict wrong tokens.",
        "loss_scaled": "The ranks' losses add up to a multiple of the whole loss.",
        "gradient_scaled": "The loss is right, but all gradients are multiplied by one number.",
        "no_label_nan": "A rank without labels divides by zero.",
        "dropout_differs": "Random numbers are not those of the unsplit model.",
        "padding_attended": "Rows of padding are attended.",
        "order_sensitive_layer": "A layer that needs neighbours in order sees a rank's rows only.",
        "missing_all_reduce": "A parameter's gradient is not summed over ranks, as others are.",
        "unknown": "The runs differ, and no cause of this list explains how.",
    }
)
"""What each cause means, in a sentence."""


class Rule(NamedTuple):
    """A cause holds if all facts do.

    Attributes:
        needs: names of facts, "not x" for one that must be absent.
        text: the evidence, formatted with the facts.
    """

    cause: str
    needs: tuple[str, ...]
    text: str


class Finding(NamedTuple):
    """A cause, and its evidence in numbers."""

    cause: str
    text: str


EXTRA = "{extra:,} pairs attended that {asked} forbids (first: {extra_first})"
MISSED = "{missed:,} allowed pairs missed (first: {missed_first})"

RULES = (
    Rule("no_label_nan", ("nan_loss",), "the loss of rank {nan_loss} is not a number"),
    Rule("dropout_differs", ("random_layer",), "{random_layer} draws random numbers: {draws}"),
    Rule("positions_wrong", ("wrong_positions",), "{wrong_positions}"),
    Rule("order_sensitive_layer", ("mixes_rows",), "{mixes_rows}"),
    Rule(
        "heads_missing",
        ("empty_heads",),
        "{empty_heads} of {num_heads} heads give nothing: {which}",
    ),
    Rule(
        "heads_missing",
        ("silent_rows", "not extra"),
        "{missed:,} allowed pairs missed: {silent_rows} queries of a head attend to nothing",
    ),
    Rule("gqa_shifted", ("foreign_heads",), "{foreign_heads}"),
    Rule(
        "shard_only",
        ("cut", "not extra", "not silent_rows"),
        "{missed:,} allowed pairs missed, all between {cut} parts of the sequence that do not see "
        "each other",
    ),
    Rule(
        "padding_attended",
        ("extra", "padding_keys"),
        EXTRA + ", on {padding_keys} keys that no query may see",
    ),
    Rule(
        "padding_attended",
        ("lost", "not differing", "not empty_heads"),
        "{lost:.1%} of weight is on rows that are none of the sequence's",
    ),
    Rule(
        "documents_ignored",
        ("extra", "without_documents"),
        EXTRA + "; the {without_documents} documents are ignored",
    ),
    Rule(
        "window_ignored",
        ("extra", "without_window"),
        EXTRA + "; the window {without_window} is ignored",
    ),
    Rule(
        "window_per_block",
        ("window", "as_a_whole", "not is_plain"),
        "{extra:,} pairs attended that {asked} forbids, {missed:,} allowed ones missed: the window "
        "{window} is kept in some places and not in others",
    ),
    Rule(
        "mask_ignored",
        ("extra", "as_a_whole", "is_plain"),
        EXTRA + "; the mask is that of {is_plain}",
    ),
    Rule(
        "mask_ignored",
        ("missed", "as_a_whole", "is_plain"),
        MISSED + "; the mask is that of {is_plain}",
    ),
    Rule("mask_ignored", ("extra", "as_a_whole", "not missed", "not window"), EXTRA),
    Rule(
        "unknown",
        ("differing",),
        "{extra:,} pairs attended that {asked} forbids, {missed:,} allowed ones missed",
    ),
    Rule("sink_dropped", ("sink_gone",), "{sink_gone:.1%} of weight should be lost to a sink"),
    Rule("counted_twice", ("row_sum",), "weights of a query sum to {row_sum:.3g}, not to 1"),
    Rule(
        "counted_twice",
        ("multiple",),
        "{times:,} of {values:,} weights are {multiple} times what is right beside the others",
    ),
    Rule("scale_wrong", ("scale_ratio",), "scores are {scale_ratio:.4g} times what they should be"),
    Rule(
        "softcap_dropped",
        ("curved",),
        "scores are in the right order, but large ones are not held back: {curved}",
    ),
    Rule("positions_wrong", ("moved_blocks",), "{moved_blocks}"),
    Rule(
        "positions_wrong",
        ("moved",),
        "weights differ by up to {moved:.3g} times where mask, projections and values are "
        "right, and no factor explains it: queries and keys do not carry the tokens' positions",
    ),
    Rule("unknown", ("values_differ",), "weights differ by up to {values_differ:.1%}"),
    Rule("missing_all_reduce", ("unreduced",), "{unreduced}"),
    Rule("labels_shifted", ("border_rows",), "{border_rows}"),
    Rule(
        "loss_scaled",
        ("loss_ratio", "not border_rows"),
        "{loss_total}; gradients are {loss_ratio} times on the ranks",
    ),
    Rule("loss_scaled", ("loss_times", "not border_rows"), "{loss_total}"),
    Rule("gradient_scaled", ("gradient_ratio",), "{gradient_ratio}"),
    Rule("lse_gradient_lost", ("lse_lost",), "{lse_lost}"),
    Rule("dv_wrong", ("dv",), "dv is {dv}"),
    Rule("dk_wrong", ("dk",), "dk is {dk}"),
    Rule("dq_wrong", ("dq",), "dq is {dq}"),
)
"""Most telling first: causes of a forward pass before those of a backward pass."""


def classify(facts: Facts) -> list[Finding]:
    """The causes whose facts hold, most telling first, each once; empty if nothing differs."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        if all(
            not facts.get(need[4:]) if need.startswith("not ") else facts.get(need)
            for need in rule.needs
        ):
            found.setdefault(rule.cause, Finding(rule.cause, rule.text.format_map(facts)))
    unknown = found.pop("unknown", None)
    return list(found.values()) or ([unknown] if unknown else [])


def explained(findings: Sequence[Finding]) -> str:
    """A line a finding: cause, meaning, evidence."""
    return "\n".join(f"{cause}: {CAUSES[cause]} Here: {text}." for cause, text in findings)
