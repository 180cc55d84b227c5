// Every parameter of the installed DeepSpeed, looked up when the section is first opened.

import { all, byId, el, fill, idOf } from "./dom.js";
import { get } from "./api.js";
import { take } from "./form.js";
import { print, read } from "./state.js";

let parameters = null;
const MOST = 60;

export function bindAdvanced() {
  byId("advanced").addEventListener("toggle", async () => {
    if (!byId("advanced").open || parameters) return;
    byId("advanced-count").textContent = "Asking DeepSpeed, which takes some seconds…";
    try {
      const found = await get("/schema");
      if (!found.available) {
        byId("advanced-count").textContent = `Not available: ${found.reason}`;
        return;
      }
      parameters = found.parameters;
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
  const matching = parameters.filter((each) =>
    words.every((word) => `${each.path} ${each.doc}`.toLowerCase().includes(word)));
  const written = matching.filter((each) => read("config", each.path) !== undefined);
  const rest = matching.filter((each) => read("config", each.path) === undefined);
  const shown = [...written, ...rest].slice(0, MOST);
  const version = byId("advanced-count").dataset.version;
  byId("advanced-count").textContent =
    `${matching.length} of ${parameters.length} parameters of DeepSpeed ${version}` +
    (matching.length > shown.length ? `; the first ${shown.length} are shown.` : ".");
  fill(byId("advanced-list"), ...shown.map(row));
}

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
    each.deprecated ? `deprecated${each.replaced_by ? `, write ${each.replaced_by}` : ""}` : "",
  ].filter(Boolean).join("; ");
  return el("div", { class: "entry field" },
    el("label", { for: id, text: each.path }), input,
    el("p", { class: "doc", id: `${id}-doc`, text: each.doc ? `${each.doc} (${about})` : about }),
    el("div", { class: "messages doc", id: `${id}-messages` }));
}

export function refreshAdvanced() {
  for (const input of all("[data-advanced]")) {
    if (document.activeElement !== input) input.value = print(read("config", input.dataset.path));
  }
}
