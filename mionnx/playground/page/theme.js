// Light, dark, or as the system says; kept by the browser.
import { find } from "./dom.js";

const NEXT = { "": "dark", dark: "light", light: "" }, NAMES = { "": "Colours: as the system", dark: "Colours: dark", light: "Colours: light" };
const SIGNS = { "": "◐ Auto", dark: "☾ Dark", light: "☀ Light" };

export function listenTheme(changed) {
  const root = document.documentElement, press = find("theme");
  const show = () => {
    const theme = root.dataset.theme || "";
    press.textContent = SIGNS[theme];
    press.title = NAMES[theme];
    press.setAttribute("aria-label", NAMES[theme]);
  };
  press.addEventListener("click", () => {
    const theme = NEXT[root.dataset.theme || ""];
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    try { localStorage.setItem("mionnx-theme", theme); } catch { /* a browser that keeps nothing */ }
    show();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}
