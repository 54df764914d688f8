// onnxruntime-web's WebGPU in a page, told what to do by the process that serves it (`browser.py`): a question is JSON,
// an answer a line of JSON and the bytes of values one after the other.
//
//     {"adapter": true}                                             -> {vendor, description, float16}, or {} without one
//     {"open": true}, the model at "model"                          -> {log: lines of ONNX Runtime on where nodes run}
//     {"feeds": [{name, type, dims, start, end}], "names": [..]}, their bytes at "feeds"   -> {values: the same}
//
// What fails answers {"error": text}.
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array,
  float16: globalThis.Float16Array ?? Uint16Array,
};
const log = [];
for (const kind of ["log", "debug", "info", "warn", "error"]) console[kind] = (...said) => log.push(said.join(" "));

let ort = null, session = null;

async function adapter() {
  const found = await navigator.gpu?.requestAdapter();
  if (!found) return {};
  const { vendor, architecture, description } = found.info;
  return { vendor, description: description || architecture, float16: found.features.has("shader-f16") };
}

async function bytes(name) {
  return (await fetch(name)).arrayBuffer();
}

async function open() {
  ort ??= await import(new URL("dist/ort.webgpu.min.mjs", location.href).href);
  ort.env.wasm.wasmPaths = new URL("dist/", location.href).href;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "verbose"; // it says which nodes run where
  log.length = 0;
  session = await ort.InferenceSession.create(new Uint8Array(await bytes("model")), { executionProviders: ["webgpu"], logSeverityLevel: 0 });
  return { log: log.filter((line) => line.includes("VerifyEachNodeIsAssignedToAnEp")) };
}

async function run({ feeds, names }) {
  const data = await bytes("feeds"), given = {}, found = [], parts = [];
  for (const { name, type, dims, start, end } of feeds) given[name] = new ort.Tensor(type, new ARRAYS[type](data.slice(start, end)), dims);
  const results = await session.run(given, names);
  let start = 0;
  for (const name of names) {
    const { type, dims } = results[name], own = await results[name].getData();
    parts.push(new Uint8Array(own.buffer.slice(own.byteOffset, own.byteOffset + own.byteLength)));
    found.push({ name, type, dims, start, end: start + own.byteLength });
    start += own.byteLength;
  }
  return [{ values: found }, ...parts];
}

async function answered(question) {
  try {
    const answer = question.adapter ? await adapter() : question.open ? await open() : await run(question);
    return Array.isArray(answer) ? answer : [answer];
  } catch (error) {
    return [{ error: String(error?.message ?? error) }];
  }
}

for (;;) {
  const asked = await fetch("question");
  if (asked.status === 204) continue;
  const [said, ...parts] = await answered(await asked.json());
  await fetch("answer", { method: "POST", body: new Blob([JSON.stringify(said) + "\n", ...parts]) });
}
