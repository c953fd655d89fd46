"""The tables of the probes `head_effects` and `sinks`; `columns` lists them with the others."""

from __future__ import annotations

from ln_probe.analyses.schema import Column, Table

_HEAD = (
    Column("layer", "int", "block whose attention it is"),
    Column("head", "int", "head"),
)

HEAD_EFFECTS = Table(
    "head_effects",
    "Heads without a term",
    "A row per (layer, head, variant): what the loss loses when this head alone reads its norm without a term, its "
    "queries, keys and values made of the edited norm.",
    ("layer", "head", "variant"),
    (
        *_HEAD,
        Column("variant", "text", "what is left of the norm for this head: no_scaling, no_projection or neither"),
        Column(
            "delta_loss",
            "float",
            "change of the mean next-token loss, by running the edited model; NaN where only estimated",
            "nats per token",
        ),
        Column(
            "delta_loss_low",
            "float",
            "lower end of its 95 % interval over prompts (bootstrap-t); NaN with fewer than 32 prompts",
            "nats per token",
        ),
        Column("delta_loss_high", "float", "upper end of the same", "nats per token"),
        Column("prompts_worse", "int", "prompts whose loss rises; NaN where only estimated"),
        Column(
            "p_adjusted",
            "float",
            "sign test of that number (Holm-adjusted for the heads run under the same variant); NaN if only estimated",
        ),
        Column(
            "estimate",
            "float",
            "first-order estimate of delta_loss: gradient of the loss at what the head hands on, times its change",
            "nats per token",
        ),
        Column("estimate_low", "float", "lower end of the estimate's interval over prompts", "nats per token"),
        Column("estimate_high", "float", "upper end of the same", "nats per token"),
        Column("loss", "float", "of the unedited model, to compare with", "nats per token"),
        Column("prompts", "int", "number of prompts"),
        Column("no_op", "text", "why nothing changes by construction; empty if something does"),
    ),
)

SINKS = Table(
    "sinks",
    "Sinks and outlier tokens",
    "A row per token that is longer than 10 times the median token at some norm (outlier), or that attention of some "
    "layer falls to (sink).",
    ("prompt", "position"),
    (
        Column("prompt", "int", "number of the prompt, from 0"),
        Column("position", "int", "in its prompt, from 0"),
        Column("token", "text", "the token there"),
        Column("outlier", "bool", "whether |Px| exceeds 10 times the prompt's median at some norm"),
        Column(
            "massive",
            "bool",
            "whether an entry of it exceeds 100 and 1000 times the median entry's size at some norm (Sun et al. 2024)",
        ),
        Column("emerges_at", "text", "the first norm at which |Px| exceeds 10 times the median; empty if at none"),
        Column("emerges_in", "int", "the layer of that norm; NaN if at none"),
        Column(
            "writer",
            "text",
            "what wrote it: the parts between the norm before and that norm; empty where that cannot be told",
        ),
        Column(
            "writer_share",
            "float",
            "share of the vector's squared length there along what was written between: <P written, P x> / |P x|²",
            "share",
        ),
        Column("longest_at", "text", "the norm at which it is longest beside the median"),
        Column("length_ratio", "float", "|Px| there over the prompt's median"),
        Column("sigma", "float", "its divisor there; NaN where the norm does not scale"),
        Column("length_before", "float", "|x| there", "L2 norm"),
        Column("length_after", "float", "length of the norm's output there", "L2 norm"),
        Column("dimensions", "text", "the dimensions that make most of it there, with their shares of squared length"),
        Column(
            "sink", "bool", "whether, in some layer, over 30 % of (head, query) give it over 0.3 of their attention"
        ),
        Column("sink_layer", "int", "the layer in which most do; NaN without a query that sees it"),
        Column("sink_rate", "float", "share of (head, query) of that layer that do (Gu et al. 2025)", "share"),
        Column("received", "float", "mean attention that queries of all layers looked at give it", "share"),
        Column(
            "uniform",
            "float",
            "the same if attention were uniform: mean over these queries of 1 / visible keys, to compare with",
            "share",
        ),
        Column(
            "received_no_scaling",
            "float",
            "the same over the layers from the one where it emerges on, if its own key alone were made with the mean "
            "sigma of the other tokens; NaN where head space is not supported",
            "share",
        ),
        Column("received_there", "float", "received over those layers as they are, to compare with", "share"),
    ),
)

