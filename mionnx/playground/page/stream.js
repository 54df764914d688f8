// The residual stream, layer by position, where the head reads whole texts and no lens is: how far the prediction moves when one
// cell alone is zeroed, or takes what a second text has there.
import { element, visible } from "./dom.js";
import { patch, place, scale, zero } from "./entries.js";
import { fillGrid, focusCell } from "./grid.js";
import { effectText, measureName } from "./heads.js";
import { brief, largestOf, Measuring } from "./measuring.js";
import { openMenu } from "./menu.js";
import { theEngine, tokenText } from "./runs.js";
import { addEntry, answers, change, state, whenTyped } from "./state.js";

export const title = "Stream";
let table, second, note, measuring;

function layers() { return theEngine().manifest.model.layers; }
function hook(layer) { return `blocks.${layer}.hook_resid_post`; }
// Cells can be patched where the second text has as many tokens.
function patches() { return answers.secondTokens.length > 0 && answers.secondTokens.length === answers.tokens.length; }
function deed(layer, position) { return patches() ? patch(hook(layer), position, state.second, position) : zero({ hook: hook(layer), positions: [position] }); }
function each() { return Array.from({ length: layers() }, (_, layer) => answers.tokens.map((_one, position) => deed(layer, position))).flat(); }

export function build(box) {
  table = element("table", { class: "grid parts stream" });
  note = element("p", { class: "faint small" });
  second = element("textarea", { id: "second", rows: 1, spellcheck: "false" });
  second.value = state.second;
  second.addEventListener("input", () => whenTyped("second", 250, () => change({ second: second.value })));
  measuring = new Measuring({ id: "measure-stream", name: () => (patches() ? "Patch each cell in turn and measure" : "Zero each cell in turn and measure"), unit: "cells", draw,
    list: each, row: () => answers.tokens.length, key: () => (patches() ? state.second : "") });
  box.replaceChildren(
    element("p", { class: "faint small" }, "The stream after each layer, at each token. A number is how far the prediction moves when that cell alone is zeroed, or patched from the second text. Press a cell to change it."),
    element("div", { class: "bar measure" }, measuring.press, measuring.note), element("div", { class: "scroll" }, table),
    element("h3", { class: "second" }, element("label", { for: "second" }, "Second text, to patch cells from")), second, note);
}

export function draw() {
  if (!theEngine() || !answers.tokens.length) return;
  if (document.activeElement !== second) second.value = state.second;
  const { tokens } = answers, known = measuring.known, most = largestOf(known);
  note.textContent = !answers.secondTokens.length ? "Write a text here with as many tokens; its cells can then replace those of the text above."
    : patches() ? "Each cell can be patched with the one at the same place of this text." : `It has ${answers.secondTokens.length} tokens and the text above ${tokens.length}: cells can be patched one by one where the text has that place.`;
  fillGrid(table, {
    label: "Stream: layers down, the last on top, tokens across", corner: "", kind: "token", columns: tokens.map((id, i) => `${i} ${visible(tokenText(id)).trim()}`),
    rows: Array.from({ length: layers() }, (_, r) => "layer " + (layers() - 1 - r)), pick: (r, c, cell) => menu(layers() - 1 - r, c, cell),
    cell: (r, c) => cellOf(layers() - 1 - r, c, known?.values[(layers() - 1 - r) * tokens.length + c], most),
  });
  measuring.offer();
  if (!known?.done) return;
  const what = patches() ? "patched from the second text" : "zeroed";
  measuring.note.textContent = known.left ? `The first layers are measured; ${known.left} cells are left.` : `${measureName()} when that cell alone is ${what}` + (known.over ? ", on top of the interventions in the list then." : ".");
}

function cellOf(layer, position, value, most) {
  const touched = state.entries.some((entry) => entry.on !== false && entry.hook === hook(layer) && (!entry.positions || (Array.isArray(entry.positions) && entry.positions.includes(position))));
  return { text: value === undefined ? "·" : brief(value), share: value === undefined ? 0 : Math.max(0, value) / most, mark: touched ? "touched" : "",
    name: `layer ${layer}, position ${place(position)}` + (value === undefined ? "" : `, ${effectText(value)}`) };
}

function menu(layer, position, cell) {
  const { row, column } = cell.dataset, spot = { hook: hook(layer), positions: [position] }, actions = [];
  if (position < answers.secondTokens.length) actions.push({ text: `Patch with ${place(position, answers.secondTokens)} of the second text`, main: true, press: () => addEntry(patch(hook(layer), position, state.second, position)) });
  actions.push({ text: "Zero this cell", press: () => addEntry(zero(spot)) }, { text: "Scale this cell", press: () => addEntry(scale(spot)) });
  openMenu(cell, { title: `After layer ${layer}, at ${place(position)}`, actions, back: () => focusCell(table, row, column) });
}
