// One bar per place, drawn as SVG, with the same numbers as a table beneath.

import { byId, el, fill, svg } from "./dom.js";

const COLOURS = ["weights", "gradients", "master weights", "optimizer states", "activations",
  "buckets", "EMA"];
const GIB = 1024 ** 3;

export function size(bytes) {
  if (bytes >= 0.1 * GIB) return `${(bytes / GIB).toFixed(2)} GiB`;
  return `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}

function colour(component, used) {
  const own = COLOURS.indexOf(component);
  if (own >= 0) return own;
  if (!used.has(component)) used.set(component, COLOURS.length + (used.size % (10 - COLOURS.length)));
  return used.get(component);
}

export function renderMemory(memory) {
  const holder = byId("memory");
  if (memory.reason) return fill(holder, el("p", { class: "sentence", text: memory.reason }));
  const used = new Map();
  fill(holder,
    el("p", { class: "sentence", text: memory.subject }),
    ...memory.bars.flatMap((bar) => draw(bar, used)),
    ...memory.notes.map((note) => el("p", { class: "hint", text: `Note: ${note}.` })));
}

function draw(bar, used) {
  const full = Math.max(bar.needed, bar.available ?? 0) || 1;
  const words = bar.available === null
    ? size(bar.needed)
    : `${size(bar.needed)} of ${size(bar.available)}, ${
        bar.fits ? `${size(bar.available - bar.needed)} free` : `over by ${size(bar.needed - bar.available)}`}`;
  let left = 0;
  const parts = bar.components.map((one) => {
    const width = (one.nbytes / full) * 1000;
    const part = svg("rect", { x: left, y: 1, width, height: 24, class: `c${colour(one.component, used)}` },
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
      limit === null ? null : svg("line", { x1: limit, x2: limit, y1: 0, y2: 26, class: "limit" })),
    el("table", { class: "parts" },
      el("caption", { class: "hint", text: `Peak ${bar.when}` }),
      el("tbody", {}, ...bar.components.map((one) => el("tr", {},
        el("th", { scope: "row" }, el("span", { class: `swatch c${colour(one.component, used)}`, "aria-hidden": "true" }), one.component),
        el("td", { class: "size", text: size(one.nbytes) }),
        el("td", { text: [one.note, one.pinned ? "pinned" : ""].filter(Boolean).join(", ") }))))),
  ];
}
