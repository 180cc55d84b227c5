// One bar per place, drawn as SVG, with the same numbers as a table beneath.

import { byId, el, fill, svg } from "./dom.js";

const GIB = 1024 ** 3;

export function size(bytes) {
  if (bytes >= 0.1 * GIB) return `${(bytes / GIB).toFixed(2)} GiB`;
  return bytes > 0 && bytes < 0.05 * 1024 ** 2 ? "< 0.1 MiB" : `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}

const swatch = (colour) => svg("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
  svg("rect", { width: 10, height: 10, fill: colour }));

export function renderMemory(memory) {
  const holder = byId("memory");
  if (memory.reason) return fill(holder, el("p", { class: "sentence", text: memory.reason }));
  fill(holder,
    el("p", { class: "sentence", text: memory.subject }),
    ...memory.bars.flatMap(draw),
    ...memory.notes.map((note) => el("p", { class: "hint", text: `Note: ${note}.` })));
}

// Summary for narrow screens: the verdict, and each memory against its limit.
export function renderStrip(chips, memory) {
  const [[severity, text]] = chips;
  const places = (memory.bars ?? []).map((bar) => {
    const full = Math.max(bar.needed, bar.available ?? 0) || 1;
    const words = [bar.needed, bar.available].filter((bytes) => bytes !== null).map(rounded).join("/");
    return el("span", { class: "strip-place", "data-fits": String(bar.fits) },
      el("span", {}, el("b", { text: bar.label }), ` ${words}`, el("span", { class: "unit", text: " GiB" })),
      svg("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { width: 100, height: 4, class: "ground" }),
        svg("rect", { width: (bar.needed / full) * 100, height: 4, class: "used" })));
  });
  fill(byId("strip"), el("span", { class: "count", "data-severity": severity, text }),
    ...(places.length ? places : [el("span", { class: "strip-place words", text: memory.reason })]));
}

const rounded = (bytes) => String(Number((bytes / GIB).toFixed(bytes < 10 * GIB ? 1 : 0)));

function draw(bar) {
  const full = Math.max(bar.needed, bar.available ?? 0) || 1;
  const words = bar.available === null
    ? size(bar.needed)
    : `${size(bar.needed)} of ${size(bar.available)}, ${
        bar.fits ? `${size(bar.available - bar.needed)} free` : `over by ${size(bar.needed - bar.available)}`}`;
  let left = 0;
  const parts = bar.components.map((one) => {
    const width = (one.nbytes / full) * 1000;
    const part = svg("rect", { x: left, y: 1, width, height: 24, fill: one.colour, class: "part" },
      svg("title", { text: `${one.component}: ${size(one.nbytes)}` }));
    left += width;
    return part;
  });
  const limit = bar.available === null || bar.fits ? null : (bar.available / full) * 1000;
  return [
    el("div", { class: "bar-title" }, el("strong", { text: bar.label }),
      el("span", { class: bar.fits ? "" : "over", text: words })),
    svg("svg", { class: "memory", viewBox: "0 0 1000 26", preserveAspectRatio: "none", role: "img",
      "aria-label": `${bar.label}: ${words}, ${bar.when}` },
      svg("rect", { x: 0, y: 0.5, width: 1000, height: 25, class: "ground" }), ...parts,
      ...(limit === null ? [] : ["halo", "limit"].map((kind) =>
        svg("line", { x1: limit, x2: limit, y1: 0, y2: 26, class: kind })))),
    el("table", { class: "parts" },
      el("caption", { class: "hint", text: `Peak ${bar.when}` }),
      el("tbody", {}, ...bar.components.map((one) => el("tr", {},
        el("th", { scope: "row" }, swatch(one.colour), one.component),
        el("td", { class: "size", text: size(one.nbytes) }),
        el("td", { text: [one.note, one.pinned ? "pinned" : ""].filter(Boolean).join(", ") }))))),
  ];
}
