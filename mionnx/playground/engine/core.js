// The engine itself, in a worker: opens a playground's folder, runs the model, looks inside and changes it.
import { PlaygroundError, told, WITHOUT_FLOATS } from "./errors.js";
import { Files } from "./files.js";
import { inputs, stored } from "./feeds.js";
import { edits, needed, valueOf } from "./interventions.js";
import { chances, largest, probabilities, random } from "./numbers.js";
import { hasGpu, hasMemory, loadRuntime, openSession, refuseWithoutWasm, runSession, runtimeFiles } from "./session.js";
import { readTensors, specBytes } from "./spec_file.js";
import { Tokens } from "./tokens.js";

const FORMAT = 1, MOST = 50, DEFAULT_TOP = 10, LENS_ROWS = 256, KEPT_CAPTURES = 64;
const LARGE = 50e6; // bytes of weights from which a graphics processor is tried unasked
const TOKENIZER = ["model/tokenizer.json", "model/tokenizer_config.json"], GRAPH = "model/model.onnx", SPEC = "spec.safetensors";
const OF_ROWS = ["logits", "mionnx.rows.top", "mionnx.rows.top_ids", "mionnx.rows.tracked_log_probs"]; // outputs of a head that reads rows

export class Core {
  // base: address of the folder; device: "auto", "wasm" or "webgpu"; see engine.js.
  static async open({ base, device, floats, onProgress }) {
    refuseWithoutWasm();
    const core = new Core();
    core.manifest = await json(new URL("manifest.json", base), "manifest.json");
    if (core.manifest.format !== FORMAT) throw new PlaygroundError("broken-file", `manifest.json has format ${core.manifest.format}; this page reads ${FORMAT}. Write the folder again.`);
    core.examples = (await json(new URL("examples.json", base), "examples.json")).examples;
    core.files = new Files(base, core.manifest, onProgress);
    await core.load(device, floats, onProgress);
    onProgress?.({ stage: "ready", loaded: core.files.total, total: core.files.total, file: "", cached: false });
    return core;
  }

  async load(device, floats, onProgress) {
    const { manifest, files } = this, large = manifest.model.bytes >= LARGE;
    const gpu = device === "webgpu" || (device === "auto" && large && (await hasGpu()));
    const parts = manifest.engine.weights.flatMap(({ parts: names }) => names), unpacked = manifest.engine.floats;
    const graph = floats && unpacked && !gpu && hasMemory(unpacked.bytes) ? unpacked.graph : GRAPH;
    const more = manifest.files[SPEC] ? [SPEC] : [];
    files.expect([...runtimeFiles(gpu ? "webgpu" : "wasm"), ...TOKENIZER, ...more, graph, ...parts]);
    await this.loadTokenizer();
    this.tensors = more.length ? readTensors(await files.bytes(SPEC, "model")) : {};
    this.captured = new Map();
    const note = gpu ? await this.tryGpu(device, onProgress) : null;
    if (graph !== GRAPH) await this.openFloats(graph, onProgress);
    if (!this.session) await this.openOn("wasm", GRAPH, onProgress);
    this.backend.note = note ?? this.backend.note;
  }

  // Open with weights that are floats in memory. A runtime that found too little memory is of no more use: engine.js
  // begins again in another worker, with weights in blocks, which are slower.
  async openFloats(graph, onProgress) {
    try {
      await this.openOn("wasm", graph, onProgress);
    } catch (error) {
      if (["network", "broken-file"].includes(error.code)) throw error;
      throw new PlaygroundError(WITHOUT_FLOATS, error.message);
    }
  }

  async loadTokenizer() {
    const [tokenizer, config] = await Promise.all(TOKENIZER.map((path) => this.files.text(path, "tokenizer")));
    const { Tokenizer } = await import(this.files.url("vendor/huggingface-tokenizers/tokenizers.min.mjs"));
    this.tokens = new Tokens(Tokenizer, JSON.parse(tokenizer), JSON.parse(config), this.manifest.model);
  }

  // Open on the graphics processor; why not, as a sentence, where it fails or gives other numbers.
  async tryGpu(device, onProgress) {
    try {
      await this.openOn("webgpu", GRAPH, onProgress);
      return null;
    } catch (error) {
      if (["network", "broken-file"].includes(error.code)) throw error;
      await this.session?.release?.();
      this.session = null;
      this.files.expect(runtimeFiles("wasm"));
      const asked = device === "webgpu" ? "WebGPU was asked for, and " : "";
      return `${asked}WebGPU is not used: ${error.message} The model runs on WebAssembly.`;
    }
  }

