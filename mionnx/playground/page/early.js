// Runs before anything is drawn: the reader's colours, and a sentence where the page cannot work at all.
(function () {
  try {
    var theme = localStorage.getItem("mionnx-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch (blocked) { /* a browser that keeps nothing: the system's colours */ }
  if (location.protocol !== "file:") return;
  addEventListener("DOMContentLoaded", function () {
    document.getElementById("loading-title").textContent = "This folder needs a web server";
    document.getElementById("loading-text").textContent = "A browser loads no model from a file. Open the folder through a web server: " +
      "python -m http.server --directory FOLDER, then http://localhost:8000.";
    document.getElementById("progress").hidden = true;
  });
})();
