// A session of onnxruntime-web: WASM, with threads where the page is isolated; WebGPU where it gives the same numbers.
import { PlaygroundError, told } from "./errors.js";

const RUNTIME = "vendor/onnxruntime-web/";
const KINDS = {
  wasm: { script: "ort.wasm.min.mjs", loader: "ort-wasm-simd-threaded.mjs", binary: "ort-wasm-simd-threaded.wasm.gz" },
  webgpu: { script: "ort.webgpu.min.mjs", loader: "ort-wasm-simd-threaded.asyncify.mjs", binary: "ort-wasm-simd-threaded.asyncify.wasm.gz" },
};
const MOST_THREADS = 4, LARGEST_HEAP = 3 * 2 ** 30;

export function runtimeFiles(device) {
  return [RUNTIME + KINDS[device].binary];
}

export function refuseWithoutWasm() {
  if (typeof WebAssembly !== "object") {
    throw new PlaygroundError("no-wasm", "This browser does not run WebAssembly, which the model needs. Another browser, or its settings, may.");
  }
}

// The library, its WASM unpacked and given to it.
export async function loadRuntime(files, device) {
  const { script, loader, binary } = KINDS[device];
  const wasmBinary = await files.gunzipped(RUNTIME + binary, "runtime");
  let ort;
  try {
    ort = await import(files.url(RUNTIME + script));
  } catch {
    throw new PlaygroundError("network", `${RUNTIME + script} cannot be loaded.`);
  }
  const isolated = globalThis.crossOriginIsolated === true;
  const cores = globalThis.navigator?.hardwareConcurrency || 1;
  ort.env.wasm.wasmBinary = wasmBinary.buffer;
  ort.env.wasm.wasmPaths = { mjs: files.url(RUNTIME + loader) };
  ort.env.wasm.numThreads = isolated ? Math.min(MOST_THREADS, cores) : 1;
  ort.env.logLevel = "error";
  return { ort, threads: ort.env.wasm.numThreads, isolated };
}

// Open the model.
export async function openSession(ort, model, weights, device) {
  const options = {
    executionProviders: [device],
    externalData: weights.map(({ path, data }) => ({ path, data })),
    logSeverityLevel: 3,
    graphOptimizationLevel: "all",
    extra: { session: { disable_quant_qdq: "1" } }, // weights that are to be floats are unpacked now, not in every run
  };
  try {
    return await ort.InferenceSession.create(model, options);
  } catch (error) {
    throw told(error, "opening the model");
  }
}

const ARRAYS = { float32: Float32Array, int64: BigInt64Array };

// Run: feeds are name -> {dims, data, type?}; outputs name -> {dims, data}.
export async function runSession(ort, session, feeds, fetches) {
  const given = {};
  for (const [name, { dims, data, type = "float32" }] of Object.entries(feeds)) {
    given[name] = new ort.Tensor(type, data instanceof ARRAYS[type] ? data : ARRAYS[type].from(data), dims);
  }
  try {
    const found = await session.run(given, fetches);
    const outputs = {};
    for (const name of fetches) outputs[name] = { dims: found[name].dims, data: found[name].data };
    return outputs;
  } catch (error) {
    throw told(error, "running the model");
  }
}

// Whether there is memory for weights of so many bytes, held twice for a moment. Browsers tell the machine's memory in
// GiB, at most 8, or not at all; a phone's pages may have little of it.
export function hasMemory(bytes) {
  const { deviceMemory = 4, userAgent = "", maxTouchPoints = 0 } = globalThis.navigator ?? {};
  const phone = /Android|iPhone|iPad|Mobi/.test(userAgent) || (/Macintosh/.test(userAgent) && maxTouchPoints > 1);
  return !phone && 2 * bytes <= Math.min((deviceMemory / 2) * 2 ** 30, LARGEST_HEAP);
}

// Whether there is a graphics processor to try: not a software one, which is slower than WASM.
export async function hasGpu() {
  try {
    const adapter = await globalThis.navigator?.gpu?.requestAdapter();
    return Boolean(adapter) && !(adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter ?? false);
  } catch {
    return false;
  }
}
