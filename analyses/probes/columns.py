"""The tables of the built-in probes: every column's name, type, unit and meaning, written here and nowhere else.

`python -m ln_probe.analyses.probes.columns` prints them as Markdown (`docs/columns.md`).
"""

from __future__ import annotations

from collections.abc import Iterable

from ln_probe.analyses.schema import Column, columns, declare, reference


def _tail(columns: Iterable[Column]) -> tuple[Column, ...]:
    """The same statistics over all positions but 0, where attention sinks are."""
    return tuple(Column(f"{c.name}_tail", c.kind, f"`{c.name}` without position 0", c.unit) for c in columns)


_TERMS = columns(
    """
    mean_share (float): mean over tokens of d·mu²/‖x‖²: the share of squared length that projection removes
    angle_to_ones_deg (float, degrees): mean angle of the norm's input to the all-ones direction, 0–90; at 90 projection
        does nothing
    norm_before_mean (float, L2 norm): mean length of the norm's input
    norm_before_cv (float): standard deviation of the input's length over its mean
    norm_after_mean (float, L2 norm): mean length of the norm's output, gain and bias included
    scale_mean (float): mean of 1/sigma
    scale_cv (float): standard deviation over mean of 1/sigma
    """
)

LAYERNORMS = declare(
    "layernorms",
    "Norms",
    "A row per norm; columns ending in _tail leave position 0 out.",
    ("site",),
    """
    site (text): the norm's name in the model
    layer (int): block it belongs to; 0 after the embedding, the number of blocks for the final norm
    kind (text): what it computes: layernorm, rmsnorm, projection_only, scaling_only or none
    reads (text): who reads its output, joined by +: attention, mlp, unembed, query, key, …
    tokens (int): vectors seen
    """,
    _TERMS,
    """
    gain_mean (float): mean of the gain; NaN where there is none
    gain_cv (float): standard deviation over absolute mean of the gain; NaN where there is none
    bias_norm (float, L2 norm): length of the bias; NaN where there is none
    reconstruction_error (float): max |LN(x) − sum of its terms| over the RMS of LN(x)
    """,
    _tail(_TERMS),
    """
    sigma_mean (float): mean divisor
    sigma_mean_tail (float): `sigma_mean` without position 0
    constant_first (float): constant that replaces sigma at position 0, pooled over all prompts
    constant_rest (float): the same at the other positions
    constant_ratio_first (float): `constant_first` over the mean sigma of the measured prompts at position 0: 1 for
        leave-one-out means
    constant_ratio_rest (float): the same at the other positions
    eps (float): inside the square root of sigma; NaN where the norm does not scale
    reconstruction_bound (float): what rounding explains of reconstruction_error: 1e-5 in float32, 1e-12 in float64,
        in half precision three half-ulps of the largest entry over the RMS
    """,
)

_PLACE = columns(
    """
    layer (int): block whose attention it is
    head (int): head; -1: the whole layer, at the norm's output
    space (text): normalized: the norm's output before gain and bias; head: keys as attention sees them (gain, bias,
        W_K, b_K, QK-norm, rotary)
    variant (text): intact, no_scaling, no_projection, both_removed
    """
)

