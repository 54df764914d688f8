// Interventions as the graph's inputs.
//
// 1. An entry is that of a HookSpec's file with a "value"; its hook may be a glob. Entries at one hook point apply in
//    their order. Entries with "on": false are skipped.
// 2. Adding, scaling, zeroing and replacing are x * scale + add, entry for entry of the activation: any number of them in
//    any order is one pair of arrays, the inputs of an affine slot. At scores there is one slot, an array that is added.
// 3. "clamp" and "project_out" have slots of their own where the playground was written with a spec that uses them.
// 4. What nothing is done at gets neutral numbers: 1 and 0, broadcast.
// 5. An entry that would take no effect, or cannot take it, is an error, a sentence that names the hook point.
import { PlaygroundError } from "./errors.js";

const FIELDS = new Set(["hook", "kind", "positions", "heads", "rows", "neurons", "value", "strength", "on", "label"]);
const SEQUENCE = ["seq_q", "seq"], HEADS = ["n_heads", "n_kv_heads"], NEURONS = ["d_mlp", "d_expert"];

export function refuse(entry, hook, message) {
  throw new PlaygroundError("intervention", `${entry?.kind ?? "an intervention"} at ${hook}: ${message}`);
}

// The hook points that a name or glob means, in execution order.
export function matching(hook, names) {
  if (!/[*?[]/.test(hook)) return names.includes(hook) ? [hook] : [];
  const pattern = hook.replace(/[.+^${}()|\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".").replace(/\[!/g, "[^");
  return names.filter((name) => new RegExp(`^${pattern}$`, "s").test(name));
}

// One edit for each hook point of each entry that is on: {entry, number, hook, axes, dims}; see rule 1.
export function edits(entries, manifest) {
  return entries.flatMap((entry, number) => (entry?.on === false ? [] : editsOf(entry, number, manifest)));
}

function editsOf(entry, number, manifest) {
  if (!entry || typeof entry.hook !== "string" || typeof entry.kind !== "string") {
    throw new PlaygroundError("intervention", `An intervention needs a "hook" and a "kind", got ${JSON.stringify(entry)?.slice(0, 80)}.`);
  }
  for (const field of Object.keys(entry)) if (!FIELDS.has(field)) refuse(entry, entry.hook, `there is no field "${field}".`);
  const names = Object.keys(manifest.hooks);
  const hooks = matching(entry.hook, names);
  if (!hooks.length) {
    const known = manifest.hook_points.includes(entry.hook);
    const why = known ? "this page cannot change that hook point; it was written without it (--hook)" : "the model has no such hook point";
    refuse(entry, entry.hook, `${why}; the nearest is ${nearest(entry.hook, names)}.`);
  }
  return hooks.map((hook) => {
    const { kinds, axes: dims } = manifest.hooks[hook];
    if (!kinds.includes(entry.kind)) refuse(entry, hook, `this page has ${kinds.join(", ")} there.`);
    if (entry.rows != null) refuse(entry, hook, "a page runs one prompt; it has no rows to choose.");
    const edit = { entry, number, hook, axes: manifest.engine.axes[hook], dims };
    check(edit);
    return edit;
  });
}

function nearest(name, names) {
  const shared = (other) => [...name].filter((c, i) => c === other[i]).length;
  return names.reduce((best, other) => (shared(other) > shared(best) ? other : best), names[0]);
}

function check({ entry, hook, axes, dims }) {
  for (const [limit, among] of [["heads", HEADS], ["neurons", NEURONS]]) {
    const chosen = entry[limit];
    if (chosen == null) continue;
    const axis = axes.findIndex((name) => among.includes(name));
    if (axis < 0) refuse(entry, hook, `its axes are ${axes.join(", ")}: it has no ${limit}.`);
    if (!isIndices(chosen)) refuse(entry, hook, `${limit} must be a list of numbers from 0.`);
    const beyond = chosen.find((i) => i >= dims[axis]);
    if (beyond !== undefined) refuse(entry, hook, `there is no ${limit.slice(0, -1)} ${beyond}; there are ${dims[axis]}.`);
  }
  const positions = entry.positions;
  if (positions != null && !["prompt", "generated"].includes(positions)) {
    if (!Array.isArray(positions) || !positions.length || !positions.every(Number.isInteger)) {
      refuse(entry, hook, 'positions must be a list of integers, "prompt" or "generated".');
    }
    if (!axes.some((name) => SEQUENCE.includes(name))) refuse(entry, hook, "it has no positions.");
  }
  if (entry.kind === "zero" ? entry.value !== undefined : entry.value === undefined) {
    refuse(entry, hook, entry.kind === "zero" ? "it takes no value." : "it needs a value.");
  }
  if (entry.strength !== undefined && (entry.kind !== "add" || !Number.isFinite(entry.strength))) {
    refuse(entry, hook, "a strength is a finite number, and belongs to add.");
  }
}

function isIndices(list) {
  return Array.isArray(list) && list.length > 0 && list.every((i) => Number.isInteger(i) && i >= 0);
}

// The captures that the edits need: text -> set of hook points.
export function needed(all) {
  const texts = new Map();
  for (const { entry, hook } of all) {
    const from = entry.value?.from;
    const wanted = from === "prompt" ? [entry.value.text] : from === "contrast" ? [...list(entry.value.more), ...list(entry.value.less)] : [];
    for (const text of wanted) {
      if (typeof text !== "string" || !text) refuse(entry, hook, "the prompt that its value comes from is empty.");
      if (!texts.has(text)) texts.set(text, new Set());
      texts.get(text).add(hook);
    }
  }
  return texts;
}

function list(texts) {
  return Array.isArray(texts) ? texts : texts === undefined ? [] : [texts];
}

// The value of an edit: {shape, data}, or {edges} of a knockout; null of zero.
// captured(text, hook) -> {shape, data}; tensors: of the spec's file.
export function valueOf(edit, captured, tensors) {
  const { entry, hook } = edit, value = entry.value;
  if (entry.kind === "zero") return null;
  if (typeof value === "number" || Array.isArray(value)) return scaled(entry, literal(entry, hook, value));
  if (value?.edges && entry.kind === "knockout") return { edges: value.edges };
  if (value?.from === "prompt") return ofPrompt(edit, captured(value.text, hook));
  if (value?.from === "contrast") return scaled(entry, ofContrast(edit, captured));
  if (value?.from === "spec") return ofSpec(entry, hook, value, tensors);
  return refuse(entry, hook, `its value is none that this page knows: ${JSON.stringify(value)?.slice(0, 80)}.`);
}

function literal(entry, hook, value) {
  const shape = [], data = [];
  for (let part = value; Array.isArray(part); part = part[0]) shape.push(part.length);
  const walk = (part, depth) => {
    if (depth === shape.length) {
      if (!Number.isFinite(part)) refuse(entry, hook, "its value must be finite numbers.");
      data.push(part);
    } else {
      if (!Array.isArray(part) || part.length !== shape[depth]) refuse(entry, hook, "its value is no rectangle of numbers.");
      part.forEach((one) => walk(one, depth + 1));
    }
  };
  walk(value, 0);
  if (!data.length) refuse(entry, hook, "its value is empty.");
  return { shape, data: Float32Array.from(data) };
}

function scaled(entry, { shape, data }) {
  const strength = entry.strength ?? 1;
  return { shape, data: strength === 1 ? data : data.map((x) => x * strength) };
}

function ofSpec(entry, hook, value, tensors) {
  const names = value.tensors ?? [value.tensor];
  const found = names.map((name) => tensors?.[name] ?? refuse(entry, hook, `this page has no tensor ${name}.`));
  if (value.tensors) return { several: found };
  return entry.kind === "add" ? scaled(entry, found[0]) : found[0];
}

function sequenceOf(axes) {
  return axes.findIndex((name) => SEQUENCE.includes(name));
}

// Some entries of a tensor along an axis.
function taken({ shape, data }, axis, indices) {
  const inner = shape.slice(axis + 1).reduce((a, b) => a * b, 1), outer = shape.slice(0, axis).reduce((a, b) => a * b, 1);
  const made = new Float32Array(outer * indices.length * inner);
  for (let o = 0; o < outer; o++) {
    indices.forEach((index, i) => {
      const start = (o * shape[axis] + index) * inner;
      made.set(data.subarray(start, start + inner), (o * indices.length + i) * inner);
    });
  }
  return { shape: shape.map((size, i) => (i === axis ? indices.length : size)), data: made };
}

// Heads and neurons that an entry chooses, in its order.
function limited({ entry, axes }, tensor) {
  for (const [limit, among] of [["heads", HEADS], ["neurons", NEURONS]]) {
    const axis = axes.findIndex((name) => among.includes(name));
    if (entry[limit] != null && axis >= 0) tensor = taken(tensor, axis, entry[limit]);
  }
  return tensor;
}

function ofPrompt(edit, found) {
  const { entry, hook, axes } = edit, axis = sequenceOf(axes), length = found.shape[axis];
  if (axes.includes("seq_k")) refuse(entry, hook, "an attention of another prompt cannot be patched in; patch hook_z.");
  let positions = entry.value.positions;
  if (positions == null) {
    if (entry.positions != null) refuse(entry, hook, "its value needs as many positions as the entry has.");
    positions = Array.from({ length }, (_, i) => i);
  } else if (!Array.isArray(entry.positions) || positions.length !== entry.positions.length) {
    refuse(entry, hook, "its value needs as many positions as the entry has.");
  }
  const indices = positions.map((at) => resolved(edit, at, length, "the other prompt"));
  return limited(edit, taken(found, axis, indices));
}

function resolved({ entry, hook }, at, length, where) {
  const index = at < 0 ? at + length : at;
  if (!Number.isInteger(at) || index < 0 || index >= length) refuse(entry, hook, `${where} has no position ${at}; it has ${length} tokens.`);
  return index;
}

function ofContrast(edit, captured) {
  const { entry, hook, axes } = edit, { more, less, position = -1 } = entry.value;
  const axis = sequenceOf(axes);
  if (axes.includes("seq_k")) refuse(entry, hook, "a direction is a contrast of activations, not of attention.");
  if (!list(more).length || !list(less).length) refuse(entry, hook, "a contrast needs texts on both sides.");
  const mean = (texts) => {
    let sum = null;
    for (const text of texts) {
      const found = captured(text, hook), length = found.shape[axis];
      const at = position === "mean" ? Array.from({ length }, (_, i) => i) : [resolved(edit, position, length, `"${text}"`)];
      const part = taken(found, axis, at), inner = part.shape.slice(axis + 1).reduce((a, b) => a * b, 1);
      const outer = part.data.length / (inner * at.length);
      sum ??= { shape: part.shape.map((size, i) => (i === axis ? 1 : size)), data: new Float64Array(outer * inner) };
      for (let o = 0; o < outer; o++) {
        for (let i = 0; i < at.length; i++) {
          for (let j = 0; j < inner; j++) sum.data[o * inner + j] += part.data[(o * at.length + i) * inner + j] / at.length / texts.length;
        }
      }
    }
    return sum;
  };
  const plus = mean(list(more)), minus = mean(list(less));
  const data = Float32Array.from(plus.data, (x, i) => x - minus.data[i]);
  if (data.every((x) => x === 0)) refuse(entry, hook, "the two sides of the contrast do not differ there.");
  return limited(edit, { shape: plus.shape, data });
}

// Inputs of all slots: name -> {dims, data}.
// all: edits; values: theirs; call: {start, count, prompt, generating}: tokens of the past and of this call, the prompt's length.
export function inputs(all, values, manifest, call, windows = []) {
  const feeds = {};
  for (const [hook, slots] of Object.entries(manifest.engine.slots)) {
    for (const slot of slots) neutral(feeds, slot, manifest.hooks[hook].axes);
  }
  for (const hook of new Set(all.map((edit) => edit.hook))) {
    const here = all.map((edit, i) => [edit, values[i]]).filter(([edit]) => edit.hook === hook);
    chain(feeds, here, manifest.engine.slots[hook], call, windows);
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
function chain(feeds, here, slots, call, windows) {
  let at = 0;
  const { axes, dims } = here[0][0];
  const full = axes.map((name, i) => sizeOf(name, dims[i], call));
  for (const [edit, value] of here) {
    const wanted = { clamp: "clamp", project_out: "project_out" }[edit.entry.kind] ?? (slots[0].slot === "mask" ? "mask" : "affine");
    const place = slots.findIndex(({ slot }, i) => i >= at && slot === wanted);
    if (place < 0) refuse(edit.entry, edit.hook, "this page was not written for it at this place of the list; move it up.");
    at = ["affine", "mask"].includes(wanted) ? place : place + 1;
    const names = slots[place].inputs;
    if (wanted === "affine") affine(feeds, names, edit, value, full, call);
    else if (wanted === "mask") mask(feeds, names[0], edit, value, full, call);
    else special(feeds, names, edit, value, full.length);
  }
  if (slots[0].slot === "mask") refuseBlind(feeds[slots[0].inputs[0]], here, full, call, windows);
}

function sizeOf(name, dim, { start, count }) {
  return name === "batch" ? 1 : name === "seq_k" ? start + count : SEQUENCE.includes(name) ? count : dim;
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
}

function special(feeds, names, edit, value, rank) {
  const found = value.several ?? [value];
  names.forEach((name, i) => {
    const { shape, data } = found[i];
    feeds[name] = edit.entry.kind === "project_out" ? { dims: shape, data } : { dims: [...Array(rank - shape.length).fill(1), ...shape], data };
  });
}

// Call change(index, value) for every entry of the activation that an edit chooses.
function each(edit, value, full, call, change) {
  const axes = chosenAxes(edit, full, call);
  const rank = full.length, shape = value ? [...Array(rank - value.shape.length).fill(1), ...value.shape] : Array(rank).fill(1);
  if (value && value.shape.length > rank) refuse(edit.entry, edit.hook, `its value has the shape [${value.shape}], and the activation [${edit.dims}].`);
  const pick = axes.map((axis, i) => picker(edit, axis, shape[i], i, value));
  const strides = stridesOf(full), own = stridesOf(shape);
  const walk = (i, at, from) => {
    if (i === rank) change(at, value ? value.data[from] : 0);
    else for (const one of axes[i].chosen) walk(i + 1, at + one.at * strides[i], from + pick[i](one) * own[i]);
  };
  walk(0, 0, 0);
}

function stridesOf(shape) {
  const strides = Array(shape.length).fill(1);
  for (let i = shape.length - 2; i >= 0; i--) strides[i] = strides[i + 1] * shape[i + 1];
  return strides;
}

// For each axis what is chosen: its place in this call, in the order given, and in the whole text.
function chosenAxes(edit, full, call) {
  const { entry, axes } = edit;
  return axes.map((name, i) => {
    const all = (start) => Array.from({ length: full[i] }, (_, at) => ({ at, order: at, whole: at + start }));
    if (SEQUENCE.includes(name)) return { ...positionsOf(edit, call, all(call.start)), size: call.prompt, sequence: true };
    const limit = HEADS.includes(name) ? entry.heads : NEURONS.includes(name) ? entry.neurons : null;
    if (limit == null) return { chosen: all(0), size: full[i] };
    return { chosen: limit.map((at, order) => ({ at, order, whole: at })), size: full[i], given: limit.length };
  });
}

function positionsOf(edit, { start, count, prompt, generating }, all) {
  const { entry, hook } = edit, positions = entry.positions;
  if (positions == null) return { chosen: all };
  if (positions === "prompt") return { chosen: all.filter(({ whole }) => whole < prompt) };
  if (positions === "generated") {
    if (!generating) refuse(entry, hook, '"generated" means tokens that the model writes: it takes effect when text is generated.');
    return { chosen: all.filter(({ whole }) => whole >= prompt) };
  }
  const chosen = positions.map((at, order) => {
    const whole = at < 0 ? at + prompt : at;
    if (whole < 0 || (whole >= prompt && !generating)) refuse(entry, hook, `the prompt has no position ${at}; it has ${prompt} tokens.`);
    return { at: whole - start, order, whole };
  });
  return { chosen: chosen.filter(({ at }) => at >= 0 && at < count), given: positions.length };
}

function picker(edit, axis, size, i, value) {
  if (size === 1) return () => 0;
  if (axis.given === size) return (one) => one.order;
  if (axis.size === size && !(axis.sequence && axis.chosen.some(({ whole }) => whole >= size))) return (one) => one.whole;
  return refuse(edit.entry, edit.hook, `its value has the shape [${value.shape}], which fits neither the activation's axes [${edit.dims}] nor what is chosen of them (axis ${edit.axes[i]}).`);
}

function mask(feeds, name, edit, value, full, call) {
  const { entry, hook } = edit;
  const added = dense(feeds, name, full, 0), [, heads, queries, keys] = full;
  if (entry.kind === "add") return each(edit, value, full, call, (i, v) => { added[i] += v; });
  const chosenHeads = entry.heads ?? Array.from({ length: heads }, (_, i) => i);
  const rows = new Set(positionsOf(edit, call, Array.from({ length: queries }, (_, at) => ({ at, order: at, whole: at + call.start }))).chosen.map(({ at }) => at));
  let cut = 0;
  for (const [query, key, head] of value.edges ? edgesOf(edit, value.edges, call) : maskEdges(edit, value, full, call)) {
    const at = query - call.start;
    if (!rows.has(at) || key >= keys) continue;
    for (const h of head === undefined ? chosenHeads : [head]) {
      if (!chosenHeads.includes(h)) continue;
      added[(h * queries + at) * keys + key] = -Infinity;
      cut += key <= query;
    }
  }
  if (!cut && call.start === 0) refuse(entry, hook, "it cuts no edge that a query reads: keys come before their query.");
}

function edgesOf(edit, edges, { prompt, generating }) {
  const { entry, hook } = edit;
  if (!Array.isArray(edges) || !edges.length) refuse(entry, hook, "it needs edges, [query, key] each.");
  return edges.map((edge) => {
    if (!Array.isArray(edge) || edge.length !== 2 || !edge.every(Number.isInteger)) refuse(entry, hook, "an edge is [query, key].");
    const [query, key] = edge.map((at) => (at < 0 ? at + prompt : at));
    for (const [at, given] of [[query, edge[0]], [key, edge[1]]]) {
      if (at < 0 || (at >= prompt && !generating)) refuse(entry, hook, `the prompt has no position ${given}; it has ${prompt} tokens.`);
    }
    if (key > query) refuse(entry, hook, `the query at ${edge[0]} reads no later key, ${edge[1]}.`);
    return [query, key];
  });
}

// The edges of a dense mask of a spec's file, [.., heads, queries, keys] of the whole text.
function* maskEdges(edit, { shape, data }, full, call) {
  const [, heads, queries, keys] = [...Array(4 - shape.length).fill(1), ...shape];
  const fits = (size, ...others) => size === 1 || others.includes(size);
  const given = edit.entry.heads?.length;
  if (!fits(heads, full[1], given) || (call.start === 0 && (!fits(queries, call.prompt) || !fits(keys, call.prompt)))) {
    refuse(edit.entry, edit.hook, `its mask is for ${queries} queries and ${keys} keys, and the prompt has ${call.prompt} tokens.`);
  }
  for (let h = 0; h < heads; h++) {
    for (let q = 0; q < full[2]; q++) {
      const query = q + call.start;
      if (queries > 1 && query >= queries) continue;
      for (let k = 0; k < full[3]; k++) {
        if (keys > 1 && k >= keys) continue;
        const at = (h * queries + (queries > 1 ? query : 0)) * keys + (keys > 1 ? k : 0);
        const head = heads === 1 ? undefined : heads === given && heads !== full[1] ? edit.entry.heads[h] : h;
        if (data[at] === -Infinity) yield [query, k, head];
      }
    }
  }
}

// A query without a key would be NaN.
function refuseBlind({ data, dims }, here, full, { start }, windows) {
  if (data.length === 1) return;
  const [, heads, queries, keys] = dims, window = windows[here[0][0].hook] ?? Infinity;
  for (let h = 0; h < heads; h++) {
    for (let q = 0; q < queries; q++) {
      let left = false;
      for (let k = Math.max(0, q + start - window + 1); k <= q + start && k < keys && !left; k++) left = data[(h * queries + q) * keys + k] !== -Infinity;
      if (!left) refuse(here.at(-1)[0].entry, here[0][0].hook, `the query at position ${q + start} is left with no key in head ${h}. Keep at least one edge (a position may read itself).`);
    }
  }
}

// Entry and tensors of an edit, as a spec's file holds them.
export function stored(edit, value, prompt, heads) {
  const { entry, hook } = edit;
  const own = { hook, kind: entry.kind, positions: entry.positions ?? null, heads: entry.heads ?? null, rows: null };
  if (entry.neurons != null) own.neurons = entry.neurons;
  if (value === null) return [own, {}];
  if (value.several) return [own, Object.fromEntries(["low", "high"].map((name, i) => [name, value.several[i]]))];
  if (!value.edges) return [own, { value }];
  const data = new Float32Array(heads * prompt * prompt);
  const chosen = entry.heads ?? Array.from({ length: heads }, (_, i) => i);
  for (const [query, key] of edgesOf(edit, value.edges, { prompt, generating: false })) {
    for (const h of chosen) data[(h * prompt + query) * prompt + key] = -Infinity;
  }
  return [own, { value: { shape: [1, heads, prompt, prompt], data } }];
}
