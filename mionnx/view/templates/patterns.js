// Attention patterns: what a token reads and what reads it, one head's pattern, and all heads to choose from.
let patterns;
PANELS.Patterns = (part, panel) => {
  const find = (id) => document.getElementById(id);
  part.insertAdjacentHTML("beforeend", `
<p class="faint">Point at a token to see what it reads (blue) and which later tokens read it (red); click to keep it.
Click a small pattern to choose its layer and head, or use the arrow keys. Weights are rounded to 8 bits.
<label><input type="checkbox" id="root"> show small weights (colours on a square-root scale)</label></p>
<h3>what <span id="who1" class="token"></span> reads</h3>
<div class="strip" id="reads"></div>
<div class="list faint token" id="most"></div>
<h3>what reads <span id="who2" class="token"></span></h3>
<div class="strip" id="read"></div>
<div class="row">
  <div>
    <h2 id="which"></h2>
    <div class="framed"><div id="top"></div><div id="left"></div><canvas id="main"></canvas></div>
    <p class="faint">Rows are queries, columns keys: a row is what its token reads.</p>
  </div>
  <div>
    <h2>All heads</h2>
    <div class="gridbox"><div id="grid"></div></div>
  </div>
</div>`);
  const size = panel.tokens.length, heads = panel.heads.length;
  const each = panel.causal ? size * (size + 1) / 2 : size * size;
  const levels = Uint8Array.from(atob(panel.patterns), (letter) => letter.charCodeAt(0));
  const squares = Float32Array.from({ length: 256 }, (_, level) => (level / 255) ** 2);
  let layer = 0, head = 0, kept = size - 1, shown = kept;

  // The weight with which a query reads a key, in a layer and head counted from 0 among those that are shown.
  function weight(i, j, query, key) {
    if (panel.causal && key > query) return 0;
    const place = panel.causal ? query * (query + 1) / 2 + key : query * size + key;
    return squares[levels[(i * heads + j) * each + place]];
  }

  const root = find("root");
  root.checked = size > 40;
  function share(value) { return root.checked ? Math.sqrt(value) : value; }

  let shades;
  function ink() {
    shades = Array.from({ length: 256 }, (_, level) => mix(WHITE, BLUE, share(squares[level])).match(/\d+/g).map(Number));
  }

  function draw(canvas, i, j) {
    canvas.width = canvas.height = size;
    const pen = canvas.getContext("2d"), image = pen.createImageData(size, size), start = (i * heads + j) * each;
    let place = start;
    for (let query = 0; query < size; query++) {
      for (let key = 0; key < size; key++) {
        const at = 4 * (query * size + key);
        if (panel.causal && key > query) continue;  // what lies ahead stays transparent
        const shade = shades[levels[place++]];
        image.data[at] = shade[0];
        image.data[at + 1] = shade[1];
        image.data[at + 2] = shade[2];
        image.data[at + 3] = 255;
      }
    }
    pen.putImageData(image, 0, 0);
  }

  function name(token) { return visible(panel.tokens[token]); }

  const strips = { reads: [], read: [] };
  function strip(id) {
    const box = find(id);
    panel.tokens.forEach((_, token) => {
      const made = element("span", name(token));
      made.addEventListener("mouseenter", () => show(token));
      made.addEventListener("click", () => { kept = token; show(token); });
      explain(made, () => tokenTip(id, token));
      strips[id].push(made);
      box.append(made);
    });
    box.addEventListener("mouseleave", () => show(kept));
  }

  function tokenTip(id, token) {
    const [query, key] = id === "reads" ? [shown, token] : [token, shown];
    return "position " + token + "\n" + name(query) + " reads " + name(key) + ": " + spelled(weight(layer, head, query, key));
  }

  function show(token) {
    shown = token;
    find("who1").textContent = find("who2").textContent = name(token);
    const found = [];
    for (let other = 0; other < size; other++) {
      const reads = weight(layer, head, token, other), read = weight(layer, head, other, token);
      colour(strips.reads[other], mix(WHITE, BLUE, share(reads)), other === token);
      colour(strips.read[other], mix(WHITE, RED, share(read)), other === token);
      found.push([reads, other]);
    }
    const best = found.sort((one, two) => two[0] - one[0]).slice(0, 6).filter(([value]) => value > 0);
    find("most").textContent =
      best.map(([value, other]) => name(other) + " " + spelled(value)).join("   ");
  }

  function colour(span, shade, here) {
    paint(span, shade);
    span.classList.toggle("here", here);
  }

  const thumbnails = [];
  function chooseHead(i, j) {
    thumbnails[layer * heads + head].classList.remove("chosen");
    [layer, head] = [i, j];
    thumbnails[layer * heads + head].classList.add("chosen");
    find("which").textContent = "Layer " + panel.layers[i] + ", head " + panel.heads[j];
    draw(find("main"), i, j);
    show(shown);
  }

  // Thumbnails are drawn when they come into view.
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    watcher.unobserve(entry.target);
    drawThumbnail(entry.target);
  }), { rootMargin: "200px" });

  function drawThumbnail(canvas) {
    canvas.dataset.drawn = "yes";
    draw(canvas, Number(canvas.dataset.layer), Number(canvas.dataset.head));
  }

  function grid() {
    const box = find("grid"), wide = Math.max(26, Math.min(60, Math.floor(520 / heads)));
    box.style.gridTemplateColumns = "max-content repeat(" + heads + ", " + wide + "px)";
    box.append(element("span", "", "side"));
    panel.heads.forEach((number) => box.append(element("span", number, "side")));
    panel.layers.forEach((number, i) => {
      box.append(element("span", number, "side"));
      panel.heads.forEach((other, j) => {
        const canvas = element("canvas");
        canvas.dataset.layer = i;
        canvas.dataset.head = j;
        canvas.addEventListener("click", () => chooseHead(i, j));
        explain(canvas, () => "layer " + number + ", head " + other);
        thumbnails.push(canvas);
        box.append(canvas);
        watcher.observe(canvas);
      });
    });
  }

  function under(event) {
    const box = event.target.getBoundingClientRect();
    const place = (offset, length) => Math.max(0, Math.min(size - 1, Math.floor(offset / length * size)));
    return [place(event.clientY - box.top, box.height), place(event.clientX - box.left, box.width)];
  }

  const main = find("main");
  explain(main, (event) => {
    const [query, key] = under(event);
    return query + " " + name(query) + "\nreads " + key + " " + name(key) + "\n" + spelled(weight(layer, head, query, key));
  });
  main.addEventListener("mousemove", (event) => { const [query] = under(event); if (query !== shown) show(query); });
  main.addEventListener("mouseleave", () => show(kept));
  main.addEventListener("click", (event) => { [kept] = under(event); show(kept); });
  addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    chooseHead((layer + step[0] + panel.layers.length) % panel.layers.length, (head + step[1] + heads) % heads);
    thumbnails[layer * heads + head].scrollIntoView({ block: "nearest" });
  });
  root.addEventListener("change", () => {
    ink();
    thumbnails.filter((canvas) => canvas.dataset.drawn).forEach(drawThumbnail);
    chooseHead(layer, head);
  });

  if (size <= 32) for (const side of ["top", "left"]) {
    panel.tokens.forEach((_, token) => find(side).append(element("span", name(token))));
  }
  ink();
  strip("reads");
  strip("read");
  grid();
  chooseHead(0, 0);
  patterns = { weight, show, chooseHead, thumbnails };
};
