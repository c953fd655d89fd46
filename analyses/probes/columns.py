"""The tables of the built-in probes: every column's name, type, unit and meaning, written here and nowhere else.

`python -m ln_probe.analyses.probes.columns` prints them as Markdown (`docs/columns.md`).
"""

from __future__ import annotations

from ln_probe.analyses.probes import head_columns
from ln_probe.analyses.schema import Column, Kind, Table, reference


def _without_first(column: Column) -> Column:
    """The same statistic over all positions but 0, where attention sinks live."""
    return Column(f"{column.name}_tail", column.kind, f"`{column.name}` without position 0", column.unit)


def _column(name: str, kind: Kind, meaning: str, unit: str = "") -> Column:
    return Column(name, kind, meaning, unit)


# ------------------------------------------------------------------------------------------------------------ norms

_MEAN_SHARE = _column(
    "mean_share", "float", "mean over tokens of d·mu²/‖x‖²: the share of squared length that projection removes"
)
_ANGLE = _column(
    "angle_to_ones_deg",
    "float",
    "mean angle of the norm's input to the ones-vector, 0–90; 90 leaves projection nothing to do",
    "degrees",
)
_BEFORE = _column("norm_before_mean", "float", "mean length of the norm's input", "L2 norm")
_BEFORE_CV = _column("norm_before_cv", "float", "standard deviation over mean of the input's length")
_AFTER = _column("norm_after_mean", "float", "mean length of the norm's output, gain and bias included", "L2 norm")
_SCALE = _column("scale_mean", "float", "mean of 1/sigma")
_SCALE_CV = _column("scale_cv", "float", "standard deviation over mean of 1/sigma")

LAYERNORMS = Table(
    "layernorms",
    "Norms",
    "A row per norm; columns ending in _tail leave position 0 out.",
    ("site",),
    (
        _column("site", "text", "the norm's name in the model"),
        _column("layer", "int", "block it stands in; 0 after the embedding, the number of blocks for the final norm"),
        _column(
            "kind",
            "text",
            "what it computes: layernorm, rmsnorm, projection_only, scaling_only or none; unknown: no norm that ln_probe "
            "knows, listed because something reads it where a norm would stand (see evidence)",
        ),
        _column("reads", "text", "who reads its output, joined by +: attention, mlp, unembed, query, key, …"),
        _column("state", "text", "of the weights around it: raw, folded, centred or folded+centred"),
        _column("tokens", "int", "vectors seen"),
        _MEAN_SHARE,
        _ANGLE,
        _BEFORE,
        _BEFORE_CV,
        _AFTER,
        _SCALE,
        _SCALE_CV,
        _column("gain_mean", "float", "mean of the gain; NaN where there is none"),
        _column("gain_cv", "float", "standard deviation over absolute mean of the gain; NaN where there is none"),
        _column("bias_norm", "float", "length of the bias; NaN where there is none", "L2 norm"),
        _column("reconstruction_error", "float", "max |LN(x) − sum of its terms| over the RMS of LN(x)"),
        *map(_without_first, (_MEAN_SHARE, _ANGLE, _BEFORE, _BEFORE_CV, _AFTER, _SCALE, _SCALE_CV)),
        _column("sigma_mean", "float", "mean divisor"),
        _column("sigma_mean_tail", "float", "`sigma_mean` without position 0"),
        _column("constant_first", "float", "constant that replaces sigma at position 0, pooled over all prompts"),
        _column("constant_rest", "float", "the same at the other positions"),
        _column(
            "constant_ratio_first",
            "float",
            "`constant_first` over the mean sigma of the measured prompts at position 0: 1 for leave-one-out means",
        ),
        _column("constant_ratio_rest", "float", "the same at the other positions"),
        _column("eps", "float", "inside the square root of sigma; NaN where the norm does not scale"),
        _column(
            "reconstruction_bound",
            "float",
            "what rounding explains of reconstruction_error: 1e-5 in float32, 1e-12 in float64, in half precision three "
            "half-ulps of the largest entry over the RMS",
        ),
        Column("evidence", "text", "why `state` is believed", shown=False),
    ),
)

# ------------------------------------------------------------------------------------------------------------- keys

