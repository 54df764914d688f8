// Attention of all heads: small patterns by layer and head; the chosen one large, with its edges to cut.
import { button, element, percent, visible } from "./dom.js";
import { cut, part, place, sameDeed, scale, zero } from "./entries.js";
import { fillGrid, focusCell } from "./grid.js";
import { isSpecial, readingQuery, readsBoth } from "./heads.js";
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

// Whether a key tells little of a query: its own, the first one of a decoder, which heads rest on, an encoder's special ones.
function resting(query, key) { return key === query || (readsBoth() ? isSpecial(answers.tokens[key]) : key === 0); }

// The head whose reading query, the last token of a decoder, reads another one most: [layer, head].
function telling(shown, layers, heads, size) {
  let best = [layers[0], 0], most = -1;
  for (const layer of layers) {
    for (let head = 0; head < heads; head++) {
      const weight = strongestEdge(shown.patterns[layer], head, size)[2];
      if (weight > most) [best, most] = [[layer, head], weight];
    }
  }
  return best;
}

// [query, key, weight] of the strongest edge of a head: of the query that is read, or where there is no single one of any token.
function strongestEdge(weights, head, size) {
  const reading = readingQuery(), queries = reading === null ? Array.from({ length: size }, (_, i) => i).filter((i) => !isSpecial(answers.tokens[i])) : [reading];
  let best = [queries[0] ?? 0, 0, -1];
  for (const query of queries) {
    for (let key = 0; key < size; key++) {
      const weight = weights[(head * size + query) * size + key];
      if (!resting(query, key) && weight > best[2]) best = [query, key, weight];
    }
  }
  return best;
}

// The key that a query reads in one kind of edge; none: -1.
const KINDS = {
  "previous token": (query) => query - 1,
  induction: (query, ids) => { const before = ids.lastIndexOf(ids[query], query - 1); return readsBoth() || query < 1 || before < 0 || before + 1 >= query ? -1 : before + 1; },
  "next token": (query, ids) => (readsBoth() && query + 1 < ids.length ? query + 1 : -1),
  "same word": (query, ids) => (readsBoth() ? ids.findIndex((id, at) => id === ids[query] && at !== query) : -1),
  "first token": (query) => (readsBoth() && query > 0 ? 0 : -1),
  "last token": (query, ids) => (readsBoth() && query < ids.length - 1 ? ids.length - 1 : -1),
};

// What a head does here, in a word: the mean weight of one kind of edge is above a half.
function role(shown, layer, head, size) {
  const ids = answers.tokens;
  return Object.keys(KINDS).find((name) => {
    const weights = ids.map((_, query) => [query, KINDS[name](query, ids)]).filter(([, key]) => key >= 0).map(([query, key]) => shown.patterns[layer][(head * size + query) * size + key]);
    return weights.length && weights.reduce((a, b) => a + b, 0) / weights.length > 0.5;
  }) ?? "";
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
    for (let key = 0; key < (readsBoth() ? size : query + 1); key++) {
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
  const reader = (readingQuery() ?? strongestEdge(shown.patterns[layer], head, size)[0]) - first, from = Math.max(0, reader); // among the tokens shown
  const row = names.map((_, k) => weight(from, k)), strongest = row.indexOf(Math.max(...row)), kind = role(shown, layer, head, size);
  named.textContent = `Layer ${layer}, head ${head}` + (kind ? ` · ${kind}` : "");
  said.textContent = `${readsBoth() ? place(from + first) : "The last token"} reads ${place(strongest + first)} most, with ${percent(row[strongest])}. Press any cell to cut its edge.`;
  note.textContent = first ? `The last ${LARGE} of ${size} tokens.` : "";
  fillGrid(large, {
    label: `Attention pattern of layer ${layer}, head ${head}`, corner: "", kind: "token", rows: names, columns: names,
    here: large.last ? undefined : [from, strongest], pick: (q, k, cell) => menu(q + first, k + first, weight(q, k), cell),
    cell: (q, k) => k > q && !readsBoth() ? null : { text: size <= 16 ? (100 * weight(q, k)).toFixed(0) : "", share: weight(q, k), mark: isCut(q + first, k + first) ? "cut" : q === from && k === strongest ? "strongest" : "",
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
