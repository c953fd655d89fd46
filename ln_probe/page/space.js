// Points in three dimensions that can be turned. What `space_data` in page/lab.py packed: what can be chosen, and coordinates by model,
// seed, step, stage, role (keys, queries), token and axis.
const SPACE_SIZE = 100; // from the centre to the farthest key, in units of the drawing
const SPACE_TURN = Math.PI / 36; // of an arrow key
const SPACE_MOVES = 350; // milliseconds from one stage to the next
const ROOT3 = Math.sqrt(3), TO_DEGREES = 180 / Math.PI;
// Rows: right, up, towards the eye. The all-ones direction is upright, then the whole is turned.
const UPRIGHT = [[1 / Math.SQRT2, -1 / Math.SQRT2, 0], [1 / ROOT3, 1 / ROOT3, 1 / ROOT3], [-1 / Math.sqrt(6), -1 / Math.sqrt(6), 2 / Math.sqrt(6)]];
const SPACE_VIEWS = { slanted: [0.35, 0.5], side: [0, 0], along: [Math.PI / 2, 0] };

function turned(matrix, aroundRight, aroundUp) {
  const [cx, sx, cy, sy] = [Math.cos(aroundRight), Math.sin(aroundRight), Math.cos(aroundUp), Math.sin(aroundUp)];
  const [right, up, eye] = matrix;
  const right1 = right.map((v, i) => cy * v + sy * eye[i]), eye1 = eye.map((v, i) => cy * v - sy * right[i]);
  return [right1, up.map((v, i) => cx * v - sx * eye1[i]), eye1.map((v, i) => cx * v + sx * up[i])];
}

const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const lengthOf = (a) => Math.sqrt(dot(a, a));
// Angle of a vector to the line of the all-ones direction, 0 to 90 degrees.
const toOnes = (a) => TO_DEGREES * Math.acos(Math.min(1, Math.abs(a[0] + a[1] + a[2]) / (ROOT3 * lengthOf(a))));

