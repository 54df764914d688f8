// Runs model.onnx in onnxruntime-web (WASM) under Node: FEEDS.json in, OUT.json out, every output by its name.
//
//     node web_runner.mjs MODEL.onnx FEEDS.json OUT.json
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const [model, feeds, out] = process.argv.slice(2);
const ort = createRequire(`${process.cwd()}/`)("onnxruntime-web");
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(model), { executionProviders: ["wasm"] });
const given = {};
for (const [name, { type, dims, data }] of Object.entries(JSON.parse(readFileSync(feeds)))) {
  const values = type === "int64" ? BigInt64Array.from(data, BigInt) : Float32Array.from(data);
  given[name] = new ort.Tensor(type, values, dims);
}
const found = await session.run(given);
const text = {};
for (const [name, tensor] of Object.entries(found)) text[name] = { dims: tensor.dims, data: Array.from(tensor.data, Number) };
writeFileSync(out, JSON.stringify(text));
