"""The probe `attribution`: which parts write the next token's logit, over all positions of the prompts.

What is read is the logit of the token that came next, minus the mean logit of the vocabulary (a softmax does not see
the mean). Every part's share of it through the final norm, exactly (`ln_probe.attribute_logits` does the same for one
position), as means over positions: with projection, and without what projection takes off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ln_probe.analyses.attribution.asked import outputs
from ln_probe.analyses.probes.protocol import Context, Cost, Found, Needs, Observer, Piece, Probe, Shape, View
from ln_probe.analyses.tables import ATTRIBUTION
from ln_probe.hooks.components import END, Part, Split, SplitError, Writers, find_wiring, record, weight

PROMPTS = 8  # of the default ones, as `writers`
AT_ONCE = 64  # positions whose readings are held at once
_MEASURES = ("contribution", "magnitude", "without_projection", "projection")
_PASSES = 2.0


class Attribution(Probe):
    name = "attribution"
    summary = "which parts write the next token's logit, through the final norm"
    tables = (ATTRIBUTION,)
    needs = Needs(output=True)
    interleaved = True
    prompts = PROMPTS

    def start(self, view: View) -> Observer:
        return _Watching(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        measured = [p for p in pieces if p.info.get("rows")]
        notes = tuple(dict.fromkeys(note for p in pieces for note in p.notes))
        if not measured:
            return Found({ATTRIBUTION.name: ATTRIBUTION.empty()}, notes)
        count = float(sum(p.arrays["count"][0] for p in measured))
        means = np.sum([p.arrays["sums"] for p in measured], axis=0) / count
        rows = [
            {**row, "tokens": int(count), **dict(zip(_MEASURES, values.tolist(), strict=True))}
            for row, values in zip(measured[0].info["rows"], means, strict=True)
        ]
        return Found({ATTRIBUTION.name: ATTRIBUTION.frame(rows)}, notes)

    def cost(self, shape: Shape) -> Cost:
        return Cost(passes=_PASSES)


class _Watching(Observer):
    def __init__(self, view: View) -> None:
        self.view, self.model = view, view.model
        self.why = view.meaningless
        self.final = next((s for s in reversed(view.sites) if "unembed" in s.reads.split("+")), None)
        self.where = END if self.final is None else self.final.name
        self.wiring = find_wiring(view.model, view.sites)
        W_U, b_U = weight(view.model, "W_U"), weight(view.model, "b_U")
        try:
            self.wiring.at(self.where)
        except SplitError as error:
            self.why = self.why or str(error)
        if W_U is None:
            self.why = self.why or "the model shows no W_U"
        else:
            size = outputs(view.model)
            self.W_U, self.mean = W_U, W_U[:, :size].mean(1, dtype=torch.float64).cpu()
            lift = torch.zeros(W_U.shape[1]) if b_U is None else b_U
            self.b_U, self.mean_b = lift.double().cpu(), float(lift[:size].double().mean())
        self.sums: dict[Part, Float64[np.ndarray, " measure"]] = {}
        self.count = 0

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if self.why or len(tokens) < 2:
            return
        known = list(range(len(tokens) - 1))
        seen = record(self.model, tokens, known, self.view.sites)
        split = Split(Writers(self.model), self.wiring, self.view.sites, seen)
        split.check(self.where)
        for first in range(0, len(known), AT_ONCE):
            some = known[first : first + AT_ONCE]
            self._add(split.rows(some), tokens[[i + 1 for i in some]])
        self.count += len(known)

    def _add(self, split: Split, following: Int[Tensor, " row"]) -> None:
        w = self.W_U[:, following.to(self.W_U.device)].double().cpu().T - self.mean  # [row d_model]
        final = self.final
        gain = w if final is None or final.gain is None else w * final.gain.detach().cpu().double()
        sigma = torch.ones(len(w), 1).double() if final is None else split.sigma(self.where)
        f = torch.stack([gain / sigma, torch.full_like(gain, 1.0 / gain.shape[1])], 1)
        taken = gain.sum(1) / sigma[:, 0] if final is not None and final.projects else torch.zeros(len(w)).double()
        for part, values in split.read(self.where, f).items():
            self._sum(part, values[:, 0], -values[:, 1] * taken)
        zeros = torch.zeros(len(w)).double()
        if final is not None and final.bias is not None:
            part = Part(f"{final.name} bias", "norm bias", final.layer)
            self._sum(part, zeros, zeros, w @ final.bias.detach().cpu().double())
        self._sum(Part("b_U", "unembedding bias"), zeros, zeros, self.b_U[following.cpu()] - self.mean_b)

    def _sum(self, part: Part, without: Tensor, taken: Tensor, fixed: Tensor | float = 0.0) -> None:
        whole = without + taken + fixed
        found = torch.stack([whole, whole.abs(), without, taken], 1).sum(0).numpy()
        self.sums[part] = self.sums.get(part, np.zeros(len(_MEASURES))) + found

    def piece(self) -> Piece:
        if self.why:
            return Piece(notes=(f"attribution of logits was not measured: {self.why}",))
        if not self.sums:
            return Piece()
        rows = [{"part": p.name, "kind": p.kind, "part_layer": p.layer, "index": p.index} for p in self.sums]
        return Piece({"sums": np.stack(list(self.sums.values())), "count": np.array([self.count])}, {}, {"rows": rows})
