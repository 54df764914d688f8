// Where a model has no lessons: prompts to begin with, and its chat template around what is typed.
import { button, find } from "./dom.js";
import { theEngine } from "./runs.js";
import { change, state } from "./state.js";

const PROMPTS = ["The capital of France is", "When Mary and John went to the store, John gave a drink to", "1 2 3 4 5 6", "The opposite of hot is", "Once upon a time"];
const QUESTIONS = ["What is the capital of France?", "Name three animals that lay eggs.", "Is the sky green?"];

// What stands around a message; null where the model has no template.
function template() { return theEngine()?.manifest.model.chat ?? null; }

function isChat(prompt) {
  const around = template();
  return Boolean(around) && prompt.length >= around.before.length + around.after.length && prompt.startsWith(around.before) && prompt.endsWith(around.after);
}

// What the reader typed of a prompt, and the prompt of what is typed.
export function typed(prompt) { return isChat(prompt) ? prompt.slice(template().before.length, prompt.length - template().after.length) : prompt; }
export function asPrompt(text) { return find("chat").checked && template() ? template().before + text + template().after : text; }

export function drawTyped() {
  find("chat-choice").hidden = !template();
  find("chat").checked = isChat(state.prompt);
  if (find("prompt").value !== typed(state.prompt)) find("prompt").value = typed(state.prompt);
  find("continue").textContent = isChat(state.prompt) ? "Answer" : "Continue the text";
  for (const chip of find("starts").children) chip.setAttribute("aria-pressed", String(typed(state.prompt) === chip.textContent));
}

// Prompts whose words the model knows.
export async function showStarts(lessons) {
  find("starts").hidden = lessons > 0;
  const engine = theEngine(), known = [];
  for (const text of lessons ? [] : PROMPTS) if (!(await engine.tokenTexts(await engine.encode(text))).some((one) => one.trim() === "<unk>")) known.push([text, text]);
  const around = lessons ? null : template();
  const asked = around ? QUESTIONS.map((text) => [text, around.before + text + around.after]) : [];
  find("starts").replaceChildren(...[...asked, ...known].map(([text, prompt]) => button(text, () => change({ prompt, entries: [], lesson: null }))));
  find("starts").hidden ||= !find("starts").children.length;
  return (asked[0] ?? known[0] ?? [null, PROMPTS[0]])[1];
}

export function listenStarts() {
  find("chat").addEventListener("change", () => change({ prompt: asPrompt(find("prompt").value) }));
}
