// Colours of head maps and attention patterns, and the words for their numbers.
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const UNKNOWN = [140, 140, 140], WHITE = dark ? [42, 48, 55] : [240, 242, 244];
const LESS = dark ? [120, 180, 235] : [33, 102, 172], MORE = dark ? [245, 130, 110] : [178, 24, 43];
const MUCH = dark ? [86, 180, 233] : [0, 114, 178];
const INK = [0, 114, 178]; // Okabe & Ito's blue

const share = (value) => (Number.isNaN(value) ? "–" : `${Number((100 * value).toPrecision(value < 0.1 ? 2 : 3))} %`);
const weight = (byte) => (byte / 255) ** 2;

const mixed = (a, b, t) => `rgb(${a.map((v, c) => Math.round(v + (b[c] - v) * t)).join(" ")})`;
function amount(value, of) {
  if (Number.isNaN(value)) return "not known";
  const sign = of.signed && value > 0 ? "+" : "", tiny = value && Math.abs(value) < 1e-4;
  if (of.unit === "share") return sign + (of.signed ? `${Number((100 * value).toPrecision(2))} points` : share(value));
  return `${sign}${tiny ? value.toExponential(1) : Number(value.toPrecision(3))} ${of.unit}`;
}

function tint(value, top, low) {
  if (Number.isNaN(value)) return mixed(UNKNOWN, UNKNOWN, 0);
  if (low < 0) return mixed(WHITE, value < 0 ? LESS : MORE, Math.min(1, Math.abs(value) / top));
  return mixed(WHITE, MUCH, Math.min(1, value / top));
}

const strongest = (bytes, start, n) => bytes.subarray(start, start + n * n).reduce((a, b) => Math.max(a, b), 1);
function paint(canvas, bytes, start, n, causal, top = strongest(bytes, start, n)) {
  canvas.width = canvas.height = n;
  const image = new ImageData(n, n);
  for (let i = 0; i < n * n; i++) {
    const dark = bytes[start + i] / top, hidden = causal && i % n > Math.floor(i / n);
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = hidden ? 225 : 255 + (INK[c] - 255) * dark;
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