_PLACE = (
    _column("layer", "int", "block whose attention it is"),
    _column("head", "int", "head; -1: the whole layer, at the norm's output"),
    _column(
        "space",
        "text",
        "normalized: the norm's output before gain and bias; head: keys as attention sees them (gain, bias, W_K, b_K, "
        "QK-norm, rotary)",
    ),
    _column("variant", "text", "intact, no_scaling, no_projection or neither"),
)

# Estimates over keys that have an interval where keys were sampled, with their units.
INTERVALS = {
    "unselectable_fraction": "share",
    "unreachable_fraction": "share",
    "margin_median": "nats; normalized: relative",
    "margin_p05": "nats; normalized: relative",
    "attainable_median": "share",
    "attainable_p05": "share",
    "attainable_last_median": "share",
    "attainable_last_p05": "share",
}

HEADS = Table(
    "heads",
    "Heads",
    "A row per (layer, head, space, variant); head −1 is the whole layer at the norm's output.",
    ("layer", "head", "space", "variant"),
    (
        *_PLACE,
        _column("keys", "int", "keys measured, of all prompts; NaN where selectability was not measured"),
        _column(
            "unselectable",
            "int",
            "keys in the convex hull of their prompt's other keys: no query of any length selects them",
        ),
        _column("duplicate", "int", "keys on the hull that occur more than once"),
        _column("undecided", "int", "keys whose verdict could not be proved within the tolerance"),
        _column("unselectable_fraction", "float", "unselectable / keys", "share"),
        _column(
            "unreachable_fraction",
            "float",
            "share of keys that no query of the set that `queries` names gives strictly the highest score (`reachable` in the "
            "keys table); includes unselectable keys and exact copies; NaN in normalized space",
            "share",
        ),
        _column(
            "margin_median",
            "float",
            "median over keys of the best score gap over all others: in head space by any query of the set that `queries` "
            "names, biases included, negative if none puts the key on top (the same in every basis of the head); in "
            "normalized space by a query of unit length, over the RMS norm of the centred keys",
            "nats; normalized: relative",
        ),
        _column(
            "margin_p05",
            "float",
            "5th percentile of the same",
            "nats; normalized: relative",
        ),
        _column(
            "attainable_median",
            "float",
            "median over keys of `attainable` in the keys table: the largest softmax weight at any position that sees the key",
            "share",
        ),
        _column("attainable_p05", "float", "5th percentile of the same", "share"),
        _column(
            "attainable_last_median",
            "float",
            "median over keys of `attainable_last` in the keys table: the largest softmax weight at the last position, which "
            "sees all keys, from queries of the size that occur",
            "share",
        ),
        _column("attainable_last_p05", "float", "5th percentile of the same", "share"),
        _column(
            "attainable_reachable_median",
            "float",
            "the median at the last position over every query the head can make from any residual vector (reachable set); NaN "
            "without a bound on queries",
            "share",
        ),
        _column(
            "pattern_max_median",
            "float",
            "median over keys of the largest weight they really received from any query that sees them and another key: "
            "compare it with attainable_median; attainable_last_median is about the last position, which sees more keys",
            "share",
        ),
        _column(
            "query_radius",
            "float",
            "rho: how far into the reachable set (0–1) the observed queries go, 95 % quantile; NaN without a bound",
        ),
        _column(
            "queries",
            "text",
            "the set of queries of margins: reachable, all that the head can make; empirical, where nothing bounds them: the "
            "ellipsoid of mean and covariance of those that occurred, holding 95 % of them; empty in normalized space",
        ),
        _column(
            "entropy_ratio",
            "float",
            "attention entropy over log(visible keys), mean over queries; NaN where uniformity was not measured",
        ),
        _column(
            "uniform_angle_deg",
            "float",
            "mean angle of gain·(W_K q) to the ones-vector: 0 would attend uniformly whatever the keys (without a bias per "
            "key; with rotary positions, only if so for every key's); NaN without projection (a random direction's angle is in the provenance)",
            "degrees",
        ),
        _column("score_spread", "float", "mean standard deviation of a query's scores over the keys it sees", "nats"),
        _column(
            "score_spread_floor",
            "float",
            "least spread that a query at the end of the reachable set could have (those inside it can spread less); NaN "
            "without a bound on queries, or with ALiBi",
            "nats",
        ),
        _column("keys_all", "int", "keys there are, of all prompts: more than `keys` where only a sample was measured"),
        _column("prompts", "int", "prompts that they come from"),
        *(
            Column(
                f"{name}_{end}",
                "float",
                f"{side} end of the 95 % interval of {name}; NaN where all keys were measured, or the sample is too small",
                unit,
                shown=False,
            )
            for name, unit in INTERVALS.items()
            for end, side in (("low", "lower"), ("high", "upper"))
        ),
        _column(
            "by_theorem",
            "text",
            "why no key is unselectable here whatever was learned (at most d + 1 affinely independent keys, a sphere); empty if "
            "one could be or is",
        ),
        _column(
            "no_op", "text", "why the variant changes nothing here by construction; empty if it does change something"
        ),
    ),
)

