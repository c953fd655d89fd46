// The notebook widget: a text, a switch per layer and term, and what they change. ln_probe/notebook.py runs the model.
const SWITCHES = [["scaling", "Scaling frozen"], ["projection", "Projection removed"]];
const percentOf = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

function render({ model, el }) {
  const chosen = { query: 0, key: 0 }, get = (name) => model.get(name);
  const set = (name, value) => { model.set(name, value); model.save_changes(); };
  const bytes = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  const labelled = (text, node) => made("label", {}, text, " ", node);

  const text = made("textarea", { rows: 2, value: get("text") });
  text.addEventListener("change", () => set("text", text.value));
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    set("text", text.value);
  });
  const switches = made("table", {}, made("thead", {}, made("tr", {}, made("th", { textContent: "Norms" }), ...SWITCHES.map(([, label]) => made("th", { textContent: label, scope: "col" })))));
  const rows = switches.appendChild(made("tbody"));
  const boxes = [];
  const names = get("groups").length > 1 ? [...get("groups"), "all"] : get("groups");
  for (const name of names) {
    const row = made("tr", {}, made("th", { textContent: name, scope: "row" }));
    for (const [trait, label] of SWITCHES) {
      const box = made("input", { type: "checkbox", ariaLabel: `${label}, ${name}` });
      box.addEventListener("change", () => {
        const others = name === "all" ? [] : get(trait).filter((other) => other !== name);
        set(trait, box.checked ? (name === "all" ? get("groups") : [...others, name]) : others);
      });
      boxes.push([box, trait, name]);
      row.append(made("td", {}, box));
    }
    rows.append(row);
  }
  const layer = made("select"), head = made("select");
  layer.addEventListener("change", () => set("layer", Number(layer.value)));
  head.addEventListener("change", () => set("head", Number(head.value)));
  const loss = made("p", { className: "ln-loss" }), problem = made("p", { className: "ln-problem" }), notes = made("p", { className: "ln-soft" });
  loss.setAttribute("role", "status");
  problem.setAttribute("role", "alert");
  const panels = ["Intact", "Edited", "Edited − intact"].map((what) => Object.assign(patternPanel(chosen, point), { what }));
  panels.forEach(({ title, what }) => { title.textContent = what; });
  const read = made("p", { className: "ln-soft" }), tokens = made("div", { className: "ln-tokens" });
  tokens.setAttribute("role", "group");
  tokens.setAttribute("aria-label", "Tokens; choose one to see what is predicted after it");
  const following = made("table", { className: "ln-next" }), after = made("p");
  el.classList.add("ln-probe");
  el.append(labelled("Text (Enter runs it)", text), problem,
    made("div", { className: "ln-row" }, switches, made("div", {}, loss, notes, after, following)),
    made("p", {}, labelled("Layer", layer), " ", labelled("Head", head)), made("div", { className: "ln-row" }, ...panels.map((p) => p.box)), read, tokens);

  // Bytes of the chosen head's pattern in a pass.
  function weights(pass) {
    const row = pass.layers.indexOf(get("layer")), n = get("intact").tokens.length;
    if (row < 0 || get("head") >= pass.heads) return null;
    return bytes(pass.patterns).subarray((row * pass.heads + get("head")) * n * n, (row * pass.heads + get("head") + 1) * n * n);
  }

  function point(query, key) {
    const one = weights(get("intact")), two = weights(get("edited")), names = get("intact").tokens, n = names.length;
    Object.assign(chosen, { query: clamp(query, n), key: clamp(key, n) });
    if (!one || !two || one.length !== two.length) return;
    const at = chosen.query * n + chosen.key;
    read.textContent = `Query ${chosen.query} “${names[chosen.query]}” gives key ${chosen.key} “${names[chosen.key]}”: intact ${share(weight(one[at]))}, edited ${share(weight(two[at]))}.`;
  }

  function patterns() {
    const one = weights(get("intact")), two = weights(get("edited")), n = get("intact").tokens.length;
    const known = one && two && one.length === two.length;
    panels.forEach(({ canvas, what }, p) => {
      canvas.hidden = !known;
      canvas.setAttribute("aria-label", `Attention, ${what}, layer ${get("layer")}, head ${get("head")}; rows are queries, columns keys; arrow keys move`);
      if (!known) return;
      const causal = one.every((v, i) => !v || i % n <= Math.floor(i / n));
      if (p < 2) paint(canvas, p ? two : one, 0, n, causal, Math.max(strongest(one, 0, n), strongest(two, 0, n)));
      else paintChange(canvas, n, (i) => weight(two[i]) - weight(one[i]), causal);
    });
    if (known) point(chosen.query, chosen.key);
    else read.textContent = "No attention of this head: choose another.";
  }

  function typed() {
    const { tokens: names, layers, heads } = get("intact");
    if (document.activeElement !== text) text.value = get("text");
    layer.replaceChildren(...layers.map((l) => new Option(l, l, false, l === get("layer"))));
    head.replaceChildren(...Array.from({ length: heads }, (_, h) => new Option(h, h, false, h === get("head"))));
    tokens.replaceChildren(...names.map((name, i) => {
      const button = made("button", { type: "button", textContent: name });
      button.addEventListener("click", () => set("position", i));
      return button;
    }));
  }

  function switched() {
    const before = get("intact").loss, now = get("edited").loss, known = before !== null && now !== null;
    loss.textContent = known ? `Loss: intact ${before.toFixed(3)}, edited ${now.toFixed(3)} nats/token (${now < before ? "−" : "+"}${Math.abs(now - before).toFixed(3)})` : "Loss: a single token predicts nothing that is known.";
    notes.textContent = [`Computed in ${get("edited").milliseconds} ms.`, get("edited").notes && `No effect: ${get("edited").notes}.`].filter(Boolean).join(" ");
    for (const [box, trait, name] of boxes) box.checked = name === "all" ? get("groups").every((g) => get(trait).includes(g)) : get(trait).includes(name);
    patterns();
  }

  function predicted() {
    const names = get("intact").tokens, at = get("position") < 0 ? names.length + get("position") : get("position");
    [...tokens.children].forEach((button, i) => button.setAttribute("aria-pressed", i === at));
    after.textContent = `Next token after ${at} “${names[at] ?? ""}”:`;
    const bar = (value, kind) => {
      const fill = made("i", { className: kind });
      fill.style.width = `${(100 * value).toFixed(1)}%`;
      return made("td", {}, made("span", { className: "ln-bar" }, fill), ` ${percentOf(value)}`);
    };
    following.replaceChildren(
      made("thead", {}, made("tr", {}, ...["Token", "Intact", "Edited"].map((t) => made("th", { textContent: t, scope: "col" })))),
      made("tbody", {}, ...get("following").map(([name, one, two]) => made("tr", {}, made("th", { textContent: name, scope: "row" }), bar(one, "before"), bar(two, "after")))));
  }

  const watched = [["intact", typed], ["edited", switched], ["following", predicted], ["position", predicted], ["layer", () => { layer.value = get("layer"); patterns(); }], ["head", () => { head.value = get("head"); patterns(); }], ["problem", () => { problem.textContent = get("problem"); }]];
  for (const [name, act] of watched) model.on(`change:${name}`, act);
  typed(); switched(); predicted();
  return () => { for (const [name, act] of watched) model.off(`change:${name}`, act); };
}
export default { render };
