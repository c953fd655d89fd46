// The attention picture: selectors, a small canvas per head, circuitsvis's AttentionPattern for the chosen one.
const SIGNS = ["", "▲", "✕", "?"];
const WINDOW = 64; // tokens enlarged at once: circuitsvis draws an element a cell, and 128² take a second
const SCROLLBAR = 20; // pixels: coming and going of one is no reason to draw again
const LABEL = 10; // characters of a token on an axis

const at = (id) => document.getElementById(id);
let data, shown, layerAt = 0, headAt = 0, keyAt = 0, corner = null, drawnFor = 0;

const size = () => shown.tokens.length;

// Where the numbers of the chosen layer and head begin in an array [layer head …] with `each` numbers per head.
const begin = (each, head = headAt) => (layerAt * shown.heads.length + head) * each;

// Each chart gets an element of its own, which the next one replaces.
let charts = 0;

function draw(place, props) {
  const element = Object.assign(document.createElement("div"), { id: `${place}-${++charts}` });
  element.style.minHeight = `${at(place).clientHeight}px`; // until the chart is there, so that the page does not jump
  at(place).replaceChildren(element);
  CircuitsVis.render(element.id, CircuitsVis.AttentionPattern, props);
}

const clip = (text, n = LABEL) => { const c = [...text]; return c.length > n ? c.slice(0, n - 1).join("") + "…" : text; };

// What a key would get from the average query that sees it if attention were even; 0 where a window may hide keys, which
// is where the last query pays nothing at all to the first ones.
function evenly(i) {
  const n = shown.edges.length - 1;
  if (shown.heads.every((_, h) => !shown.cells[begin(n * n, h) + n * (n - 1)])) return 0;
  if (!shown.causal) return 1 / size();
  let sum = 0;
  for (let q = Math.max(1, i); q < size(); q++) sum += 1 / (q + 1);
  return sum / Math.max(1, size() - Math.max(1, i));
}

function key(i) {
  const k = begin(size()) + i, known = (a) => half(a[k]);
  const margin = known(shown.margin), best = known(shown.attainable), frozen = known(shown.frozen);
  const parts = [data.marks[shown.marks[k]]];
  if (!Number.isNaN(margin)) parts.push(`margin ${Number(margin.toPrecision(3))} nats`);
  if (!Number.isNaN(best)) parts.push(`attainable attention at the last position ${share(best)}` + (Number.isNaN(frozen) ? "" : ` (${share(frozen)} with scaling frozen)`) + `; uniform attention: ${share(1 / size())}`);
  const even = evenly(i);
  parts.push(`receives ${share(weight(shown.received[k]))} from the average query that sees it` + (even ? ` (uniform: ${share(even)})` : ""));
  return { mark: shown.marks[k], text: parts.join("; ") };
}

// Labels of the axes: a cell's first token, with the sign of the key that is hardest to select.
function bin(b) {
  const from = shown.edges[b], to = shown.edges[b + 1], marks = shown.marks.subarray(begin(size()) + from, begin(size()) + to);
  const worst = [2, 1, 3].find((mark) => marks.includes(mark)) ?? 0;
  return `${SIGNS[worst]}${clip(shown.tokens[from])}${to - from > 1 ? "…" : ""}`;
}

const single = (i) => `${SIGNS[key(i).mark]}${clip(shown.tokens[i])}`;

// circuitsvis makes a canvas that is an image without a name, some time after it was asked for one.
function nameCharts() {
  for (const [place, what] of [["pattern", "intact"], ["frozen", "with scaling frozen for keys"], ["difference", "frozen minus intact"]])
    for (const canvas of at(place).querySelectorAll("canvas")) {
      canvas.setAttribute("aria-label", `Attention of ${at("title").textContent}, ${what}`);
      at(place).firstElementChild.style.minHeight = "";
    }
}

// Rows of weights around a corner of a pattern, and the weights by which the scale is chosen.
function block(bytes, start, width, first, count, seen) {
  return Array.from({ length: count }, (_, i) => Array.from({ length: count }, (_, j) => {
    const v = Number(weight(bytes[start + (first + i) * width + first + j]).toPrecision(3));
    if (v && first + i > first) seen.push(v); // the first row is 100 % by necessity
    return v;
  }));
}

