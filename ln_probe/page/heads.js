// The map of heads, and the attention of the chosen one, which circuitsvis draws.
const weight = (byte) => (byte / 255) ** 2;
const percent = (value) => `${Number((100 * value).toPrecision(value < 0.1 ? 2 : 3))} %`;
const at = (id) => document.getElementById(id);
const cells = [...document.querySelectorAll("button.head")];
let patterns = null, charts = 0;

// A head's name in an address is untrusted text: only digits are taken from it.
function placeOf(name) {
  const digits = /^L(\d{1,5})H(\d{1,5})$/.exec(name);
  const [layer, head] = digits ? [patterns.layers.indexOf(Number(digits[1])), patterns.heads.indexOf(Number(digits[2]))] : [-1, -1];
  return layer < 0 || head < 0 ? null : layer * patterns.heads.length + head;
}

// The rows of one head; of a causal pattern the part below the diagonal, which alone is kept.
function rowsOf(place, frozen) {
  const count = patterns.tokens.length, size = patterns.causal ? (count * (count + 1)) / 2 : count * count;
  const rows = [];
  for (let query = 0, i = place * size; query < count; query++) {
    const row = [];
    for (let key = 0; key < (patterns.causal ? query + 1 : count); key++, i++)
      row.push(Number(weight(frozen ? (patterns.intact[i] + patterns.change[i]) & 255 : patterns.intact[i]).toPrecision(3)));
    rows.push(row);
  }
  return rows;
}

// circuitsvis writes the index behind each token: that is its position, because the first token shown is position 0.
function draw(id, attention, maxValue, minValue = 0) {
  const element = make("div", { id: `chart${++charts}` });
  at(id).replaceChildren(element);
  CircuitsVis.render(element.id, CircuitsVis.AttentionPattern, {
    attention, tokens: patterns.tokens, zoomed: true, minValue, maxValue, positiveColor: "#0072b2", negativeColor: "#d55e00",
    maskUpperTri: patterns.causal,
  });
}

function show(name) {
  const place = placeOf(name);
  if (place === null) return;
  const intact = rowsOf(place, false), rows = rowsOf(place, true), known = rows[0].some(Boolean); // zeros: not known
  const changed = known && rows.some((row, q) => row.some((value, k) => value !== intact[q][k]));
  const frozen = changed ? rows : null;
  // A few large weights would leave the rest white; the first query's weight of 1 says nothing.
  const top = quantile([...intact.slice(1), ...(frozen ?? []).slice(1)].flat());
  draw("intact", intact, top);
  for (const panel of document.querySelectorAll(".beside")) panel.hidden = !frozen;
  at("same").hidden = Boolean(frozen);
  const change = frozen && frozen.map((row, q) => row.map((value, k) => Number((value - intact[q][k]).toPrecision(3))));
  const most = frozen && quantile(change.flat().map(Math.abs));
  if (frozen) setTimeout(() => { // the first is seen before the others are drawn
    draw("frozen", frozen, top);
    draw("difference", change, most, -most);
  });
  at("head").textContent = `Attention of ${name}`;
  const cell = cells.find((one) => one.dataset.name === name);
  at("measured").textContent = [cell && `${cell.title}.`, frozen && largestChange(intact, frozen)].filter(Boolean).join(" ");
  at("scale").textContent = `Colours are full at ${percent(top)}${frozen ? `, those of the difference at ${percent(most)}` : ""}.`;
  for (const one of cells) {
    one.setAttribute("aria-pressed", one === cell);
    one.tabIndex = one === cell ? 0 : -1;
  }
}

// What 0.5 % of the values that are not 0 exceed.
function quantile(values) {
  const sizes = values.filter(Boolean).sort((a, b) => a - b);
  return sizes[Math.floor(0.995 * (sizes.length - 1))] ?? 1;
}

function largestChange(intact, frozen) {
  let most = 0, [query, key] = [0, 0];
  intact.forEach((row, q) => row.forEach((value, k) => {
    if (Math.abs(frozen[q][k] - value) > most) [most, query, key] = [Math.abs(frozen[q][k] - value), q, k];
  }));
  const name = (i) => `${patterns.tokens[i]} (${i})`;
  return `Largest change of a weight: query ${name(query)} to key ${name(key)}, from ${percent(intact[query][key])} to ${percent(frozen[query][key])}.`;
}

// Arrow keys move between heads; the map is one stop of the tabulator.
function moved(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: -1, ArrowDown: 1 }[event.key], here = cells.indexOf(event.target);
  if (!step || here < 0) return;
  event.preventDefault();
  const across = event.key === "ArrowRight" || event.key === "ArrowLeft" ? 1 : event.target.closest("tr").querySelectorAll("button").length;
  const next = cells[here + step * across];
  if (!next || next.disabled) return;
  next.focus();
  choose(next.dataset.name);
}

// The address names the head that is shown; the document in a notebook has none.
function choose(name) {
  if (location.protocol !== "about:") history.replaceState(null, "", `#${name}`);
  show(name);
}

function clicked(event) {
  const link = event.target.closest("a"), name = link ? link.hash.slice(1) : event.target.dataset.name;
  if (!name || placeOf(name) === null || (link && !link.getAttribute("href").startsWith("#"))) return;
  event.preventDefault();
  choose(name);
  if (link) at("head").scrollIntoView();
  else at("intact").scrollIntoView({ block: "nearest" });
}

async function load() {
  document.head.append(make("script", { textContent: new TextDecoder().decode(await inflate(at("bundle").textContent)) }));
}

// The text, coloured by the change of each token's loss.
async function color() {
  const { tokens, values, full } = await unpack(at("colored").dataset.tokens);
  CircuitsVis.render("colored", CircuitsVis.ColoredTokens, {
    tokens, values, minValue: -full, maxValue: full, negativeColor: "#0072b2", positiveColor: "#d55e00",
  });
}

async function start() {
  patterns = await unpack(at("data").textContent);
  const map = document.querySelector("table.heads");
  document.addEventListener("click", clicked);
  map?.addEventListener("keydown", moved);
  const follow = () => {
    const name = location.hash.slice(1);
    if (placeOf(name) === null) return false;
    show(name);
    at("head").scrollIntoView();
    return true;
  };
  addEventListener("hashchange", follow);
  if (!follow()) show(at("head").dataset.first);
}

async function drawAll() {
  await load();
  if (at("data")) await start();
  if (at("colored")) await color();
}

if (at("bundle")) drawAll().catch((error) => {
  (at("measured") ?? at("colored")).textContent = `circuitsvis cannot draw: ${error.message}`;
});