HEADS = declare(
    "heads",
    "Heads",
    "A row per (layer, head, space, variant); head −1 is the whole layer at the norm's output.",
    ("layer", "head", "space", "variant"),
    _PLACE,
    """
    keys (int): keys measured, of all prompts; NaN where selectability was not measured
    unselectable (int): keys in the convex hull of their prompt's other keys: no query of any length selects them
    duplicate (int): keys on the hull that occur more than once
    undecided (int): keys whose verdict could not be proved within the tolerance
    unselectable_fraction (float, share): unselectable / keys
    unreachable_fraction (float, share): share of keys that no query of the head gives strictly the highest score
        (`reachable` in the keys table); includes unselectable keys and exact copies; NaN in normalized space, and
        without a bound on queries
    margin_median (float, nats; normalized: relative): median over keys of the best score gap over all others: in head
        space by any query that the head can make, biases included, negative if none puts the key on top (the same in
        every basis of the head), NaN without a bound on queries; in normalized space by a query of unit length, over
        the RMS norm of the centred keys
    margin_p05 (float, nats; normalized: relative): 5th percentile of the same
    attainable_median (float, share): median over keys of `attainable` in the keys table: the largest softmax weight
        at the last position, which sees all keys, from queries of the size that occur
    attainable_p05 (float, share): 5th percentile of the same
    attainable_reachable_median (float, share): the median at the last position over every query the head can make
        from any residual vector (reachable set); NaN without a bound on queries
    pattern_max_median (float, share): median over keys of the largest weight they receive from any query that
        sees them and another key: early queries see few keys, the last position, which attainable_median is about,
        sees all
    query_radius (float): rho: how far into the reachable set (0–1) the observed queries go, 95 % quantile; NaN
        without a bound
    entropy_ratio (float): attention entropy over log(visible keys), mean over queries; NaN where uniformity was not
        measured
    uniform_angle_deg (float, degrees): mean angle of gain·(W_K q) to the all-ones direction: 0 would attend uniformly
        for any keys (without a bias per key; with rotary positions, only if so for every key's); NaN without
        projection (a random direction's angle is in the provenance)
    score_spread (float, nats): mean standard deviation of a query's scores over the keys it sees
    score_spread_floor (float, nats): least spread that a query at the end of the reachable set could have (those
        inside it can spread less); NaN without a bound on queries, or with ALiBi
    prompts (int): prompts that they come from
    by_theorem (text): why no key can be unselectable here for any weights (at most d + 1 affinely independent keys,
        a sphere); empty if one could be or is
    no_op (text): why the variant changes nothing here by construction; empty if it does change something
    """,
)

KEYS = declare(
    "keys",
    "Keys",
    "The hardest keys of each head and a sample, each under all variants; hardest first.",
    ("layer", "head", "space", "variant", "prompt", "position"),
    _PLACE,
    """
    prompt (int): number of the prompt, from 0
    position (int): of the key in its prompt, from 0
    token (text): the token there
    verdict (text): selectable: some query of any length gives it strictly the highest score; unselectable: it lies in
        the convex hull of the others; duplicate: selectable but for keys within the tolerance of it; undecided. Keys
        are judged in their own coordinates, less the directions that W_Q removes (relative singular value below
        1e-9), as `key_geometry` judges them
    margin_lower (float, nats; normalized: relative): proven lower bound of the best score gap over all other keys
        that a query of the head gives, negative if none puts the key on top, NaN without a bound on queries;
        normalized: distance to the hull of the others over the keys' RMS norm; NaN for a single key
    margin_upper (float, nats; normalized: relative): upper bound of the same
    reachable (bool): whether some query that the head can make gives it strictly the highest score: its margin is
        above tau (1e-7) times the RMS norm, in nats, of the keys as these queries see them. A selectable key that is
        not reachable is selected only by queries that the head cannot produce. False for an exact copy; missing in
        normalized space, and without a bound on queries
    attainable (float, share): largest softmax weight at the position `judged_at`, where all its keys compete, from
        queries of the observed set: a proven lower bound of the maximum; NaN without a bound on queries
    attainable_upper (float, share): what no query of that set at that position exceeds (proven): at most 0.01
        more (absolute), so a small weight is known less well relative to itself
    attainable_reachable (float, share): largest softmax weight found at that position from queries of the reachable
        set; NaN if unbounded
    pattern_max (float, share): the largest weight it receives from any query that sees it and another key
    judged_at (int, position): position of the query whose visible keys it was judged among: the last one; with a
        window the last one or one whole windows before it
    """,
)

