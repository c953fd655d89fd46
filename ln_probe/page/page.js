// The page around the pictures: tables that sort and download; the frame's height.
const PAGE = 100; // rows added at a time

function csvCell(value, text) {
  if (value === null || value === undefined) return "";
  let written = String(value);
  // A spreadsheet takes these for a formula, full-width forms and those behind white space too.
  if (text && /^[\t\r\n]|^[\s\u0000-\u0020\u200b-\u200f\u2060\ufeff]*[=+\-@|%]/.test(written.normalize("NFKC"))) written = "'" + written;
  return /[",\n\r]/.test(written) ? `"${written.replaceAll('"', '""')}"` : written;
}

// A file is named after the model and what is in it.
function save(content, name) {
  const link = document.createElement("a"), model = document.querySelector("main").dataset.name;
  link.href = URL.createObjectURL(content);
  link.download = `${model}-${name}`.normalize("NFKC").replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[.-]+/, "");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // a busy browser may take seconds to begin reading
}

class Table {
  constructor(section, content) {
    Object.assign(this, content, { section, body: section.querySelector("tbody"), shown: PAGE, sorted: null, upward: true });
    this.isText = new Set(content.text);
    this.order = Array.from({ length: content.rows }, (_, i) => i);
    this.count = section.querySelector(".count");
    section.querySelectorAll("thead th").forEach((head, c) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      button.title = head.title ? `${head.title}. Click to sort` : "Sort by this column";
      head.removeAttribute("title");
      button.addEventListener("click", () => this.sort(c, head));
      head.replaceChildren(button);
    });
    const tools = section.querySelector(".tools");
    const saves = Object.assign(document.createElement("button"), { textContent: "Download CSV" });
    saves.addEventListener("click", () => this.download());
    this.more = Object.assign(document.createElement("button"), { textContent: "Show more rows" });
    this.more.addEventListener("click", () => { this.shown += PAGE; this.fill(); });
    tools.append(saves);
    section.append(this.more);
    this.fill();
  }

  fill() {
    this.body.replaceChildren(...this.order.slice(0, this.shown).map((i) => {
      const row = document.createElement("tr");
      for (const c of this.columns) {
        const cell = document.createElement("td");
        cell.textContent = this.isText.has(c) ? this.data[c][i] : figure(this.data[c][i]);
        const link = c === this.columns[0] && this.links[i];
        if (link && !/^[a-z]*:|^\/\//i.test(link)) {
          const way = Object.assign(document.createElement("a"), { href: link, textContent: cell.textContent });
          cell.replaceChildren(way);
        }
        if (this.isText.has(c)) cell.className = "text";
        row.append(cell);
      }
      return row;
    }));
    this.more.hidden = this.rows <= this.shown;
    this.count.textContent = `${Math.min(this.rows, this.shown)} of ${this.rows} rows shown.`;
  }

  sort(c, head) {
    this.upward = this.sorted === c ? !this.upward : true;
    this.sorted = c;
    const values = this.data[this.columns[c]], way = this.upward ? 1 : -1, text = this.isText.has(this.columns[c]);
    this.order.sort((a, b) => {
      const x = values[a], y = values[b];
      if (x === null || y === null) return (x === null) - (y === null); // unknown values last, either way
      return way * (text ? x.localeCompare(y) : x - y);
    });
    this.section.querySelectorAll("thead th").forEach((h) => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", this.upward ? "ascending" : "descending");
    this.fill();
  }

  download() {
    const lines = [this.columns.map((c) => csvCell(c, true)).join(",")];
    for (const i of this.order) lines.push(this.columns.map((c) => csvCell(this.data[c][i], this.isText.has(c))).join(","));
    save(new Blob(["\ufeff" + lines.join("\r\n") + "\r\n"], { type: "text/csv" }), `${this.section.dataset.file}.csv`);
  }
}

for (const section of document.querySelectorAll("section.table")) {
  const source = section.querySelector("script.rows");
  if (!source) continue;
  unpack(source.textContent)
    .then((content) => new Table(section, content))
    .catch((error) => { section.querySelector(".count").textContent = `Only the first rows are shown: ${error.message}.`; });
}

