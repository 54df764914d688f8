// What would take no effect: an intervention that later ones overwrite, or that leads to the logits through nothing but
// hook points whose whole value another one overwrites. Decided by structure, as in Python (mionnx/bind/effect.py).
import { chooses, listed, range } from "./choices.js";
import { HEADS, isLimited, refuse } from "./interventions.js";

const OVERWRITING = ["zero", "replace"], LIMITS = ["positions", "heads", "neurons"];

// engine: of the manifest; its `leads`: hook point -> those that its value flows into with none between, the output among them.
export function refuseIdle(all, engine, call) {
  const { leads, output } = engine;
  all.forEach((edit, n) => {
    const later = all.slice(n + 1).filter(({ hook, entry }) => hook === edit.hook && OVERWRITING.includes(entry.kind));
    const last = later.find((other) => covers(other.entry, edit.entry)) ?? (overwritten(edit, later, call) ? later.at(-1) : null);
    if (last) refuse(edit.entry, edit.hook, `it would do nothing: the ${last.entry.kind} after it there puts other values in place of all that it changes.`);
  });
  const whole = new Set(all.filter(({ entry }) => OVERWRITING.includes(entry.kind) && !isLimited(entry)).map(({ hook }) => hook));
  for (const { entry, hook } of whole.size ? all : []) {
    if (!arrives(hook, leads, whole, output)) refuse(entry, hook, "it would do nothing: other interventions overwrite the whole value of what it leads to.");
  }
  if (engine.reads) for (const edit of all) refuseUnread(edit, engine, call);
}

// A head of whole texts may read one token alone: what changes others, and is read by none of them, does nothing.
function refuseUnread(edit, { reads, spreads }, call) {
  const { entry, hook } = edit, at = reads === "first" ? 0 : call.prompt - 1;
  const chosen = entry.kind === "knockout" && entry.value?.edges ? queriesOf(edit, call) : Array.isArray(entry.positions) ? listed(edit, call) : null;
  if (!chosen || spreads.includes(hook) || chosen.includes(at)) return;
  refuse(entry, hook, `it would do nothing: the model reads the ${reads} token alone there, at position ${at}.`);
}

// The queries of an entry's edges, those that it is limited to.
function queriesOf(edit, call) {
  const here = chooses(edit, call);
  return edit.entry.value.edges.map(([query]) => (query < 0 ? query + call.prompt : query)).filter(here);
}

// Whether a limit of one entry lies within that of another in every text.
function covers(other, one) {
  return LIMITS.every((limit) => {
    const wide = other[limit] ?? null, narrow = one[limit] ?? null;
    if (wide === null || wide === narrow) return true;
    return Array.isArray(wide) && Array.isArray(narrow) && narrow.every((at) => wide.includes(at));
  });
}

function overwritten(edit, later, call) {
  const others = later.filter(({ entry }) => entry.neurons == null);
  return others.length > 0 && spots(edit, call).every((spot) => others.some((other) => within(other, call)(spot)));
}

function spots(edit, call) {
  const axis = edit.axes.findIndex((name) => HEADS.includes(name));
  const heads = edit.entry.heads ?? range(0, axis < 0 ? 1 : edit.dims[axis]), here = chooses(edit, call);
  return range(0, call.length).filter(here).flatMap((at) => heads.map((head) => [at, head]));
}

function within(edit, call) {
  const here = chooses(edit, call), { heads } = edit.entry;
  return ([at, head]) => here(at) && (heads == null || heads.includes(head));
}

function arrives(hook, leads, whole, output) {
  const seen = new Set([hook]), open = [hook];
  while (open.length) {
    for (const next of leads[open.pop()] ?? []) {
      if (next === output) return true;
      if (!seen.has(next) && !whole.has(next)) open.push(next);
      seen.add(next);
    }
  }
  return false;
}
