// Random links under Node: `node playground_links.mjs FOLDER SEED COUNT SECONDS < asked.json` writes links of random, mostly
// broken states, reads them as the page does, says the entries in words, and makes the graph's inputs of them. Anything
// but a sentence of the page is printed, with the link that it came of; then the counts of what happened.
// asked: {manifest, entries: valid ones that are broken here, words: texts that have a meaning to somebody}
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, seed, count, seconds] = process.argv.slice(2);
const module = (name) => import(pathToFileURL(`${folder}/${name}.js`));
const [{ readLink, writeLink, LinkError }, { describe, sameDeed }, { setEngine }, { answers }] = await Promise.all(["link", "entries", "runs", "state"].map(module));
const [{ PlaygroundError }, { edits, needed, valueOf }, { inputs, stored }, { random }] =
  await Promise.all(["errors", "interventions", "feeds", "numbers"].map((name) => module(`engine/${name}`)));
const { manifest, entries, words } = JSON.parse(readFileSync(0, "utf8"));
const chance = random(Number(seed)), below = (n) => Math.floor(chance() * n), pick = (list) => list[below(list.length)];
const FIELDS = ["hook", "kind", "positions", "heads", "rows", "neurons", "value", "strength", "on", "label"];
const hooks = Object.keys(manifest.hooks), PROMPT = 5;
setEngine({ tokenText: (id) => pick(words) + id });
answers.tokens = [1, 2, 3, 4, 5];

const NASTY = [
  ...[null, true, false, 0, -1, 1, 4, 5, 1e39, -1e308, 0.5, 2 ** 53, "", "prompt", "generated"], [], {}, [[]], [0], [-1], [4, -1], [9], [1, [2]], [null], ["0"],
  [[4, 3]], [[3, 4]], { from: "prompt" }, { from: "prompt", text: "a" }, { from: "prompt", text: "a", positions: [0] }, { from: "contrast", more: [], less: [] },
  { from: "contrast", more: ["a"], less: ["b"], position: "mean" }, { from: "contrast", more: ["a"], less: ["b"], position: -9 }, { edges: [[4, 3]] }, { edges: [] }, { edges: [[0, 0]] },
  { from: "spec" }, { from: "spec", tensor: "constructor" }, { from: "spec", tensor: "__proto__" }, { from: "spec", tensors: [] }, { from: "spec", tensors: ["toString", "interventions.0.low"] },
];

function nested(depth) { let made = 1; for (let i = 0; i < depth; i++) made = [made]; return made; }
function anything() { return chance() < 0.7 ? structuredClone(pick(NASTY)) : chance() < 0.3 ? nested(below(40)) : pick([...words, ...hooks]); }

function broken(given) {
  const made = structuredClone(given);
  for (let changes = below(4); changes > 0; changes--) {
    const field = chance() < 0.95 ? pick(FIELDS) : pick(words);
    if (chance() < 0.25) delete made[field];
    else if (field === "hook" && chance() < 0.8) made.hook = glob();
    else if (field === "kind" && chance() < 0.8) made.kind = pick(["add", "clamp", "knockout", "project_out", "replace", "scale", "zero"]);
    else if (field === "value" && chance() < 0.4 && made.value && typeof made.value === "object" && !Array.isArray(made.value)) {
      const part = pick([...Object.keys(made.value), ...words]);
      Object.defineProperty(made.value, part, { value: anything(), enumerable: true, configurable: true, writable: true });
    } else Object.defineProperty(made, field, { value: anything(), enumerable: true, configurable: true, writable: true });
  }
  return made;
}

function glob() {
  let text = pick(hooks);
  for (let changes = below(30); changes > 0; changes--) {
    const at = below(text.length);
    text = text.slice(0, at) + pick(["*", "*", "?", "[", "]", "!", "-", "[a-z]", "[!b]", ".*"]) + text.slice(at + below(3));
  }
  return text;
}

function state() {
  const made = { prompt: pick(words), second: "", entries: Array.from({ length: 1 + below(3) }, () => broken(pick(entries))), view: "lens", layer: 0, head: 0 };
  if (chance() < 0.1) made[pick(Object.keys(made))] = anything();
  return made;
}

// What of an activation another prompt gives here: right in shape, without a model.
function captured(text, hook) {
  const shape = manifest.hooks[hook].axes.map((size, i) => (i === 0 ? 1 : typeof size === "number" ? size : PROMPT));
  return { shape, data: Float32Array.from({ length: shape.reduce((a, b) => a * b, 1) }, () => chance()) };
}

function used(list) {
  list.forEach((entry) => { describe(entry); sameDeed(entry, list[0]); });
  const all = edits(list, manifest), generating = chance() < 0.2;
  needed(all);
  const values = all.map((edit) => valueOf(edit, captured, {}));
  inputs(all, values, manifest, { start: 0, count: PROMPT, prompt: PROMPT, length: PROMPT + 3 * generating, generating });
  all.forEach((edit, n) => stored(edit, values[n], PROMPT));
}

const found = { links: 0, refusedByLink: 0, refusedByEngine: 0, taken: 0, slowest: 0 }, wrong = [], began = performance.now();
while (found.links < count && performance.now() - began < 1000 * seconds) {
  const made = state();
  let text;
  try { text = await writeLink(made, manifest.model.name); } catch { continue; } // a state that no page has
  found.links++;
  const from = performance.now();
  try {
    const read = await readLink(text, manifest);
    if (Object.getPrototypeOf(read.entries[0] ?? {}) !== Object.prototype || {}.polluted !== undefined) throw new Error("a prototype was changed");
    try {
      used(read.entries);
      found.taken++;
    } catch (error) {
      if (!(error instanceof PlaygroundError)) throw error;
      found.refusedByEngine++;
    }
  } catch (error) {
    if (error instanceof LinkError) found.refusedByLink++;
    else wrong.push([`${error.name}: ${error.message}`, JSON.stringify(made.entries).slice(0, 600)]);
  }
  found.slowest = Math.max(found.slowest, performance.now() - from);
}
process.stdout.write(JSON.stringify({ ...found, wrong: wrong.slice(0, 5) }));
