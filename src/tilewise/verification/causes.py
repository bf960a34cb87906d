"""The closed list of causes, and the table that leads from facts to them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
"""Numbers and names that were found, by what they are; absent, 0 and None: not found."""

CAUSES = MappingProxyType(
    {
        "mask_ignored": "The mask is thrown away: pairs that it forbids are attended.",
        "window_ignored": "The window is not applied, or another one; the rest of the mask is.",
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
        needs: names of facts, "!x" for one that must be absent.
        text: the evidence, formatted with the facts.
    """

    cause: str
    needs: tuple[str, ...]
    text: str


class Finding(NamedTuple):
    """A cause, and its evidence in numbers."""

    cause: str
    text: str


EXTRA = "{extra:,} pairs attended that {asked} forbids"
FIRST = " (first: {extra_first})"
MISSED = "{missed:,} allowed pairs missed"

TABLE = f"""
no_label_nan | nan_loss | the loss of rank {{nan_loss}} is not a number
dropout_differs | random_layer | {{random_layer}} draws random numbers: {{draws}}
positions_wrong | wrong_positions | {{wrong_positions}}
order_sensitive_layer | mixes_rows | {{mixes_rows}}
heads_missing | empty_heads | {{empty_heads}} of {{num_heads}} heads give nothing: {{which}}
heads_missing | silent_rows !extra | {MISSED}: {{silent_rows}} queries of a head attend to nothing
gqa_shifted | foreign_heads | {{foreign_heads}}
shard_only | cut !silent_rows | {MISSED}, {{cut}}
padding_attended | extra padding_keys | {EXTRA}{FIRST}, \
    on {{padding_keys}} keys that no query may see
padding_attended | lost !differing !empty_heads | {{lost:.1%}} of weight is on rows that are none \
    of the sequence's
documents_ignored | other_documents | {EXTRA}{FIRST}; {{other_documents}}
window_ignored | other_window extra | {EXTRA}{FIRST}; {{other_window}}
window_ignored | other_window !extra | {MISSED} (first: {{missed_first}}); {{other_window}}
positions_wrong | reordered | {EXTRA}, {MISSED}: \
    {{reordered}}, so that the mask is not in the order of the tokens
window_per_block | window as_a_whole !is_plain | {EXTRA}, {MISSED}: \
    the window {{window}} is kept in some places and not in others
mask_ignored | extra as_a_whole is_plain | {EXTRA}{FIRST}; the mask is {{is_plain}}
mask_ignored | missed as_a_whole is_plain | {MISSED} (first: {{missed_first}}); \
    the mask is {{is_plain}}
mask_ignored | extra as_a_whole !missed !window | {EXTRA}{FIRST}
unknown | differing | {EXTRA}, {MISSED}
sink_dropped | sink_gone | {{sink_gone:.1%}} of weight should be lost to a sink
counted_twice | row_sum | weights of a query sum to {{row_sum:.3g}}, not to 1
counted_twice | multiple | {{times:,}} of {{values:,}} weights are {{multiple}} times what is \
    right beside the others
scale_wrong | scale_ratio | scores are {{scale_ratio:.4g}} times what they should be
softcap_dropped | curved | large scores are not held back: {{curved}}
positions_wrong | moved_blocks | {{moved_blocks}}
positions_wrong | moved | weights differ by up to {{moved:.3g}} times where mask, projections and \
    values are right, and no factor explains it: queries and keys do not carry the tokens' positions
unknown | merged | {{merged}}: partial results are merged by wrong log-sum-exps
unknown | shrunk | weights of every query sum to {{shrunk:.1%}} less than they should
unknown | values_differ | weights differ by up to {{values_differ:.1%}}
unknown | unread | its outputs or gradients deviate, and no attention in it was read that differs
missing_all_reduce | unreduced | {{unreduced}}
labels_shifted | border_rows | {{border_rows}}
loss_scaled | loss_ratio !border_rows | {{loss_total}}; \
    gradients are {{loss_ratio}} times on the ranks
loss_scaled | loss_times !border_rows | {{loss_total}}
gradient_scaled | gradient_ratio | {{gradient_ratio}}
lse_gradient_lost | lse_lost !shrunk | {{lse_lost}}
dv_wrong | dv | dv is {{dv}}
dk_wrong | dk | dk is {{dk}}
dq_wrong | dq | dq is {{dq}}
"""


def _rules() -> tuple[Rule, ...]:
    rows = [line.split(" | ") for line in TABLE.replace("    ", "").strip().splitlines()]
    return tuple(Rule(cause, tuple(needs.split()), text) for cause, needs, text in rows)


RULES = _rules()
"""Most telling first: causes of a forward pass before those of a backward pass."""


def classify(facts: Facts) -> list[Finding]:
    """The causes whose facts hold, most telling first, each once; empty if nothing differs."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        if all(bool(facts.get(need.lstrip("!"))) != (need[0] == "!") for need in rule.needs):
            found.setdefault(rule.cause, Finding(rule.cause, rule.text.format_map(facts)))
    unknown = found.pop("unknown", None)
    return list(found.values()) or ([unknown] if unknown else [])


def explained(findings: Sequence[Finding]) -> str:
    """A line a finding: cause, meaning, evidence."""
    return "\n".join(f"{cause}: {CAUSES[cause]} Here: {text}." for cause, text in findings)
