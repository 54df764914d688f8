// The open engine.
let engine = null;

export function setEngine(opened) { engine = opened; }
export function theEngine() { return engine; }
export function tokenText(id) { return engine.tokenText(id); }