function pattern() {
  const n = shown.edges.length - 1, full = shown.full[`${shown.layers[layerAt]}.${shown.heads[headAt]}`];
  const pooled = n < size(), close = full && corner !== null, start = begin(n * n), seen = [];
  const first = close ? corner : 0, count = close ? Math.min(WINDOW, size()) : n;
  const intact = close ? block(full, 0, size(), first, count, seen) : block(shown.cells, start, n, 0, n, seen);
  const changed = shown.frozenCells?.subarray(start, start + n).some(Boolean); // rows sum to 1 where it is known
  const frozen = changed ? block(shown.frozenCells, start, n, 0, n, seen) : null;
  // A few large weights would leave the rest white: the scale ends at the largest but one in two hundred.
  const top = seen.sort((a, b) => a - b)[Math.floor(0.995 * (seen.length - 1))] ?? 1;
  const looks = { zoomed: true, minValue: 0, maxValue: top, positiveColor: "#0072B2", maskUpperTri: shown.causal };
  const named = (exact, from, many) => Array.from({ length: many }, (_, i) => (exact ? single(from + i) : bin(i)));
  draw("pattern", { attention: intact, tokens: named(close || !pooled, first, count), ...looks });
  at("without").hidden = !shown.frozenCells;
  at("frozen").hidden = !frozen;
  at("unchanged").hidden = Boolean(frozen);
  at("apart").hidden = !frozen;
  clearTimeout(pattern.later);
  // (Each chart after the one before is seen: React draws in separate tasks.)
  if (frozen) pattern.later = setTimeout(() => {
    draw("frozen", { attention: frozen, tokens: named(!pooled, 0, n), ...looks });
    pattern.later = setTimeout(() => { difference(start, n, named(!pooled, 0, n)); setTimeout(tell, 50); }, 50);
  }, 50);
  at("title").textContent = `Layer ${shown.layers[layerAt]}, head ${shown.heads[headAt]}`;
  const wide = `${Math.floor(size() / n)}${size() % n ? `–${Math.ceil(size() / n)}` : ""}`;
  at("resolution").textContent =
    (close ? `Tokens ${first}–${first + count - 1} of ${size()}, one cell per weight${frozen ? " (on the right all tokens, reduced)" : ""}. `
      : pooled ? `Reduced: ${size()} tokens in ${n} × ${n} cells of ${wide} tokens; each cell sums the attention an average query in that row gives to its keys. ${full ? "" : "Single weights of this head are not kept. "}`
        : "Each cell is one attention weight. ") + `The colour scale saturates at ${share(top)}${frozen ? " in both panels" : ""}. Values are accurate to 0.4 %.`;
  at("whole").hidden = !full || !pooled;
  at("back").hidden = corner === null;
  if (full && pooled) paint(at("navigator"), full, 0, size(), shown.causal);
  nameCharts();
  drawnFor = at("panels").offsetWidth;
  setTimeout(tell, 50);
}

// What frozen scaling changes, on a separate scale: nearly all changes are far smaller than the weights.
function difference(start, n, tokens) {
  const changes = Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) =>
    Number((weight(shown.frozenCells[start + i * n + j]) - weight(shown.cells[start + i * n + j])).toPrecision(2))));
  const sizes = changes.flat().map(Math.abs).filter(Boolean).sort((a, b) => a - b), top = sizes[Math.floor(0.995 * (sizes.length - 1))] ?? 0.01;
  draw("difference", { attention: changes, tokens, zoomed: true, minValue: -top, maxValue: top, positiveColor: "#B2182B", negativeColor: "#2166AC", maskUpperTri: shown.causal });
  at("apartScale").textContent = `Red: more attention with scaling frozen, blue: less. The colours saturate at ${share(top)}.`;
}

function keys() {
  const list = at("keys");
  list.replaceChildren(...shown.tokens.map((token, i) => {
    const one = document.createElement("span");
    const mark = shown.marks[begin(size()) + i];
    one.className = `key m${mark}`;
    one.textContent = (SIGNS[mark] ? SIGNS[mark] + " " : "") + token;
    one.dataset.key = i;
    return one;
  }));
  point(Math.min(keyAt, size() - 1), false);
}

function point(i, follow = true) {
  keyAt = i;
  const list = at("keys");
  list.querySelector(".on")?.classList.remove("on");
  const one = list.children[i];
  one.classList.add("on");
  if (follow) one.scrollIntoView({ block: "nearest" });
  at("detail").textContent = `Key ${i}, “${shown.tokens[i]}”: ${key(i).text}.`;
}

function heads() {
  const n = shown.edges.length - 1;
  at("heads").replaceChildren(...shown.heads.map((head, h) => {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    paint(canvas, shown.cells, begin(n * n, h), n, shown.causal);
    button.append(canvas, `head ${head}${`${shown.layers[layerAt]}.${head}` in shown.full && n < size() ? " ◆" : ""}`);
    button.setAttribute("aria-pressed", h === headAt);
    button.addEventListener("click", () => show(shown.layers[layerAt], head));
    return button;
  }));
}
const pressed = () => [...at("heads").children].forEach((b, h) => b.setAttribute("aria-pressed", h === headAt));

