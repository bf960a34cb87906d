"""The closed list of causes, and the table that leads from facts to them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
"""Numbers and texts that were found, by what they are; absent, 0 and None: not found."""

CAUSES = MappingProxyType(
    {
        "mask_ignored": "The mask is thrown away: pairs that it forbids are attended.",
        "window_ignored": "The window is not applied, or another one; the rest of the mask is.",
        "window_per_block": "The window is counted inside a block, not over the sequence.",
        "documents_ignored": "Packed documents see each other.",
        "sink_dropped": "The sink takes no weight, or that of another sink.",
        "sink_added": "A sink takes weight that none should have.",
        "softcap_dropped": "Scores are not capped, or by another number.",
        "softcap_added": "Scores are capped that should not be.",
        "scale_wrong": "Scores are multiplied by another number.",
        "shard_only": "A rank attends to its own shard alone.",
        "shard_skipped": "Some ranks never see the keys of some others.",
        "key_positions_lost": "Keys of every shard are masked as if they were the queries' own.",
        "counted_twice": "Keys, or whole rows, are counted more than once.",
        "shared_counted_per_rank": "Keys that every rank holds are counted once for each rank.",
        "shared_gradient_lost": "Tokens that every rank holds lack other ranks' gradient shares.",
        "noise_per_rank": "Ranks compute on other inputs, as where each draws noise of its own.",
        "query_heads_permuted": "Query heads come back in another order.",
        "gqa_shifted": "Query heads read the keys or values of another KV head.",
        "heads_missing": "Some heads are computed by no rank.",
        "dq_wrong": "The gradient of q is wrong.",
        "dk_wrong": "The gradient of k is wrong.",
        "dv_wrong": "The gradient of v is wrong.",
        "lse_gradient_lost": "Partial results are merged by log-sum-exps that get no gradient.",
        "positions_wrong": "Positions do not go with the tokens.",
        "labels_shifted": "Rows predict other labels, as where these are shifted after the split.",
        "loss_term_per_rank": "A term of the loss is made of each rank's rows, and is no share.",
        "loss_scaled": "The ranks' losses add up to a multiple of the whole loss.",
        "gradient_scaled": "The loss is right, but gradients are multiplied by one number.",
        "no_label_nan": "A rank without labels divides by zero.",
        "dropout_differs": "Random numbers are not those of the unsplit model.",
        "padding_attended": "Rows of padding are attended.",
        "state_restarts": "A layer's state begins anew where a rank's tokens do.",
        "state_gradient_lost": "State or rows that come from earlier tokens get no gradient.",
        "halo_missing": "A short convolution does not see the rows before a rank's tokens.",
        "borders_invented": "A layer takes other places for borders of documents.",
        "index_restarts": "An indexer scores the keys of its own rank alone.",
        "index_ties": "Of keys with equal scores, the two models choose others.",
        "order_sensitive_layer": "A layer that needs neighbours in order sees a rank's rows only.",
        "missing_all_reduce": "A parameter's gradient is not summed over ranks, as others are.",
        "unknown": "The runs differ, and no cause of this list explains how.",
    }
)
"""What each cause means, in a sentence."""

# cause | what to change in the split.
FIX_TABLE = """
mask_ignored | Hand the mask to the split attention, for this rank's rows and all keys.
window_ignored | Pass each layer's own window to the split attention.
window_per_block | Count the window over positions in the whole sequence, not within a block.
documents_ignored | Pass the documents' borders in the whole sequence to the split attention.
sink_dropped | Pass the layer's sink to the split attention; it counts once beside all keys.
sink_added | Leave the sink out: the unsplit layer has none.
softcap_dropped | Pass the model's softcap to the split attention.
softcap_added | Leave the softcap out: the unsplit layer has none.
scale_wrong | Pass the model's own softmax scale to the split attention.
shard_only | Let attention see other ranks' keys: is the split one called, on a group of all?
shard_skipped | Bring every shard to every rank: check the number of steps and the group's ranks.
key_positions_lost | Mask keys by the positions of their own shard, not by those of the queries.
counted_twice | Attend to each key once: shards must not overlap, nor be sent again.
shared_counted_per_rank | Count keys that every rank holds once, not once for each rank.
shared_gradient_lost | Sum the gradients of tokens that every rank holds over the ranks.
noise_per_rank | Draw noise for the whole input before it is split, from one seed.
query_heads_permuted | Undo the exchange of heads in the order in which it was made.
gqa_shifted | Query head i reads KV head i // (num_heads // num_kv_heads), counted over all heads.
heads_missing | Deal heads so that every one is computed; pad them if they do not divide by ranks.
dq_wrong | In backward add up dq over all shards of keys.
dk_wrong | In backward add up dk over all ranks' queries, and return it to the key's rank.
dv_wrong | In backward add up dv over all ranks' queries, and return it to the key's rank.
lse_gradient_lost | Let gradients pass the log-sum-exps that merge partial results.
positions_wrong | Give each rank its rows' positions in the whole sequence, in the rows' order.
labels_shifted | Shift the labels of the whole sequence first, then split them like the tokens.
loss_term_per_rank | Compute this term from sums over all ranks' rows, and count it once.
loss_scaled | Divide each rank's sum of losses by the number of labels on all ranks.
gradient_scaled | Look for gradients that are averaged over ranks and not summed, or summed twice.
no_label_nan | Divide by the number of labels on all ranks: a rank without labels adds 0.
dropout_differs | Switch dropout off for this comparison.
padding_attended | Mask padded keys by the attention mask of the whole sequence.
state_restarts | Pass the state on to the rank that has the next tokens.
state_gradient_lost | Return the gradient of the state, or of rows before, to their rank.
halo_missing | Get the rows before the rank's tokens, kernel size - 1 of them, from their rank.
borders_invented | Reset the layer at the documents' borders alone, not where a rank's rows begin.
index_restarts | Gather the index keys that a rank's queries see before they are scored.
index_ties | Break ties alike in both models, by the lower position, or give the indexer more heads.
order_sensitive_layer | Give this layer rows in the order of the sequence, and those before them.
missing_all_reduce | Sum this parameter's gradient over the ranks, as those of the others.
unknown | Look at the first module that differs: its inputs, and what it is told of the split.
"""
FIX_ROWS = tuple(row.partition(" | ") for row in FIX_TABLE.strip().splitlines())
FIXES = MappingProxyType({cause: fix for cause, _, fix in FIX_ROWS})
"""What to change in the split, by cause, in a sentence."""

EXTRA = "{extra:,} pairs attended that {asked} forbids (first: {extra_first})"
MISSED = "{missed:,} allowed pairs missed (first: {missed_first})"
BOTH = "{extra:,} pairs attended that {asked} forbids, {missed:,} allowed pairs missed"

# cause | facts that hold, "!x" for one that must not | the evidence, of the facts.
# Most telling first: those of a forward pass before those of a backward pass.
TABLE = f"""
no_label_nan | nan_loss | the loss of rank {{nan_loss}} is not a number
dropout_differs | random_layer | {{random_layer}}
dropout_differs | dropped | {{dropped}}
noise_per_rank | foreign_inputs | {{foreign_inputs}}
shared_counted_per_rank | shared_keys | {{shared_keys}}
query_heads_permuted | permuted_heads | {{permuted_heads}}
key_positions_lost | local_keys | {{local_keys}}
positions_wrong | wrong_positions | {{wrong_positions}}
order_sensitive_layer | mixes_rows other_rows | {{mixes_rows}}
index_restarts | index_alone | {{index_alone}}
index_ties | tied_choice | {{tied_choice}}
borders_invented | invented !other_rows | {{invented}}
state_restarts | restarts | {{restarts}}
documents_ignored | passes_borders | {{passes_borders}}
halo_missing | no_halo | {{no_halo}}
order_sensitive_layer | mixes_rows | {{mixes_rows}}
heads_missing | empty_heads | {{empty_heads}} of {{num_heads}} heads give nothing: {{which}}
heads_missing | silent_rows some_heads !extra | {MISSED}: {{silent_rows}} queries of a head attend \
    to nothing
