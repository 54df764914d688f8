// Continues the prompt token by token, without and with the interventions, and stops when asked.
import { element, find, notice, sentence } from "./dom.js";
import { theEngine } from "./runs.js";
import { answers, inForce, state } from "./state.js";

let stopping = null;

export function listenGeneration() {
  find("continue").addEventListener("click", generate);
  find("stop").addEventListener("click", () => stopping?.abort());
  find("count").addEventListener("change", () => { state.count = Number(find("count").value); });
}

export function showCount() {
  const box = find("count");
  if (![...box.options].some(({ value }) => value === String(state.count))) box.append(element("option", { value: state.count }, String(state.count)));
  box.value = state.count;
}

// The texts stand for what they were made of: another prompt or other interventions clear them.
export function clearTexts() {
  stopping?.abort();
  find("texts").hidden = true;
}

async function generate() {
  stopping?.abort();
  const mine = stopping = new AbortController(), interventions = inForce();
  const lines = [["before", []], ...(interventions.length ? [["after", interventions]] : [])];
  const said = lines.map(([kind]) => element("div", { class: "said " + kind }, element("span", { class: "faint" }, state.prompt)));
  find("texts").replaceChildren(...lines.flatMap(([kind], i) => [element("div", { class: "which" }, lines.length > 1 ? kind : "text"), said[i]]));
  find("texts").hidden = find("stop").hidden = false;
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
  find("stop").hidden = true;
  find("continue").disabled = false;
}

async function stream(box, asked) {
  const made = element("b");
  box.append(made);
  box.classList.add("running");
  try {
    const joint = (text) => (/\s$/.test(state.prompt) || /^\s/.test(text) ? text : " " + text);
    const found = await theEngine().generate({ ...asked, onToken: ({ text }) => { made.textContent = joint(text); } });
    if (found.stopped === "end") box.append(element("span", { class: "faint small" }, "  (the model ended here)"));
  } finally {
    box.classList.remove("running");
  }
}
