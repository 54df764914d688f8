// What the reader has chosen, and what the model answered. Views read both; `change` is the only way to choose.
export const state = {
  prompt: "", second: "", entries: [], view: "lens", layer: 0, head: 0, side: "after", lesson: null, count: 8, allLayers: false,
  mapped: false, // whether the lens view reads streams through the page's own lens
  place: null, compare: "", // the position that is read, where the reader chose one; the texts that an embedding model compares, one a line
  picked: false, // whether somebody chose the head; else the page opens a telling one
};

export const answers = {
  tokens: [], before: null, after: null, // Results of the engine; `after` is null where nothing is changed
  insideBefore: null, insideAfter: null, // Results with lens and patterns
  secondTokens: [], second: null, // the second prompt, and its lens
  problems: [], // one an entry: null, or why it cannot apply
  others: [], // {text, vector}: what the prompt is compared with
  busy: false,
};

const choosing = [], answering = [], past = [];
const UNDONE = ["prompt", "second", "compare", "entries", "lesson"], MOST_STEPS = 50, TOGETHER = 400; // what an undo brings back; milliseconds within which changes are one, a slider's for one
let last = 0;
export function onChange(listener) { choosing.push(listener); }
export function onAnswer(listener) { answering.push(listener); }

export function change(part) {
  const before = Object.fromEntries(UNDONE.map((name) => [name, state[name]]));
  if (UNDONE.some((name) => name in part && part[name] !== state[name])) {
    if (performance.now() - last > TOGETHER) past.push(before);
    last = performance.now();
  }
  if (past.length > MOST_STEPS) past.shift();
  choose(part);
}

function choose(part) {
  Object.assign(state, part);
  for (const listener of choosing) listener(part);
}

export function canUndo() { return past.length > 0; }

// Back to what stood before the last change of prompt or interventions.
export function undo() { if (past.length) choose(past.pop()); }

// The page's first state is nothing to go back from.
export function forgetPast() { past.length = 0; }

export function answered(kind) { for (const listener of answering) listener(kind); }

export function addEntry(entry) { change({ entries: [...state.entries, entry] }); }

export function replaceEntry(index, part) {
  change({ entries: state.entries.map((entry, i) => (i === index ? { ...entry, ...part } : entry)) });
}

export function removeEntries(test) { change({ entries: state.entries.filter((entry, i) => !test(entry, i)) }); }

// The entries that are in force: switched on, and able to apply.
export function inForce() { return state.entries.filter((entry, i) => entry.on !== false && !answers.problems[i]); }

// The run that the views show.
export function shownInside() {
  return state.side === "after" && answers.insideAfter ? answers.insideAfter : answers.insideBefore;
}

// The page does not yet show what was typed or pressed; `idle` follows with the last answer.
export function waiting() { document.body.dataset.state = "busy"; }

const typing = new Map(); // a box -> the timer after its last key

// Apply what is typed into a box after a pause; until then the page is busy, whatever an earlier run answers meanwhile.
export function whenTyped(box, milliseconds, apply) {
  waiting();
  clearTimeout(typing.get(box));
  typing.set(box, setTimeout(() => { typing.delete(box); apply(); }, milliseconds));
}

export function isTyping() { return typing.size > 0; }
