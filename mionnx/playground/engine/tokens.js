// Text to tokens and back, by Hugging Face's tokenizers.js.
import { PlaygroundError } from "./errors.js";

export class Tokens {
  // Tokenizer: the library's class; its files parsed; vocabulary: number of tokens.
  constructor(Tokenizer, tokenizer, config, vocabulary) {
    this.library = new Tokenizer(tokenizer, { ...config, clean_up_tokenization_spaces: false });
    this.vocabulary = vocabulary;
    this.texts = new Map();
  }

  encode(text) {
    if (typeof text !== "string") throw new PlaygroundError("input", "A prompt is a text.");
    return Array.from(this.library.encode(text).ids, Number);
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
    this.anchor ??= this.encode("a").at(-1);
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
