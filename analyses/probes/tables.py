"""The tables of a report: every column's unit and meaning, from which `bench/columns.py` writes `docs/columns.md`.

TABLES are those of a report; SUMMARY is computed from them (`compare`).
"""

from __future__ import annotations

from ln_probe.analyses.schema import Table

_LAYER = ("index", "block whose attention it is")
_HEAD = ("index", "head")
_VARIANT = ("text", "which terms remain: intact, no_scaling, no_projection, both_removed")
_PROMPT = ("index", "number of the prompt, from 0")
_TOKEN = ("text", "the token there")
_SITES = ("text", "a norm, or a group of norms: attention, mlp, final, all")

LAYERNORMS = Table(
    "layernorms",
    "Norms",
    "A row per norm.",
    ("site",),
    {
        "site": ("text", "the norm's name in the model"),
        "layer": ("index", "block it belongs to; the number of blocks for the final norm"),
        "reads": ("text", "who reads its output, joined by +: attention, mlp, unembed, query, key, …"),
        "projected_share": ("share", "mean of d·mean(x)²/|x|²: what projection removes of squared length"),
        "angle_to_ones_deg": (
            "degrees",
            "mean angle of x to the all-ones direction; at 90 projection does nothing",
        ),
        "input_norm": ("L2 norm", "mean length of x, the norm's input"),
        "sigma_mean": ("RMS", "mean of the divisor sigma"),
        "sigma_cv": ("ratio", "standard deviation of sigma over its mean: how much scaling does"),
        "reconstruction_error": ("ratio", "max |LN(x) − sum of its terms| over the RMS of LN(x)"),
        "n": ("count", "vectors measured"),
    },
)

HEADS = Table(
    "heads",
    "Heads",
    "A row per (layer, head, variant), of keys as attention sees them; NaN where no norm bounds the queries.",
    ("layer", "head", "variant"),
    {
        "layer": _LAYER,
        "head": _HEAD,
        "variant": _VARIANT,
        "unselectable": ("share", "share of keys in the convex hull of their prompt's others: no query selects them"),
        "unreachable": ("share", "share of keys that no query of this head selects, unselectable ones included"),
        "entropy_ratio": ("ratio", "attention entropy over log(visible keys), mean over queries: 1 is uniform"),
        "margin_median": ("nats", "median over keys of the margin: of margin_lower and margin_upper in the table keys"),
        "attainable_median": ("share", "median over keys of `attainable` in the table keys"),
        "pattern_max_median": (
            "share",
            "median over keys of `pattern_max` in the table keys",
        ),
        "uniform_angle_deg": ("degrees", "mean angle of gain·(W_K q) to the all-ones direction: 0 attends uniformly"),
        "n": ("count", "keys, over all prompts"),
    },
)

KEYS = Table(
    "keys",
    "Keys",
    "A row per key, intact and with scaling frozen; NaN where no norm bounds the queries.",
    ("layer", "head", "variant", "prompt", "position"),
    {
        "layer": _LAYER,
        "head": _HEAD,
        "variant": _VARIANT,
        "prompt": _PROMPT,
        "position": ("index", "of the key in its prompt, from 0"),
        "token": _TOKEN,
        "verdict": (
            "text",
            "selectable: some query of any length gives it strictly the highest score; unselectable: in the convex "
            "hull of the others; duplicate: selectable but for copies; undecided",
        ),
        "margin_lower": ("nats", "proved lower bound of the best score gap over all others by a query of the head"),
        "margin_upper": ("nats", "upper bound of the same"),
        "reachable": ("true/false", "whether a query of the head selects it (behind a QK-norm, false alone is proved)"),
        "attainable": ("share", "largest attention at the last position that sees its rivals: a proved lower bound"),
        "attainable_upper": ("share", "what no query of that size there exceeds (proved): at most 0.01 more"),
        "pattern_max": ("share", "the largest weight it receives from any query that sees it and another key"),
        "n": ("count", "keys that compete, itself included: those that one query sees"),
    },
)

CAUSAL = Table(
    "causal",
    "Loss without a term",
    "A row per group of norms or norm, and variant: the loss of the model with a term removed.",
    ("sites", "variant"),
    {
        "sites": _SITES,
        "variant": _VARIANT,
        "family": ("text", "rows whose p-values are Holm-adjusted together: primary, or an exploratory family"),
        "loss": ("loss", "mean loss"),
        "delta_loss": ("loss", "its change against the intact model; NaN where only estimated"),
        "delta_loss_low": ("loss", "lower end of its 95 % CI over prompts; with the choice of constants if primary"),
        "delta_loss_high": ("loss", "upper end of the same"),
        "p": ("p", "two-sided p of delta_loss being 0, Holm-adjusted within its family; NaN: not tested"),
        "equivalence_bound": ("loss", "the change is equivalent to 0 within this: its 90 % CI lies inside"),
        "delta_loss_uniform": ("loss", "delta_loss with one constant for all positions; of primary frozen scaling"),
        "delta_loss_optimal": (
            "loss",
            "delta_loss with loss-optimal constants, fitted on the other half",
        ),
        "delta_loss_optimal_low": ("loss", "lower end of its 95 % CI"),
        "delta_loss_optimal_high": ("loss", "upper end of the same"),
        "estimate": ("loss", "estimate of delta_loss from gradients at the norm; of single norms"),
        "prompts_worse": ("count", "prompts whose loss rises"),
        "n": ("count", "prompts whose loss was measured"),
    },
)

