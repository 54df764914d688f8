// Arithmetic of logits.

export function probabilities(logits) {
  let largest = -Infinity, total = 0;
  for (const x of logits) if (x > largest) largest = x;
  const found = Float32Array.from(logits, (x) => Math.exp(x - largest));
  for (const x of found) total += x;
  for (let i = 0; i < found.length; i++) found[i] /= total;
  return found;
}

// What a head makes of its logits: "softmax" (or "") of choices that exclude one another, "sigmoid" of others, "identity" of numbers.
export function chances(logits, activation = "") {
  if (activation === "identity") return Float32Array.from(logits);
  return activation === "sigmoid" ? Float32Array.from(logits, (x) => 1 / (1 + Math.exp(-x))) : probabilities(logits);
}

// Logarithms of the probabilities, in float64.
export function logProbabilities(logits) {
  let largest = -Infinity, total = 0;
  for (const x of logits) if (x > largest) largest = x;
  for (const x of logits) total += Math.exp(x - largest);
  const shift = largest + Math.log(total);
  return Float64Array.from(logits, (x) => x - shift);
}

// KL divergence of `after` from `before`, two vectors of logits, in nats: sum p (log p - log q).
export function kl(before, after) {
  const p = logProbabilities(before), q = logProbabilities(after);
  let sum = 0;
  for (let i = 0; i < p.length; i++) {
    const weight = Math.exp(p[i]);
    if (weight > 0) sum += weight * (p[i] - q[i]);
  }
  return Math.max(sum, 0);
}

// How far two predictions are apart: the KL divergence of `after` from `before`, summed over choices that do not exclude one
// another; of numbers the largest difference.
export function moved(before, after, activation = "") {
  if (activation === "identity") return Math.max(...Array.from(before, (x, i) => Math.abs(after[i] - x)));
  if (activation === "sigmoid") return Array.from(before, (x, i) => kl([x, 0], [after[i], 0])).reduce((a, b) => a + b, 0);
  return kl(before, after);
}

// How alike two embeddings are, by the measure that the model was made for.
export function alike(one, other, measure) {
  const sum = (term) => one.reduce((total, x, i) => total + term(x, other[i]), 0);
  if (measure === "manhattan") return -sum((x, y) => Math.abs(x - y));
  if (measure === "euclidean") return -Math.sqrt(sum((x, y) => (x - y) ** 2));
  const product = sum((x, y) => x * y);
  return measure === "dot" ? product : product / Math.max(1e-12, Math.sqrt(sum((x) => x * x) * sum((_, y) => y * y)));
}

// The k largest entries, as [index, value], the largest first.
export function largest(values, k) {
  const order = [];
  for (let i = 0; i < values.length; i++) {
    if (order.length === k && !(values[i] > order[k - 1][1])) continue;
    let at = order.length;
    while (at > 0 && values[i] > order[at - 1][1]) at--;
    order.splice(at, 0, [i, values[i]]);
    if (order.length > k) order.pop();
  }
  return order;
}

// A source of numbers in [0, 1) that a seed repeats (mulberry32).
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
