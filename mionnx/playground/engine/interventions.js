// Interventions: which hook points an entry means, what is wrong with it, and the numbers of its value.
//
// 1. An entry is that of a HookSpec's file with a "value"; its hook may be a glob. Entries with "on": false are skipped.
// 2. What Python refuses is refused here, and means the same where it is not (tests/playground/test_rules.py).
// 3. An entry that would take no effect, or cannot take it, is an error, a sentence that names the hook point.
import { PlaygroundError } from "./errors.js";
import { glob, isGlob } from "./globs.js";

const FIELDS = new Set(["hook", "kind", "positions", "heads", "rows", "neurons", "value", "strength", "on", "label"]);
const OWN_SLOTS = ["clamp", "project_out"], MOST_AXES = 4;
export const SEQUENCE = ["seq_q", "seq"], HEADS = ["n_heads", "n_kv_heads"], NEURONS = ["d_mlp", "d_expert"];

export function refuse(entry, hook, message) {
  const error = new PlaygroundError("intervention", `${entry?.kind ?? "an intervention"} at ${hook}: ${message}`);
  throw Object.assign(error, { entry });
}

// The hook points that a name or glob means, in execution order.
export function matching(hook, names) { return isGlob(hook) ? names.filter(glob(hook)) : names.filter((name) => name === hook); }

// One edit for each hook point of each entry that is on: {entry, number, hook, axes, dims, limit}; see rule 1.
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
    const why = known ? "this page cannot change that hook point; it was written without it (--points)" : "the model has no such hook point";
    refuse(entry, entry.hook, `${why}; the nearest is ${nearest(entry.hook, names)}.`);
  }
  const other = matching(entry.hook, manifest.hook_points).find((hook) => !names.includes(hook));
  if (other) refuse(entry, entry.hook, `it means ${other} too, which this page cannot change; it was written without it (--points).`);
  return hooks.map((hook) => {
    const { kinds, axes: dims, limit } = manifest.hooks[hook];
    if (!kinds.includes(entry.kind)) refuse(entry, hook, `this page has ${kinds.join(", ")} there.`);
    if (entry.rows != null) refuse(entry, hook, "a page runs one prompt; it has no rows to choose.");
    const edit = { entry, number, hook, axes: manifest.engine.axes[hook], dims, limit };
    check(edit);
    if (OWN_SLOTS.includes(entry.kind)) checkOfFile(edit, manifest.spec);
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

// Whether an entry is limited to a part of the activation.
export function isLimited({ positions, heads, neurons }) { return [positions, heads, neurons].some((limit) => limit != null); }

// What has slots of its own is as the spec's file has it, its bounds and directions checked when the folder was written.
function checkOfFile({ entry, hook }, spec) {
  const tensors = ({ value }) => JSON.stringify([value?.from, value?.tensor ?? null, value?.tensors ?? null]);
  const known = spec.some((one) => one.kind === entry.kind && one.hook === entry.hook && tensors(one) === tensors(entry));
  if (!known) refuse(entry, hook, "this page has it with the numbers of its spec file alone.");
  if (isLimited(entry)) refuse(entry, hook, "in a playground it holds everywhere, without limits.");
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
  if (typeof value === "number" || Array.isArray(value)) return scaled(entry, hook, literal(entry, hook, value));
  if (value?.edges && entry.kind === "knockout") return { edges: value.edges };
  if (value?.from === "prompt") return ofPrompt(edit, captured(value.text, hook));
  if (value?.from === "contrast") return scaled(entry, hook, ofContrast(edit, captured));
  if (value?.from === "spec") return ofSpec(entry, hook, value, tensors);
  return refuse(entry, hook, `its value is none that this page knows: ${JSON.stringify(value)?.slice(0, 80)}.`);
}

function literal(entry, hook, value) {
  const shape = [], data = [];
  for (let part = value; Array.isArray(part) && shape.length <= MOST_AXES; part = part[0]) shape.push(part.length);
  if (shape.length > MOST_AXES) refuse(entry, hook, "its value has more axes than any activation.");
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
  return inRange(entry, hook, { shape, data: Float32Array.from(data) });
}

function inRange(entry, hook, tensor) {
  if (!tensor.data.every(Number.isFinite)) refuse(entry, hook, "a value is beyond the range of float32.");
  return tensor;
}

function scaled(entry, hook, { shape, data }) {
  const strength = entry.strength ?? 1;
  return strength === 1 ? { shape, data } : inRange(entry, hook, { shape, data: data.map((x) => x * strength) });
}

function ofSpec(entry, hook, value, tensors) {
  const names = Array.isArray(value.tensors) ? value.tensors : [value.tensor];
  if (value.tensors !== undefined && !OWN_SLOTS.includes(entry.kind)) refuse(entry, hook, "it takes one tensor.");
  const found = names.map((name) => (Object.hasOwn(tensors, name) ? tensors[name] : refuse(entry, hook, `this page has no tensor ${name}.`)));
  if (OWN_SLOTS.includes(entry.kind)) return { several: found };
  if (entry.kind !== "knockout") return scaled(entry, hook, inRange(entry, hook, found[0]));
  if (!found[0].data.every((x) => x === 0 || x === -Infinity)) refuse(entry, hook, "a mask holds 0 (keep) and -inf (knock out) only.");
  return found[0];
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
    if (Array.isArray(entry.positions)) refuse(entry, hook, "its value needs as many positions as the entry has.");
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

