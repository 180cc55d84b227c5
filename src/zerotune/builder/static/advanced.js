// All parameters of the installed DeepSpeed, loaded when the section is first opened.

import { action, all, byId, el, fill, idOf, reach } from "./dom.js";
import { get } from "./api.js";
import { take } from "./form.js";
import { print, read } from "./state.js";

let parameters = null;
let removed = [];
let fields = [];
let unavailable = "";
const MOST = 60;

export function bindAdvanced() {
  byId("advanced").addEventListener("toggle", async () => {
    if (!byId("advanced").open || parameters) return;
    byId("advanced-count").textContent = "Loading DeepSpeed's parameters, which takes a few seconds…";
    try {
      const found = await get("/schema");
      unavailable = found.available ? "" : `Not available: ${found.reason}`;
      parameters = found.parameters;
      removed = found.removed;
      fields = found.fields;
      byId("advanced-count").dataset.version = found.version;
      draw();
    } catch (error) {
      byId("advanced-count").textContent = error.message;
    }
  });
  byId("advanced-search").addEventListener("input", draw);
}

function draw() {
  if (!parameters) return;
  const words = byId("advanced-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
  const matching = parameters.filter((each) => matches(`${each.path} ${each.doc}`));
  const gone = words.length ? removed.filter((each) => matches(`${each.path} ${each.reason}`)) : [];
  const above = words.length ? fields.filter((each) => matches(`${each.path} ${each.label}`)) : [];
  const written = matching.filter((each) => read("config", each.path) !== undefined);
  const rest = matching.filter((each) => read("config", each.path) === undefined);
  const shown = [...written, ...rest].slice(0, MOST);
  const version = byId("advanced-count").dataset.version;
  byId("advanced-count").textContent = unavailable ||
    `${matching.length} of ${parameters.length} other parameters of DeepSpeed ${version}` +
    (matching.length > shown.length ? `; the first ${shown.length} are shown` : "") +
    (above.length ? `; ${above.length} with a field above` : "") +
    (gone.length ? `; ${gone.length} no longer supported.` : ".");
  fill(byId("advanced-list"), ...gone.map(old), ...above.map(other), ...shown.map(row));
}

const old = (each) => el("div", { class: "entry gone" },
  el("code", { text: each.path }), el("span", { class: "count", text: "removed from DeepSpeed" }),
  el("p", { class: "doc", text: `${each.reason}.` }));

const other = (each) => el("div", { class: "entry gone elsewhere" },
  el("code", { text: each.path }), action(`Go to ${each.label}`, () => reach(byId(each.id) ?? byId(`${each.id}-0`))));

function row(each) {
  const id = `advanced-${idOf(each.path)}`;
  const input = el("input", { id, type: "text", autocomplete: "off", spellcheck: "false",
    "data-path": each.path, "data-store": "config", "data-advanced": "",
    "aria-describedby": `${id}-doc ${id}-messages`, oninput: () => take(input) });
  input.value = print(read("config", each.path));
  input.placeholder = each.default === null ? "" : print(each.default);
  const about = [
    each.types.length ? each.types.join(" or ") : "any type",
    `default ${each.default === null ? "none" : print(each.default)}`,
    each.stages.length ? `stage ${each.stages.join(", ")}` : "",
    each.deprecated ? `deprecated${each.replaced_by ? `, use ${each.replaced_by}` : ""}` : "",
  ].filter(Boolean).join("; ");
  return el("div", { class: "entry field" },
    el("label", { for: id, text: each.path }), input,
    el("p", { class: "doc", id: `${id}-doc`, text: each.doc ? `${each.doc} (${about})` : about }),
    el("div", { class: "messages doc", id: `${id}-messages` }));
}

export function refreshAdvanced({ typed = true } = {}) {
  for (const input of all("[data-advanced]")) {
    if (!typed || document.activeElement !== input) input.value = print(read("config", input.dataset.path));
  }
}
