// Interventions: how the page makes them, and how it says them in words.
import { quoted } from "./dom.js";
import { tokenText } from "./runs.js";
import { answers } from "./state.js";

const POINTS = {
  hook_resid_pre: (at) => "the stream before " + at, hook_resid_mid: (at) => "the stream between attention and MLP of " + at,
  hook_resid_post: (at) => "the stream after " + at, hook_attn_out: (at) => "attention of " + at,
  hook_mlp_out: (at) => "the MLP of " + at, "hook_*_out": (at) => "all of " + at, "attn.hook_z": (at) => "the heads of " + at,
};

export const steps = { zero: "Zero", scale: "Scale", replace: "Patch", add: "Steer", knockout: "Cut", clamp: "Clamp", project_out: "Project out of" };

// A part of the model, as the hook point and heads that an intervention names.
export function part(layer, name) {
  if (typeof name === "number") return { hook: `blocks.${layer}.attn.hook_z`, heads: [name] };
  return { hook: `blocks.${layer}.` + { attention: "hook_attn_out", MLP: "hook_mlp_out", layer: "hook_*_out" }[name] };
}

export function zero(place) { return { ...place, kind: "zero", on: true }; }
export function scale(place, value = 0.5) { return { ...place, kind: "scale", value, on: true }; }
export function cut(layer, heads, query, key) {
  return { hook: `blocks.${layer}.attn.hook_scores`, kind: "knockout", ...(heads ? { heads } : {}), value: { edges: [[query, key]] }, on: true };
}

export function patch(hook, position, text, from) {
  return { hook, kind: "replace", positions: [position], value: { from: "prompt", text, positions: [from] }, on: true };
}

export function steer(hook, more, less, position, positions) {
  return { hook, kind: "add", positions, value: { from: "contrast", more, less, position }, strength: 1, on: true };
}

export function layerOf(hook) {
  const found = /^blocks\.(\d+)\./.exec(hook);
  return found ? Number(found[1]) : null;
}

// A position of the prompt in words: 3 “France”.
export function place(position, tokens = answers.tokens) {
  const at = position < 0 ? tokens.length + position : position;
  return at >= 0 && at < tokens.length ? `${at} ${quoted(tokenText(tokens[at]))}` : String(position);
}

function list(numbers, one, many) { return (numbers.length === 1 ? one : many) + " " + numbers.join(", "); }

function point(entry) {
  const found = /^blocks\.(\d+|\*)\.(.+)$/.exec(entry.hook);
  if (!found) return entry.hook;
  const at = found[1] === "*" ? "every layer" : "layer " + found[1];
  if (entry.heads) return list(entry.heads, "head", "heads") + " of " + at;
  const named = POINTS[found[2]];
  return named ? named(at) : entry.hook;
}

// A hook point in words.
export function pointInWords(hook) { return hook === "hook_embed" ? "the embedding" : point({ hook }); }

function where(entry) {
  if (!entry.positions) return "";
  if (entry.positions === "prompt") return " in the prompt";
  if (entry.positions === "generated") return " in what is generated";
  return " at " + entry.positions.map((at) => place(at)).join(", ");
}

// An intervention as a sentence.
export function describe(entry) {
  if (entry.kind === "knockout" && entry.value?.edges) {
    const edges = entry.value.edges.map(([query, key]) => `${place(query)} → ${place(key)}`).join(", ");
    const at = /^blocks\.\*/.test(entry.hook) ? "every layer" : "layer " + layerOf(entry.hook);
    return `Cut ${edges} in ${at}, ` + (entry.heads ? list(entry.heads, "head", "heads") : "all heads");
  }
  const verb = steps[entry.kind] || entry.kind, target = point(entry) + where(entry), value = entry.value;
  if (entry.kind === "replace" && value?.from === "prompt") return `Patch ${target} from “${value.text}”` + (value.positions ? `, position ${value.positions.join(", ")}` : "");
  if (entry.kind === "add" && value?.from === "contrast") {
    return `Steer ${target} towards “${value.more.join(" / ")}”` + (value.less.length ? `, away from “${value.less.join(" / ")}”` : "");
  }
  return `${verb} ${target}` + (value?.from === "spec" ? " (from the spec file)" : "");
}

// What two entries have in common when they do the same at the same place.
export function sameDeed(one, other) {
  const key = (entry) => JSON.stringify([entry.hook, entry.heads ?? null, entry.kind, entry.positions ?? null, entry.kind === "knockout" ? entry.value : 0]);
  return key(one) === key(other);
}
