// The logit lens, or the page's own lens, layer by position, of the prompt and of a second prompt that cells can be patched from.
import { button, element, percent, quoted, visible } from "./dom.js";
import { patch, place, scale, zero } from "./entries.js";
import { fillGrid, focusCell } from "./grid.js";
import { continues, readPlace, words } from "./heads.js";
import { openMenu } from "./menu.js";
import { ownLens, readableLayers, theEngine, throughLens, tokenText } from "./runs.js";
import { addEntry, answers, change, shownInside, state, whenTyped } from "./state.js";

export const title = "Lens";
let table, secondTable, second, note, thinned, about, readers;

export function build(box) {
  table = element("table", { class: "grid lens" });
  secondTable = element("table", { class: "grid lens" });
  note = element("p", { class: "faint small" });
  second = element("textarea", { id: "second", rows: 1, spellcheck: "false" });
  second.value = state.second;
  thinned = element("p", { class: "faint small", hidden: true }, element("span"), button("Show all layers", () => change({ allLayers: true })));
  second.addEventListener("input", () => whenTyped("second", 250, () => change({ second: second.value })));
  about = element("p", { class: "faint small" });
  readers = element("div", { class: "segments readers", role: "group", "aria-label": "Read each layer by the", hidden: !ownLens() },
    ...["logit lens", ...(ownLens() ? [named(ownLens())] : [])].map((name, i) => button(capital(name), () => change({ mapped: i === 1 }))));
  box.replaceChildren(
    about, readers,
    element("div", { class: "scroll" }, table), thinned,
    element("p", { class: "legend key", id: "changed-key" }, element("span", {}, element("b", { class: "mark" }, "●"), "another top token than before"), element("span", {}, element("b", { class: "mark square" }, "▢"), "changed by you")),
    element("h3", { class: "second" }, element("label", { for: "second" }, "Second prompt, to patch cells from")),
    second, note, element("div", { class: "scroll" }, secondTable));
}

export function draw() {
  const shown = shownInside();
  [...readers.children].forEach((made, i) => made.setAttribute("aria-pressed", String(throughLens() === (i === 1))));
  about.textContent = aboutCells();
  if (second && document.activeElement !== second) second.value = state.second;
  if (shown?.lens) lensGrid(table, shown, answers.tokens, "Lens of the prompt", (r, c, cell) => menu(layerOf(shown, r), c, cell));
  document.getElementById("changed-key").hidden = !answers.insideAfter;
  const all = theEngine() && readableLayers().length, read = shown?.lens?.layers.length;
  thinned.hidden = !read || read === all;
  if (!thinned.hidden) thinned.firstChild.textContent = `${read} of ${all} layers: each cell costs a product with ${theEngine().manifest.model.choices} tokens. `;
  const other = answers.second;
  secondTable.hidden = !other;
  note.textContent = other ? "Press a cell to put it into the prompt at the top: same layer, and a position of your choice." : "Write a text here, best one of the same form; its cells can then replace those of the prompt.";
  if (other) lensGrid(secondTable, other, answers.secondTokens, "Lens of the second prompt", (r, c, cell) => secondMenu(layerOf(other, r), c, cell));
}

function aboutCells() {
  const lens = ownLens(), cells = throughLens() ?
    `Each cell: ${words().lens} if every later layer acted on the stream as it does on average, a linear map that the ${named(lens)} was fitted for${lens.prompts ? ` on ${lens.prompts} texts` : ""}.` :
    `Each cell: ${words().lens} if this layer were its last.`;
  return cells + " The deeper the colour, the surer. Point at a cell for more; press it to change what is there.";
}

function named(lens) { return lens.name.replace("jacobian", "Jacobian"); }
function capital(name) { return name.slice(0, 1).toUpperCase() + name.slice(1); }

// Rows stand with the last layer on top, as the stream flows upwards.
function layerOf(shown, row) { return shown.lens.layers[shown.lens.layers.length - 1 - row]; }

