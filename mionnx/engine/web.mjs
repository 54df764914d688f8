// onnxruntime-web (WASM) under Node, told what to do by lines of JSON on its standard input; one line answers each.
//
//     {"open": MODEL.onnx}                                    -> {}
//     {"run": FILE, "feeds": [{name, type, dims, start, end}], "out": FILE, "names": [..]}  -> {"found": the same}
//
// Both files hold the bytes of the values one after the other. What fails answers {"error": text}.
import { readFileSync, readSync, writeFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";

const ort = createRequire(`${process.argv[2]}/`)("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array,
  float16: Uint16Array,
};
let session = null;

async function open(path) {
  if (session) await session.release();
  session = await ort.InferenceSession.create(readFileSync(path), { executionProviders: ["wasm"] });
  return {};
}

async function run({ run, feeds, out, names }) {
  const bytes = readFileSync(run), given = {}, found = [], parts = [];
  for (const { name, type, dims, start, end } of feeds) {
    const own = bytes.buffer.slice(bytes.byteOffset + start, bytes.byteOffset + end);
    given[name] = new ort.Tensor(type, new ARRAYS[type](own), dims);
  }
  const results = await session.run(given, names);
  let start = 0;
  for (const name of names) {
    const { type, dims, data } = results[name];
    const own = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
    found.push({ name, type, dims, start, end: start + own.length });
    start += own.length;
    parts.push(own);
  }
  writeFileSync(out, Buffer.concat(parts));
  return { found };
}

// Read without Node's streams: with them no line was answered while the pipe stayed open.
let rest = "";
function line() {
  const piece = Buffer.alloc(65536);
  while (!rest.includes("\n")) {
    const size = readSync(0, piece);
    if (size === 0) return null;
    rest += piece.toString("utf8", 0, size);
  }
  const end = rest.indexOf("\n"), found = rest.slice(0, end);
  rest = rest.slice(end + 1);
  return found;
}

for (let asked = line(); asked !== null; asked = line()) {
  let answer;
  try {
    const question = JSON.parse(asked);
    answer = question.open ? await open(question.open) : await run(question);
  } catch (error) {
    answer = { error: String(error) };
  }
  writeSync(1, "\n@" + JSON.stringify(answer) + "\n");
}
