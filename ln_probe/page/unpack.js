"use strict";
// What `packed` in page/__init__.py made: base64 of zlib; a JSON header, then the bytes of its arrays.
async function inflate(text) {
  if (typeof DecompressionStream === "undefined")
    throw new Error("this browser cannot decompress (needed: Chrome 80, Firefox 113, Safari 16.4 or newer)");
  const letters = atob(text.trim()), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i); // (ten times as fast as Uint8Array.from)
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpack(text) {
  const buffer = await inflate(text);
  const length = new DataView(buffer).getUint32(0, true);
  const header = new TextDecoder().decode(new Uint8Array(buffer, 4, length));
  const kinds = { Uint8Array, Uint16Array, Int32Array, Float32Array };
  return JSON.parse(header, (_key, value) =>
    value && value.$ in kinds ? new kinds[value.$](buffer, 4 + length + value.at, value.n) : value);
}

// The number that the 16 bits of a float16 encode.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// Four digits, as in the tables' static rows.
function figure(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

// A head's place in an address: layer, head, prompt. An address is untrusted text: only digits are taken from it.
function placeOf(hash) {
  const found = /^#L(\d{1,5})H(\d{1,5})P(\d{1,7})$/.exec(hash);
  return found && found.slice(1).map(Number);
}
const addressOf = ([layer, head, prompt]) => `#L${layer}H${head}P${prompt}`;
