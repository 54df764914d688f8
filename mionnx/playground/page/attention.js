// Attention of all heads: small patterns by layer and head; the chosen one large, with its edges to cut.
import { button, element, percent, visible } from "./dom.js";
import { cut, part, place, sameDeed, scale, zero } from "./entries.js";
import { fillGrid, focusCell } from "./grid.js";
import { openMenu } from "./menu.js";
import { tokenText } from "./runs.js";
import { addEntry, answers, change, removeEntries, shownInside, state } from "./state.js";

export const title = "Attention";
const LARGE = 48; // tokens that the large pattern shows: the last ones
let small, large, named, said, note, deeds;

export function build(box) {
  small = element("table", { class: "grid small" });
  large = element("table", { class: "grid large" });
  named = element("h3", { id: "which-head", "aria-live": "polite" });
  note = element("p", { class: "faint small" });
  said = element("p", { class: "small", id: "strongest" });
  deeds = element("div", { class: "bar deeds" }, button("Zero this head", () => addEntry(zero(part(state.layer, state.head)))),
    button("Scale this head", () => addEntry(scale(part(state.layer, state.head)))));
  box.replaceChildren(
    element("p", { class: "faint small" }, "Rows are queries, columns keys: a row is what its token reads, and adds up to 100 %. Press a small pattern to see it large."),
    element("div", { class: "attention" }, element("div", { class: "main" }, named, said, element("div", { class: "scroll" }, large), note, deeds),
      element("div", { class: "all" }, element("h3", {}, "All heads"), element("div", { class: "scroll tall" }, small))));
}

// The head whose last token reads another one most, its own and the first left out: [layer, head].
function telling(shown, layers, heads, size) {
  let best = [layers[0], 0], most = -1;
  for (const layer of layers) {
    for (let head = 0; head < heads; head++) {
      const start = (head * size + size - 1) * size, row = shown.patterns[layer].subarray(start + 1, start + size - 1), weight = Math.max(0, ...row);
      if (weight > most) [best, most] = [[layer, head], weight];
    }
  }
  return best;
}

// What a head does here, in a word: the mean weight of one kind of edge is above a half.
function role(shown, layer, head, size) {
  const ids = answers.tokens, sums = { "previous token": [0, 0], induction: [0, 0] };
  for (let query = 1; query < size; query++) {
    const row = (key) => shown.patterns[layer][(head * size + query) * size + key], before = ids.lastIndexOf(ids[query], query - 1);
    sums["previous token"][0] += row(query - 1);
    sums["previous token"][1]++;
    if (before >= 0 && before + 1 < query) { sums.induction[0] += row(before + 1); sums.induction[1]++; }
  }
  return Object.keys(sums).find((name) => sums[name][1] && sums[name][0] / sums[name][1] > 0.5) ?? "";
}

export function draw() {
  const shown = shownInside(), layers = shown ? Object.keys(shown.patterns).map(Number).sort((a, b) => a - b) : [];
  if (!layers.length) return;
  const size = answers.tokens.length, heads = shown.patterns[layers[0]].length / (size * size);
  if (!layers.includes(state.layer)) state.layer = layers[0];
  state.head = Math.min(state.head, heads - 1);
  if (!state.picked) [state.layer, state.head] = telling(shown, layers, heads, size);
  fillGrid(small, {
    label: "Attention of all heads: layers down, heads across", corner: "layer", rows: layers.map(String), columns: Array.from({ length: heads }, (_, head) => String(head)),
    cell: (r, head) => thumbnail(shown, layers[r], head, size),
    pick: (r, head) => { change({ layer: layers[r], head, picked: true }); focusCell(small, r, head); },
    tell: (r, head) => [`layer ${layers[r]}, head ${head}`, role(shown, layers[r], head, size)].filter(Boolean).join("\n"), here: small.last ? undefined : [layers.indexOf(state.layer), state.head],
  });
  small.style.setProperty("--heads", heads);
  pattern(shown, size);
}

function altered(layer, head) {
  return state.entries.some((entry) => entry.on !== false && entry.hook.startsWith(`blocks.${layer}.attn.`) && (!entry.heads || entry.heads.includes(head)));
}