KEYS = Table(
    "keys",
    "Keys",
    "The hardest keys of each head and a sample, each under all variants; hardest first.",
    ("layer", "head", "space", "variant", "prompt", "position"),
    (
        *_PLACE,
        _column("prompt", "int", "number of the prompt, from 0"),
        _column("position", "int", "of the key in its prompt, from 0"),
        _column("token", "text", "the token there"),
        _column(
            "verdict",
            "text",
            "selectable: some query of any length gives it strictly the highest score; unselectable: it lies in the convex "
            "hull of the others; duplicate: selectable but for keys within the tolerance of it; undecided. Keys are judged "
            "in their own coordinates, less the directions that W_Q removes (relative singular value below 1e-9), as "
            "`key_geometry` judges them",
        ),
        _column(
            "margin_lower",
            "float",
            "proven lower bound of the best score gap over all other keys that a query of the head's set gives (`queries` in "
            "the heads table), negative if none puts the key on top; normalized: distance to the hull of the others over the "
            "keys' RMS norm; NaN for a single key",
            "nats; normalized: relative",
        ),
        _column("margin_upper", "float", "upper bound of the same", "nats; normalized: relative"),
        _column(
            "reachable",
            "bool",
            "whether some query of the head's set (`queries` in the heads table) gives it strictly the highest score: its "
            "margin is above tau (1e-7) times the RMS norm, in nats, of the keys as the set sees them. A selectable key that "
            "is not reachable is selected only by queries that the head cannot produce. False for an exact copy; missing in "
            "normalized space",
        ),
        _column(
            "attainable",
            "float",
            "largest softmax weight found at any position that sees it and another key, from queries of the observed set (of "
            "the empirical one where nothing bounds queries) and those that occurred: a proven lower bound of the maximum",
            "share",
        ),
        _column(
            "attainable_upper",
            "float",
            "what no query of that set at any of these positions, and none that occurred, exceeds (proven). At most 0.01 "
            "above the maximum (absolute) without rotary positions and windows. Else looser: with rotary positions the "
            "bound of one convex combination of the keys before it at every position, with a window of the keys that all "
            "positions of half a window see",
            "share",
        ),
        _column(
            "attainable_last",
            "float",
            "the same as `attainable` for queries of that set at the position `judged_at` alone: the last one, where all keys "
            "compete",
            "share",
        ),
        _column(
            "attainable_last_upper",
            "float",
            "what no query of that set at that position exceeds (proven): at most 0.01 more (absolute), so a small weight is "
            "known less well relative to itself",
            "share",
        ),
        _column(
            "attainable_reachable",
            "float",
            "largest softmax weight found at that position from queries of the reachable set; NaN if unbounded",
            "share",
        ),
        _column(
            "pattern_max",
            "float",
            "the largest weight it really received from any query that sees it and another key; at most `attainable_upper`",
            "share",
        ),
        _column(
            "first_unselectable_at",
            "int",
            "first position at which a causal query can no longer select it; -1 if never, NaN if attention is not causal, or "
            "a window hides keys",
            "position",
        ),
        _column(
            "judged_at",
            "int",
            "position of the query whose visible keys it was judged among: the last one; with a window the last one or one "
            "whole windows before it",
            "position",
        ),
    ),
)

# --------------------------------------------------------------------------------------------------------- the model

