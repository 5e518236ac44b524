"use strict";
// Shows the values of a figure of memory under the pointer, or where the arrow keys have moved to.
for (const figure of document.querySelectorAll(".figure")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const readout = figure.querySelector(".readout");
  let shown = data.peak;

  const size = bytes => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
    return bytes.toFixed(unit === 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2) + " " + units[unit];
  };

  const show = index => {
    shown = Math.max(0, Math.min(data.moments.length - 1, index));
    const now = data.layers.map(layer => [layer.bytes[shown], layer.words]);
    const total = now.reduce((sum, [bytes]) => sum + bytes, 0);
    const parts = now.filter(([bytes]) => bytes).sort((one, other) => other[0] - one[0]);
    readout.textContent = size(total) + (data.unit && " at " + data.moments[shown].toPrecision(4) + " " + data.unit) +
      ", " + data.places[data.place[shown]] + ": " + parts.map(([bytes, words]) => words + " " + size(bytes)).join(", ");
    for (const svg of figure.querySelectorAll("svg")) {
      const {left, right} = svg.querySelector(".plot").dataset;
      const x = +left + data.moments[shown] / data.end * (right - left);
      const pointer = svg.querySelector(".pointer");
      pointer.setAttribute("x1", x);
      pointer.setAttribute("x2", x);
      pointer.style.visibility = "visible";
    }
  };

  for (const svg of figure.querySelectorAll("svg")) {
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const {left, right} = svg.querySelector(".plot").dataset;
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const at = (x - left) / (right - left) * data.end;
      let low = 0, high = data.moments.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (data.moments[middle] <= at) low = middle; else high = middle - 1;
      }
      show(low);
    });
  }
  figure.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50}[event.key];
    if (step) { show(shown + step); event.preventDefault(); }
  });
}
