// Edges of attention that knockouts cut, as a mask that is added to scores. Positions are those of the text, as in Python.
import { chooses, listed, range } from "./choices.js";
import { refuse } from "./interventions.js";

// Put an edit's edges into a mask [1, heads, queries, keys] of one call.
export function cut(added, edit, value, full, call, window = Infinity) {
  const { entry, hook } = edit, [, heads, queries, keys] = full;
  const chosen = new Set(entry.heads ?? range(0, heads)), here = chooses(edit, call);
  let found = 0;
  for (const [query, key, head] of value.edges ? listedEdges(edit, value.edges, call) : maskEdges(edit, value, heads, call)) {
    if (!here(query) || !reads(query, key, call, window)) continue; // asked for elsewhere, or never read
    for (const h of head === null ? chosen : [head]) {
      if (!chosen.has(h)) continue;
      found++;
      if (query >= call.start && query < call.start + queries && key < keys) added[(h * queries + query - call.start) * keys + key] = -Infinity;
    }
  }
  if (!found) refuse(entry, hook, call.both ? "it cuts no edge that a query reads." : "it cuts no edge that a query reads: keys come before their query.");
}

// Whether a query reads a key where nothing is cut; in an encoder on both sides.
function reads(query, key, { both }, window) {
  return both ? Math.abs(query - key) < window : key <= query && query - key < window;
}

// [[query, key], ...] as [query, key, null]: in every head.
export function listedEdges({ entry, hook }, edges, { prompt, both }) {
  if (!Array.isArray(edges) || !edges.length) refuse(entry, hook, "it needs edges, [query, key] each.");
  return edges.map((edge) => {
    if (!Array.isArray(edge) || edge.length !== 2 || !edge.every(Number.isInteger)) refuse(entry, hook, "an edge is [query, key].");
    const [query, key] = edge.map((at) => {
      if (at < -prompt || at >= prompt) refuse(entry, hook, `the prompt has no position ${at}; it has ${prompt} tokens.`);
      return at < 0 ? at + prompt : at;
    });
    if (key > query && !both) refuse(entry, hook, `the query at ${edge[0]} reads no later key, ${edge[1]}.`);
    return [query, key, null];
  });
}

// The edges of a mask of 0 and -inf, [.., heads, queries, keys], which may have an entry for each chosen head or query.
function* maskEdges(edit, { shape, data }, count, call) {
  const { entry, hook } = edit, { prompt, length, generating } = call;
  const misfit = () => refuse(entry, hook, `its mask has the shape [${shape}], which fits no prompt of ${prompt} tokens and ${count} heads.`);
  if (shape.length > 4) misfit();
  const [rows, heads, queries, keys] = [...Array(4 - shape.length).fill(1), ...shape];
  const ordered = heads > 1 && heads === entry.heads?.length;
  if (ordered && new Set(entry.heads).size < heads) refuse(entry, hook, "a head is chosen twice, and its mask has two entries for it.");
  if (rows !== 1 || !(ordered || [1, count].includes(heads)) || !(generating || [1, prompt].includes(keys))) misfit();
  const places = queriesOf(edit, queries, call) ?? misfit();
  for (let h = 0; h < heads; h++) {
    for (const [q, query] of places.entries()) {
      for (let key = 0; key < (keys === 1 ? length : keys); key++) {
        const at = (h * queries + (queries === 1 ? 0 : q)) * keys + (keys === 1 ? 0 : key);
        if (data[at] === -Infinity) yield [query, key, heads === 1 ? null : ordered ? entry.heads[h] : h];
      }
    }
  }
}

function queriesOf(edit, count, call) {
  if (count === 1) return range(0, call.length);
  const chosen = Array.isArray(edit.entry.positions) ? listed(edit, call) : [];
  if (chosen.length === count) return chosen;
  return call.generating || count === call.prompt ? range(0, count) : null;
}

// A query without a key would be NaN.
export function refuseBlind({ data, dims }, { entry, hook }, call, window = Infinity) {
  if (data.length === 1) return;
  const [, heads, queries, keys] = dims;
  for (let h = 0; h < heads; h++) {
    for (let q = 0; q < queries; q++) {
      const last = q + call.start, read = range(0, keys).filter((key) => reads(last, key, call, window));
      if (read.some((key) => data[(h * queries + q) * keys + key] !== -Infinity)) continue;
      refuse(entry, hook, `the query at position ${last} is left with no key in head ${h}. Keep at least one edge (a position may read itself).`);
    }
  }
}
