// Interventions as the graph's inputs.
//
// 1. Adding, scaling, zeroing and replacing are x * scale + add, entry for entry of the activation: any number of them in
//    any order is one pair of arrays, the inputs of an affine slot. At scores there is one slot, an array that is added.
// 2. "clamp" and "project_out" have slots of their own where the playground was written with a spec that uses them.
// 3. Entries at one hook point apply in their order. What nothing is done at gets neutral numbers: 1 and 0, broadcast.
import { each, sizeOf } from "./choices.js";
import { refuseIdle } from "./effect.js";
import { refuse } from "./interventions.js";
import { cut, listedEdges, refuseBlind } from "./knockouts.js";

// Inputs of all slots: name -> {dims, data}. all: edits; values: theirs; call: see choices.js.
export function inputs(all, values, { engine, hooks }, given) {
  const call = { ...given, both: engine.both };
  if (call.start === 0) refuseIdle(all, engine, call);
  const feeds = {};
  for (const [hook, slots] of Object.entries(engine.slots)) for (const slot of slots) neutral(feeds, slot, hooks[hook].axes);
  for (const hook of new Set(all.map((edit) => edit.hook))) {
    const here = all.map((edit, i) => [edit, values[i]]).filter(([edit]) => edit.hook === hook);
    chain(feeds, here, engine.slots[hook], call, engine.windows[hook]);
  }
  return feeds;
}

function neutral(feeds, { slot, inputs: names }, dims) {
  const one = dims.map(() => 1), of = (number) => ({ dims: one, data: Float32Array.of(number) });
  if (slot === "affine") [feeds[names[0]], feeds[names[1]]] = [of(1), of(0)];
  else if (slot === "mask") feeds[names[0]] = of(0);
  else if (slot === "clamp") [feeds[names[0]], feeds[names[1]]] = [of(-Infinity), of(Infinity)];
  else feeds[names[0]] = { dims: [1, dims.at(-1)], data: new Float32Array(dims.at(-1)) };
}

// Put the edits of one hook point into its slots, each into the first from where the one before it is.
function chain(feeds, here, slots, call, window) {
  const { axes, dims } = here[0][0], full = axes.map((name, i) => sizeOf(name, dims[i], call));
  let at = 0;
  for (const [edit, value] of here) {
    const wanted = { clamp: "clamp", project_out: "project_out" }[edit.entry.kind] ?? (slots[0].slot === "mask" ? "mask" : "affine");
    const place = slots.findIndex(({ slot }, i) => i >= at && slot === wanted);
    if (place < 0) refuse(edit.entry, edit.hook, "this page was not written for it at this place of the list; move it up.");
    at = ["affine", "mask"].includes(wanted) ? place : place + 1;
    const names = slots[place].inputs;
    if (wanted === "affine") affine(feeds, names, edit, value, full, call);
    else if (wanted === "mask") mask(feeds, names[0], edit, value, full, call, window);
    else special(feeds, names, edit, value, full.length);
  }
  if (slots[0].slot === "mask") refuseBlind(feeds[slots[0].inputs[0]], here.at(-1)[0], call, window);
}

function dense(feeds, name, full, number) {
  if (feeds[name].data.length === 1 && full.some((size) => size > 1)) {
    feeds[name] = { dims: full, data: new Float32Array(full.reduce((a, b) => a * b, 1)).fill(number) };
  }
  return feeds[name].data;
}

function affine(feeds, [scale, add], edit, value, full, call) {
  const factors = dense(feeds, scale, full, 1), offsets = dense(feeds, add, full, 0);
  const change = {
    add: (i, v) => { offsets[i] += v; },
    scale: (i, v) => { factors[i] *= v; offsets[i] *= v; },
    zero: (i) => { factors[i] = 0; offsets[i] = 0; },
    replace: (i, v) => { factors[i] = 0; offsets[i] = v; },
  }[edit.entry.kind];
  each(edit, value, full, call, change);
  refuseInfinite(edit, factors);
  refuseInfinite(edit, offsets);
}

// limit: the largest number of a hook point in float16.
function refuseInfinite({ entry, hook, limit }, numbers) {
  const most = limit ?? Number.MAX_VALUE, dtype = limit ? "float16" : "float32";
  if (!numbers.every((x) => Math.abs(x) <= most)) refuse(entry, hook, `with those before it there a value is beyond the range of ${dtype}.`);
}

function special(feeds, names, { entry }, value, rank) {
  names.forEach((name, i) => {
    const { shape, data } = value.several[i];
    feeds[name] = { dims: entry.kind === "project_out" ? shape : [...Array(rank - shape.length).fill(1), ...shape], data };
  });
}

function mask(feeds, name, edit, value, full, call, window) {
  const added = dense(feeds, name, full, 0);
  if (edit.entry.kind === "knockout") return cut(added, edit, value, full, call, window);
  return each(edit, value, full, call, (i, v) => {
    if (added[i] === -Infinity) return; // an edge that is cut stays so
    added[i] += v;
    refuseInfinite(edit, [added[i]]);
  });
}

// Entry and tensors of an edit, as a spec's file holds them.
export function stored(edit, value, prompt, both = false) {
  const { entry, hook } = edit, { positions = null, heads = null } = entry;
  const own = { hook, kind: entry.kind, positions, heads, rows: null, ...(entry.neurons == null ? {} : { neurons: entry.neurons }) };
  if (value === null) return [own, {}];
  if (value.several) return [own, Object.fromEntries((entry.kind === "clamp" ? ["low", "high"] : ["value"]).map((name, i) => [name, value.several[i]]))];
  if (!value.edges) return [own, { value }];
  const data = new Float32Array(prompt * prompt);
  for (const [query, key] of listedEdges(edit, value.edges, { prompt, both })) data[query * prompt + key] = -Infinity;
  // A mask with as many queries as positions are chosen has them in the order chosen, in Python: all of them need no limit.
  const all = Array.isArray(positions) && new Set(positions.map((at) => (at < 0 ? at + prompt : at))).size === prompt;
  return [{ ...own, positions: all ? null : positions }, { value: { shape: [1, 1, prompt, prompt], data } }];
}
