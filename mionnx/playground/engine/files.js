// Files of the folder: fetched with progress, checked, kept in the browser's cache so that a later visit needs no network.
import { PlaygroundError } from "./errors.js";

const CACHE = "mionnx-playground";

export class Files {
  // files: path -> {bytes, sha256}; unpacked: path -> sha256 of what a .gz file holds.
  constructor(base, manifest, onProgress) {
    this.base = base;
    this.known = manifest.files;
    this.unpacked = manifest.engine.unpacked ?? {};
    this.onProgress = onProgress;
    this.loaded = 0;
    this.total = 0;
  }

  expect(paths) {
    for (const path of paths) this.total += this.known[path].bytes;
  }

  url(path) {
    return new URL(path, this.base).href;
  }

  // The bytes of a file, its sha256 checked where the browser can.
  async bytes(path, stage) {
    const { bytes: size, sha256 } = this.known[path];
    const address = `${this.url(path)}?sha256=${sha256.slice(0, 16)}`;
    const cache = await openCache();
    const kept = await cache?.match(address);
    if (kept) {
      const found = new Uint8Array(await kept.arrayBuffer());
      if (found.length === size) {
        this.step(found.length, path, stage, true);
        return found;
      }
      await cache.delete(address);
    }
    const found = await this.download(address, path, size, stage);
    if (!path.endsWith(".gz")) await check(found, sha256, path); // a server may have unpacked it
    if (cache && found.length === size) await keep(cache, address, found);
    return found;
  }

  async text(path, stage) {
    return new TextDecoder().decode(await this.bytes(path, stage));
  }

  // A .gz file unpacked; some servers say "Content-Encoding: gzip" for such a file, and the browser has unpacked it then.
  async gunzipped(path, stage) {
    const found = await this.bytes(path, stage);
    let data = found;
    if (found[0] === 0x1f && found[1] === 0x8b) {
      if (typeof DecompressionStream === "undefined") {
        throw new PlaygroundError("no-wasm", "This browser is too old for this page: it cannot unpack gzip (DecompressionStream).");
      }
      const stream = new Blob([found]).stream().pipeThrough(new DecompressionStream("gzip"));
      try {
        data = new Uint8Array(await new Response(stream).arrayBuffer());
      } catch {
        throw broken(path);
      }
    }
    await check(data, this.unpacked[path], path);
    return data;
  }

  async download(address, path, size, stage) {
    let response;
    try {
      response = await fetch(address);
    } catch {
      throw new PlaygroundError("network", `${path} cannot be loaded: there is no connection to the server, and this browser has not kept it.`);
    }
    if (!response.ok) throw new PlaygroundError("network", `${path} cannot be loaded: the server says ${response.status} ${response.statusText}.`.replace(" .", "."));
    const before = this.loaded;
    let found;
    try {
      found = await this.read(response, path, size, stage);
    } catch (error) {
      if (error instanceof PlaygroundError) throw error;
      throw new PlaygroundError("network", `${path} cannot be loaded: the connection ended after ${this.loaded - before} of ${size} bytes.`);
    }
    this.loaded = before;
    this.step(size, path, stage, false);
    return found;
  }

  async read(response, path, size, stage) {
    let data, filled = 0;
    try {
      data = new Uint8Array(size);
    } catch {
      throw new PlaygroundError("memory", `This browser has not enough memory for ${path} (${(size / 1e6).toFixed(0)} MB). Close other tabs, or use a smaller model.`);
    }
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (filled + value.length > data.length) { // unpacked on the way
        const wider = new Uint8Array(Math.max(2 * data.length, filled + value.length));
        wider.set(data.subarray(0, filled));
        data = wider;
      }
      data.set(value, filled);
      filled += value.length;
      this.step(Math.min(value.length, size), path, stage, false);
    }
    if (filled < size) throw broken(path);
    return data.length === filled ? data : data.slice(0, filled);
  }

  step(bytes, path, stage, cached) {
    this.loaded += bytes;
    this.onProgress?.({ stage, loaded: Math.min(this.loaded, this.total), total: this.total, file: path, cached });
  }
}

function broken(path) {
  return new PlaygroundError("broken-file", `${path} is not the file that belongs to this page: it is damaged, or of another version. Reload the page, or write the folder again.`);
}

// sha256 of the data; crypto.subtle exists on https and localhost only.
async function check(data, sha256, path) {
  if (!globalThis.crypto?.subtle || !sha256) return;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  if (hex(digest) !== sha256) throw broken(path);
}

export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function openCache() {
  try {
    return await globalThis.caches?.open(CACHE);
  } catch {
    return undefined; // private windows of some browsers
  }
}

async function keep(cache, address, data) {
  try {
    const plain = address.split("?")[0];
    for (const old of await cache.keys()) if (old.url !== address && old.url.split("?")[0] === plain) await cache.delete(old);
    await cache.put(address, new Response(data));
  } catch {
    // the browser's quota is full: the file is loaded anew next time
  }
}
