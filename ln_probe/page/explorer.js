// The map of every head, layer × head, and the place in the address (#L2H3P0), which the page around this frame holds.
const TOP = 8; // heads in the list
let measure = 0;

const kept = (layer, head) => shown.layers.includes(layer) && shown.heads.includes(head);
const valueAt = (of, layer, head) => {
  const row = data.map.layers.indexOf(layer), column = data.map.heads.indexOf(head);
  return row < 0 || column < 0 ? NaN : of.values[row * data.map.heads.length + column];
};

const absent = (layer, head) => data.map.measures.every((of) => Number.isNaN(valueAt(of, layer, head)));
const listed = (n) => (n.length > 3 && n[n.length - 1] - n[0] === n.length - 1 ? `${n[0]}–${n[n.length - 1]}` : n.join(", "));

function drawMap() {
  const of = data.map.measures[measure];
  at("overview").hidden = at("measures").hidden = !of;
  if (!of) return;
  const known = of.values.filter((v) => !Number.isNaN(v)), largest = known.reduce((m, v) => Math.max(m, Math.abs(v)), 0) || 1e-3;
  // Of tested measures colour begins at the threshold, and is full at five times of it or beyond: small effects look small.
  const least = of.threshold, top = Math.max(largest, 5 * least), colour = (v) => tint(least ? Math.sign(v) * Math.max(0, Math.abs(v) - least) : v, top - least, low);
  const told = (layer, head) => !of.significant || of.significant[data.map.layers.indexOf(layer) * data.map.heads.length + data.map.heads.indexOf(head)];
  const low = of.signed || known.some((v) => v < 0) ? -top : 0;
  const cells = [];
  for (const layer of data.map.layers) {
    const name = Object.assign(document.createElement("span"), { className: "axis", textContent: `L${layer}` });
    cells.push(name);
    for (const head of data.map.heads) {
      const cell = document.createElement("button"), value = valueAt(of, layer, head);
      cell.style.backgroundColor = colour(value);
      cell.classList.toggle("unsure", !told(layer, head) && !Number.isNaN(value));
      cell.classList.toggle("absent", absent(layer, head));
      cell.dataset.layer = layer;
      cell.dataset.head = head;
      cell.title = absent(layer, head) ? `layer ${layer}, head ${head}: not in this report` : `layer ${layer}, head ${head}: ${amount(value, of)}` + (told(layer, head) ? "" : ", not significant") + (kept(layer, head) ? "" : " (its attention is not kept)");
      cell.setAttribute("aria-label", cell.title);
      cell.disabled = !kept(layer, head);
      cells.push(cell);
    }
  }
  cells.push(document.createElement("span"), ...data.map.heads.map((head) =>
    Object.assign(document.createElement("span"), { className: "axis", textContent: data.map.heads.length > 16 && head % 4 ? "" : head })));
  at("map").style.gridTemplateColumns = `2.4rem repeat(${data.map.heads.length}, minmax(.7rem, 2rem))`;
  at("map").replaceChildren(...cells);
  at("ramp").style.background = `linear-gradient(90deg, ${[0, 0.2, 0.4, 0.6, 0.8, 1].map((t) => colour(low + (top - low) * t)).join(", ")})`;
  at("least").textContent = amount(low, of);
  at("most").textContent = amount(top, of);
  at("meaning").textContent = `${of.title}: ${of.meaning}.` + (least ? ` Colour begins at ±${least} ${of.unit}.` : "");
  at("hatched").hidden = !of.significant;
  at("absent").hidden = !at("map").querySelector(".absent");
  const count = of.significant?.reduce((a, b) => a + b, 0);
  at("tested").hidden = !of.significant;
  at("tested").textContent = of.significant ? `${count ? `${count} of ${known.length} heads are` : `None of ${known.length} heads is`} significant (exploratory; Holm-adjusted sign test over prompts).` : "";
  const order = data.map.layers.flatMap((layer) => data.map.heads.map((head) => [layer, head, valueAt(of, layer, head)])).filter(([,, v]) => !Number.isNaN(v));
  order.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
  at("ranked").textContent = `Top heads by ${of.title.charAt(0).toLowerCase() + of.title.slice(1)}`;
  at("top").replaceChildren(...order.slice(0, TOP).map(([layer, head, value]) => {
    const line = document.createElement("li"), link = Object.assign(document.createElement("button"), { textContent: `L${layer}H${head}`, disabled: !kept(layer, head) });
    link.addEventListener("click", () => show(layer, head));
    line.append(link, ` ${amount(value, { ...of, unit: of.unit === "share" ? of.unit : "" })}${of.significant && told(layer, head) ? "(significant)" : ""}`);
    return line;
  }));
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
  at("about").replaceChildren(...data.map.measures.map((of) => [of, valueAt(of, layer, head)]).filter(([, value]) => !Number.isNaN(value)).map(([of, value]) => {
    const pair = document.createElement("div"), name = document.createElement("dt"), number = document.createElement("dd");
    name.textContent = of.title;
    number.textContent = amount(value, of);
    pair.append(name, number);
    return pair;
  }));
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
  const prompts = listed(data.prompts.map((p) => p.prompt)), holds = `layers ${listed(shown.layers)}, heads ${listed(shown.heads)}, prompts ${prompts}`;
  at("lost").textContent = there ? "" : `The attention of layer ${layer}, head ${head} on prompt ${prompt} is not kept here: this page has ${holds}.` +
    (kept(layer, head) ? "" : " Layers and heads of a report are chosen with --layers and --heads, or layers= and heads= of analyze; without them it has all.");
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