  async openOn(device, graph, onProgress) {
    const { files, manifest } = this;
    const { ort, threads, isolated } = await loadRuntime(files, device);
    const model = await files.bytes(graph, "model");
    const weights = [];
    for (const { path, parts } of manifest.engine.weights) weights.push({ path, data: await this.whole(parts) });
    onProgress?.({ stage: "starting", loaded: files.total, total: files.total, file: "", cached: false });
    this.ort = ort;
    this.session = await openSession(ort, model, weights, device);
    const note = isolated || device === "webgpu" ? null : "This page is not isolated (its server sends no COOP and COEP headers), so the model has one thread.";
    const held = device === "wasm" && graph !== GRAPH ? "float32" : manifest.model.weights;
    this.backend = { name: device, threads, isolated, note, weights: held };
    await this.agree();
  }

  async whole(parts) {
    const size = parts.reduce((sum, path) => sum + this.manifest.files[path].bytes, 0);
    let data;
    try {
      data = new Uint8Array(size);
    } catch {
      throw new PlaygroundError("memory", `This browser has not enough memory for the model (${(size / 1e6).toFixed(0)} MB). Close other tabs, or use a smaller model.`);
    }
    let at = 0;
    for (const path of parts) {
      data.set(await this.files.bytes(path, "model"), at);
      at += this.manifest.files[path].bytes;
    }
    return data;
  }

  // Compare with the logits that ONNX Runtime found when the folder was written.
  async agree() {
    const { tokens, ids, tolerance, runs } = this.manifest.engine.check;
    for (const { interventions, logits } of runs) {
      const found = await this.pass(tokens, await this.prepared(interventions), this.oneRow(tokens));
      const output = found[this.manifest.engine.output].data, worst = Math.max(...ids.map((id, i) => Math.abs(output[id] - logits[i])));
      if (!(worst <= tolerance)) {
        throw new PlaygroundError("engine", `its logits differ by ${worst.toPrecision(2)} from those that the model should give (${tolerance.toPrecision(2)} is allowed).`);
      }
    }
  }

  // The row of the last layer's stream at a position of a text, its last one if none is said.
  oneRow(tokens, position = tokens.length - 1) {
    return { rows: [(this.manifest.model.layers - 1) * tokens.length + position], whole: [0] };
  }

  // Edits and their values, the activations of other prompts captured.
  async prepared(entries) {
    const all = edits(entries, this.manifest);
    for (const [text, hooks] of needed(all)) await this.remember(text, [...hooks]);
    const values = all.map((edit) => valueOf(edit, (text, hook) => this.captured.get(text).get(hook), this.tensors));
    while (this.captured.size > KEPT_CAPTURES) this.captured.delete(this.captured.keys().next().value);
    return { all, values };
  }

  async remember(text, hooks) {
    const known = this.captured.get(text) ?? new Map();
    const missing = hooks.filter((hook) => !known.has(hook));
    if (missing.length) {
      const tokens = this.tokens.encode(text);
      this.tokens.check(tokens, this.manifest.model.context);
      for (const [hook, found] of Object.entries(await this.captures(tokens, { all: [], values: [] }, missing))) known.set(hook, found);
    }
    this.captured.delete(text); // the one asked for last is the last in the map
    this.captured.set(text, known);
  }

  async captures(tokens, prepared, hooks) {
    const found = await this.pass(tokens, prepared, this.oneRow(tokens), hooks);
    return Object.fromEntries(hooks.map((hook) => [hook, { shape: [...found[hook].dims], data: Float32Array.from(found[hook].data) }]));
  }

  // One pass: {rows, whole, k, tracked, mapped} as the graph's inputs, where it has them; past: {start, prompt, length, feeds} of a generation.
  async pass(tokens, { all, values }, { rows, whole, k = 1, tracked = [], mapped = [] }, fetches = [], past = null) {
    const start = past?.start ?? 0, count = tokens.length;
    const call = { start, count, prompt: past?.prompt ?? count, length: past?.length ?? count, generating: Boolean(past) };
    const { engine } = this.manifest;
    const whole64 = (numbers) => ({ type: "int64", dims: [numbers.length], data: BigInt64Array.from(numbers, BigInt) });
    const row64 = (numbers) => ({ ...whole64(numbers), dims: [1, numbers.length] });
    const feeds = {
      ...inputs(all, values, this.manifest, call),
      input_ids: row64(tokens),
      attention_mask: row64(Array(start + count).fill(1)),
      position_ids: row64(Array.from({ length: count }, (_, i) => start + i)),
      token_type_ids: row64(this.tokens.types(tokens)),
      "mionnx.rows": whole64(rows), "mionnx.rows.whole": whole64(whole), "mionnx.rows.k": whole64([k]), "mionnx.rows.tracked": whole64(tracked),
      "mionnx.rows.mapped": whole64(mapped),
    };
    for (const { input, dims } of engine.past) feeds[input] = past?.feeds?.[input] ?? { dims, data: new Float32Array(0) };
    const known = new Set(this.session.inputNames);
    for (const name of Object.keys(feeds)) if (!known.has(name)) delete feeds[name];
    return runSession(this.ort, this.session, feeds, [...(engine.positional ? OF_ROWS : [engine.output]), ...fetches]);
  }

