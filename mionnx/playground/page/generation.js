// Continues the prompt token by token, without and with the interventions, and stops when asked.
import { element, find, notice, sentence } from "./dom.js";
import { continues } from "./heads.js";
import { theEngine } from "./runs.js";
import { typed } from "./starts.js";
import { answers, change, inForce, state } from "./state.js";

let stopping = null, estimated = false;
const FAST = 700; // milliseconds that two texts may take to be written at every change

export function listenGeneration() {
  find("continue").addEventListener("click", generate);
  find("stop").addEventListener("click", () => stopping?.abort());
  find("count").addEventListener("change", () => { change({ count: Number(find("count").value) }); clearTexts(); follow(); });
  find("temperature").addEventListener("change", () => { clearTexts(); follow(); });
  find("auto").addEventListener("change", follow);
}

export function showCount() {
  const box = find("count");
  if (![...box.options].some(({ value }) => value === String(state.count))) box.append(element("option", { value: state.count }, String(state.count)));
  box.value = state.count;
}

// The texts stand for what they were made of: with another prompt or other interventions they are out of date.
export function clearTexts() {
  stopping?.abort();
  find("texts").hidden ||= !find("auto").checked;
  find("texts").classList.add("old");
  find("strip-text").textContent = "";
}

// All else is shown: texts follow where the reader wants them at every change, and at first where the model is fast.
export function follow() {
  if (!answers.before || !continues()) return;
  if (!estimated) find("auto").checked = 2 * state.count * answers.before.ms < FAST;
  estimated = true;
  if (find("auto").checked && (find("texts").hidden || find("texts").classList.contains("old"))) generate();
}

async function generate() {
  stopping?.abort();
  const mine = stopping = new AbortController(), interventions = inForce(), asked = typed(state.prompt);
  const lines = [["before", []], ...(interventions.length ? [["after", interventions]] : [])];
  const said = lines.map(([kind]) => element("div", { class: "said " + kind }, element("span", { class: "faint" }, asked.length > 160 ? "… " + asked.slice(-100) : asked)));
  find("texts").replaceChildren(...lines.flatMap(([kind], i) => [element("div", { class: "which" }, lines.length > 1 ? kind : "text"), said[i]]));
  find("texts").hidden = find("stop").hidden = false;
  find("texts").classList.remove("old");
  find("strip-text").textContent = "";
  find("continue").disabled = true;
  const temperature = Number(find("temperature").value), seed = Math.floor(Math.random() * 2 ** 31);
  try {
    for (const [i, [, entries]] of lines.entries()) {
      if (mine.signal.aborted) break;
      await stream(said[i], { tokens: answers.tokens, interventions: entries, count: state.count, temperature, seed, signal: mine.signal });
    }
  } catch (error) {
    if (!mine.signal.aborted) notice(sentence(error), "generate");
  }
  if (mine !== stopping) return;
  if (mine.signal.aborted) find("texts").classList.add("old");
  find("stop").hidden = true;
  find("continue").disabled = false;
}

async function stream(box, asked) {
  const made = element("b");
  box.append(made);
  box.classList.add("running");
  try {
    const joint = (text) => (typed(state.prompt) !== state.prompt ? "\n" + text : /\s$/.test(state.prompt) || /^\s/.test(text) ? text : " " + text);
    const found = await theEngine().generate({ ...asked, onToken: ({ text }) => { made.textContent = joint(text); if (asked.interventions.length) find("strip-text").textContent = "… " + made.textContent.trim(); } });
    if (found.stopped === "end") box.append(element("span", { class: "faint small" }, "  (the model ended here)"));
  } finally {
    box.classList.remove("running");
  }
}
