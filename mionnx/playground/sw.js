// The service worker of a playground: the page works without network after the first visit, and with several threads on
// servers that send no COOP and COEP headers.
//
// 1. Files with "?sha256=" in their address, the large ones, are the engine's matter, which keeps them itself.
// 2. Everything else of this folder comes from the network, and is kept; without network it comes from what was kept.
const SHELL = "mionnx-playground-shell";
const HEADERS = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp", "Cross-Origin-Resource-Policy": "same-origin" };
const LARGE = 1e6;

self.addEventListener("install", (event) => {
  event.waitUntil(fill().then(() => self.skipWaiting()));
});
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== "GET" || url.origin !== location.origin || url.searchParams.has("sha256")) return;
  event.respondWith(answer(event.request));
});

async function fill() {
  const cache = await caches.open(SHELL), root = new URL("./", location.href);
  const manifest = await (await fetch(new URL("manifest.json", root))).json();
  const small = Object.entries(manifest.files).filter(([path, { bytes }]) => bytes < LARGE && !path.startsWith("model/")).map(([path]) => path);
  await cache.addAll(["", "manifest.json", ...small].map((path) => new URL(path, root).href));
}

async function answer(request) {
  const cache = await caches.open(SHELL);
  let found;
  try {
    found = await fetch(request);
    if (found.ok && found.type === "basic") await cache.put(request, found.clone());
  } catch (error) {
    found = await cache.match(request, { ignoreSearch: true });
    if (!found) throw error;
  }
  const headers = new Headers(found.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  if (found.status === 0 || found.redirected) return found;
  return new Response(found.body, { status: found.status, statusText: found.statusText, headers });
}