// A picture as a separate file: title above and caption below, ink on white.
const MARGIN = 8, LINE = 14, LETTER = 5.4; // units of the drawing: around it, a line of the caption, a letter of it
function standalone(figure) {
  const svg = figure.querySelector(".drawing svg"), { width, height } = svg.viewBox.baseVal;
  const make = (tag, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };
  const words = figure.querySelector("figcaption").textContent.split(/\s+/), lines = [""];
  for (const word of words) lines.push(`${lines.at(-1).length + word.length < (width - MARGIN) / LETTER ? lines.pop() : ""} ${word}`.trim());
  const size = { width: width + 2 * MARGIN, height: height + LINE * (lines.length + 2) + 2 * MARGIN };
  const root = make("svg", { viewBox: `0 0 ${size.width} ${size.height}`, ...size, color: "#1a1d21", fill: "#1a1d21", "font-family": "sans-serif" });
  root.append(make("rect", { width: "100%", height: "100%", fill: "#fff" }), make("text", { x: MARGIN, y: MARGIN + LINE, "font-size": 12, "font-weight": "bold" }, figure.querySelector("h3").textContent));
  const copy = svg.cloneNode(true);
  for (const [name, value] of Object.entries({ x: MARGIN, y: MARGIN + 1.5 * LINE, width, height })) copy.setAttribute(name, value);
  copy.removeAttribute("style");
  root.append(copy);
  lines.forEach((line, i) => root.append(make("text", { x: MARGIN, y: MARGIN + 3 * LINE + height + i * LINE, "font-size": 10 }, line)));
  return root;
}

async function download(figure, kind) {
  const root = standalone(figure), source = new XMLSerializer().serializeToString(root);
  if (kind === "SVG") return save(new Blob([source], { type: "image/svg+xml" }), `${figure.id}.svg`);
  const image = new Image(), canvas = document.createElement("canvas"), scale = 3;
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  await image.decode();
  canvas.width = scale * root.getAttribute("width");
  canvas.height = scale * root.getAttribute("height");
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((content) => save(content, `${figure.id}.png`), "image/png");
}

for (const figure of document.querySelectorAll("figure[id]")) {
  if (!figure.querySelector(".drawing svg")) continue;
  const tools = document.createElement("p");
  tools.className = "saves";
  for (const kind of ["SVG", "PNG"]) {
    const button = document.createElement("button");
    button.textContent = kind;
    button.setAttribute("aria-label", `Download ${figure.querySelector("h3").textContent} as ${kind}`);
    button.addEventListener("click", () => download(figure, kind));
    tools.append(button);
  }
  figure.append(tools);
}

// Every heading has an address.
for (const part of document.querySelectorAll("h2[id], figure[id], section.table[id]")) {
  const heading = part.matches("h2") ? part : part.querySelector("h3"), link = document.createElement("a");
  link.href = `#${part.id}`;
  link.className = "anchor";
  link.setAttribute("aria-label", `Link to ${heading.textContent}`);
  heading.append(link);
}

// The frame of attention patterns says how tall it is, that it is ready, and which head it shows; nothing else is listened
// to. It receives the head that the page's address names.
function go() {
  const place = placeOf(location.hash), frames = place ? document.querySelectorAll("iframe.attention") : [];
  if (place && !frames.length) {
    document.querySelector("p.lost")?.remove();
    const text = `This page has no attention patterns, of layer ${place[0]}, head ${place[1]} or another: the probes selectability and uniformity keep them.`;
    document.querySelector("main").prepend(Object.assign(document.createElement("p"), { className: "lost", role: "status", textContent: text }));
  }
  for (const frame of frames) {
    frame.contentWindow.postMessage({ lnProbeGo: place }, "*");
    document.getElementById("attention").scrollIntoView();
  }
}
addEventListener("hashchange", go);
if (!document.querySelector("iframe.attention")) go();
addEventListener("message", (event) => {
  for (const frame of document.querySelectorAll("iframe.attention")) {
    if (event.source !== frame.contentWindow) continue;
    const height = Number(event.data?.lnProbeHeight), place = event.data?.lnProbeAt;
    if (height > 0 && height < 20000) frame.style.height = `${Math.ceil(height) + 8}px`;
    if (event.data?.lnProbeReady === true) go();
    if (Array.isArray(place) && placeOf(addressOf(place))) history.replaceState(null, "", addressOf(place));
  }
});
// A frame that was drawn before this script listened repeats its message.
for (const frame of document.querySelectorAll("iframe.attention")) frame.contentWindow.postMessage({ lnProbeAsk: true }, "*");
// Everything is laid out once attention had its time to be drawn; at once where the address names a place on the page.
if (location.hash) document.documentElement.classList.add("whole");
addEventListener("hashchange", () => document.documentElement.classList.add("whole"));
addEventListener("load", () => {
  const waits = !location.hash && document.querySelector("iframe.attention") ? 1000 : 0;
  setTimeout(() => document.documentElement.classList.add("whole"), waits);
});