  // want: {top, track, patterns, lens, mapped, position}; mapped: whether streams go through the page's lens before they are read;
  // position: of the token that is read, the last one if none is said.
  async run({ tokens, interventions = [], want = {} }) {
    this.tokens.check(tokens, this.manifest.model.context);
    const begun = performance.now(), { layers, choices } = this.manifest.model, { positional } = this.manifest.engine;
    if (want.lens && !positional) throw new PlaygroundError("input", "This model says something of a whole text: its head reads no token alone, so that there is no lens.");
    if (want.position !== undefined && !tokens.hasOwnProperty(want.position)) throw new PlaygroundError("input", `The prompt has no position ${want.position}; it has ${tokens.length} tokens.`);
    const prepared = await this.prepared(interventions);
    const k = Math.min(Math.max(1, want.top ?? DEFAULT_TOP), MOST, choices), tracked = this.checkIds(want.track ?? []);
    const shown = chosenLayers(want.patterns, this.manifest.engine.layers), names = shown.map((layer) => this.manifest.patterns[this.manifest.engine.layers.indexOf(layer)]);
    const read = chosenLayers(want.lens, want.mapped ? this.mappedLayers() : Array.from({ length: layers }, (_, i) => i));
    const rows = read.flatMap((layer) => tokens.map((_, position) => this.stackedLayer(layer, want.mapped) * tokens.length + position));
    const mapped = want.mapped ? [...tokens.keys()] : [], asked = { whole: [0], k, tracked, mapped };
    const first = [...this.oneRow(tokens, want.position).rows, ...rows.slice(0, LENS_ROWS)];
    const found = [await this.pass(tokens, prepared, { ...asked, rows: first }, names)];
    for (let at = LENS_ROWS; at < rows.length; at += LENS_ROWS) found.push(await this.pass(tokens, prepared, { ...asked, rows: rows.slice(at, at + LENS_ROWS) }));
    const result = this.result(found, k, { layers: read, positions: tokens.length, tracked: tracked.length, mapped: mapped.length > 0 });
    result.patterns = Object.fromEntries(shown.map((layer, i) => [layer, Float32Array.from(found[0][names[i]].data)]));
    const said = this.manifest.model.labels.length ? [] : [...tracked, ...result.next.map(({ id }) => id), ...(result.lens?.ids ?? [])];
    return { ...result, tokens, texts: this.textsOf([...tokens, ...said]), ms: performance.now() - begun };
  }

  // The layers that the page's lens maps to the last one, and that one, which is read as it is.
  mappedLayers() {
    const lens = this.manifest.engine.lens, last = this.manifest.model.layers - 1;
    if (!lens) throw new PlaygroundError("input", "This page has no lens but the logit lens.");
    return lens.layers.includes(last) ? lens.layers : [...lens.layers, last];
  }

  // Where a layer's rows stand in the graph's stack of streams: behind all streams those that the lens maps.
  stackedLayer(layer, mapped) {
    const at = mapped ? this.manifest.engine.lens.layers.indexOf(layer) : -1;
    return at < 0 ? layer : this.manifest.model.layers + at;
  }

  checkIds(ids) {
    if (ids.length) this.tokens.check(ids, null);
    return ids;
  }

  result(found, k, { layers, positions, tracked, mapped }) {
    const { head, activation, labels } = this.manifest.model;
    const logits = Float32Array.from(found[0][this.manifest.engine.output].data), shares = head === "embedding" ? [] : chances(logits, activation);
    // A head of whole texts has no rows, and an embedding no choices.
    const next = largest(shares, k).map(([id, probability]) => ({ id, text: labels.length ? labels[id] : this.tokens.text(id), probability }));
    if (!layers.length) return { logits, next, lens: null };
    const after = (name, width, make) => { // the first row is that of the next token
      const all = found.flatMap((one, i) => [one[name].data.subarray(i ? 0 : width)]);
      const made = new make(layers.length * positions * width);
      let at = 0;
      for (const part of all) { made.set(part, at); at += part.length; }
      return made;
    };
    return {
      logits, next,
      lens: {
        layers, positions, k, mapped, tracked: after("mionnx.rows.tracked_log_probs", tracked, Float32Array).map(Math.exp),
        ids: after("mionnx.rows.top_ids", k, Int32Array), probabilities: after("mionnx.rows.top", k, Float32Array).map(Math.exp),
      },
    };
  }

  textsOf(ids) {
    return Object.fromEntries([...new Set(ids)].map((id) => [id, this.tokens.text(id)]));
  }