CAUSAL = declare(
    "causal",
    "Interventions",
    "A row per group of norms or norm, and variant: the loss of the model with a term removed.",
    ("sites", "variant"),
    """
    sites (text): a norm, or a group: attention, mlp, final, all
    variant (text): which terms remain: no_scaling, no_projection, both_removed
    family (text): rows whose p-values are Holm-adjusted together: primary, or an exploratory family
    loss (float, as loss): mean loss
    delta_loss (float, as loss): its change against the intact model; NaN where only estimated
    delta_loss_low (float, as loss): lower end of its 95 % CI over prompt groups
    delta_loss_high (float, as loss): upper end of the same
    p (float): two-sided p of delta_loss being 0, Holm-adjusted within its family; NaN: not tested
    equivalence_bound (float, as loss): the change is equivalent to 0 within this
    delta_loss_uniform (float, as loss): delta_loss with one constant for all positions
    delta_loss_optimal (float, as loss): delta_loss with loss-optimal constants, fitted on the other half
    delta_loss_optimal_low (float, as loss): lower end of its 95 % CI
    delta_loss_optimal_high (float, as loss): upper end of the same
    estimate (float, as loss): second-order estimate of delta_loss, of single norms
    prompts_worse (int): prompts whose loss rises
    n (int): prompts
    """,
)

SCALE_SUMS = declare(
    "scale_sums",
    "Sums of sigma",
    "A row per prompt and norm: what the constants of the other prompts are means of (`report.constants`).",
    ("prompt", "site"),
    """
    prompt (int): number of the prompt, from 0
    group (int): its group: the constants of a prompt are means over the other groups
    site (text): the norm's name
    sum_first (float): sum of sigma at position 0 (over heads, for norms inside attention)
    count_first (int): how many it is a sum of
    sum_rest (float): sum of sigma at the other positions
    count_rest (int): how many it is a sum of
    """,
)

CAUSAL_PROMPTS = declare(
    "causal_prompts",
    "Interventions, prompt by prompt",
    "A row per prompt, group of norms or norm, and variant: what the intervals of `causal` come from.",
    ("prompt", "sites", "variant"),
    """
    prompt (int): number of the prompt, from 0
    stratum (text): its book, or its group
    sites (text): a norm, or a group: attention, mlp, final, all
    variant (text): which terms remain: no_scaling, no_projection, both_removed
    loss (float, as loss): mean loss of the intact model on this prompt
    delta_loss (float, as loss): its change
    shift (float, as loss, summed): what the prompt adds to the summed change through the other prompts' constants
    n (int): tokens predicted
    """,
)

HEAD_EFFECTS = declare(
    "head_effects",
    "Heads without a term",
    "A row per (layer, head, variant): the loss when this head alone reads its norm without a term.",
    ("layer", "head", "variant"),
    """
    layer (int): block whose attention it is
    head (int): head
    variant (text): which terms remain for this head
    delta_loss (float, as loss): change of the mean loss; NaN where only estimated
    delta_loss_low (float, as loss): lower end of its 95 % CI over prompt groups
    delta_loss_high (float, as loss): upper end of the same
    p (float): two-sided p of delta_loss being 0, Holm-adjusted over the heads run; NaN: not tested
    prompts_worse (int): prompts whose loss rises
    estimate (float, as loss): first-order estimate
    n (int): prompts
    """,
)

