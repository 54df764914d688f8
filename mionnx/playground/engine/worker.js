// The engine's worker: one message asks, one answers; what a call says meanwhile goes as {id, event, detail}.
import { Core } from "./core.js";
import { told } from "./errors.js";

let core = null;
const aborted = new Set();

const VERBS = {
  async open({ base, device, floats }, say) {
    core = await Core.open({ base, device, floats, onProgress: (detail) => say("progress", detail) });
    return { manifest: core.manifest, examples: core.examples, backend: core.backend };
  },
  encode: ({ text }) => {
    const ids = core.tokens.encode(text);
    return { ids, texts: core.textsOf(ids) };
  },
  decode: ({ ids }) => core.tokens.decode(ids),
  tokenTexts: ({ ids }) => core.textsOf(ids),
  run: (asked) => core.run(asked),
  capture: (asked) => core.capture(asked),
  check: (asked) => core.check(asked),
  exportSpec: (asked) => core.exportSpec(asked),
  generate: (asked, say, id) => core.generate(asked, (detail) => say("token", detail), () => aborted.delete(id)),
};

self.onmessage = async ({ data: { id, verb, asked } }) => {
  if (verb === "abort") return void aborted.add(id);
  try {
    const result = await VERBS[verb](asked, (event, detail) => self.postMessage({ id, event, detail }), id);
    self.postMessage({ id, result });
  } catch (error) {
    const { code, message } = told(error, verb);
    self.postMessage({ id, error: { code, message } });
  } finally {
    aborted.delete(id);
  }
};