CAUSAL = Table(
    "causal",
    "Interventions",
    "A row per group of norms and variant: the running model with a term switched off.",
    ("sites", "variant"),
    (
        _column("sites", "text", "a norm, or a group: attention, mlp, final, all"),
        _column("variant", "text", "what is left there: intact, no_scaling, no_projection or neither"),
        _column(
            "family",
            "text",
            "which rows its p-values are Holm-adjusted with: primary ({attention, all} × {scaling frozen, projection "
            "removed}), or an exploratory family; empty for intact",
        ),
        _column("loss", "float", "mean loss; NaN where it is not applicable", "nats per token, or the user's loss"),
        _column("delta_loss", "float", "its change against the intact model, with mean constants", "as loss"),
        _column(
            "delta_loss_low",
            "float",
            "lower end of its 95 % CI over prompt groups (bootstrap-t). Where a primary contrast freezes scaling it includes "
            "the choice of the constants. NaN with fewer than 32 groups, and where an end would lie farther from the mean "
            "than half the range of the groups' values: a few prompts then carry it",
            "as loss",
        ),
        _column("delta_loss_high", "float", "upper end of the same", "as loss"),
        _column(
            "p_mean",
            "float",
            "two-sided p of delta_loss being 0, from the interval's own resamples, Holm-adjusted within its family; NaN "
            "where there is no interval. A change is called significant below 0.05",
        ),
        _column(
            "equivalence_bound",
            "float",
            "smallest number within which the change is equivalent to 0: its 90 % CI lies between minus and plus this",
            "as loss",
        ),
        _column(
            "delta_loss_median",
            "float",
            "median over prompts of the prompt's mean change; delta_loss is the mean over all their tokens",
            "as loss",
        ),
        _column(
            "delta_loss_uniform",
            "float",
            "delta_loss with one constant for all positions, that of the positions after 0: an attention sink's vectors "
            "become longer by as much as its sigma is larger; of groups, where scaling is frozen",
            "as loss",
        ),
        _column(
            "delta_loss_optimal",
            "float",
            "delta_loss with loss-optimal constants, fitted on the other half of the prompt groups; of primary contrasts "
            "that freeze scaling; NaN where they were not fitted",
            "as loss",
        ),
        _column("delta_loss_optimal_low", "float", "lower end of its 95 % CI over prompt groups", "as loss"),
        _column("delta_loss_optimal_high", "float", "upper end of the same", "as loss"),
        _column("prompts_worse", "int", "prompts whose loss rises"),
        _column(
            "p_adjusted",
            "float",
            "sign test over prompt groups: of the direction of the median, not of the size of the mean; Holm-adjusted "
            "within its family; NaN where nothing changes by construction or there is no loss",
        ),
        _column(
            "kl",
            "float",
            "KL(intact ‖ edited) of next-token distributions, mean over positions; NaN where outputs are no token logits",
            "nats",
        ),
        _column("top1_agreement", "float", "share of positions with the same most likely token", "share"),
        _column(
            "entropy_change",
            "float",
            "change of attention entropy over log(visible keys), mean over layers, heads, queries",
        ),
        _column(
            "prompts",
            "int",
            "prompts whose loss was taken, all where there is none: fewer for single norms than groups",
        ),
        _column("groups", "int", "prompt groups that these prompts form"),
        _column("no_op", "text", "why nothing changes by construction; empty if something does"),
    ),
)

SCALE_SUMS = Table(
    "scale_sums",
    "Sums of sigma",
    "A row per prompt and norm: what the constants of the other prompts are means of (`report.constants`).",
    ("prompt", "site"),
    (
        _column("prompt", "int", "number of the prompt, from 0"),
        _column("group", "int", "its group: the constants of a prompt are means over the other groups"),
        _column("site", "text", "the norm's name"),
        _column("sum_first", "float", "sum of sigma at position 0 (over heads, for norms inside attention)"),
        _column("count_first", "int", "how many it is a sum of"),
        _column("sum_rest", "float", "sum of sigma at the other positions"),
        _column("count_rest", "int", "how many it is a sum of"),
    ),
)

