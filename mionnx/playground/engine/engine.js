// What a page imports: a playground, whose work is done in a worker, so that the page never waits.
import { PlaygroundError, WITHOUT_FLOATS } from "./errors.js";
export { PlaygroundError } from "./errors.js";
export { alike, chances, kl, moved, probabilities } from "./numbers.js";

const RELOADED = "mionnx-isolated";

// Open a playground's folder. onProgress({stage, loaded, total, file, cached}); device: "auto", "wasm" or "webgpu".
export async function open(base = "./", { onProgress = null, device = "auto" } = {}) {
  const address = new URL(base, document.baseURI).href;
  await serviceWorker(address);
  try {
    return await started(address, device, true, onProgress);
  } catch (error) {
    if (error.code !== WITHOUT_FLOATS) throw error;
    return started(address, device, false, onProgress);
  }
}

// floats: whether weights in blocks may be unpacked to floats, where there seems to be memory for them.
async function started(address, device, floats, onProgress) {
  const client = new Client(new Worker(new URL("./worker.js", import.meta.url), { type: "module" }));
  try {
    const found = await client.ask("open", { base: address, device, floats }, { progress: onProgress });
    return new Playground(client, found);
  } catch (error) {
    client.close();
    throw error;
  }
}

// The service worker keeps the page for a visit without network, and isolates it where the server does not: that takes
// one reload, so that the model has several threads.
async function serviceWorker(address) {
  const workers = navigator.serviceWorker;
  if (!workers || !globalThis.isSecureContext) return;
  try {
    await workers.register(new URL("sw.js", address), { scope: new URL("./", address).pathname });
    if (globalThis.crossOriginIsolated || sessionStorage.getItem(RELOADED)) return;
    await workers.ready;
    sessionStorage.setItem(RELOADED, "1");
    location.reload();
    await new Promise(() => {});
  } catch {
    // no service worker here: the page works, with the network and one thread
  }
}

class Client {
  constructor(worker) {
    this.worker = worker;
    this.open = new Map();
    this.count = 0;
    this.queue = [];
    this.busy = false;
    worker.onmessage = ({ data }) => this.heard(data);
    worker.onerror = (event) => {
      event.preventDefault?.();
      const error = new PlaygroundError("engine", `The engine stopped: ${event.message ?? "its script cannot be loaded"}.`);
      for (const { reject } of this.open.values()) reject(error);
      this.open.clear();
    };
  }

  heard({ id, event, detail, result, error }) {
    const call = this.open.get(id);
    if (!call) return;
    if (event) return void call.events[event]?.(detail);
    this.open.delete(id);
    if (error) call.reject(new PlaygroundError(error.code, error.message));
    else call.resolve(result);
  }

  // One call at a time; a later call that is the "latest" of its kind takes the place of one that has not begun.
  ask(verb, asked, events = {}, latest = false, signal = null) {
    return new Promise((resolve, reject) => {
      if (this.closed) return reject(new PlaygroundError("engine", "The playground is closed."));
      if (latest) {
        for (const other of this.queue.filter((one) => one.latest && one.verb === verb)) {
          this.queue.splice(this.queue.indexOf(other), 1);
          other.reject(new PlaygroundError("overtaken", "A later call took this one's place."));
        }
      }
      this.queue.push({ verb, asked, events, latest, signal, resolve, reject });
      this.next();
    });
  }

  next() {
    if (this.busy || !this.queue.length) return;
    const { verb, asked, events, signal, resolve, reject } = this.queue.shift(), id = ++this.count;
    this.busy = true;
    const done = (settle) => (value) => {
      this.busy = false;
      signal?.removeEventListener("abort", abort);
      settle(value);
      this.next();
    };
    const abort = () => this.worker.postMessage({ id, verb: "abort" });
    this.open.set(id, { events, resolve: done(resolve), reject: done(reject) });
    this.worker.postMessage({ id, verb, asked });
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort);
  }

  close() {
    this.closed = true;
    this.worker.terminate();
    const error = new PlaygroundError("engine", "The playground is closed.");
    for (const { reject } of [...this.open.values(), ...this.queue]) reject(error);
    this.queue = [];
    this.open.clear();
  }
}

class Playground {
  #client;
  #texts = new Map();

  constructor(client, { manifest, examples, backend }) {
    this.#client = client;
    this.manifest = manifest;
    this.examples = examples;
    this.backend = backend;
    this.spec = manifest.spec;
  }

  #learn(texts) {
    for (const [id, text] of Object.entries(texts)) this.#texts.set(Number(id), text);
  }

  async encode(text) {
    const { ids, texts } = await this.#client.ask("encode", { text });
    this.#learn(texts);
    return ids;
  }

  decode(ids) {
    return this.#client.ask("decode", { ids });
  }

  async tokenTexts(ids) {
    this.#learn(await this.#client.ask("tokenTexts", { ids }));
    return ids.map((id) => this.tokenText(id));
  }

  // The text of a token that some result has named.
  tokenText(id) {
    return this.#texts.get(id) ?? `#${id}`;
  }

  // The text of one of the head's choices: a label, or a token.
  choiceText(id) {
    return this.manifest.model.labels[id] ?? this.tokenText(id);
  }

  async run({ tokens, interventions = [], want = {}, latest = false }) {
    const { texts, ...result } = await this.#client.ask("run", { tokens, interventions, want }, {}, latest);
    this.#learn(texts);
    if (result.lens) result.lens.at = (layer, position) => this.#cell(result.lens, layer, position);
    return result;
  }

  #cell({ layers, positions, k, ids, probabilities }, layer, position) {
    const start = (layers.indexOf(layer) * positions + position) * k;
    return Array.from({ length: k }, (_, i) => ({ id: ids[start + i], text: this.choiceText(ids[start + i]), probability: probabilities[start + i] }));
  }

  async generate({ tokens, interventions = [], count = 20, temperature = 0, seed = 0, onToken = null, signal = null }) {
    const { texts, ...result } = await this.#client.ask("generate", { tokens, interventions, count, temperature, seed }, { token: onToken }, false, signal);
    this.#learn(texts);
    return result;
  }

  capture({ tokens, interventions = [], hooks }) {
    return this.#client.ask("capture", { tokens, interventions, hooks });
  }

  check(interventions, tokens = null) {
    return this.#client.ask("check", { interventions, tokens });
  }

  exportSpec({ interventions, tokens }) {
    return this.#client.ask("exportSpec", { interventions, tokens });
  }

  close() {
    this.#client.close();
  }
}