function thumbnail(shown, layer, head, size) {
  const canvas = element("canvas", { width: size, height: size, "aria-hidden": "true" }), pen = canvas.getContext("2d");
  const image = pen.createImageData(size, size), weights = shown.patterns[layer], start = head * size * size;
  const [low, high] = [ink("--ground"), ink("--accent")];
  for (let query = 0; query < size; query++) {
    for (let key = 0; key <= query; key++) {
      const at = query * size + key, weight = weights[start + at];
      for (let n = 0; n < 3; n++) image.data[4 * at + n] = low[n] + (high[n] - low[n]) * weight;
      image.data[4 * at + 3] = 255;
    }
  }
  pen.putImageData(image, 0, 0);
  const mark = [layer === state.layer && head === state.head ? "chosen" : "", altered(layer, head) ? "touched" : ""].join(" ").trim();
  return { child: canvas, mark, name: `layer ${layer}, head ${head}` + (altered(layer, head) ? ", changed" : "") };
}

const probe = element("span", { hidden: true });
document.body.append(probe);
function ink(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function pattern(shown, size) {
  const { layer, head } = state, first = Math.max(0, size - LARGE), names = answers.tokens.slice(first).map((id) => visible(tokenText(id)).trim());
  const weight = (q, k) => shown.patterns[layer][(head * size + q + first) * size + k + first];
  const last = names.map((_, k) => weight(names.length - 1, k)), strongest = last.indexOf(Math.max(...last)), kind = role(shown, layer, head, size);
  named.textContent = `Layer ${layer}, head ${head}` + (kind ? ` · ${kind}` : "");
  said.textContent = `The last token reads ${place(strongest + first)} most, with ${percent(last[strongest])}. Press any cell to cut its edge.`;
  note.textContent = first ? `The last ${LARGE} of ${size} tokens.` : "";
  fillGrid(large, {
    label: `Attention pattern of layer ${layer}, head ${head}`, corner: "", kind: "token", rows: names, columns: names,
    here: large.last ? undefined : [names.length - 1, strongest], pick: (q, k, cell) => menu(q + first, k + first, weight(q, k), cell),
    cell: (q, k) => k > q ? null : { text: size <= 16 ? (100 * weight(q, k)).toFixed(0) : "", share: weight(q, k), mark: isCut(q + first, k + first) ? "cut" : q === names.length - 1 && k === strongest ? "strongest" : "",
      name: `${place(q + first)} reads ${place(k + first)}: ${percent(weight(q, k))}` + (isCut(q + first, k + first) ? ", cut" : "") },
    tell: (q, k) => `${place(q + first)}\nreads ${place(k + first)}: ${percent(weight(q, k))}\n` + (isCut(q + first, k + first) ? "cut: press to restore it" : "press to cut it"),
  });
  large.classList.toggle("dense", size > 16);
  large.closest(".attention").classList.toggle("wide", size > 16);
  large.style.setProperty("--columns", names.length);
  deeds.firstChild.disabled = state.entries.some((entry) => sameDeed(entry, zero(part(layer, head))));
}

function cuts(entry, query, key) {
  const absolute = (at) => (at < 0 ? at + answers.tokens.length : at);
  const hooks = [`blocks.${state.layer}.attn.hook_scores`, "blocks.*.attn.hook_scores"];
  return entry.kind === "knockout" && hooks.includes(entry.hook) && (!entry.heads || entry.heads.includes(state.head)) &&
    Boolean(entry.value?.edges?.some(([q, k]) => absolute(q) === query && absolute(k) === key));
}

function isCut(query, key) { return state.entries.some((entry) => entry.on !== false && cuts(entry, query, key)); }

function menu(query, key, weight, cell) {
  const { layer, head } = state, { row, column } = cell.dataset, actions = [];
  if (isCut(query, key)) {
    actions.push({ text: "Restore this edge", main: true, press: () => removeEntries((entry) => cuts(entry, query, key)) });
  } else {
    actions.push({ text: `Cut it in head ${head} of layer ${layer}`, main: true, press: () => addEntry(cut(layer, [head], query, key)) },
      { text: `Cut it in all heads of layer ${layer}`, press: () => addEntry(cut(layer, null, query, key)) },
      { text: "Cut it in every layer", press: () => addEntry(cut("*", null, query, key)) });
  }
  const body = [element("p", {}, `${place(query)} reads ${place(key)} with ${percent(weight)} of its attention in layer ${layer}, head ${head}.`)];
  openMenu(cell, { title: `Edge ${query} → ${key}`, body, actions, back: () => focusCell(large, row, column) });
}