SINKS = declare(
    "sinks",
    "Sinks and outlier tokens",
    "A row per token that is longer than 10 times the median token at some norm (outlier), or that "
    "attention of some layer falls to (sink).",
    ("prompt", "position"),
    """
    prompt (int): number of the prompt, from 0
    position (int): in its prompt, from 0
    token (text): the token there
    outlier (bool): whether |Px| exceeds 10 times the prompt's median at some norm
    massive (bool): whether an entry of it exceeds 100 and 1000 times the median entry's size at some norm (Sun et al.
        2024)
    emerges_at (text): the first norm at which |Px| exceeds 10 times the median; empty if at none
    emerges_in (int): the layer of that norm; NaN if at none
    writer (text): what wrote it: the parts between the norm before and that norm; empty where that is unknown
    writer_share (float, share): share of the vector's squared length there along what was written between: <P
        written, P x> / |P x|²
    longest_at (text): the norm at which it is longest relative to the median
    length_ratio (float): |Px| there over the prompt's median
    sigma (float): its divisor there; NaN where the norm does not scale
    length_before (float, L2 norm): |x| there
    length_after (float, L2 norm): length of the norm's output there
    dimensions (text): the dimensions that make most of it there, with their shares of squared length
    sink (bool): whether, in some layer, over 30 % of (head, query) give it over 0.3 of their attention
    sink_layer (int): the layer in which most do; NaN where fewer than 10 queries see it
    sink_rate (float, share): share of (head, query) of that layer that do (Gu et al. 2025)
    received (float, share): mean attention that queries of all measured layers give it
    uniform (float, share): the same if attention were uniform: mean over these queries of 1 / visible keys, to
        compare with
    received_no_scaling (float, share): the same over the layers from the one where it emerges on (of a sink that is
        no outlier: over the layers where it is one), if its own key alone were made with the norm's mean sigma over the
        other prompts, position 0 left out; NaN where the norm does not scale or head space is not supported
    received_there (float, share): received over those layers as they are, to compare with
    """,
)

SINK_HEADS = declare(
    "sink_heads",
    "Sinks by head",
    "A row per (layer, head): attention to the prompts' sinks and outlier tokens.",
    ("layer", "head"),
    """
    layer (int): block whose attention it is
    head (int): head
    queries (int): queries that see one of them and another key
    sink_rate (float): how many of them these give over 0.3 of their attention, on average: a share, where there is
        one
    attention (float, share): mean attention that they give all of them
    uniform (float, share): the same if attention were uniform, to compare with
    first_rate (float, share): share of queries after position 0 (bidirectional: all) that give it over 0.3
    first_attention (float, share): mean attention that they give it
    first_uniform (float, share): the same if attention were uniform, to compare with
    seen_by (int): queries that see the token that most see, in the prompt where they are most
    """,
)

OUTLIER_DIMENSIONS = declare(
    "outlier_dimensions",
    "Outlier dimensions",
    "A row per norm and dimension that is over 10 times larger than the median dimension, for the median token.",
    ("site", "dimension"),
    """
    site (text): the norm's name in the model
    layer (int): block it belongs to
    dimension (int): of the norm's input, from 0
    ratio (float): median over tokens of |Px| there over its median over dimensions, mean over these prompts
    prompts (int): prompts in which it is over 10
    """,
)

BY_HEAD = declare(
    "by_head",
    "By head",
    "A row per (layer, head): columns of the other tables for it; columns of tables that were not measured are NaN.",
    ("layer", "head"),
    """
    layer (int): block whose attention it is
    head (int): head
    delta_loss (float, nats per token): how much the loss rises when this head alone reads its norm with scaling frozen
        (first-order estimate if not run)
    delta_loss_no_projection (float, nats per token): the same without projection
    delta_loss_both_removed (float, nats per token): the same without both
    exact (bool): whether these were run, not estimated
    p_sign (float): of delta_loss, as in head_effects
    loss (float, nats per token): of the intact model
    entropy_ratio (float): attention entropy over log(visible keys): 1 is uniform
    entropy_change (float): its change with scaling frozen for the keys
    attainable (float, share): median attention that a key can receive at the last position from queries of the size
        that occur
    attainable_change (float, share): its change with scaling frozen for the keys
    received (float, share): median over keys of the largest weight they receive
    margin (float, nats): median margin of the keys
    margin_change (float, nats): its change with scaling frozen for the keys
    first_attention (float, share): mean attention to position 0 of the queries behind it
    sink_rate (float): of sink or outlier tokens, how many the queries give over 0.3, on average
    first_uniform (float, share): attention to position 0 if attention were uniform
    first_change (float, share): change of the attention to position 0 with scaling frozen for the keys, mean over the
        prompts whose attention is kept
    """,
)

