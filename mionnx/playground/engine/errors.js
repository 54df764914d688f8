// Errors that a reader sees: a sentence, and a code for the page.

export const WITHOUT_FLOATS = "without-floats"; // between worker and page: open it again, weights in blocks

export class PlaygroundError extends Error {
  // code: "network", "broken-file", "no-wasm", "memory", "intervention", "input", "engine" or "overtaken"
  constructor(code, message) {
    super(message);
    this.name = "PlaygroundError";
    this.code = code;
  }
}

// An error of the runtime as a sentence.
export function told(error, doing) {
  if (error instanceof PlaygroundError) return error;
  const said = String(error?.message ?? error);
  if (/out of memory|bad_alloc|allocation failed|Array buffer allocation|memory access out of bounds|std::length_error/i.test(said)) {
    return new PlaygroundError("memory", `This browser has not enough memory for ${doing}. Close other tabs, or use a smaller model.`);
  }
  return new PlaygroundError("engine", `The runtime failed at ${doing}: ${said.slice(0, 300)}`);
}