SINK_HEADS = Table(
    "sink_heads",
    "Sinks by head",
    "A row per (layer, head): attention to the prompts' sinks and outlier tokens.",
    ("layer", "head"),
    (
        *_HEAD,
        Column("queries", "int", "queries that see one of them and another key"),
        Column(
            "sink_rate",
            "float",
            "how many of them these give over 0.3 of their attention, on average: a share, where there is one",
        ),
        Column("attention", "float", "mean attention that they give all of them", "share"),
        Column("uniform", "float", "the same if attention were uniform, to compare with", "share"),
        Column(
            "first_rate",
            "float",
            "share of queries after position 0 (bidirectional: all) that give it over 0.3",
            "share",
        ),
        Column("first_attention", "float", "mean attention that they give it", "share"),
        Column("first_uniform", "float", "the same if attention were uniform, to compare with", "share"),
        Column("seen_by", "int", "queries that see the token that most see, in the prompt where they are most"),
    ),
)

TOKEN_SIZES = Table(
    "token_sizes",
    "Sizes by position",
    "A row per norm and stretch of positions: how long vectors are there.",
    ("site", "first"),
    (
        Column("site", "text", "the norm's name in the model"),
        Column("layer", "int", "block it stands in"),
        Column("first", "int", "first position of the stretch"),
        Column("last", "int", "its last position"),
        Column("tokens", "int", "vectors seen"),
        Column("sigma_mean", "float", "mean divisor"),
        Column("length_before_mean", "float", "mean |x|", "L2 norm"),
        Column("length_after_mean", "float", "mean length of the norm's output", "L2 norm"),
        Column("outliers", "int", "of them, longer than 10 times their prompt's median"),
    ),
)

OUTLIER_DIMENSIONS = Table(
    "outlier_dimensions",
    "Outlier dimensions",
    "A row per norm and dimension that is over 10 times larger than the median dimension, for the median token.",
    ("site", "dimension"),
    (
        Column("site", "text", "the norm's name in the model"),
        Column("layer", "int", "block it stands in"),
        Column("dimension", "int", "of the norm's input, from 0"),
        Column("ratio", "float", "median over tokens of |Px| there over its median over dimensions, mean over prompts"),
        Column("prompts", "int", "prompts in which it is over 10"),
    ),
)

BY_HEAD = Table(
    "by_head",
    "By head",
    "A row per (layer, head): what the other tables say of it; columns of tables that were not measured are NaN.",
    ("layer", "head"),
    (
        *_HEAD,
        Column(
            "delta_loss",
            "float",
            "what the loss loses when this head alone reads its norm without scaling (estimated if not run)",
            "nats per token",
        ),
        Column("delta_loss_no_projection", "float", "the same without projection", "nats per token"),
        Column("delta_loss_neither", "float", "the same without both", "nats per token"),
        Column("exact", "bool", "whether these were run, not estimated"),
        Column("p_adjusted", "float", "of delta_loss, as in head_effects"),
        Column("loss", "float", "of the unedited model, to compare with", "nats per token"),
        Column("entropy_ratio", "float", "attention entropy over log(visible keys): 1 is uniform"),
        Column("entropy_change", "float", "what keys without scaling do to it"),
        Column(
            "attainable",
            "float",
            "median attention that a key can receive at the last position from queries of the size that occur",
            "share",
        ),
        Column("attainable_change", "float", "what keys without scaling do to it", "share"),
        Column("received", "float", "median over keys of the largest weight they really received", "share"),
        Column("margin", "float", "median margin of the keys", "nats"),
        Column("margin_change", "float", "what keys without scaling do to it", "nats"),
        Column("first_attention", "float", "mean attention to position 0 of the queries behind it", "share"),
        Column("sink_rate", "float", "of sink or outlier tokens, how many the queries give over 0.3, on average"),
        Column("first_uniform", "float", "attention to position 0 if it were uniform, to compare with", "share"),
    ),
)

TABLES = (HEAD_EFFECTS, SINKS, SINK_HEADS, TOKEN_SIZES, OUTLIER_DIMENSIONS)
