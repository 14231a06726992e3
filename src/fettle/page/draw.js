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
})();
document.querySelectorAll("[data-copy]").forEach(function (button) {
  button.addEventListener("click", function () {
    navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent).then(function () { button.textContent = "copied"; });
  });
});
