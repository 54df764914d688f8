// Asks the engine for what the state needs: the prediction before and after at once, then what the open view shows.
import { clearNotice, notice, sentence } from "./dom.js";
import { head, readPlace } from "./heads.js";
import { setEngine, theEngine, tokenText } from "./opened.js";
import { answered, answers, inForce, state } from "./state.js";

const MOST_PRODUCTS = 15e6; // cells of a lens times vocabulary
let wanted = 0, done = 0, running = false;
const kept = { prompt: null, place: null, compare: null, entries: null, second: null };
const vectors = new Map(), MOST_VECTORS = 200; // text -> its embedding

export { setEngine, theEngine, tokenText };

// Something changed: run again what depends on it. Changes during a run are taken together afterwards.
export async function refresh() {
  wanted++;
  if (running || !theEngine()) return;
  running = true;
  while (done !== wanted) {
    const round = wanted;
    try {
      await run(() => round === wanted);
      clearNotice("run");
    } catch (error) {
      notice(sentence(error), "run");
    }
    done = round;
  }
  running = false;
  answered("idle");
}

async function run(current) {
  if (state.prompt !== kept.prompt) await newPrompt();
  if (!answers.tokens.length || !current()) return;
  if (head() === "embedding" && state.compare !== kept.compare) await newCompare();
  const engine = theEngine(), place = readPlace();
  if (place !== kept.place) Object.assign(answers, { before: null, after: null }); // lens and patterns are of all positions
  if (!answers.before) Object.assign(kept, { place, entries: null });
  if (!answers.before) answers.before = await engine.run({ tokens: answers.tokens, want: read({ top: 10 }) });
  if (state.entries !== kept.entries) await newEntries();
  answered("next");
  if (current()) await inside(current);
}

// What is wanted of a run: the prediction at the place that is read.
function read(want) {
  const position = readPlace();
  return position === null ? want : { ...want, position };
}

// The embeddings of the texts that the prompt is compared with, one text a line; no intervention reaches them.
async function newCompare() {
  const texts = state.compare.split("\n").map((line) => line.trim()).filter(Boolean);
  kept.compare = state.compare;
  answers.others = [];
  clearNotice("compare");
  for (const text of texts) {
    try {
      if (!vectors.has(text)) vectors.set(text, (await theEngine().run({ tokens: await theEngine().encode(text) })).logits);
      answers.others = [...answers.others, { text, vector: vectors.get(text) }];
    } catch (error) {
      notice(`The text “${text}”: ` + sentence(error), "compare");
    }
  }
  while (vectors.size > MOST_VECTORS) vectors.delete(vectors.keys().next().value);
}

async function newPrompt() {
  const prompt = state.prompt, engine = theEngine();
  Object.assign(answers, { before: null, after: null, insideBefore: null, insideAfter: null });
  Object.assign(kept, { prompt, entries: null });
  answers.tokens = prompt.trim() ? await engine.encode(prompt) : [];
  if (answers.tokens.length) await engine.tokenTexts(answers.tokens);
  answered("tokens");
}

async function newEntries() {
  const entries = state.entries, tokens = answers.tokens, engine = theEngine();
  const problems = entries.length ? await engine.check(entries, tokens) : [];
  answers.problems = problems;
  kept.entries = entries;
  const active = entries.filter((entry, i) => entry.on !== false && !problems[i] && inPrompt(entry));
  answers.insideAfter = null;
  answers.after = active.length ? await engine.run({ tokens, interventions: active, want: read({ top: 10 }) }) : null;
}

// Lens and patterns of what the open view shows.
async function inside(current) {
  const want = { lens: { top: 5, lens: lensLayers(), mapped: throughLens() }, attention: { top: 5, patterns: true } }[state.view];
  if (state.view === "stream") await secondTokens();
  if (!want) return answered("inside");
  const tokens = answers.tokens, engine = theEngine();
  const lacks = (found) => !found || (want.lens ? !reads(found, want) : !Object.keys(found.patterns).length);
  if (lacks(answers.insideBefore)) answers.insideBefore = await engine.run({ tokens, want });
  if (!current()) return undefined;
  if (answers.after && lacks(answers.insideAfter)) {
    answers.insideAfter = await engine.run({ tokens, interventions: inForce().filter(inPrompt), want });
  }
  answered("inside");
  if (want.lens && current()) await secondPrompt(want);
  return undefined;
}

// Whether a result has the lens that is wanted.
function reads({ lens }, want) { return lens?.layers.length === want.lens.length && lens.mapped === want.mapped; }

// The page's own lens, whether the reader chose it.
export function ownLens() { return theEngine()?.manifest.engine.lens ?? null; }
export function throughLens() { return Boolean(state.mapped && ownLens()); }

// The layers that the chosen lens has; the last one is read as it is.
export function readableLayers() {
  const { layers } = theEngine().manifest.model, all = Array.from({ length: layers }, (_, layer) => layer);
  return throughLens() ? all.filter((layer) => layer === layers - 1 || ownLens().layers.includes(layer)) : all;
}

// The layers that a lens reads: all that it has, or every second, third, ... up to the last where a head product for each would take seconds.
export function lensLayers() {
  const { layers, choices } = theEngine().manifest.model, cells = choices * layers * answers.tokens.length;
  const step = state.allLayers ? 1 : Math.max(1, Math.ceil(cells / MOST_PRODUCTS));
  return readableLayers().filter((layer) => (layers - 1 - layer) % step === 0);
}

// The tokens of the second text alone, where no lens reads it.
async function secondTokens() {
  answers.secondTokens = state.second.trim() ? await theEngine().encode(state.second) : [];
  await theEngine().tokenTexts(answers.secondTokens);
}

async function secondPrompt(want) {
  const engine = theEngine();
  if (state.second === kept.second && (!answers.second || reads(answers.second, want))) return;
  const text = state.second;
  try {
    answers.secondTokens = text.trim() ? await engine.encode(text) : [];
    answers.second = answers.secondTokens.length ?
      await engine.run({ tokens: answers.secondTokens, want }) : null;
    clearNotice("second");
  } catch (error) {
    Object.assign(answers, { secondTokens: [], second: null });
    notice("The second prompt: " + sentence(error), "second");
  }
  kept.second = text;
  answered("inside");
}

// Zeroes each part in turn and tells how far the prediction moves; `told(index, nats)` as it goes.
export async function measure(parts, divergence, told, stopped) {
  const tokens = answers.tokens, active = inForce().filter(inPrompt), base = answers.after || answers.before;
  for (const [index, part] of parts.entries()) {
    if (stopped() || tokens !== answers.tokens) return;
    const found = await without([...active, part], tokens);
    told(index, found ? divergence(base.logits, found.logits) : undefined); // open where others have taken the part away already
  }
}

// A run with the last of some entries; those before it that it overwrites are left out. null where it is idle itself.
async function without(entries, tokens) {
  const problems = await theEngine().check(entries, tokens);
  return problems.at(-1) ? null : theEngine().run({ tokens, interventions: entries.filter((_, i) => !problems[i]), want: read({ top: 1 }) });
}

// A run of the prompt with the entries in force and one more, instead of one of them; null where that cannot apply.
export function tried(entry, instead) {
  return without([...inForce().filter((one) => one !== instead), entry].filter(inPrompt), answers.tokens);
}

// What holds for generated tokens alone is no part of the prompt's run.
function inPrompt({ positions }) { return positions !== "generated"; }
