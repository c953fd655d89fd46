// Why the chosen head attends where it does: scores of a few pairs as sums over components and over the norm's terms.
const AVERAGE = -1; // in the place of a query: the mean over all queries
let pair = 0;

const nats = (value) => `${value > 0 ? "+" : ""}${Number(value.toPrecision(3))}`;
const token = (i) => `“${clip(shown.tokens[i], 20)}”`;
const named = (query, key) => (query === AVERAGE ? `position ${key}, all queries` : `${query} ${token(query)} → ${key} ${token(key)}`);

function reasons() {
  const sums = data.scores.find((s) => s.prompt === shown.prompt), layer = shown.layers[layerAt], head = shown.heads[headAt];
  const mine = sums ? [...sums.head.keys()].filter((i) => sums.layer[i] === layer && sums.head[i] === head) : [];
  pair = Math.min(pair, Math.max(0, mine.length - 1));
  at("pairs").replaceChildren(...mine.map((i, n) => {
    const button = document.createElement("button");
    button.textContent = `${named(sums.query[i], sums.key[i])}: ${share(sums.weight[i])}`;
    button.setAttribute("aria-pressed", n === pair);
    button.addEventListener("click", () => { pair = n; reasons(); at("pairs").children[n].focus(); });
    return button;
  }));
  if (mine.length) return explain(sums, mine[pair]);
  at("reasons").replaceChildren();
  at("because").textContent = data.scores.length && !sums ? `Scores are explained for prompt ${data.scores.map((s) => s.prompt).join(", ")}.`
    : "The scores of this head are not explained here; ln_probe.attribute_scores does it in Python.";
}

function explain(sums, i) {
  const score = sums.score[i], places = sums.part.length / sums.head.length / 2, terms = data.terms;
  const side = (s) => Array.from({ length: places }, (_, k) => (i * 2 + s) * places + k)
    .filter((k) => sums.contribution[k]).map((k) => [sums.parts[sums.part[k]], sums.contribution[k]]);
  const rest = (rows) => [...rows, ["all others", score - rows.reduce((a, [, v]) => a + v, 0)]];
  const ofNorm = ["query", "key"].flatMap((name, s) => terms.map((term, t) => [`${term} of the ${name}`, sums.terms[(i * 2 + s) * terms.length + t]]));
  const [key, query] = [side(1), side(0)], most = ofNorm.reduce((a, b) => (Math.abs(b[1]) > Math.abs(a[1]) ? b : a));
  const whose = sums.query[i] === AVERAGE ? `The average query gives ${share(sums.weight[i])} to position ${sums.key[i]} ${token(sums.key[i])}` : `Query ${sums.query[i]} ${token(sums.query[i])} gives ${share(sums.weight[i])} to key ${sums.key[i]} ${token(sums.key[i])}`;
  const largest = (rows) => (rows.length ? `${rows[0][0]} (${nats(rows[0][1])})` : "none");
  at("because").textContent = `${whose} (uniform attention: ${share(sums.uniform[i])}): the key's score is ${Number(Math.abs(score).toPrecision(3))} nats ${score < 0 ? "below" : "above"} the mean of the keys that the query sees. `
    + `Largest contributions: of the key ${largest(key)}, of the query ${largest(query)}; of the norm, ${most[0]} (${nats(most[1])}).`
    + (sums.length < shown.tokens.length ? ` On the first ${sums.length} tokens of the prompt.` : "");
  at("reasons").replaceChildren(
    bars("Components of the key", "they add up to the difference of scores", rest(key)),
    bars("Components of the query", "they add up to the same", rest(query)),
    bars("Terms of the norm", "what the score would lose without each alone (sigma: with the median instead)", ofNorm.filter(([, v]) => Math.abs(v) > 1e-9)));
}

function bars(title, note, rows) {
  const top = rows.reduce((m, [, v]) => Math.max(m, Math.abs(v)), 1e-12), table = document.createElement("table"), caption = document.createElement("caption");
  const small = document.createElement("small");
  small.textContent = note;
  caption.append(title, small);
  table.append(caption, ...rows.map(([name, value]) => {
    const row = document.createElement("tr"), head = document.createElement("th"), drawn = document.createElement("td"), number = document.createElement("td"), bar = document.createElement("span");
    head.scope = "row";
    head.textContent = name;
    bar.style.width = `${(50 * Math.abs(value)) / top}%`;
    bar.style.left = `${value < 0 ? 50 - (50 * Math.abs(value)) / top : 50}%`;
    bar.className = value < 0 ? "less" : "more";
    drawn.append(bar);
    drawn.setAttribute("aria-hidden", "true");
    number.textContent = nats(value);
    row.append(head, drawn, number);
    return row;
  }));
  return table;
}