function drawn(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function arrow(parent, [x, y], opacity) {
  const group = drawn(parent, "g", { class: "query", opacity });
  drawn(group, "line", { x1: 0, y1: 0, x2: x, y2: y });
  const size = Math.hypot(x, y) || 1, [u, v] = [(6 * x) / size, (6 * y) / size];
  drawn(group, "path", { d: `M${x + u},${y + v}L${x - v / 2},${y + u / 2}L${x + v / 2},${y - u / 2}Z` });
  return [x + 2 * u, y + 2 * v + 3];
}

function drawSpace(svg, view, points, tokens, onSphere) {
  svg.replaceChildren();
  const flat = (p) => [dot(view[0], p), -dot(view[1], p), dot(view[2], p)];
  if (onSphere) drawn(svg, "circle", { class: "sphere", r: SPACE_SIZE });
  const rim = Array.from({ length: 49 }, (_, i) => {
    const [c, s] = [Math.cos((i * Math.PI) / 24), Math.sin((i * Math.PI) / 24)];
    return flat(UPRIGHT[0].map((v, k) => SPACE_SIZE * (c * v + s * UPRIGHT[2][k]))).slice(0, 2).map((v) => v.toFixed(2)).join(",");
  });
  drawn(svg, "path", { class: "plane", d: `M${rim.join("L")}Z` });
  for (const axis of [0, 1, 2]) {
    const [x, y] = flat([0, 1, 2].map((k) => (k === axis ? 1.15 * SPACE_SIZE : 0)));
    drawn(svg, "line", { class: "axis", x1: -x, y1: -y, x2: x, y2: y });
    drawn(svg, "text", { x, y, "text-anchor": "middle" }, `x${axis + 1}`);
  }
  const [ox, oy] = flat([1, 1, 1].map((v) => (1.2 * SPACE_SIZE * v) / ROOT3));
  drawn(svg, "line", { class: "ones", x1: -ox, y1: -oy, x2: ox, y2: oy });
  drawn(svg, "text", { x: ox + 4, y: oy + 3 }, "ones");
  const near = (z) => (0.55 + (0.45 * (z + SPACE_SIZE)) / (2 * SPACE_SIZE)).toFixed(2); // what is far is paler
  const items = points.flatMap((role, kind) => role.map((p, token) => ({ kind, token, at: flat(p) })));
  const labels = []; // on top of everything
  for (const { kind, token, at: [x, y, z] } of items.sort((a, b) => a.at[2] - b.at[2])) {
    if (!Number.isFinite(x)) continue;
    if (kind === 1) labels.push(["of-query", tokens[token], ...arrow(svg, [x, y], near(z))]);
    else {
      drawn(svg, "circle", { class: "key", opacity: near(z), cx: x, cy: y, r: 4 + z / 60 });
      labels.push(["of-key", tokens[token], x, y - 6]);
    }
  }
  for (const [kind, text, x, y] of labels) drawn(svg, "text", { class: kind, x, y, "text-anchor": "middle" }, text);
}

// Text: angles of queries and keys to the all-ones direction.
function spaceSaid(data, choice, [keys, queries]) {
  const told = (rows) => {
    const angles = rows.filter((p) => lengthOf(p) > 0).map(toOnes);
    if (!angles.length) return "–";
    const mean = angles.reduce((a, b) => a + b) / angles.length;
    return `${mean.toFixed(0)}° on average (${Math.min(...angles).toFixed(0)}° to ${Math.max(...angles).toFixed(0)}°)`;
  };
  const stage = data.stages[choice.stage], lengths = keys.map(lengthOf);
  const [least, most] = [figure(Math.min(...lengths)), figure(Math.max(...lengths))];
  return `${data.models[choice.model]}; seed ${data.seeds[choice.seed]}, step ${data.steps[choice.step]}; ` +
    `${stage === "stream" ? "the residual stream" : `after ${stage}`}. Angles to the all-ones direction: queries are at ${told(queries)}, ` +
    `keys at ${told(keys)}. Keys are ${least === most ? most : `${least} to ${most}`} long.`;
}

function spaceTable(into, tokens, [keys, queries]) {
  const table = document.createElement("table");
  const line = (cells, tag) => {
    const row = table.insertRow();
    for (const cell of cells) row.append(Object.assign(document.createElement(tag), { textContent: cell }));
  };
  line(["class", "key x1", "x2", "x3", "query x1", "x2", "x3"], "th");
  tokens.forEach((token, i) => line([token, ...keys[i].map(figure), ...queries[i].map(figure)], "td"));
  into.replaceChildren(table);
}

async function startSpace(root) {
  const data = await unpack(root.dataset.points), at = (name) => root.querySelector(`.space-${name}`);
  const sizes = [data.models, data.seeds, data.steps, data.stages, [0, 1], data.tokens].map((list) => list.length);
  const choice = { model: 0, seed: 0, step: data.steps.length - 1, stage: data.stages.length - 1 };
  const vectors = () => [0, 1].map((role) => data.tokens.map((_, token) => {
    const place = [choice.model, choice.seed, choice.step, choice.stage, role, token].reduce((sum, v, i) => sum * sizes[i] + v, 0);
    return Array.from(data.points.slice(3 * place, 3 * place + 3));
  }));
  const svg = drawn(at("drawing"), "svg", { viewBox: "-128 -128 256 256", "aria-hidden": "true" });
  let view = turned(UPRIGHT, ...SPACE_VIEWS.slanted), shown = null, moving = 0;
  const paint = () => drawSpace(svg, view, shown, data.tokens, choice.stage > 1);
  const rotate = (aroundRight, aroundUp) => { view = turned(view, aroundRight, aroundUp); paint(); };

  function show() {
    const raw = vectors(), reach = Math.max(...raw[0].map(lengthOf)) || 1, from = shown;
    const to = raw.map((rows, role) => rows.map((p) => p.map((v) => (SPACE_SIZE * v) / (role ? 1.15 * lengthOf(p) || 1 : reach))));
    at("said").textContent = spaceSaid(data, choice, raw);
    spaceTable(at("scroll"), data.tokens, raw);
    cancelAnimationFrame(moving);
    if (!from || matchMedia("(prefers-reduced-motion: reduce)").matches) { shown = to; paint(); return; }
    const began = performance.now();
    const step = (now) => {
      const part = Math.min(1, Math.max(0, now - began) / SPACE_MOVES);
      shown = to.map((rows, role) => rows.map((p, i) => p.map((v, k) => from[role][i][k] + part * (v - from[role][i][k]))));
      paint();
      if (part < 1) moving = requestAnimationFrame(step);
    };
    moving = requestAnimationFrame(step);
  }

  for (const [name, list] of [["model", data.models], ["seed", data.seeds], ["step", data.steps]]) {
    at(name).append(...list.map((text, i) => new Option(text, i, false, i === choice[name])));
    at(name).addEventListener("change", (event) => { choice[name] = Number(event.target.value); show(); });
  }
  data.stages.forEach((text, i) => {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, { type: "radio", name: "space-stage", checked: i === choice.stage });
    input.addEventListener("change", () => { choice.stage = i; show(); });
    label.append(input, text === "stream" ? "nothing (the stream)" : text);
    at("stages").append(label);
  });
  for (const button of root.querySelectorAll("[data-view]"))
    button.addEventListener("click", () => { view = turned(UPRIGHT, ...SPACE_VIEWS[button.dataset.view]); paint(); });
  const drawing = at("drawing"), keys = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  drawing.addEventListener("keydown", (event) => {
    if (event.key === "Home") view = turned(UPRIGHT, ...SPACE_VIEWS.slanted), paint();
    else if (event.key in keys) rotate(...keys[event.key].map((v) => v * SPACE_TURN));
    else return;
    event.preventDefault();
  });
  drawing.addEventListener("pointerdown", (event) => drawing.setPointerCapture(event.pointerId));
  drawing.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) rotate(event.movementY / 120, event.movementX / 120);
  });
  for (const part of root.querySelectorAll("[hidden]")) part.hidden = false;
  show();
}

// In a frame of the site: no second heading, and the site's choice of light or dark where it can be asked.
function frameTheme() {
  if (window.parent === window) return;
  document.documentElement.classList.add("framed");
  try {
    const body = window.parent.document.body;
    const follow = () => { document.documentElement.dataset.theme = body.dataset.theme ?? ""; };
    follow();
    new MutationObserver(follow).observe(body, { attributes: true, attributeFilter: ["data-theme"] });
  } catch { /* another origin: the system's choice */ }
}

frameTheme();
for (const root of document.querySelectorAll(".space")) startSpace(root);
