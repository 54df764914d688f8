// Every head, attention, MLP and layer: zero or scale one; or zero each in turn and see which the prediction needs.
import { button, element, nats } from "./dom.js";
import { part, sameDeed, scale, zero } from "./entries.js";
import { fillGrid, focusCell } from "./grid.js";
import { openMenu } from "./menu.js";
import { measure, theEngine } from "./runs.js";
import { addEntry, answers, removeEntries, state } from "./state.js";

export const title = "Parts";
let table, press, note, divergence, effects = null, running = false, offered = null;
const AT_ONCE = 1500; // milliseconds of measuring that nobody asked for

export function setMeasures(found) { divergence = found.kl; }

export function build(box) {
  table = element("table", { class: "grid parts" });
  press = button("Zero each in turn and measure", () => (running ? stop() : start()), { id: "measure" });
  note = element("span", { class: "faint small", role: "status" });
  box.replaceChildren(
    element("p", { class: "faint small" }, "What each layer is made of. A number is how far the prediction moves without that part: a KL divergence in nats. Press a part to zero or scale what it writes into the stream."),
    element("div", { class: "bar measure" }, press, note), element("div", { class: "scroll" }, table));
  offered = null;
}

// The parts that a layer has and this page can change.
function names() {
  const { hooks, model } = theEngine().manifest, has = (name) => Object.keys(hooks).some((hook) => hook.endsWith(name));
  return [...(has("attn.hook_z") ? Array(model.heads).keys() : []), ...(has("hook_attn_out") ? ["attention"] : []), ...(has("hook_mlp_out") ? ["MLP"] : []), "layer"];
}

function inList(spot) { return state.entries.find((entry) => ["zero", "scale"].includes(entry.kind) && entry.on !== false && !entry.positions && sameDeed({ ...entry, kind: "" }, { ...spot, kind: "" })); }

export function draw() {
  if (!theEngine()) return;
  const { layers } = theEngine().manifest.model, columns = names(), known = effects && effects.tokens === answers.tokens ? effects : null;
  const most = known ? Math.max(1e-9, ...known.values.filter((value) => value !== undefined)) : 1;
  fillGrid(table, {
    label: "Parts of the model: layers down, heads, attention, MLP and whole layer across", corner: "layer",
    rows: Array.from({ length: layers }, (_, layer) => String(layer)), columns: columns.map((name) => (typeof name === "number" ? "head " + name : name)),
    cell: (layer, c) => cell(layer, columns[c], known?.values[layer * columns.length + c], most), pick: (layer, c, at) => menu(layer, columns[c], at),
  });
  table.classList.toggle("many", columns.length > 14);
  if (!known && !running && answers.before && offered !== answers.before) {
    offered = answers.before;
    start(Math.max(1, Math.floor(AT_ONCE / (answers.before.ms * columns.length))));
  }
  if (known?.done) note.textContent = known.values.length < layers * columns.length ? `The first layers are measured; ${layers * columns.length - known.values.length} parts are left.` : "KL divergence in nats when that part alone is zeroed" + (known.over ? ", on top of the interventions in the list then." : ".");
}

function said(layer, name) { return typeof name === "number" ? `head ${name} of layer ${layer}` : name === "layer" ? `all of layer ${layer}` : `${name} of layer ${layer}`; }

function cell(layer, name, effect, most) {
  const entry = inList(part(layer, name)), text = entry ? (entry.kind === "zero" ? "× 0" : "× " + entry.value) : effect !== undefined ? brief(effect) : "·";
  return { text, mark: [entry ? "touched" : "", typeof name === "number" ? "" : "block"].join(" ").trim(), share: effect === undefined ? 0 : Math.max(0, effect) / most,
    name: said(layer, name) + (entry ? ", " + text : "") + (effect === undefined ? "" : `, KL ${nats(effect)} nats`) };
}

function brief(effect) { return effect < 0.0005 ? "0" : effect < 10 ? effect.toFixed(effect < 1 ? 3 : 2) : effect.toFixed(1); }

function menu(layer, name, at) {
  const spot = part(layer, name), entry = inList(spot), { row, column } = at.dataset;
  const actions = entry ? [{ text: "Restore it", main: true, press: () => removeEntries((one) => one === entry) }] : [
    { text: "Zero it", main: true, press: () => addEntry(zero(spot)) }, { text: "Halve it, with a slider", press: () => addEntry(scale(spot, 0.5)) },
    { text: "Double it, with a slider", press: () => addEntry(scale(spot, 2)) }];
  const what = name === "layer" ? "Zeroing it skips the layer: the stream passes unchanged." : "Zeroing it takes away what it writes into the stream, at every position.";
  openMenu(at, { title: said(layer, name), body: [element("p", {}, what)], actions, back: () => focusCell(table, row, column) });
}

function stop() { running = false; }

// rows: how many layers are measured, the first ones; all of them when the reader asks.
async function start(rows = Infinity) {
  const columns = names(), layers = Math.min(rows, theEngine().manifest.model.layers), list = [], asked = rows === Infinity;
  for (let layer = 0; layer < layers; layer++) for (const name of columns) list.push(zero(part(layer, name)));
  running = asked;
  let drawn = performance.now();
  if (asked) press.textContent = "Stop";
  const mine = effects = { tokens: answers.tokens, values: [], over: Boolean(answers.after) };
  try {
    await measure(list, divergence, (index, value) => {
      mine.values[index] = value;
      note.textContent = `${index + 1} of ${list.length} parts`;
      if (performance.now() - drawn < 250 || !press.isConnected) return;
      drawn = performance.now();
      draw();
    }, () => (asked && !running) || mine !== effects);
  } catch (error) {
    note.textContent = error.message;
  }
  if (mine !== effects) return;
  mine.done = true;
  running = false;
  press.textContent = "Zero each in turn and measure";
  if (press.isConnected) draw();
}