CAUSAL_PROMPTS = Table(
    "causal_prompts",
    "Interventions, prompt by prompt",
    "A row per prompt, group of norms or norm, and variant: what the intervals of `causal` come from.",
    ("prompt", "sites", "variant"),
    (
        _column("prompt", "int", "number of the prompt, from 0"),
        _column("group", "int", "its prompt group"),
        _column("sites", "text", "a norm, or a group: attention, mlp, final, all"),
        _column("variant", "text", "what is left there: no_scaling, no_projection or neither"),
        _column("predicted", "int", "tokens that are predicted: all but the first; 1 under a loss of the user's"),
        _column("loss", "float", "mean loss of the intact model on this prompt", "nats per token, or the user's loss"),
        _column("delta_loss", "float", "its change", "as loss"),
        _column(
            "shift",
            "float",
            "what the prompt adds to the summed loss change through the other prompts' constants, to first order; the "
            "interval resamples delta_loss × predicted + shift",
            "as loss, summed",
        ),
        _column("delta_loss_uniform", "float", "the same with one constant for all positions", "as loss"),
        _column("delta_loss_optimal", "float", "the same with loss-optimal constants", "as loss"),
        _column("kl", "float", "KL(unedited ‖ edited), mean over positions", "nats"),
        _column("top1_agreement", "float", "share of positions with the same most likely token", "share"),
        _column("entropy_change", "float", "change of attention entropy over log(visible keys)"),
    ),
)

UNEMBEDDING = Table(
    "unembedding",
    "Unembedding",
    "Tokens that are hard to predict, over everything the final norm can put out.",
    ("token_id",),
    (
        _column("token_id", "int", "the token"),
        _column("token", "text", "as it is written"),
        _column(
            "verdict",
            "text",
            "whether some output of the final norm makes it the most likely one; undecided if not solved for",
        ),
        _column(
            "margin_lower",
            "float",
            "proven lower bound of the best lead over all other logits that an output of the final norm gives; negative if "
            "none puts the token on top",
            "nats",
        ),
        _column("margin_upper", "float", "upper bound of the same", "nats"),
        _column(
            "attainable",
            "float",
            "largest probability found from any residual vector; NaN where the final norm does not scale",
            "share",
        ),
        _column("attainable_upper", "float", "upper bound of that probability", "share"),
    ),
)

# -------------------------------------------------------------------------------------------------- parts of the model

_PART = (
    _column("part", "text", "embed, pos_embed, L3H5 (a head), L3 mlp, L3 b_O and L3 b_out (biases), or a norm's bias"),
    _column("kind", "text", "embedding, position, head, mlp, bias, norm bias or unembedding bias"),
    _column("part_layer", "int", "its block; -1 for embeddings"),
    _column("index", "int", "its head; -1 for others"),
    _column("tokens", "int", "positions seen"),
)
_OF_SIGMA = (
    _column(
        "share",
        "float",
        "mean over tokens of <P x_p, P x> / |P x|²: the part's share of sigma² − eps, negative where it shrinks the vector; shares of a norm add up to 1",
        "share",
    ),
    _column(
        "sigma_change",
        "float",
        "mean over tokens of the relative change of sigma if this norm read its input without the part (exact); NaN where the norm does not scale",
        "share",
    ),
    _column(
        "mu",
        "float",
        "mean over tokens of mean(x_p): what the part writes on the ones-vector, which projection takes off",
    ),
    _column("mu_share", "float", "mean over tokens of |mu_p| / Σ|mu_p|", "share"),
)

WRITERS = Table(
    "writers",
    "Writers",
    "A row per norm and part of the model that writes to its input: who sets sigma, who writes on the ones-vector. Columns ending in _tail leave position 0 out.",
    ("site", "part"),
    (
        _column("site", "text", "the norm's name in the model"),
        _column("layer", "int", "block it stands in"),
        *_PART,
        *_OF_SIGMA,
        *map(_without_first, _OF_SIGMA),
    ),
)

ATTRIBUTION = Table(
    "attribution",
    "Attribution",
    "A row per part of the model: what it gives to the next token's logit minus the mean logit, through the final norm, exactly; rows add up to the mean of that difference.",
    ("part",),
    (
        *_PART,
        _column("contribution", "float", "mean over positions of what it gives", "nats"),
        _column("magnitude", "float", "mean over positions of the absolute value of that", "nats"),
        _column("without_projection", "float", "mean of what it would give if the final norm did not project", "nats"),
        _column(
            "projection",
            "float",
            "mean of what projection takes off; the rest of a bias's contribution is constant",
            "nats",
        ),
    ),
)

# ---------------------------------------------------------------------------------------------- computed from others