function lensGrid(target, shown, tokens, label, pick) {
  const rows = shown.lens.layers.map((_, r) => "layer " + layerOf(shown, r));
  const first = shown === answers.insideAfter ? answers.insideBefore : null;
  fillGrid(target, {
    label, corner: "", kind: "token", rows, columns: tokens.map((id, i) => `${i} ${visible(tokenText(id)).trim()}`), pick,
    here: target.last ? undefined : [0, target === table ? readPlace() : tokens.length - 1],
    cell: (r, c) => {
      const layer = layerOf(shown, r), top = shown.lens.at(layer, c)[0];
      const moved = first && first.lens.at(layer, c)[0].id !== top.id;
      const mark = (moved ? "moved " : "") + (target === table && shown === answers.insideAfter && touched(layer, c) ? "touched" : "");
      return { text: visible(top.text).trim(), share: top.probability, mark: mark.trim(),
        name: `layer ${layer}, position ${place(c, tokens)}: ${visible(top.text).trim()}, ${percent(top.probability)}` };
    },
    tell: (r, c) => tell(shown, layerOf(shown, r), c, tokens),
  });
  target.style.setProperty("--columns", tokens.length);
  if (target.tokens !== tokens && continues()) target.parentElement.scrollLeft = target.scrollWidth; // the last position is in view
  target.tokens = tokens;
}

function touched(layer, position) {
  return state.entries.some((entry) => entry.on !== false && entry.hook === `blocks.${layer}.hook_resid_post` &&
    (!entry.positions || (Array.isArray(entry.positions) && entry.positions.some((at) => (at < 0 ? at + answers.tokens.length : at) === position))));
}

function tell(shown, layer, position, tokens) {
  const lines = shown.lens.at(layer, position).map(({ text, probability }) => percent(probability).padStart(8) + "  " + visible(text).trim());
  return [`after layer ${layer}, at ${place(position, tokens)}`, ...lines].join("\n");
}

function tops(shown, layer, position, name) {
  const list = element("ol", { class: "tops", "aria-label": name });
  for (const { text, probability } of shown.lens.at(layer, position)) {
    list.append(element("li", { share: probability }, element("span", { class: "token" }, visible(text).trim()), element("span", {}, percent(probability))));
  }
  return element("div", {}, element("div", { class: "faint small" }, name), list);
}

// The hook point of a cell: the stream after the layer. After the last layer there is none to patch into but its own.
function hook(layer) { return `blocks.${layer}.hook_resid_post`; }

function menu(layer, position, cell) {
  const { row, column } = cell.dataset, both = element("div", { class: "both" }, tops(answers.insideBefore, layer, position, answers.insideAfter ? "before" : "what it would say"));
  if (answers.insideAfter) both.append(tops(answers.insideAfter, layer, position, "after"));
  const actions = [], spot = { hook: hook(layer), positions: [position] };
  if (answers.second) {
    const same = Math.min(position, answers.secondTokens.length - 1), from = quoted(tokenText(answers.secondTokens[same]));
    actions.push({ text: `Patch with ${same} ${from} of the second prompt`, main: true, press: () => addEntry(patch(hook(layer), position, state.second, same)) });
  } else {
    actions.push({ text: "Patch from a second prompt …", press: () => second.focus() });
  }
  actions.push({ text: "Zero this cell", press: () => addEntry(zero(spot)) }, { text: "Scale this cell", press: () => addEntry(scale(spot)) });
  openMenu(cell, { title: `After layer ${layer}, at ${place(position)}`, body: [both], actions, back: () => focusCell(table, row, column) });
}

function secondMenu(layer, position, cell) {
  const { row, column } = cell.dataset, target = element("select", { id: "patch-target" });
  answers.tokens.forEach((_, i) => target.append(element("option", { value: i }, place(i))));
  target.value = Math.min(position, answers.tokens.length - 1);
  const body = [tops(answers.second, layer, position, "what it would say"), element("p", {}, element("label", { for: "patch-target" }, "into position "), target)];
  const text = state.second;
  openMenu(cell, {
    title: `Second prompt, after layer ${layer}, at ${place(position, answers.secondTokens)}`, body, back: () => focusCell(secondTable, row, column),
    actions: [{ text: "Put it into the prompt", main: true, press: () => addEntry(patch(hook(layer), Number(target.value), text, position)) }],
  });
}