CAUSAL_PROMPTS = Table(
    "causal_prompts",
    "Loss without a term, prompt by prompt",
    "A row per (prompt, sites, variant): what the intervals of `causal` come from.",
    ("prompt", "sites", "variant"),
    {
        "prompt": _PROMPT,
        "stratum": ("text", "the prompt's book; empty where prompts are of no books, or have their own groups"),
        "sites": _SITES,
        "variant": _VARIANT,
        "loss": ("loss", "mean loss of the intact model on this prompt"),
        "delta_loss": ("loss", "its change"),
        "shift": (
            "loss, summed",
            "first-order effect through the other prompts' constants; CIs resample delta_loss·n + shift",
        ),
        "n": ("count", "tokens predicted; 1 under a loss of the user's"),
    },
)

HEAD_EFFECTS = Table(
    "head_effects",
    "Heads without a term",
    "A row per (layer, head, variant): the loss when this head alone reads its norm without a term.",
    ("layer", "head", "variant"),
    {
        "layer": _LAYER,
        "head": _HEAD,
        "variant": _VARIANT,
        "delta_loss": ("loss", "change of the mean loss, by running the edited model; NaN where only estimated"),
        "delta_loss_low": ("loss", "lower end of its 95 % CI over prompt groups; NaN with too few groups"),
        "delta_loss_high": ("loss", "upper end of the same"),
        "p": ("p", "two-sided p of delta_loss being 0, Holm-adjusted over the heads run; NaN: not tested"),
        "prompts_worse": ("count", "prompts whose loss rises"),
        "estimate": ("loss", "first-order estimate: the gradient of the loss at the head's output times its change"),
        "n": ("count", "prompts"),
    },
)

SINKS = Table(
    "sinks",
    "Sinks and outlier tokens",
    "A row per (prompt, position): position 0, the longest other token, and every sink or outlier token.",
    ("prompt", "position"),
    {
        "prompt": _PROMPT,
        "position": ("index", "in its prompt, from 0"),
        "token": _TOKEN,
        "kind": (
            "text",
            "joined by +: first (position 0), longest (of the others), outlier (over 10 times the median length at a "
            "norm), massive (Sun et al. 2024), sink (over 0.3 of the attention of over 30 % of a layer's heads)",
        ),
        "site": ("text", "the norm at which it is longest relative to the prompt's median token"),
        "length_ratio": ("ratio", "|Px| there over that median"),
        "received": ("share", "mean attention that queries of all measured heads give it"),
        "uniform": ("share", "the same if attention were uniform"),
        "received_no_scaling": ("share", "received with scaling frozen for the keys; NaN where that was not measured"),
        "dimensions": ("text", "its largest dimensions there, with their shares of its squared length"),
        "n": ("count", "queries that see it"),
    },
)

SINK_HEADS = Table(
    "sink_heads",
    "Attention to position 0",
    "A row per (layer, head).",
    ("layer", "head"),
    {
        "layer": _LAYER,
        "head": _HEAD,
        "sink_rate": ("share", "share of prompts with mean attention to position 0 above 0.3 (Gu et al. 2025)"),
        "first_attention": ("share", "mean attention to position 0 of the queries behind it"),
        "first_attention_no_scaling": ("share", "the same with scaling frozen for the keys"),
        "n": ("count", "prompts"),
    },
)

# In the order in which a report shows them; all of them are in every report, empty where their probe did not run.
TABLES = (LAYERNORMS, HEADS, KEYS, CAUSAL, CAUSAL_PROMPTS, HEAD_EFFECTS, SINKS, SINK_HEADS)

SUMMARY = Table(
    "comparison",
    "Comparison",
    "A row per model. Columns ending in _no_scaling: with scaling frozen.",
    ("model",),
    {
        "model": ("text", "what the report is called"),
        "step": ("index", "training step; NaN if not known"),
        "loss": ("loss", "of the intact model, over all prompts"),
        "loss_difference": ("loss", "of the same prompts, minus the first model's; NaN on other tokens"),
        "loss_difference_low": ("loss", "lower end of its 95 % CI over prompt groups (paired differences)"),
        "loss_difference_high": ("loss", "upper end of the same"),
        "unselectable": ("share", "share of keys that no query can select"),
        "unselectable_no_scaling": ("share", "the same with scaling frozen"),
        "attainable": ("share", "median over heads of heads.attainable_median"),
        "attainable_no_scaling": ("share", "the same with scaling frozen"),
        "margin": ("nats", "median over heads of heads.margin_median"),
        "margin_no_scaling": ("nats", "the same with scaling frozen"),
        "entropy_ratio": ("ratio", "median over heads of heads.entropy_ratio"),
        "entropy_ratio_no_scaling": ("ratio", "the same with scaling frozen"),
        "sink_rate": ("share", "mean over heads of sink_heads.sink_rate"),
        "first_attention": ("share", "mean over heads of sink_heads.first_attention"),
    },
)
