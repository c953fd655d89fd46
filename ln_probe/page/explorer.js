// The map of every head, layer × head, and the place in the address (#L2H3P0), which the page around this frame holds.
let measure = 0;

const kept = (layer, head) => shown.layers.includes(layer) && shown.heads.includes(head);
const valueAt = (of, layer, head) => {
  const row = data.map.layers.indexOf(layer), column = data.map.heads.indexOf(head);
  return row < 0 || column < 0 ? NaN : of.values[row * data.map.heads.length + column];
};

function drawMap() {
  const of = data.map.measures[measure];
  at("overview").hidden = at("measures").hidden = !of;
  if (!of) return;
  const known = of.values.filter((v) => !Number.isNaN(v)), top = known.reduce((m, v) => Math.max(m, Math.abs(v)), 0) || 1e-3;
  const low = of.signed || known.some((v) => v < 0) ? -top : 0;
  const cells = [];
  for (const layer of data.map.layers) {
    const name = Object.assign(document.createElement("span"), { className: "axis", textContent: `L${layer}` });
    cells.push(name);
    for (const head of data.map.heads) {
      const cell = document.createElement("button"), value = valueAt(of, layer, head);
      cell.style.background = tint(value, top, low);
      cell.dataset.layer = layer;
      cell.dataset.head = head;
      cell.title = `layer ${layer}, head ${head}: ${amount(value, of)}` + (kept(layer, head) ? "" : " (its attention is not kept)");
      cell.setAttribute("aria-label", cell.title);
      cell.disabled = !kept(layer, head);
      cells.push(cell);
    }
  }
  cells.push(document.createElement("span"), ...data.map.heads.map((head) =>
    Object.assign(document.createElement("span"), { className: "axis", textContent: data.map.heads.length > 16 && head % 4 ? "" : head })));
  at("map").style.gridTemplateColumns = `2.4rem repeat(${data.map.heads.length}, minmax(.7rem, 2rem))`;
  at("map").replaceChildren(...cells);
  at("ramp").style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((t) => tint(low + (top - low) * t, top, low)).join(", ")})`;
  at("least").textContent = amount(low, of);
  at("most").textContent = amount(top, of);
  at("meaning").textContent = `${of.title}: ${of.meaning}.`;
  mark();
}

// Which square is the head that is shown: it alone is reached by the tabulator, the others by arrow keys.
function mark() {
  const layer = shown.layers[layerAt], head = shown.heads[headAt];
  for (const cell of at("map").querySelectorAll("button")) {
    const here = Number(cell.dataset.layer) === layer && Number(cell.dataset.head) === head;
    cell.setAttribute("aria-pressed", here);
    cell.tabIndex = here ? 0 : -1;
  }
  at("about").textContent = data.map.measures.map((of) => [of, valueAt(of, layer, head)])
    .filter(([, value]) => !Number.isNaN(value)).map(([of, value]) => `${of.title} ${amount(value, of)}`).join(" · ");
}

function moved(event) {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  const layer = shown.layers[Math.min(shown.layers.length - 1, Math.max(0, layerAt + step[0]))];
  const head = shown.heads[Math.min(shown.heads.length - 1, Math.max(0, headAt + step[1]))];
  show(layer, head);
  at("map").querySelector('[aria-pressed="true"]')?.focus();
}

// An address from a user or from the page: only three whole numbers are taken, and only if they name something that is kept.
function go(place) {
  if (!Array.isArray(place) || place.length !== 3 || !place.every((n) => Number.isInteger(n) && n >= 0)) return;
  const [layer, head, prompt] = place, i = data.prompts.findIndex((p) => p.prompt === prompt);
  const there = i >= 0 && data.prompts[i].layers.includes(layer) && data.prompts[i].heads.includes(head);
  at("lost").hidden = there;
  at("lost").textContent = there ? "" : `The attention of layer ${layer}, head ${head} on prompt ${prompt} is not kept here.`;
  if (!there) return;
  at("prompt").selectedIndex = i;
  choosePrompt(i, layer, head);
}

// The position of the shown head, sent to the window that holds the address.
function told() {
  at("lost").hidden = true;
  const place = [shown.layers[layerAt], shown.heads[headAt], shown.prompt];
  if (parent === window) history.replaceState(null, "", addressOf(place));
  else parent.postMessage({ lnProbeAt: place }, "*");
}

function explore() {
  fill(at("measure"), data.map.measures, 0, (m) => m.title);
  at("measure").addEventListener("change", (e) => { measure = e.target.selectedIndex; drawMap(); });
  at("map").addEventListener("click", (e) => { if (e.target.dataset.layer) show(Number(e.target.dataset.layer), Number(e.target.dataset.head)); });
  at("map").addEventListener("keydown", moved);
  if (parent === window) {
    addEventListener("hashchange", () => go(placeOf(location.hash)));
    go(placeOf(location.hash));
  } else {
    const ready = () => { parent.postMessage({ lnProbeReady: true }, "*"); tell(); };
    addEventListener("message", (e) => {
      if (e.source !== parent) return;
      if (e.data?.lnProbeAsk === true) ready();
      go(e.data?.lnProbeGo);
    });
    ready();
  }
}
