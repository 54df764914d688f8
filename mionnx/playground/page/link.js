// The page's address: what the reader has made, as `#1.` and base64url of deflated JSON. What is read is checked, field by field.
import { matching } from "./engine/interventions.js";

const VERSION = "1", MOST_BYTES = 200_000, MOST_ENTRIES = 64, MOST_NUMBERS = 20_000;
const KINDS = ["add", "clamp", "knockout", "project_out", "replace", "scale", "zero"];
const VIEWS = ["lens", "stream", "attention", "parts", "steer"];

export class LinkError extends Error {}

function refuse(text) { throw new LinkError(text); }

// State -> the text after `#`.
export async function writeLink(state, model) {
  const packed = { m: model, p: state.prompt, e: state.entries, v: state.view, l: state.layer, h: state.head };
  if (state.second) packed.s = state.second;
  if (state.compare) packed.t = state.compare;
  if (state.mapped) packed.j = true;
  if (state.place !== null && state.place !== undefined) packed.r = state.place;
  const bytes = new TextEncoder().encode(JSON.stringify(packed));
  return VERSION + "." + base64url(await through(bytes, new CompressionStream("deflate-raw"), Infinity));
}

// The text after `#` -> the part of the state that it holds.
// Throws LinkError, whose message is a sentence, for whatever is not such a text of this page's model.
export async function readLink(text, manifest) {
  const found = /^([0-9]+)\.([A-Za-z0-9_-]+)$/.exec(text);
  if (!found) refuse("This link is damaged: it has characters that no link of this page has.");
  if (found[1] !== VERSION) refuse(`This link is of version ${found[1].slice(0, 6)}; this page reads version ${VERSION}.`);
  let read;
  try {
    read = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(await through(unbase64url(found[2]), new DecompressionStream("deflate-raw"), MOST_BYTES)));
  } catch (error) {
    refuse(error instanceof LinkError ? error.message : "This link is damaged: it was cut off or changed on its way.");
  }
  return checked(read, manifest);
}

async function through(bytes, stream, most) {
  const writer = stream.writable.getWriter(), parts = [];
  const written = writer.write(bytes).then(() => writer.close());
  written.catch(() => {}); // the reader below fails with the same
  let size = 0;
  for (const reader = stream.readable.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) {
      reader.cancel().catch(() => {}); // not awaited: the stream may still be unpacking
      refuse("This link is too long to be one of this page.");
    }
    parts.push(value);
  }
  await written;
  const whole = new Uint8Array(size);
  let at = 0;
  for (const part of parts) { whole.set(part, at); at += part.length; }
  return whole;
}

function base64url(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function unbase64url(text) { return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0)); }

function checked(read, manifest) {
  if (!isObject(read)) refuse("This link holds nothing that this page can show.");
  const { m, p, s = "", e, v = "lens", l = 0, h = 0, t = "", r = null, j = false } = read;
  known(read, ["m", "p", "s", "e", "v", "l", "h", "t", "r", "j"], "The link");
  if (typeof m === "string" && m !== manifest.model.name) refuse(`This link was made for the model ${m.slice(0, 80)}; this page runs ${manifest.model.name}.`);
  if (![p, s, t].every((one) => typeof one === "string")) refuse("This link has no prompt.");
  if (!Array.isArray(e) || e.length > MOST_ENTRIES) refuse(`This link has no list of at most ${MOST_ENTRIES} interventions.`);
  if (r !== null && !whole(r, 0, 65535)) refuse("This link reads the model at a place that no text has.");
  if (j !== false && !(j === true && manifest.engine.lens)) refuse("This link reads layers through a lens that this page does not have.");
  if (!VIEWS.includes(v)) refuse("This link opens a view that this page does not have.");
  if (!whole(l, 0, manifest.model.layers - 1) || !whole(h, 0, Math.max(0, (manifest.model.heads || 1) - 1))) refuse("This link names a layer or head that the model does not have.");
  return { prompt: p, second: s, entries: e.map((entry, i) => checkedEntry(entry, manifest, `Intervention ${i + 1} of the link`)), view: v, layer: l, head: h, place: r, compare: t, mapped: j };
}

