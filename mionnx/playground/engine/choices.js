// What an intervention chooses of an activation, in one call of the graph.
//
// call: {start, count, prompt, length, generating, both}: tokens of the past and of this call, the prompt's length, the text's
// length when all is written; whether tokens read later ones too.
import { HEADS, isLimited, NEURONS, refuse, SEQUENCE } from "./interventions.js";

export function sizeOf(name, dim, { start, count }) {
  return name === "batch" ? 1 : name === "seq_k" ? start + count : SEQUENCE.includes(name) ? count : dim;
}

export function range(from, to) { return Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i); }

// The positions of a list, counted from the text's start, each once, in the order given.
export function listed({ entry, hook }, { prompt, length }) {
  const whole = entry.positions.map((at) => {
    const found = at < 0 ? at + prompt : at;
    if (found < 0 || found >= length) refuse(entry, hook, `the prompt has no position ${at}; it has ${prompt} tokens.`);
    return found;
  });
  return [...new Set(whole)];
}

// A function of a position, counted from the text's start: whether the intervention is there.
export function chooses(edit, call) {
  const { positions } = edit.entry;
  if (positions == null) return () => true;
  if (positions === "prompt") return (at) => at < call.prompt;
  if (positions === "generated") return (at) => at >= call.prompt;
  const places = new Set(listed(edit, call));
  return (at) => places.has(at);
}

// Along one axis:
//   chosen: what is chosen in this call, in the order given: its place there, its number in the list, its place in the text
//   size: of the whole axis; given: how many a list names; twice: whether one of them more than once
//   here: whether all of them are in this call
function chosenAt(edit, name, size, call) {
  const { entry, hook } = edit, { start, count, prompt, generating } = call;
  const places = (wholes, first) => wholes.map((whole, order) => ({ at: whole - first, order, whole }));
  if (SEQUENCE.includes(name)) {
    const inCall = places(range(start, start + count), start);
    if (entry.positions === "generated" && !generating) {
      refuse(entry, hook, '"generated" means tokens that the model writes: it takes effect when text is generated.');
    }
    if (!Array.isArray(entry.positions)) return { chosen: inCall.filter(({ whole }) => chooses(edit, call)(whole)), size: prompt, here: true };
    const all = listed(edit, call), chosen = places(all, start).filter(({ at }) => at >= 0 && at < count);
    const given = entry.positions.length;
    return { chosen, size: prompt, given, twice: all.length < given, here: chosen.length === all.length };
  }
  const limit = HEADS.includes(name) ? entry.heads : NEURONS.includes(name) ? entry.neurons : null;
  if (limit == null) return { chosen: places(range(0, size), 0), size, here: true };
  const all = [...new Set(limit)];
  return { chosen: places(all, 0), size, given: limit.length, twice: all.length < limit.length, here: true };
}

// Call change(index, value) once for every entry of the activation that an edit chooses.
export function each(edit, value, full, call, change) {
  const { entry, hook, axes, dims } = edit, rank = full.length;
  if (value && value.shape.length > rank) refuse(entry, hook, `its value has the shape [${value.shape}], and the activation [${dims}].`);
  const shape = value ? [...Array(rank - value.shape.length).fill(1), ...value.shape] : Array(rank).fill(1);
  if (entry.kind === "replace" && !isLimited(entry) && !call.generating && String(value.shape) !== String(full)) {
    refuse(entry, hook, `its value has the shape [${value.shape}], and takes the place of all of [${full}]: give it that shape, or choose positions or heads.`);
  }
  const found = axes.map((name, i) => chosenAt(edit, name, full[i], call));
  if (!found.every(({ chosen }) => chosen.length)) return; // another step's
  const pick = found.map((axis, i) => picker(edit, axis, shape[i], i, value));
  const strides = stridesOf(full), own = stridesOf(shape);
  const walk = (i, at, from) => {
    if (i === rank) change(at, value ? value.data[from] : 0);
    else for (const one of found[i].chosen) walk(i + 1, at + one.at * strides[i], from + pick[i](one) * own[i]);
  };
  walk(0, 0, 0);
}

function stridesOf(shape) {
  const strides = Array(shape.length).fill(1);
  for (let i = shape.length - 2; i >= 0; i--) strides[i] = strides[i + 1] * shape[i + 1];
  return strides;
}

// A value has one entry for all that is chosen; or one for each, in the order given; or one for each of the whole axis.
function picker({ entry, hook, axes, dims }, axis, size, i, value) {
  if (size === 1) return () => 0;
  if (axis.given === size) {
    if (axis.twice) refuse(entry, hook, `an index along ${axes[i]} is chosen twice, and its value of shape [${value.shape}] has two entries for it.`);
    return (one) => one.order;
  }
  if (axis.size === size && axis.here && axis.chosen.every(({ whole }) => whole < size)) return (one) => one.whole;
  return refuse(entry, hook, `its value has the shape [${value.shape}], which fits neither the activation's axes [${dims}] nor what is chosen of them (axis ${axes[i]}).`);
}
