// Where a model has no lessons: prompts to begin with, by its head, and its chat template around what is typed.
import { button, find } from "./dom.js";
import { head } from "./heads.js";
import { theEngine } from "./runs.js";
import { change, state } from "./state.js";

const PROMPTS = ["The capital of France is", "When Mary and John went to the store, John gave a drink to", "1 2 3 4 5 6", "The opposite of hot is", "Once upon a time"];
const TEXTS = {
  next_token: PROMPTS,
  masked_lm: ["The capital of France is [MASK].", "The capital of France is [MASK] .", "[MASK] is the capital of Japan.", "The opposite of hot is [MASK].", "She put the [MASK] in the oven."],
  classes: ["I loved every minute of it.", "The plot was dull and far too long.", "Not bad, but I would not see it again."],
  token_classes: ["Angela Merkel met Barack Obama in Berlin.", "My name is Ada and I live in London."],
  embedding: ["A man is playing a guitar on stage.", "How do I reset my password?"],
};
const COMPARED = {
  "A man is playing a guitar on stage.": "Someone performs music for an audience.\nA woman cooks dinner.\nThe stock market fell today.",
  "How do I reset my password?": "I cannot log in to my account.\nWhere is the nearest station?",
};
const PAIRS = ["How many people live in Berlin?{}Berlin has a population of 3.5 million.", "A man is eating.{}Nobody eats."];
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
  if (document.activeElement !== find("compare")) find("compare").value = state.compare;
  find("continue").textContent = isChat(state.prompt) ? "Answer" : "Continue the text";
  for (const chip of find("starts").children) chip.setAttribute("aria-pressed", String(typed(state.prompt) === chip.textContent));
}

// The texts that a model of this head may begin with, its own mask and its own sign between the texts of a pair in them.
function texts() {
  const { mask, pair, labels } = theEngine().manifest.model, pairs = pair ? PAIRS.map((text) => text.replace("{}", ` ${pair.between} `)) : [];
  // A reranker has one number, and an entailment is of a pair: their texts come first.
  const all = labels.length === 1 || /entail|contradict/i.test(labels.join()) ? [...pairs, ...TEXTS[head()]] : [...TEXTS[head()], ...pairs];
  return mask ? all.map((text) => text.replace("[MASK]", mask.text)) : all;
}

// What the page begins with: prompts whose words the model knows, the first of them given back.
export async function showStarts(lessons) {
  find("starts").hidden = lessons > 0;
  const engine = theEngine(), known = [];
  const { unknown } = engine.manifest.model, lost = (words) => words.some((one) => unknown !== null && one.trim() === unknown);
  for (const text of lessons ? [] : texts()) if (!lost(await engine.tokenTexts(await engine.encode(text)))) known.push([text, text]);
  const around = lessons ? null : template();
  const asked = around ? QUESTIONS.map((text) => [text, around.before + text + around.after]) : [];
  find("starts").replaceChildren(...[...asked, ...known].map(([text, prompt]) => button(text, () => change({ ...beginning(prompt), entries: [], lesson: null }))));
  find("starts").hidden ||= !find("starts").children.length;
  return beginning((asked[0] ?? known[0] ?? [null, texts()[0]])[1]);
}

function beginning(prompt) { return prompt in COMPARED ? { prompt, compare: COMPARED[prompt] } : { prompt }; }

export function listenStarts() {
  find("chat").addEventListener("change", () => change({ prompt: asPrompt(find("prompt").value) }));
}
