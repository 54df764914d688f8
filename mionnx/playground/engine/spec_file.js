// Spec files: safetensors with a declaration and a checksum, as mionnx' HookSpec.save writes and HookSpec.load reads them.
import { PlaygroundError } from "./errors.js";
import { hex } from "./files.js";

const WIDTHS = { F32: 4, F64: 8, I64: 8, I32: 4, F16: 2, BF16: 2, U8: 1, BOOL: 1 };

// name -> {shape, data: Float32Array}
export function readTensors(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const size = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size)));
  const tensors = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [start, end] = entry.data_offsets;
    tensors[name] = { shape: entry.shape, data: numbers(bytes.slice(8 + size + start, 8 + size + end), entry.dtype, name) };
  }
  return tensors;
}

function numbers(bytes, dtype, name) {
  const view = new DataView(bytes.buffer);
  const read = {
    F32: (i) => view.getFloat32(i, true),
    F64: (i) => view.getFloat64(i, true),
    I32: (i) => view.getInt32(i, true),
    I64: (i) => Number(view.getBigInt64(i, true)),
    F16: (i) => half(view.getUint16(i, true)),
    BF16: (i) => bfloat(view.getUint16(i, true)),
    U8: (i) => view.getUint8(i),
    BOOL: (i) => view.getUint8(i),
  }[dtype];
  if (!read) throw new PlaygroundError("input", `${name} is of dtype ${dtype}, which this page does not read.`);
  return Float32Array.from({ length: bytes.length / WIDTHS[dtype] }, (_, i) => read(i * WIDTHS[dtype]));
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function bfloat(bits) {
  return new Float32Array(new Uint32Array([bits << 16]).buffer)[0];
}

// The bytes of a spec file.
// entries: of the declaration, without values; tensors: name -> {shape, data: Float32Array}.
export async function specBytes(entries, tensors) {
  const names = Object.keys(tensors).sort();
  const header = {}, parts = [];
  let start = 0;
  for (const name of names) {
    const { shape, data } = tensors[name];
    header[name] = { dtype: "F32", shape, data_offsets: [start, start + data.byteLength] };
    start += data.byteLength;
    parts.push(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  }
  const declaration = asPython({ captures: [], interventions: entries });
  const metadata = { declaration, mionnx_spec: "1" };
  const values = joined(parts);
  if (globalThis.crypto?.subtle) {
    const unsigned = new TextEncoder().encode(asPython(sorted({ ...header, __metadata__: metadata })));
    metadata.mionnx_sha256 = hex(new Uint8Array(await crypto.subtle.digest("SHA-256", joined([values, unsigned]))));
  }
  const text = new TextEncoder().encode(asPython(sorted({ ...header, __metadata__: metadata })));
  const padded = new Uint8Array(Math.ceil(text.length / 8) * 8).fill(32);
  padded.set(text);
  const size = new Uint8Array(8);
  new DataView(size.buffer).setBigUint64(0, BigInt(padded.length), true);
  return joined([size, padded, values]);
}

function sorted(value) {
  if (Array.isArray(value) || value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
}

// JSON as Python's json.dumps writes it: a space after "," and ":", ASCII alone.
function asPython(value) {
  if (Array.isArray(value)) return `[${value.map(asPython).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([key, entry]) => `${asPython(key)}: ${asPython(entry)}`).join(", ")}}`;
  }
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

function joined(parts) {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