unknown | copied_heads | {{copied_heads}}
gqa_shifted | foreign_heads | {{foreign_heads}}
shard_only | cut !silent_rows !values_differ | {MISSED}, {{cut}}
shard_skipped | skipped !silent_rows !values_differ | {MISSED}, {{skipped}}
padding_attended | padding_keys extra | {EXTRA}, on {{padding_keys}} keys that no query may see
padding_attended | lost !differing !empty_heads | {{lost:.1f}} % of weight is on rows that are \
    none of the sequence's
documents_ignored | other_documents | {EXTRA}; {{other_documents}}
window_ignored | other_window extra | {EXTRA}; {{other_window}}
window_ignored | other_window !extra | {MISSED}; {{other_window}}
mask_ignored | other_mask extra | {EXTRA}; {{other_mask}}
mask_ignored | other_mask !extra | {MISSED}; {{other_mask}}
positions_wrong | reordered | {BOTH}: {{reordered}}, so that the mask is not in the order of the \
    tokens
window_per_block | window as_a_whole | {BOTH}: the window {{window}} is kept in some places and \
    not in others
mask_ignored | extra as_a_whole !missed !window | {EXTRA}
mask_ignored | keyless !differing | {{keyless}} queries that may see no key see all of them, or \
    should
unknown | silent_rows !some_heads | {MISSED}: {{silent_rows}} queries attend to nothing in any head
unknown | differing | {BOTH}
sink_added | added_sink | {{added_sink}}
sink_dropped | lost_sink | {{lost_sink}}
softcap_added | added_cap | {{added_cap}}
softcap_dropped | lost_cap | {{lost_cap}}
sink_dropped | other_sink | sinks take {{other_sink}}
counted_twice | row_sum | weights of a query sum to {{row_sum:.3g}}, not to 1
counted_twice | multiple | {{times:,}} of {{values:,}} weights are {{multiple}} times what is \
    right beside the others
