// What the model says, by its head: the page's words for it, where it is read, its choices before and after, how far it moved.
import { alike, chances, moved } from "./engine/engine.js";
import { nats, percent, quoted, visible } from "./dom.js";
import { theEngine, tokenText } from "./opened.js";
import { answers, state } from "./state.js";

const KL = { name: "KL divergence", unit: "nats", said: "KL", words: [0.01, 0.1, 1], note: "How far the interventions move the prediction. Below 0.01 nats it hardly moves, above 1 it is another one." };
const NUMBER = { name: "change", unit: "", said: "moved by", words: [0.01, 0.1, 1], note: "How far the interventions move the model's number, the one that moves most." };
const COSINE = { name: "change of similarity", unit: "", said: "similarity moved by", words: [0.005, 0.05, 0.2], note: "How far the interventions move the similarity that moves most. They change the text above; those that it is compared with are read as they are." };
const WORDS = {
  next_token: { card: "Next token", text: "Prompt", about: "How likely each token is to come next.", lens: "the token that the model would say next", summary: "next token" },
  masked_lm: { card: "At the mask", text: "Text with a mask", about: "How likely each token is to stand there.", lens: "the token that the model would put there", summary: "at the mask" },
  token_classes: { card: "Tag", text: "Text", about: "How likely each tag is to be that token's. Press another token to read its tag.", lens: "the tag that the model would give the token", summary: "tag" },
  classes: { card: "Labels", text: "Text", about: "How likely the model holds each label.", summary: "label" },
  embedding: { card: "Similarity", text: "Text", about: "How alike the text and each of those below it are, by their embeddings.", summary: "similarity" },
};
const SHOWN = 0.001, LEAST = 3, MOST = 8, BOTH = 6; // the probability from which a choice has a line; lines at least; lines without and with interventions

function model() { return theEngine()?.manifest.model; }
export function head() { return model()?.head ?? "next_token"; }
export function words() { return WORDS[head()]; }
export function continues() { return (theEngine()?.manifest.engine.past.length ?? 1) > 0; }
export function readsTokens() { return theEngine()?.manifest.engine.positional ?? true; }
export function readsBoth() { return theEngine()?.manifest.engine.both ?? false; }
function measure() { return head() === "embedding" ? COSINE : model()?.activation === "identity" ? NUMBER : KL; }
export function measureName() { return measure().name; }
export function measureNote() { return measure().note; }

// Whether a token is one that the tokenizer adds, as [CLS] is.
export function isSpecial(id) { return model().special.includes(id) && id !== model().mask?.id; }

// The position whose prediction is shown; null where the model says something of the whole text.
export function readPlace() {
  const { tokens } = answers;
  if (!readsTokens() || !tokens.length) return null;
  if (head() === "next_token") return tokens.length - 1;
  if (state.place !== null && state.place < tokens.length) return state.place;
  const masked = head() === "masked_lm" ? tokens.indexOf(model().mask?.id) : -1;
  return masked >= 0 ? masked : Math.max(0, tokens.findIndex((id) => !isSpecial(id)));
}

// The query whose reading is told first: of the token that is read, or that classes are made of; null where it is no single one.
export function readingQuery() {
  const { reads } = theEngine().manifest.engine;
  return readPlace() ?? { first: 0, last: answers.tokens.length - 1 }[reads] ?? null;
}

// Why the prediction may not be what the reader expects.
export function doubt() {
  if (head() !== "masked_lm" || !answers.tokens.length || answers.tokens.includes(model().mask?.id)) return null;
  return `The text has no mask: write ${model().mask?.text} where a word is hidden. Until then the page reads the model at position ${readPlace()}.`;
}

export function choiceText(id) { return head() === "embedding" ? answers.others[id].text : visible(theEngine().choiceText(id)); }

// A probability, a similarity or a number as people read it.
export function valueText(value) {
  if (head() !== "embedding" && model().activation !== "identity") return percent(value);
  return Math.abs(value) < 100 ? value.toFixed(3) : value.toFixed(1);
}

// The length of a bar, from 0 to 1; 0 where numbers have no such bounds.
export function barLength(value) {
  const bounded = head() === "embedding" ? model().similarity === "cosine" : model().activation !== "identity";
  return bounded ? Math.min(1, Math.max(0, value)) : 0;
}

function similarities(vector) { return answers.others.map((other) => alike(vector, other.vector, model().similarity)); }

// [{id, before, after}]: the choices that either run holds likely, with both probabilities, those that moved most among them; of
// an embedding model the texts that it is compared with.
export function comparedChoices(before, after) {
  if (head() === "embedding") {
    const one = similarities(before.logits), other = after ? similarities(after.logits) : [];
    return one.map((value, id) => ({ id, before: value, after: after ? other[id] : null }));
  }
  const ids = new Set([...before.next.slice(0, after ? 5 : MOST), ...(after ? after.next.slice(0, 5) : [])].map(({ id }) => id));
  const one = chances(before.logits, model().activation), other = after ? chances(after.logits, model().activation) : null;
  const highest = (line) => Math.max(line.before, line.after ?? 0);
  const lines = [...ids].map((id) => ({ id, before: one[id], after: other ? other[id] : null })).sort((a, b) => highest(b) - highest(a));
  return lines.filter((line, i) => i < LEAST || highest(line) >= SHOWN).slice(0, after ? BOTH : MOST);
}

// How far a prediction moves: from logits to logits, or from an embedding to another one.
export function effect(before, after) {
  if (head() !== "embedding") return moved(before, after, model().activation);
  if (!answers.others.length) return 1 - alike(before, after, "cosine");
  const one = similarities(before), other = similarities(after);
  return Math.max(...one.map((value, i) => Math.abs(other[i] - value)));
}

// An effect in a word, in figures, in both, and as the depth of a cell.
export function inWords(value) {
  const [almost, slight, clear] = measure().words;
  return value < almost ? "almost none" : value < slight ? "slight" : value < clear ? "clear" : "strong";
}
export function effectParts(value) { return [measure().said, nats(value), measure().unit]; }
export function effectText(value) { return effectParts(value).filter(Boolean).join(" "); }
export function effectShare(value) { return Math.min(1, value / (3 * measure().words[2])); }

// What one run says, in a few characters and in a line.
export function briefly({ next, logits }) {
  if (head() !== "embedding") return { text: visible(next[0].text).trim(), line: `${valueText(next[0].probability)}  ${visible(next[0].text).trim()}` };
  if (!answers.others.length) return { text: "·", line: "no text to compare with" };
  const found = valueText(similarities(logits)[0]);
  return { text: found, line: `similarity ${found} to “${answers.others[0].text}”` };
}

// Where it is read, in words.
export function readWhere() {
  const at = readPlace();
  return at === null || head() === "next_token" ? "" : `at ${at} ${quoted(tokenText(answers.tokens[at]))}`;
}