  async capture({ tokens, interventions = [], hooks }) {
    this.tokens.check(tokens, this.manifest.model.context);
    const known = [...Object.keys(this.manifest.hooks), ...this.manifest.patterns];
    for (const hook of hooks) if (!known.includes(hook)) throw new PlaygroundError("intervention", `${hook} cannot be read on this page.`);
    return this.captures(tokens, await this.prepared(interventions), hooks);
  }

  // Generate token by token; onToken({id, text, index}) and aborted() are the caller's.
  async generate({ tokens, interventions = [], count = 20, temperature = 0, seed = 0 }, onToken, aborted) {
    if (!this.manifest.engine.past.length) throw new PlaygroundError("input", "This model reads each text whole: it continues none.");
    this.tokens.check(tokens, this.manifest.model.context);
    const prepared = await this.prepared(interventions), next = random(seed), { context, end_tokens: ends } = this.manifest.model;
    const ids = [], outputs = this.manifest.engine.past.map(({ output }) => output);
    const most = Math.min(count, (context ?? Infinity) - tokens.length), length = tokens.length + Math.max(most, 1) - 1; // the last token is not read
    let past = { start: 0, prompt: tokens.length, length, feeds: null }, given = tokens, stopped = "count";
    while (ids.length < most) {
      if (aborted()) { stopped = "aborted"; break; }
      const found = await this.pass(given, prepared, this.oneRow(given), outputs, past);
      const id = sample(found.logits.data, temperature, next);
      if (ends.includes(id)) { stopped = "end"; break; }
      ids.push(id);
      onToken({ id, text: this.continuation(tokens, ids), index: ids.length - 1 });
      const feeds = Object.fromEntries(this.manifest.engine.past.map(({ input, output }) => [input, { dims: found[output].dims, data: found[output].data }]));
      past = { ...past, start: past.start + given.length, feeds };
      given = [id];
      await new Promise((done) => setTimeout(done)); // let a message to abort come in
    }
    return { ids, text: this.continuation(tokens, ids), stopped, texts: this.textsOf(ids) };
  }

  // The text of new tokens: what they add to the prompt's.
  continuation(tokens, ids) {
    const before = this.tokens.decode(tokens), both = this.tokens.decode([...tokens, ...ids]);
    return both.startsWith(before) ? both.slice(before.length) : this.tokens.decode(ids);
  }

  // For every entry null, or why it cannot apply: by itself, or, where it is on, together with the others that are.
  async check({ interventions, tokens = null }) {
    const found = interventions.map(() => null), count = tokens?.length;
    const tried = async (entries) => {
      const { all, values } = await this.prepared(entries), generating = this.manifest.engine.past.length > 0 && entries.some((entry) => entry?.positions === "generated");
      if (tokens) inputs(all, values, this.manifest, { start: 0, count, prompt: count, length: count + generating, generating });
    };
    const together = () => interventions.filter((entry, i) => entry?.on !== false && !found[i]);
    for (const [i, entry] of interventions.entries()) found[i] = await tried([{ ...entry, on: true }]).then(() => null, (error) => told(error, "checking").message);
    for (let wrong = -1; ; ) {
      try {
        await tried(together());
        return found;
      } catch (error) {
        wrong = interventions.indexOf(error.entry);
        if (wrong < 0) throw error;
        found[wrong] = error.message;
      }
    }
  }

  async exportSpec({ interventions, tokens }) {
    const { all, values } = await this.prepared(interventions), entries = [], tensors = {};
    all.forEach((edit, n) => {
      const [entry, parts] = stored(edit, values[n], tokens.length, this.manifest.engine.both);
      entries.push(entry);
      for (const [name, tensor] of Object.entries(parts)) tensors[`interventions.${n}.${name}`] = tensor;
    });
    return specBytes(entries, tensors);
  }
}

function chosenLayers(asked, all) {
  if (asked === true) return all;
  if (!asked) return [];
  for (const layer of asked) if (!all.includes(layer)) throw new PlaygroundError("input", `There is no layer ${layer} to read; there are ${all.length}.`);
  return asked;
}

function sample(logits, temperature, next) {
  if (!(temperature > 0)) return largest(logits, 1)[0][0];
  const chances = probabilities(logits.map((x) => x / temperature));
  let left = next();
  for (let i = 0; i < chances.length; i++) {
    left -= chances[i];
    if (left < 0) return i;
  }
  return largest(logits, 1)[0][0];
}

async function json(url, name) {
  let response;
  try {
    response = await fetch(url);
  } catch {
    throw new PlaygroundError("network", `${name} cannot be loaded: there is no connection to the server, and this browser has not kept it.`);
  }
  if (!response.ok) throw new PlaygroundError("network", `${name} cannot be loaded: the server says ${response.status}.`);
  try {
    return await response.json();
  } catch {
    throw new PlaygroundError("broken-file", `${name} is damaged: it is no JSON. Write the folder again.`);
  }
}