TOKENS = Table(
    "tokens",
    "Tokens",
    "What keys of each token can get, over all heads of the prompts kept here: position 0 and attention sinks apart, then "
    "the tokens that lose most when scaling is taken away.",
    ("token", "place"),
    (
        _column("token", "text", "the token"),
        _column(
            "place",
            "text",
            "position 0, sink (a token that the table sinks calls one), or elsewhere",
        ),
        _column("keys", "int", "(layer, head, prompt, position) counted"),
        _column("unselectable", "float", "of them, in the hull of the others; NaN where not measured"),
        _column("unselectable_no_scaling", "float", "the same with scaling replaced by a constant"),
        _column(
            "attainable_median",
            "float",
            "median attention that a key can receive at the last position from queries of the size that occur",
            "share",
        ),
        _column("attainable_no_scaling_median", "float", "the same with scaling replaced by a constant", "share"),
        _column(
            "attainable_change",
            "float",
            "what taking scaling away does to that median: negative where the token loses",
            "share",
        ),
        _column("margin_median", "float", "median margin", "nats"),
        _column("received_mean", "float", "mean attention received from queries that see it", "share"),
    ),
)

SUMMARY = Table(
    "comparison",
    "Comparison",
    "A row per model. mean_share: median over norms; unselectable: share of all keys; the others: medians over heads. "
    "Columns ending in _no_scaling: with scaling replaced by a constant.",
    ("model",),
    (
        _column("model", "text", "what the report is called"),
        _column("step", "int", "training step; NaN if not known"),
        _column("norms", "int", "number of norms"),
        _column("mean_share", "float", "median over norms of layernorms.mean_share"),
        _column("unselectable", "float", "share of keys that no query can select, head space", "share"),
        _column("unselectable_no_scaling", "float", "the same with scaling replaced by a constant", "share"),
        _column("attainable", "float", "median over heads of heads.attainable_last_median", "share"),
        _column("attainable_no_scaling", "float", "the same with scaling replaced by a constant", "share"),
        _column("margin", "float", "median over heads of heads.margin_median", "nats"),
        _column("margin_no_scaling", "float", "the same with scaling replaced by a constant", "nats"),
        _column("entropy_ratio", "float", "median over heads of heads.entropy_ratio"),
        _column("entropy_ratio_no_scaling", "float", "the same with scaling replaced by a constant"),
    ),
)

PAIRED = Table(
    "paired",
    "Paired differences",
    "A row per model but the first, group of norms or norm, and variant: how much more its loss changes than the first "
    "one's on the same prompts.",
    ("model", "sites", "variant"),
    (
        _column("model", "text", "what the report is called"),
        _column("against", "text", "the first report"),
        _column("sites", "text", "a norm, or a group: attention, mlp, final, all"),
        _column("variant", "text", "what is left there: no_scaling, no_projection or neither"),
        _column("difference", "float", "delta_loss of this model minus that of the first", "nats per token"),
        _column(
            "low",
            "float",
            "lower end of its 95 % interval over prompts (bootstrap-t of paired differences); NaN as in `causal`",
            "nats per token",
        ),
        _column("high", "float", "upper end of the same", "nats per token"),
        _column(
            "p_mean",
            "float",
            "two-sided p of the difference being 0, from the interval's own resamples (Holm-adjusted for all rows of "
            "groups, or all rows of single norms); NaN where there is no interval",
        ),
        _column("prompts", "int", "prompts that both were measured on"),
        _column("prompts_more", "int", "of them, those on which this model loses more"),
        _column(
            "p_adjusted",
            "float",
            "sign test of that number: of the median, not of the mean (Holm-adjusted for all rows)",
        ),
    ),
)

# In the order in which a report shows them; all of them stand in every report, empty where their probe did not run.
BUILT_IN = (LAYERNORMS, HEADS, KEYS, CAUSAL, CAUSAL_PROMPTS, UNEMBEDDING, *head_columns.TABLES, SCALE_SUMS)
# Of probes that run when they are asked for: in reports where they did.
ON_REQUEST = (WRITERS, ATTRIBUTION)


def document() -> str:
    """`docs/columns.md`."""
    made = "Made by `python -m ln_probe.analyses.probes.columns > docs/columns.md`."
    return (
        f"# Columns\n\n{made}\n\n{reference((*BUILT_IN, *ON_REQUEST, TOKENS, SUMMARY, PAIRED, head_columns.BY_HEAD))}"
    )


if __name__ == "__main__":
    print(document(), end="")
