// Two models head by head: a map of each and of their difference, a head's numbers and attention in both, and, of a
// training run, a slider over its steps. The data are what `compared` in page/compared.py packed.
const LISTED = 8; // heads that differ most

function compareModels(root, { models, layers, heads, measures }) {
  const find = (name) => root.querySelector(`.${name}`), size = layers.length * heads.length;
  const chosen = { a: 0, b: 1, of: 0, row: 0, column: 0, query: 0, key: 0 };
  const run = () => models.map((m, i) => i).filter((i) => models[chosen.b].run && models[i].run === models[chosen.b].run).sort((i, j) => models[i].step - models[j].step);
  const values = (model, of = measures[chosen.of]) => of.values.subarray(model * size, (model + 1) * size);
  const differences = (of) => values(chosen.b, of).map((v, i) => v - values(chosen.a, of)[i]);
  const place = () => chosen.row * heads.length + chosen.column;
  const largest = (lists) => lists.reduce((m, list) => list.reduce((n, v) => (Number.isNaN(v) ? n : Math.max(n, Math.abs(v))), m), 0) || 1e-3;
  const asChange = (of) => ({ ...of, signed: true });
  const bare = (value, of) => (of.unit === "share" ? amount(value, of) : amount(value, { ...of, unit: "" }).trim());
  const headName = (i) => `L${layers[Math.floor(i / heads.length)]}H${heads[i % heads.length]}`;

  // A grid of buttons, one of which is reached by the tabulator, the others by arrow keys.
  const maps = ["A", "B", "B − A"].map((what) => {
    const title = made("h3"), grid = made("div", { className: "map" }), scale = made("p", { className: "cut" });
    grid.setAttribute("role", "group");
    const cells = layers.flatMap((_, r) => heads.map((_, c) => {
      const cell = made("button", { type: "button" });
      cell.addEventListener("click", () => choose(r, c));
      return cell;
    }));
    const side = layers.map((layer) => made("span", { className: "axis", textContent: `L${layer}` }));
    const below = heads.map((head, i) => made("span", { className: "axis", textContent: heads.length > 16 && i % 4 ? "" : head }));
    grid.style.gridTemplateColumns = `2.2rem repeat(${heads.length}, minmax(.6rem, 2rem))`;
    grid.append(...layers.flatMap((_, r) => [side[r], ...cells.slice(r * heads.length, (r + 1) * heads.length)]), made("span"), ...below);
    grid.addEventListener("keydown", (event) => {
      const step = KEYS[event.key];
      if (!step) return;
      event.preventDefault();
      choose(clamp(chosen.row + step[0], layers.length), clamp(chosen.column + step[1], heads.length));
      cells[place()].focus();
    });
    find("maps").append(made("div", {}, title, grid, scale));
    return { what, title, grid, cells, scale };
  });

  function drawMaps() {
    const of = measures[chosen.of], shown = [values(chosen.a), values(chosen.b), differences(of)], both = Math.max(largest(shown.slice(0, 2)), of.least);
    maps.forEach(({ what, title, grid, cells, scale }, m) => {
      const change = m === 2, words = change ? asChange(of) : of, top = change ? Math.max(largest([shown[2]]), of.least) : both;
      const low = change || of.signed || shown[m].some((v) => v < 0) ? -top : 0;
      title.textContent = change ? what : `${what}: ${models[m ? chosen.b : chosen.a].name}`;
      grid.setAttribute("aria-label", `${of.title}, ${title.textContent}; arrow keys move`);
      cells.forEach((cell, i) => {
        const value = shown[m][i], tested = !change && of.significant;
        const small = tested ? !of.significant[(m ? chosen.b : chosen.a) * size + i] : Math.abs(value) < of.least;
        cell.style.backgroundColor = tint(value, top, low);
        cell.classList.toggle("small", small);
        cell.title = `${headName(i)}: ${amount(value, words)}${!small ? "" : tested ? " (not significant)" : ` (below ${of.least})`}`;
        cell.setAttribute("aria-label", cell.title);
      });
      const ramp = made("span", { className: "ramp" });
      ramp.style.background = `linear-gradient(90deg, ${[0, 0.5, 1].map((t) => tint(low + (top - low) * t, top, low)).join(", ")})`;
      scale.replaceChildren(`${amount(low, words)} `, ramp, ` ${amount(top, words)}`);
    });
    find("meaning").textContent = `${of.title}: ${of.meaning}. ${of.significant ? "Hatched in A and B: not significant (exploratory). " : ""}${of.least ? `Hatched in ${of.significant ? "B − A" : "all"}: below ${of.least}, too small to report. ` : ""}Grey: no data. Differences of single heads have no CI.`;
    const changes = maps[2].cells.map((_, i) => [i, differences(of)[i]]).filter(([, v]) => !Number.isNaN(v) && v !== 0);
    changes.sort((x, y) => Math.abs(y[1]) - Math.abs(x[1]));
    find("most").replaceChildren(...changes.slice(0, LISTED).map(([i, v]) => {
      const button = made("button", { type: "button", textContent: headName(i) });
      button.addEventListener("click", () => { choose(Math.floor(i / heads.length), i % heads.length); find("head-name").focus(); });
      return made("li", {}, button, ` ${bare(values(chosen.a)[i], of)} → ${bare(values(chosen.b)[i], of)} (${amount(v, asChange(of))})`);
    }));
    if (!changes.length) find("most").append(made("li", { textContent: "None: A and B are equal in this measure." }));
  }

  function drawHead() {
    const i = place();
    for (const { cells } of maps) cells.forEach((cell, j) => { cell.setAttribute("aria-pressed", i === j); cell.tabIndex = i === j ? 0 : -1; });
    find("head-name").textContent = `Layer ${layers[chosen.row]}, head ${heads[chosen.column]}`;
    const line = (tag, cells) => made("tr", {}, ...cells.map((text, c) => (c && tag === "td" ? made("td", { textContent: text }) : made("th", { textContent: text, scope: tag === "td" ? "row" : "col", className: c ? "" : "text" }))));
    const rows = measures.map((of) => line("td", [of.title + (of.unit === "share" ? "" : `, ${of.unit}`), bare(values(chosen.a, of)[i], of), bare(values(chosen.b, of)[i], of), bare(differences(of)[i], asChange(of))]));
    find("figures").replaceChildren(made("thead", {}, line("th", ["Measure", "A", "B", "B − A"])), made("tbody", {}, ...rows));
    drawCurve(i);
    drawPatterns();
  }

  // The chosen measure of the head over the steps of B's run.
  function drawCurve(i) {
    const steps = run(), of = measures[chosen.of], figure = find("curve"), svg = figure.querySelector("svg");
    figure.hidden = steps.length < 2;
    if (figure.hidden) return;
    const points = steps.map((m, n) => [models[m].step, values(m)[i], m, n]).filter(([, v]) => !Number.isNaN(v));
    const seen = points.map(([, v]) => v), low = Math.min(0, ...seen), high = Math.max(low + 1e-9, ...seen);
    const x = (n) => 52 + (n * 256) / Math.max(1, steps.length - 1), y = (v) => 118 - ((v - low) * 104) / (high - low);
    const draw = (name, attributes, text = "") => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      node.textContent = text;
      return node;
    };
    const few = Math.ceil(steps.length / 6);
    svg.replaceChildren(
      draw("line", { x1: 52, x2: 308, y1: y(0), y2: y(0) }),
      draw("path", { d: points.map(([, v, , n], k) => `${k ? "L" : "M"}${x(n).toFixed(1)},${y(v).toFixed(1)}`).join("") }),
      ...points.map(([, v, m, n]) => draw("circle", { cx: x(n), cy: y(v), r: m === chosen.b ? 5 : 3, class: m === chosen.b ? "now" : "" })),
      ...[low, high].map((v) => draw("text", { x: 47, y: y(v) + 4, "text-anchor": "end" }, figure_(v))),
      ...steps.filter((_, n) => n % few === 0).map((m, n) => draw("text", { x: x(n * few), y: 138, "text-anchor": "middle" }, String(models[m].step))),
    );
    svg.setAttribute("aria-label", `${of.title} of this head over training: ${points.map(([step, v]) => `step ${step} ${amount(v, of)}`).join(", ")}`);
    figure.querySelector("h4").textContent = `${of.title} over training steps${of.unit === "share" ? "" : `, ${of.unit}`}`;
  }
  const figure_ = (v) => String(Number(v.toPrecision(2)));

  const kept = (model) => {
    const found = models[model].attention, row = found?.layers.indexOf(layers[chosen.row]) ?? -1, column = found?.heads.indexOf(heads[chosen.column]) ?? -1;
    if (row < 0 || column < 0) return null;
    const n = found.edges.length - 1;
    return { ...found, n, start: (row * found.heads.length + column) * n * n };
  };
  const comparable = (one, two) => one && two && one.n === two.n && one.tokens.length === two.tokens.length && one.tokens.every((t, i) => t === two.tokens[i]);

  const panels = ["A", "B", "B − A"].map((what) => {
    const none = made("p", { className: "cut", textContent: "No attention of this head is kept on this page." });
    const panel = patternPanel(chosen, point);
    panel.box.append(none);
    find("patterns").append(panel.box);
    return { what, none, ...panel };
  });

  function drawPatterns() {
    const one = kept(chosen.a), two = kept(chosen.b), same = comparable(one, two);
    const top = Math.max(...[one, two].map((found) => (found ? strongest(found.cells, found.start, found.n) : 1)));
    panels.forEach(({ what, title, canvas, none }, p) => {
      const found = [one, two, same ? one : null][p];
      title.textContent = p === 2 ? `Attention, ${what}` : `Attention, ${what}: ${models[p ? chosen.b : chosen.a].name}`;
      canvas.hidden = !found;
      none.hidden = Boolean(found) || p === 2;
      title.hidden = p === 2 && !found;
      canvas.setAttribute("aria-label", `${title.textContent}, layer ${layers[chosen.row]}, head ${heads[chosen.column]}; rows are queries, columns keys; arrow keys move`);
      if (!found) return;
      if (p < 2) paint(canvas, found.cells, found.start, found.n, found.causal, top);
      else paintChange(canvas, one.n, (i) => weight(two.cells[two.start + i]) - weight(one.cells[one.start + i]), one.causal);
    });
    point(Math.min(chosen.query, (one ?? two)?.n - 1 || 0), Math.min(chosen.key, (one ?? two)?.n - 1 || 0));
  }

  function point(query, key) {
    Object.assign(chosen, { query, key });
    const one = kept(chosen.a), two = kept(chosen.b), same = comparable(one, two);
    const named = ({ edges, tokens }, at) => (edges[at + 1] - edges[at] === 1 ? `${edges[at]} “${tokens[edges[at]]}”` : `${edges[at]}–${edges[at + 1] - 1} “${tokens[edges[at]]}…”`);
    const give = (found) => share(weight(found.cells[found.start + query * found.n + key]));
    const told = (found, what) => found && query < found.n && key < found.n ? `${what}: query ${named(found, query)} gives ${give(found)} to key ${named(found, key)}. ` : "";
    find("read").textContent = same ? `Query ${named(one, query)} gives key ${named(one, key)}: A ${give(one)}, B ${give(two)}.` : told(one, "A") + told(two, "B");
  }

  function choose(row, column) {
    Object.assign(chosen, { row, column });
    drawHead();
    history.replaceState(null, "", addressOf([layers[row], heads[column], 0]));
  }

  function drawAll() {
    const steps = run(), slider = find("steps").querySelector("input"), state = find("state");
    find("model-a").selectedIndex = chosen.a;
    find("model-b").selectedIndex = chosen.b;
    find("steps").hidden = steps.length < 2;
    slider.max = steps.length - 1;
    slider.value = steps.indexOf(chosen.b);
    slider.setAttribute("aria-valuetext", `step ${models[chosen.b].step}`);
    find("steps").querySelector("output").textContent = steps.length < 2 ? "" : `${models[chosen.b].step} (${steps.indexOf(chosen.b) + 1} of ${steps.length})`;
    if (chosen.a === chosen.b) state.textContent = "A and B are the same model.";
    else if (state.textContent.startsWith("A and B")) state.textContent = "";
    drawMaps();
    drawHead();
  }

  for (const [name, letter] of [["model-a", "a"], ["model-b", "b"]]) {
    find(name).append(...models.map((m) => new Option(m.name)));
    find(name).addEventListener("change", (event) => { chosen[letter] = event.target.selectedIndex; drawAll(); });
  }
  find("measure").append(...measures.map((m) => new Option(m.title)));
  find("measure").addEventListener("change", (event) => { chosen.of = event.target.selectedIndex; drawAll(); });
  find("steps").querySelector("input").addEventListener("input", (event) => { chosen.b = run()[Number(event.target.value)]; drawAll(); });
  find("choices").hidden = false;
  if (models[0].run) [chosen.a, chosen.b] = ((steps) => [steps[0], steps[steps.length - 1]])((chosen.b = 0, run()));
  const most = differences(measures[0]).reduce((m, v, i, all) => (Math.abs(v) > Math.abs(all[m]) || Number.isNaN(all[m]) ? i : m), 0);
  Object.assign(chosen, { row: Math.floor(most / heads.length), column: most % heads.length });
  drawAll();

  // An address is untrusted text: whole numbers that name a head are taken from it.
  function follow() {
    const [layer, head] = placeOf(location.hash) ?? [], row = layers.indexOf(layer), column = heads.indexOf(head);
    if (layer !== undefined && (row < 0 || column < 0)) find("state").textContent = `None of these reports has layer ${layer}, head ${head}.`;
    if (row < 0 || column < 0) return;
    choose(row, column);
    find("head-name").scrollIntoView();
  }
  // A sentence about a head names the model and the measure that it compares with the first one.
  for (const link of document.querySelectorAll("a[data-model]"))
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const of = measures.findIndex((m) => m.name === link.dataset.measure);
      Object.assign(chosen, { a: 0, b: Number(link.dataset.model), of: Math.max(0, of) });
      find("measure").selectedIndex = chosen.of;
      drawAll();
      history.replaceState(null, "", link.getAttribute("href"));
      follow();
    });
  addEventListener("hashchange", follow);
  follow();
}

for (const root of document.querySelectorAll("section.compared")) {
  unpack(root.querySelector(".compared-data").textContent)
    .then((data) => compareModels(root, data))
    .catch((error) => { root.querySelector(".state").textContent = `Maps cannot be drawn: ${error.message}.`; });
}
