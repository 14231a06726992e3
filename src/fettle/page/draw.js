(function () {
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  function draw() {
    Object.keys(specs).forEach(function (name) {
      var holder = document.getElementById("chart-" + name), still = holder && holder.nextElementSibling;
      if (holder) vegaEmbed(holder, specs[name], { config: configs[dark.matches ? "dark" : "light"], actions: false, renderer: "svg" })
        .catch(function () { holder.style.display = "none"; if (still && still.className === "still") still.style.display = "block"; });
    });
  }
  draw();
  dark.addEventListener("change", draw);
  // A chart in what is folded has no room: it finds its width once that opens, for a reader or for paper.
  var folded = document.querySelectorAll("details");
  folded.forEach(function (part) { part.addEventListener("toggle", function () { window.dispatchEvent(new Event("resize")); }); });
  window.addEventListener("hashchange", function () {
    var part = document.getElementById(location.hash.slice(1));
    if (part && part.tagName === "DETAILS") part.open = true;
  });
  window.addEventListener("beforeprint", function () { folded.forEach(function (part) { part.open = true; }); });
})();
document.querySelectorAll("[data-copy]").forEach(function (button) {
  button.addEventListener("click", function () {
    var text = document.getElementById(button.dataset.copy);
    // In a sandbox, as that of fettle ui, nothing may be copied for the reader.
    (navigator.clipboard ? navigator.clipboard.writeText(text.textContent) : Promise.reject()).then(
      function () { button.textContent = "copied"; },
      function () { getSelection().selectAllChildren(text); button.textContent = "selected, to be copied"; });
  });
});
