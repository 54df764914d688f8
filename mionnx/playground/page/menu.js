// What opens where the reader points: what is there, and what can be done to it. Escape or a press elsewhere closes it.
import { button, element } from "./dom.js";
import { hideTip } from "./grid.js";

let open = null;

// Opens a menu at an element.
//   title: a text; body: elements; actions: [{ text, press, main }]; back: called with nothing when it closes by keyboard
export function openMenu(anchor, { title, body = [], actions, back = () => anchor.focus() }) {
  closeMenu(false);
  hideTip();
  const close = button("Close", () => closeMenu(true), { class: "quiet" });
  const made = element("div", { class: "menu", role: "dialog", "aria-label": title },
    element("div", { class: "menuhead" }, element("h3", {}, title), close), ...body);
  const list = element("div", { class: "actions" });
  for (const { text, press, main } of actions) {
    list.append(button(text, () => { closeMenu(true); press(); }, { class: main ? "main" : "" }));
  }
  made.append(list);
  document.body.append(made);
  open = { made, back };
  put(made, anchor.getBoundingClientRect());
  made.addEventListener("keydown", (event) => trap(event, made));
  (list.querySelector("button") || close).focus({ preventScroll: true });
}

function put(made, box) {
  const room = innerWidth > 560;
  made.classList.toggle("sheet", !room);
  if (!room) return;
  const below = box.bottom + 8 + made.offsetHeight < innerHeight - 8;
  made.style.left = Math.max(8, Math.min(box.left, innerWidth - made.offsetWidth - 8)) + "px";
  made.style.top = Math.max(8, below ? box.bottom + 8 : box.top - made.offsetHeight - 8) + "px";
}

function trap(event, made) {
  if (event.key !== "Tab") return;
  const all = [...made.querySelectorAll("button, select, input, textarea")];
  const edge = event.shiftKey ? all[0] : all[all.length - 1];
  if (document.activeElement !== edge) return;
  event.preventDefault();
  (event.shiftKey ? all[all.length - 1] : all[0]).focus();
}

export function closeMenu(back) {
  if (!open) return;
  const { made, back: again } = open;
  open = null;
  made.remove();
  if (back) again();
}

addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideTip();
  if (open) { event.preventDefault(); closeMenu(true); }
});
addEventListener("pointerdown", ({ target }) => { if (open && !open.made.contains(target)) closeMenu(false); });
addEventListener("resize", () => closeMenu(false));
