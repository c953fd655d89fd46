// All heads of a layer, intact and edited, which circuitsvis draws.
const at = (id) => document.getElementById(id);
const weight = (byte) => Number(((byte / 255) ** 2).toPrecision(3));

async function start() {
  const [code, data] = await Promise.all([inflate(at("bundle").textContent), unpack(at("data").textContent)]);
  document.head.append(make("script", { textContent: new TextDecoder().decode(code) }));
  const { count, panels } = data;
  // circuitsvis draws a rectangle for every entry of a row, in every head: those that would be white are left out, as
  // holes of the row, which leave the others in their places.
  const row = (weights, start, length) => {
    const values = new Array(length);
    for (let key = 0; key < length; key++) {
      const value = weight(weights[start + key]);
      if (value >= data.least) values[key] = value;
    }
    return values;
  };
  const draw = ({ weights, tokens, names }, place) => CircuitsVis.render(`panel${place}`, CircuitsVis.AttentionHeads, {
    attention: names.map((_, head) => Array.from({ length: count }, (_, query) =>
      row(weights, (head * count + query) * count, data.causal ? query + 1 : count))),
    attentionHeadNames: names, tokens, minValue: 0, maxValue: data.full, positiveColor: "#0072b2", maskUpperTri: data.causal,
  });
  panels.forEach((panel, place) => setTimeout(() => draw(panel, place))); // the first is seen before the second is drawn
}

start().catch((error) => { at("status").textContent = `Attention cannot be drawn: ${error.message}`; });
