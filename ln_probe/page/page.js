"use strict";
// Data of a page (see `packed`), and tables that show, sort and save it.
const PAGE = 20; // rows at first, and added at a time
const FIRST = 8; // columns shown before a reader asks for all

async function inflate(text) {
  if (typeof DecompressionStream === "undefined")
    throw new Error("this browser cannot decompress (needed: Chrome 80, Firefox 113, Safari 16.4 or newer)");
  const letters = atob(text.trim()), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i); // (ten times as fast as Uint8Array.from)
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpack(text) {
  const buffer = await inflate(text), length = new DataView(buffer).getUint32(0, true);
  const header = new TextDecoder().decode(new Uint8Array(buffer, 4, length));
  return JSON.parse(header, (_key, value) =>
    value && Number.isInteger(value.$) ? new Uint8Array(buffer, 4 + length + value.$, value.n) : value);
}

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Four digits; a dash for a missing value.
function figure(value) {
  if (value === null) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

function csvCell(value, text) {
  if (value === null) return "";
  let written = String(value);
  // A spreadsheet takes these for a formula, full-width forms and those behind white space too.
  if (text && /^[\t\r\n]|^[\s\u0000-\u0020\u200b-\u200f\u2060\ufeff]*[=+\-@|%]/.test(written.normalize("NFKC"))) written = "'" + written;
  return /[",\n\r]/.test(written) ? `"${written.replaceAll('"', '""')}"` : written;
}

class Table {
  constructor(element, content) {
    Object.assign(this, content, { element, rowsShown: PAGE, sorted: null, upward: true });
    this.isText = new Set(content.text);
    this.order = Array.from({ length: content.rows }, (_, i) => i);
    this.shown = this.first = this.columns.slice(0, FIRST);
    const button = (textContent, act) => make("button", { textContent, onclick: act });
    this.all = button("All columns", () => { this.shown = this.shown === this.first ? this.columns : this.first; this.fill(); });
    this.all.hidden = this.columns.length <= this.first.length;
    this.more = button("Show more rows", () => { this.rowsShown *= 5; this.fill(); });
    element.querySelector(".tools").append(this.all, button("Download CSV", () => this.download()));
    element.querySelector(".scroll").after(this.more);
    this.fill();
  }

  cell(column, i) {
    const value = this.data[column][i], text = this.isText.has(column) ? value : figure(value);
    const link = column === this.columns[0] && this.links[i];
    const inside = link && !/^[a-z]*:|^\/\//i.test(link) ? make("a", { href: link, textContent: text }) : text;
    return make("td", { className: this.isText.has(column) ? "text" : "" }, inside);
  }

  fill() {
    const heads = this.shown.map((column) => {
      const head = make("th", { scope: "col" }, make("button", { textContent: column, onclick: () => this.sort(column) }));
      if (column === this.sorted) head.setAttribute("aria-sort", this.upward ? "ascending" : "descending");
      return head;
    });
    const rows = this.order.slice(0, this.rowsShown).map((i) => make("tr", {}, ...this.shown.map((column) => this.cell(column, i))));
    this.element.querySelector("table").replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
    this.all.textContent = this.shown === this.first ? `All ${this.columns.length} columns` : `First ${this.first.length} columns`;
    this.more.hidden = this.rows <= this.rowsShown;
  }

  sort(column) {
    this.upward = this.sorted === column ? !this.upward : true;
    this.sorted = column;
    const values = this.data[column], sign = this.upward ? 1 : -1, text = this.isText.has(column);
    this.order.sort((a, b) => {
      const x = values[a], y = values[b];
      if (x === null || y === null) return (x === null) - (y === null); // unknown values last, either way
      return sign * (text ? x.localeCompare(y) : x - y);
    });
    this.fill();
    this.element.querySelector("th[aria-sort] button").focus();
  }

  download() {
    const lines = [this.columns.map((c) => csvCell(c, true)).join(",")];
    for (const i of this.order) lines.push(this.columns.map((c) => csvCell(this.data[c][i], this.isText.has(c))).join(","));
    const name = `${document.querySelector("main").dataset.name}-${this.element.dataset.file}.csv`;
    const href = URL.createObjectURL(new Blob(["\ufeff" + lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
    make("a", { href, download: name.normalize("NFKC").replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[.-]+/, "") }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000); // a busy browser may take seconds to begin reading
  }
}

// A table is filled when it is opened.
async function fill(element) {
  const source = element.querySelector("script.rows");
  if (!element.open || !source) return;
  source.remove();
  try {
    new Table(element, await unpack(source.textContent));
  } catch (error) {
    element.querySelector(".tools").textContent = `The rows cannot be shown: ${error.message}.`;
  }
}
for (const element of document.querySelectorAll("details.table")) {
  element.addEventListener("toggle", () => fill(element));
  fill(element);
}

// A link to something folded unfolds it.
function unfold() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.tagName === "DETAILS") target.open = true;
}
addEventListener("hashchange", unfold);
unfold();
