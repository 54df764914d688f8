// Text to tokens and back, by Hugging Face's tokenizers.js.
import { PlaygroundError } from "./errors.js";

export class Tokens {
  // Tokenizer: the library's class; its files parsed; model: the manifest's facts of how texts are read.
  constructor(Tokenizer, tokenizer, config, model) {
    this.library = new Tokenizer(tokenizer, { ...config, clean_up_tokenization_spaces: false });
    this.vocabulary = model.vocabulary;
    this.model = model;
    this.texts = new Map();
  }

  encode(text) {
    if (typeof text !== "string") throw new PlaygroundError("input", "A prompt is a text.");
    const { before = "", lower = false } = this.model, whole = text.trim() ? before + text : text;
    return Array.from(this.library.encode(lower ? whole.toLowerCase() : whole).ids, Number);
  }

  // Which of two texts each token belongs to: 1 behind the tokens that part a pair.
  types(ids) {
    const parts = this.model.pair?.ids ?? [], first = parts.length ? ids.findIndex((_, at) => parts.every((id, i) => ids[at + i] === id)) : -1;
    return ids.map((_, at) => (first >= 0 && at >= first + parts.length ? 1 : 0));
  }

  decode(ids) {
    if (!ids.length) return "";
    return this.library.decode(Array.from(ids, Number), { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  }

  // A token alone; what a decoder strips from the start of a text stays: it is decoded behind another token.
  text(id) {
    if (!this.texts.has(id)) this.texts.set(id, this.alone(id));
    return this.texts.get(id);
  }

  alone(id) {
    this.anchor ??= Number(this.library.encode("a", { add_special_tokens: false }).ids.at(-1));
    const before = this.decode([this.anchor]), both = this.decode([this.anchor, id]);
    return both.startsWith(before) ? both.slice(before.length) : this.decode([id]);
  }

  // Refuse ids that the model does not have.
  check(ids, context) {
    if (!Array.isArray(ids) || !ids.length) throw new PlaygroundError("input", "The prompt is empty: it has no tokens.");
    const wrong = ids.find((id) => !Number.isInteger(id) || id < 0 || id >= this.vocabulary);
    if (wrong !== undefined) throw new PlaygroundError("input", `${wrong} is no token; the model has ${this.vocabulary}.`);
    if (context && ids.length > context) {
      throw new PlaygroundError("input", `The prompt has ${ids.length} tokens, and the model is made for ${context}.`);
    }
  }
}
