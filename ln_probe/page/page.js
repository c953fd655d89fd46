// The page around the pictures: tables that sort, filter and download; one picture of several chosen; the frame's height.
const PAGE = 100; // rows added at a time

function csvCell(value, text) {
  if (value === null || value === undefined) return "";
  let written = String(value);
  // A spreadsheet takes these for a formula, full-width forms and those behind white space too.
  if (text && /^[\t\r\n]|^[\s\u0000-\u0020\u200b-\u200f\u2060\ufeff]*[=+\-@|%]/.test(written.normalize("NFKC"))) written = "'" + written;
  return /[",\n\r]/.test(written) ? `"${written.replaceAll('"', '""')}"` : written;
}

// A test of rows for each word: layer=2 or margin > 0.5 compares a column, L2H3 is a head, a number matches a whole cell.
function wanted(words, { columns, data, isText }) {
  const cell = (c, i) => (isText.has(c) ? String(data[c][i]) : figure(data[c][i])).toLowerCase();
  const head = columns.includes("layer") && columns.includes("head") ? "layer=$1 head=$2" : "$&";
  const plain = words.toLowerCase().replace(/\s*([<>]=?|=)\s*/g, "$1").replace(/\bl(\d+)h(\d+)\b/g, head);
  return plain.split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, value] = /^([^<>=]+)(=|<=|>=|<|>)(.+)$/.exec(word) ?? [];
    const column = columns.find((c) => c.toLowerCase() === name);
    if (column !== undefined) {
      const number = Number(value);
      if (isText.has(column) || Number.isNaN(number)) return (i) => sign === "=" && cell(column, i) === value;
      const holds = { "=": (v) => v === number, "<": (v) => v < number, ">": (v) => v > number, "<=": (v) => v <= number, ">=": (v) => v >= number }[sign];
      return (i) => data[column][i] !== null && holds(data[column][i]);
    }
    if (sign) return Object.assign(() => false, { unknown: name });
    if (!Number.isNaN(Number(word))) return (i) => columns.some((c) => cell(c, i) === word);
    return (i) => columns.some((c) => cell(c, i).includes(word));
  });
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
    const filter = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter: word or layer=2", ariaLabel: "Filter rows" });
    filter.addEventListener("input", () => { this.tests = wanted(filter.value, this); this.shown = PAGE; this.fill(); });
    const save = Object.assign(document.createElement("button"), { textContent: "Download CSV" });
    save.addEventListener("click", () => this.download());
    this.more = Object.assign(document.createElement("button"), { textContent: "Show more rows" });
    this.more.addEventListener("click", () => { this.shown += PAGE; this.fill(); });
    tools.append(filter, save);
    section.append(this.more);
    this.tests = [];
    this.fill();
  }

  matching() {
    return this.tests.length ? this.order.filter((i) => this.tests.every((test) => test(i))) : this.order;
  }

  fill() {
    const found = this.matching();
    this.body.replaceChildren(...found.slice(0, this.shown).map((i) => {
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
    this.more.hidden = found.length <= this.shown;
    const unknown = this.tests.find((test) => test.unknown)?.unknown;
    this.count.textContent = (unknown ? `No column is named "${unknown}". ` : "") + `${Math.min(found.length, this.shown)} of ${found.length} rows shown` + (found.length < this.rows ? ` (${this.rows} in all)` : "") + ".";
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
    for (const i of this.matching()) lines.push(this.columns.map((c) => csvCell(this.data[c][i], this.isText.has(c))).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff" + lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
    link.download = `${this.section.dataset.file}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}

for (const section of document.querySelectorAll("section.table")) {
  const source = section.querySelector("script.rows");
  if (!source) continue;
  unpack(source.textContent)
    .then((content) => new Table(section, content))
    .catch((error) => { section.querySelector(".count").textContent = `Only the first rows are shown: ${error.message}.`; });
}

// Of several drawings of the same thing one is shown.
for (const choice of document.querySelectorAll("select.drawings")) {
  const drawings = [...choice.closest("figure").querySelectorAll(".drawing")];
  const show = () => drawings.forEach((d, i) => { d.hidden = i !== choice.selectedIndex; });
  choice.hidden = false;
  choice.closest("label").hidden = false;
  choice.addEventListener("change", show);
  show();
}

// The frame of attention patterns says how tall it is, that it is ready, and which head it shows; nothing else is listened
// to. It receives the head that the page's address names.
function go() {
  const place = placeOf(location.hash);
  for (const frame of place ? document.querySelectorAll("iframe.attention") : []) {
    frame.contentWindow.postMessage({ lnProbeGo: place }, "*");
    document.getElementById("attention").scrollIntoView();
  }
}
addEventListener("hashchange", go);
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
