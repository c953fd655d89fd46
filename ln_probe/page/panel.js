// An attention pattern on a canvas that mouse and arrow keys read, and small helpers for building elements.
const KEYS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));

function made(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// `chosen` has the query and key that were read last; `point(query, key)` is called with the next ones.
function patternPanel(chosen, point) {
  const title = made("h4"), canvas = made("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect(), n = canvas.width;
    point(clamp(Math.floor(((event.clientY - box.top) / box.height) * n), n), clamp(Math.floor(((event.clientX - box.left) / box.width) * n), n));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = KEYS[event.key];
    if (!step) return;
    event.preventDefault();
    point(clamp(chosen.query + step[0], canvas.width), clamp(chosen.key + step[1], canvas.width));
  });
  return { box: made("div", {}, title, canvas), title, canvas };
}

// Changes of attention weights: red where there is more, blue where there is less.
function paintChange(canvas, n, change, causal) {
  const changes = Array.from({ length: n * n }, (_, i) => change(i));
  const top = changes.reduce((m, v) => Math.max(m, Math.abs(v)), 1e-3), image = new ImageData(n, n);
  changes.forEach((v, i) => {
    const end = v < 0 ? [33, 102, 172] : [178, 24, 43], hidden = causal && i % n > Math.floor(i / n);
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = hidden ? 225 : 255 + ((end[c] - 255) * Math.abs(v)) / top;
    image.data[4 * i + 3] = 255;
  });
  canvas.width = canvas.height = n;
  canvas.getContext("2d").putImageData(image, 0, 0);
}
