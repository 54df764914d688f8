// Every head, attention, MLP and layer: zero or scale one; or zero each in turn and see which the prediction needs.
import { element } from "./dom.js";
import { part, sameDeed, scale, zero } from "./entries.js";
import { fillGrid, focusCell } from "./grid.js";
import { effectText, measureName } from "./heads.js";
import { brief, largestOf, Measuring } from "./measuring.js";
import { openMenu } from "./menu.js";
import { theEngine } from "./runs.js";
import { addEntry, removeEntries, state } from "./state.js";

export const title = "Parts";
let table, measuring;

export function build(box) {
  table = element("table", { class: "grid parts" });
  measuring = new Measuring({ id: "measure", name: () => "Zero each in turn and measure", unit: "parts", draw, list: each, row: () => names().length });
  box.replaceChildren(
    element("p", { class: "faint small" }, `What each layer is made of. A number is how far the prediction moves without that part: ${measureName()}. Press a part to zero or scale what it writes into the stream.`),
    element("div", { class: "bar measure" }, measuring.press, measuring.note), element("div", { class: "scroll" }, table));
}

function each() { return Array.from({ length: theEngine().manifest.model.layers }, (_, layer) => names().map((name) => zero(part(layer, name)))).flat(); }

// The parts that a layer has and this page can change.
function names() {
  const { hooks, model } = theEngine().manifest, has = (name) => Object.keys(hooks).some((hook) => hook.endsWith(name));
  return [...(has("attn.hook_z") ? Array(model.heads).keys() : []), ...(has("hook_attn_out") ? ["attention"] : []), ...(has("hook_mlp_out") ? ["MLP"] : []), "layer"];
}

function inList(spot) { return state.entries.find((entry) => ["zero", "scale"].includes(entry.kind) && entry.on !== false && !entry.positions && sameDeed({ ...entry, kind: "" }, { ...spot, kind: "" })); }

export function draw() {
  if (!theEngine()) return;
  const { layers } = theEngine().manifest.model, columns = names(), known = measuring.known, most = largestOf(known);
  fillGrid(table, {
    label: "Parts of the model: layers down, heads, attention, MLP and whole layer across", corner: "layer",
    rows: Array.from({ length: layers }, (_, layer) => String(layer)), columns: columns.map((name) => (typeof name === "number" ? "head " + name : name)),
    cell: (layer, c) => cell(layer, columns[c], known?.values[layer * columns.length + c], most), pick: (layer, c, at) => menu(layer, columns[c], at),
  });
  table.classList.toggle("many", columns.length > 14);
  measuring.offer();
  if (known?.done) measuring.note.textContent = known.left ? `The first layers are measured; ${known.left} parts are left.` : `${measureName()} when that part alone is zeroed` + (known.over ? ", on top of the interventions in the list then." : ".");
}

function said(layer, name) { return typeof name === "number" ? `head ${name} of layer ${layer}` : name === "layer" ? `all of layer ${layer}` : `${name} of layer ${layer}`; }

function cell(layer, name, effect, most) {
  const entry = inList(part(layer, name)), text = entry ? (entry.kind === "zero" ? "× 0" : "× " + entry.value) : effect !== undefined ? brief(effect) : "·";
  return { text, mark: [entry ? "touched" : "", typeof name === "number" ? "" : "block"].join(" ").trim(), share: effect === undefined ? 0 : Math.max(0, effect) / most,
    name: said(layer, name) + (entry ? ", " + text : "") + (effect === undefined ? "" : `, ${effectText(effect)}`) };
}

function menu(layer, name, at) {
  const spot = part(layer, name), entry = inList(spot), { row, column } = at.dataset;
  const actions = entry ? [{ text: "Restore it", main: true, press: () => removeEntries((one) => one === entry) }] : [
    { text: "Zero it", main: true, press: () => addEntry(zero(spot)) }, { text: "Halve it, with a slider", press: () => addEntry(scale(spot, 0.5)) },
    { text: "Double it, with a slider", press: () => addEntry(scale(spot, 2)) }];
  const what = name === "layer" ? theEngine().manifest.model.normed ? "Zeroing it takes away all that the layer adds; its norms stay." : "Zeroing it skips the layer: the stream passes unchanged." : "Zeroing it takes away what it writes into the stream, at every position.";
  openMenu(at, { title: said(layer, name), body: [element("p", {}, what)], actions, back: () => focusCell(table, row, column) });
}