function isObject(value) { return typeof value === "object" && value !== null && !Array.isArray(value); }
function whole(value, low, high) { return Number.isInteger(value) && value >= low && value <= high; }
function texts(value, most = 64) { return Array.isArray(value) && value.length <= most && value.every((text) => typeof text === "string"); }
function places(value) { return Array.isArray(value) && value.length > 0 && value.length <= 4096 && value.every((at) => whole(at, -65536, 65535)); }
function known(value, names, who) {
  const other = Object.keys(value).find((name) => !names.includes(name));
  if (other !== undefined) refuse(`${who} has a field ${JSON.stringify(other.slice(0, 40))} that this page does not know.`);
}

// The hook points that a name or glob means; none where it is neither.
function hooksOf(glob, manifest) {
  return /^[\w.*?[\]!-]{1,200}$/.test(glob) ? matching(glob, Object.keys(manifest.hooks)) : [];
}

// A copy of an intervention with the fields that one has; LinkError for anything else.
export function checkedEntry(entry, manifest, who) {
  if (!isObject(entry)) refuse(`${who} is not an intervention.`);
  known(entry, ["hook", "kind", "positions", "heads", "rows", "neurons", "value", "strength", "on", "label"], who);
  const { hook, kind, positions = null, heads = null, rows = null, value, strength, on = true, label } = entry;
  if (typeof hook !== "string") refuse(`${who} names no hook point.`);
  const hooks = hooksOf(hook, manifest);
  if (!hooks.length) refuse(`${who} is at ${hook.slice(0, 80)}, which is no hook point of this page's model.`);
  if (!KINDS.includes(kind) || !hooks.every((name) => manifest.hooks[name].kinds.includes(kind))) refuse(`${who} is of a kind that ${hook} does not take here.`);
  if (positions !== null && positions !== "prompt" && positions !== "generated" && !places(positions)) refuse(`${who} has positions that are no list of numbers.`);
  if (heads !== null && !(places(heads) && heads.every((head) => whole(head, 0, manifest.model.heads - 1)))) refuse(`${who} names a head that the model does not have.`);
  if (entry.neurons !== undefined && entry.neurons !== null && !(places(entry.neurons) && entry.neurons.every((at) => at >= 0))) refuse(`${who} has neurons that are no list of numbers.`);
  if (rows !== null) refuse(`${who} is limited to rows; this page runs one text.`);
  if (strength !== undefined && !Number.isFinite(strength)) refuse(`${who} has a strength that is no number.`);
  if (typeof on !== "boolean") refuse(`${who} is neither on nor off.`);
  if (label !== undefined && (typeof label !== "string" || label.length > 500)) refuse(`${who} has a label that is no text.`);
  const made = { hook, kind, positions, heads, on };
  if (kind !== "zero") made.value = checkedValue(value, kind, who);
  if (entry.neurons) made.neurons = entry.neurons;
  if (strength !== undefined) made.strength = strength;
  if (label !== undefined) made.label = label;
  return made;
}

function checkedValue(value, kind, who) {
  if (Number.isFinite(value)) return value;
  if (Array.isArray(value) && numbers(value) <= MOST_NUMBERS) return structuredClone(value);
  const fits = isObject(value) && (value.edges !== undefined ? kind === "knockout" && Object.keys(value).length === 1 && edges(value.edges) : FORMS[value.from]?.(value, kind));
  if (!fits) refuse(`${who} has a value that its kind does not take.`);
  return structuredClone(value);
}

function only(value, names) { return Object.keys(value).every((name) => names.includes(name)); }

const FORMS = Object.assign(Object.create(null), {
  prompt: (value, kind) => kind === "replace" && only(value, ["from", "text", "positions"]) && typeof value.text === "string" && (value.positions === undefined || places(value.positions)),
  contrast: (value, kind) => kind === "add" && only(value, ["from", "more", "less", "position"]) && texts(value.more) && texts(value.less) && (value.position === undefined || value.position === "mean" || whole(value.position, -65536, 65535)),
  spec: (value) => only(value, ["from", "tensor", "tensors"]) && (value.tensors === undefined ? texts([value.tensor]) : texts(value.tensors, 8)),
});

function edges(list) { return Array.isArray(list) && list.length > 0 && list.length <= 4096 && list.every((edge) => places(edge) && edge.length === 2); }

// How many numbers nested lists hold; infinitely many where something else is among them.
function numbers(value, depth = 0) {
  if (Number.isFinite(value)) return 1;
  return Array.isArray(value) && depth < 5 ? value.reduce((sum, part) => sum + numbers(part, depth + 1), 0) : Infinity;
}