function fill(select, values, chosen, name) {
  select.replaceChildren(...values.map((v, i) => new Option(name(v), i, false, i === chosen)));
}

function choosePrompt(i, layer, head) {
  shown = data.prompts[i];
  layerAt = Math.max(0, shown.layers.indexOf(layer));
  headAt = Math.max(0, shown.heads.indexOf(head));
  corner = null;
  fill(at("layer"), shown.layers, layerAt, String);
  heads(); pattern(); keys(); drawMap();
}

// Another head of the same prompt, chosen by the reader.
function show(layer, head) {
  const other = shown.layers[layerAt] !== layer;
  layerAt = shown.layers.indexOf(layer);
  headAt = shown.heads.indexOf(head);
  corner = null;
  at("layer").selectedIndex = layerAt;
  if (other) heads();
  pressed(); pattern(); keys(); mark(); told();
}

function read(event) {
  const box = at("navigator").getBoundingClientRect(), n = size();
  const k = Math.min(n - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * n)));
  const q = Math.min(n - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * n)));
  return [q, k, shown.full[`${shown.layers[layerAt]}.${shown.heads[headAt]}`][q * n + k]];
}

// The frame reports its height to the page around it. Observers rest while a frame is out of sight, so it is also
// told after every drawing (by then React has put its elements in place).
const tell = () => parent.postMessage({ lnProbeHeight: document.documentElement.offsetHeight }, "*");

// A chart keeps the width it was drawn for, be it the none of a frame that has no place on the page yet, or lost it. No
// observer is sure to say when there is a place again (they rest out of sight), so charts without a width are checked
// until they have one; they appear some time after they were asked for, which is why drawing looks later, too.
function fit() {
  clearTimeout(fit.later);
  fit.later = setTimeout(() => {
    const blank = at("pattern").querySelector("canvas")?.width === 0, width = at("panels").offsetWidth;
    if (!blank && Math.abs(width - drawnFor) <= SCROLLBAR) return;
    if (width) pattern();
    fit.later = setTimeout(fit, 500);
  }, 50);
}

async function start() {
  const code = document.createElement("script"), numbers = unpack(at("data").textContent);
  code.textContent = new TextDecoder().decode(await inflate(at("bundle").textContent));
  document.head.append(code);
  data = await numbers;
  const first = Math.max(0, data.prompts.findIndex((p) => p.prompt === data.prompt));
  fill(at("prompt"), data.prompts, first, (p) => `${p.prompt}: ${clip(p.tokens.slice(0, 8).join(""), 40)} (${p.tokens.length} tokens)`);
  at("notes").textContent = data.notes.join(". ");
  at("prompt").addEventListener("change", (e) => { choosePrompt(Number(e.target.value), shown.layers[layerAt], shown.heads[headAt]); told(); });
  at("layer").addEventListener("change", (e) => show(shown.layers[Number(e.target.value)], shown.heads[headAt]));
  at("keys").addEventListener("click", (e) => { if (e.target.dataset.key) point(Number(e.target.dataset.key)); });
  at("keys").addEventListener("mouseover", (e) => { if (e.target.dataset.key) point(Number(e.target.dataset.key), false); });
  at("keys").addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
    if (!step) return;
    e.preventDefault();
    point(Math.min(size() - 1, Math.max(0, keyAt + step)));
  });
  at("navigator").addEventListener("mousemove", (e) => {
    const [q, k, byte] = read(e);
    at("where").textContent = shown.causal && k > q ? `Query ${q} does not see key ${k}.`
      : `Query ${q} “${shown.tokens[q]}” gives ${share(weight(byte))} to key ${k} “${shown.tokens[k]}”.`;
  });
  at("navigator").addEventListener("click", (e) => {
    corner = Math.max(0, Math.min(size() - WINDOW, read(e)[0] - WINDOW / 2));
    pattern();
  });
  at("back").addEventListener("click", () => { corner = null; pattern(); });
  new MutationObserver(() => { nameCharts(); fit(); }).observe(at("panels"), { childList: true, subtree: true });
  choosePrompt(first, data.layer, data.head);
  explore();
  new ResizeObserver(() => { tell(); fit(); }).observe(document.documentElement);
  new IntersectionObserver(fit).observe(at("panels"));
}

start().catch((error) => { at("title").textContent = `Attention cannot be drawn: ${error.message}`; });