TOKENS = declare(
    "tokens",
    "Tokens",
    "How much attention keys of each token can receive, over all heads of the prompts kept here: position 0 and"
    " attention sinks apart, then the tokens whose attainable attention falls most with scaling frozen.",
    ("token", "place"),
    """
    token (text): the token
    place (text): position 0, sink (a token that the table sinks calls one), or elsewhere
    keys (int): (layer, head, prompt, position) counted
    unselectable (float): of them, in the hull of the others; NaN where not measured
    unselectable_no_scaling (float): the same with scaling frozen
    attainable_median (float, share): median attention that a key can receive at the last position from queries of the
        size that occur
    attainable_no_scaling_median (float, share): the same with scaling frozen
    attainable_change (float, share): change of that median with scaling frozen: negative where it falls
    margin_median (float, nats): median margin
    received_mean (float, share): mean attention received from queries that see it
    """,
)

SUMMARY = declare(
    "comparison",
    "Comparison",
    "A row per model. mean_share: median over norms; unselectable: share of all keys; columns of attainable "
    "attention, margins and entropy: medians over heads. Columns ending in _no_scaling: with scaling frozen.",
    ("model",),
    """
    model (text): what the report is called
    step (int): training step; NaN if not known
    loss (float, nats per token): of the intact model, over all prompts
    loss_difference (float, nats per token): of the same prompts, minus the first model's; NaN on other tokens
    loss_difference_low (float, nats per token): lower end of its 95 % interval over prompt groups (bootstrap-t of
        paired differences); NaN with fewer than 32
    loss_difference_high (float, nats per token): upper end of the same
    norms (int): number of norms
    first_attention (float, share): attention to position 0, mean over heads of sink_heads.first_attention
    sink_heads (float, share): heads in which that is over 0.3
    mean_share (float): median over norms of layernorms.mean_share
    unselectable (float, share): share of keys that no query can select, head space
    unselectable_no_scaling (float, share): the same with scaling frozen
    attainable (float, share): median over heads of heads.attainable_median
    attainable_no_scaling (float, share): the same with scaling frozen
    margin (float, nats): median over heads of heads.margin_median
    margin_no_scaling (float, nats): the same with scaling frozen
    entropy_ratio (float): median over heads of heads.entropy_ratio
    entropy_ratio_no_scaling (float): the same with scaling frozen
    """,
)

PAIRED = declare(
    "paired",
    "Paired differences",
    "A row per model but the first, group of norms or norm, and variant: how much more its loss changes"
    " than the first one's on the same prompts.",
    ("model", "sites", "variant"),
    """
    model (text): what the report is called
    against (text): the first report
    sites (text): a norm, or a group: attention, mlp, final, all
    variant (text): which terms remain: no_scaling, no_projection, both_removed
    difference (float, nats per token): delta_loss of this model minus that of the first
    low (float, nats per token): lower end of its 95 % interval over prompt groups (bootstrap-t of paired differences,
        the choice of both models' constants included as in `causal`); NaN as there
    high (float, nats per token): upper end of the same
    p_mean (float): two-sided p of the difference being 0, from the interval's own resamples (Holm-adjusted for all
        rows of groups, or all rows of single norms); NaN where there is no interval
    prompts (int): prompts that both were measured on
    prompts_more (int): of them, those on which this model's loss rises more
    p_sign (float): sign test over prompt groups: of the median, not of the mean (Holm-adjusted for all rows)
    """,
)

# In the order in which a report shows them; all of them are in every report, empty where their probe did not run.
BUILT_IN = (
    LAYERNORMS,
    HEADS,
    KEYS,
    CAUSAL,
    CAUSAL_PROMPTS,
    HEAD_EFFECTS,
    SINKS,
    SINK_HEADS,
    OUTLIER_DIMENSIONS,
    SCALE_SUMS,
)


def document() -> str:
    """`docs/columns.md`."""
    made = "Made by `python -m ln_probe.analyses.probes.columns > docs/columns.md`."
    return f"# Columns\n\n{made}\n\n{reference((*BUILT_IN, TOKENS, SUMMARY, PAIRED, BY_HEAD))}"


if __name__ == "__main__":
    print(document(), end="")