scale_wrong | scale_ratio | scores are {{scale_ratio:.4g}} times what they should be
softcap_dropped | curved | large scores are not held back: they are right if scores are capped \
    with about {{curved:.3g}}
positions_wrong | values_move values_differ projected !differing | weights differ by up to \
    {{values_differ:.3g}} times where mask, projections and values are right, and no factor \
    explains it: queries and keys do not carry the tokens' positions
unknown | merged | weights are right within every shard of keys, but not between shards: partial \
    results are merged by wrong log-sum-exps
unknown | own_shard | weights are right but for the keys of a query's own shard
unknown | shrunk | weights of every query sum to {{shrunk:.1f}} % less than they should
unknown | values_differ | weights differ by up to {{values_differ:.3g}} times
unknown | undiagnosed | {{undiagnosed}}
unknown | unread | its outputs or gradients deviate, and no attention in it was read that differs
unknown | uncounted | {{uncounted}}
shared_gradient_lost | shared_gradient | {{shared_gradient}}
missing_all_reduce | unreduced | {{unreduced}}
labels_shifted | border_rows !uncounted | {{border_rows}}
loss_term_per_rank | loss_term | {{loss_total}}; {{loss_term}}
unknown | term_ratio | {{loss_total}}; {{term_ratio}}
loss_scaled | loss_ratio !border_rows !uncounted | {{loss_total}}; \
    gradients are {{loss_ratio}} times on the ranks
loss_scaled | loss_times !term_ratio !border_rows !uncounted | {{loss_total}}
gradient_scaled | gradient_ratio | {{gradient_ratio}}
state_gradient_lost | state_gradient | {{state_gradient}}
lse_gradient_lost | lse_lost !shrunk | {{lse_lost}}
dv_wrong | dv | dv is {{dv}}
dk_wrong | dk | dk is {{dk}}
dq_wrong | dq | dq is {{dq}}
"""
RULES = tuple(tuple(row.split(" | ")) for row in TABLE.replace("    ", "").strip().splitlines())


class Finding(NamedTuple):
    """A cause, and its evidence in numbers."""

    cause: str
    text: str


def classify(facts: Facts) -> list[Finding]:
    """The causes whose facts hold, most telling first, each once; empty if nothing differs."""
    findings: dict[str, Finding] = {}
    for cause, needs, text in RULES:
        if all(bool(facts.get(need.lstrip("!"))) != (need[0] == "!") for need in needs.split()):
            findings.setdefault(cause, Finding(cause, text.format_map(facts)))
    unknown = findings.pop("unknown", None)
    return list(findings.values()) or ([unknown] if unknown else [])


def explained(findings: Sequence[Finding]) -> str:
    """A line a finding: cause, meaning, evidence."""
    return "\n".join(f"{cause}: {CAUSES[cause]} Here: {text}." for cause, text in findings)
