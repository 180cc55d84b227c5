// Opening, saving, applying, fitting a card, and templates.

import { ApiError, get, post } from "./api.js";
import { all, byId, download, el, fill, openDialog, status } from "./dom.js";
import { size } from "./memory.js";
import { print, state } from "./state.js";

let load = () => {};
let refresh = () => {};
const known = { planVersion: null, planFile: null, template: null, saved: new Map(), typed: "open-text" };

export function bindDialogs(start, loader, refresher) {
  load = loader;
  refresh = refresher;
  known.planVersion = start.version;
  known.planFile = start.plan_file;
  for (const button of all("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
  byId("open-button").addEventListener("click", () => { byId("open-error").textContent = ""; openDialog(byId("open-dialog")); });
  byId("open-do").addEventListener("click", open);
  for (const id of ["open-path", "open-text"]) byId(id).addEventListener("input", () => { known.typed = id; });
  byId("open-file").addEventListener("change", upload);
  byId("save-button").addEventListener("click", () => { byId("save-error").textContent = ""; openDialog(byId("save-dialog")); });
  byId("save-do").addEventListener("click", () => save(false));
  byId("apply-button")?.addEventListener("click", () => apply(known.planVersion));
  byId("fit-button").addEventListener("click", fitOpen);
  byId("fit-do").addEventListener("click", fit);
  byId("templates-button").addEventListener("click", async () => { openDialog(byId("templates-dialog")); await listTemplates(); });
  byId("template-save").addEventListener("click", () => saveTemplate());
  byId("template-import").addEventListener("change", importTemplate);
}

const where = (error) =>
  error instanceof ApiError && error.data.line ? `Line ${error.data.line}, column ${error.data.column}: ` : "";

async function open() {
  const path = byId("open-path").value.trim();
  const text = byId("open-text").value;
  // What was typed last is meant: an old text may still stand below a new path.
  const body = path && (known.typed === "open-path" || !text.trim()) ? { path } : { text, name: byId("open-text").dataset.name || "the pasted text" };
  try {
    const opened = await post("/open", body);
    const setup = { ...state.setup, ...opened.state.setup };
    load({ ...opened.state, setup }, opened.messages, `Opened ${opened.source}.`);
    byId("open-dialog").close();
    byId("open-path").value = byId("open-text").value = "";
    byId("open-text").removeAttribute("aria-invalid");
  } catch (error) {
    byId("open-text").setAttribute("aria-invalid", "true");
    byId("open-error").textContent = `${where(error)}${error.message}`;
    point(error.data);
  }
}

function point(data) {
  const area = byId("open-text");
  if (!data?.line || !area.value) return;
  const before = area.value.split("\n").slice(0, data.line - 1).reduce((sum, line) => sum + line.length + 1, 0);
  const at = before + data.column - 1;
  area.focus();
  area.setSelectionRange(at, Math.min(at + 1, area.value.length));
}

async function upload(event) {
  const [file] = event.target.files;
  if (!file) return;
  byId("open-text").value = await file.text();
  byId("open-text").dataset.name = file.name;
  known.typed = "open-text";
  event.target.value = "";
  await open();
  delete byId("open-text").dataset.name;
}

async function save(overwrite) {
  const path = byId("save-path").value.trim();
  try {
    const done = await post("/save", { state, path, version: overwrite ? null : (known.saved.get(path) ?? null) });
    known.saved.set(path, done.version);
    byId("save-dialog").close();
    told(`Saved ${done.paths.join(", ")}`, done);
    refresh();
  } catch (error) {
    const line = byId("save-error");
    fill(line, error.message, " ");
    if (error.status === 409) line.append(el("button", { type: "button", text: "Save over it", onclick: () => save(true) }));
  }
}

async function apply(version) {
  try {
    const done = await post("/apply", { state, version });
    known.planVersion = done.version;
    told(done.answer || `Applied${done.paths.length ? ` to ${done.paths.join(", ")}` : ""}`, done);
    refresh();
  } catch (error) {
    status(error.message, "error");
    if (error.status === 409 && error.data.key === known.planFile) {
      byId("status").append(" ",
        el("button", { type: "button", class: "quiet", text: "Open it again", onclick: reopen }),
        el("button", { type: "button", class: "quiet", text: "Overwrite it", onclick: () => apply(null) }));
    }
  }
}

async function reopen() {
  const start = await get("/start");
  known.planVersion = start.version;
  load(start.state, start.messages, `Opened ${start.plan_file}.`);
}

function told(sentence, done) {
  const kept = done.backups.length ? `; what it replaced is in ${done.backups.join(", ")}` : "";
  status([`${sentence}${kept}.`, ...done.decisions].join(" "), "good");
}

const FIT_FIELDS = [["family", "Model"], ["vram", "VRAM per GPU, GiB"], ["ram", "RAM, GiB"], ["nvme", "NVMe, GiB"],
  ["resolution", "Resolution"], ["world_size", "Processes"]];

function fitOpen() {
  fill(byId("fit-fields"), ...FIT_FIELDS.map(([name, label]) => {
    const id = `fit-${name.replace("_", "-")}`;
    const model = byId(`setup-${name.replace("_", "-")}`);
    const control = name === "family" ? model.cloneNode(true) : el("input", { type: "text", autocomplete: "off" });
    control.id = id;
    control.removeAttribute("aria-describedby");
    control.value = model.value;
    return el("div", { class: "field" }, el("label", { for: id, text: label }), control);
  }), fitBatch());
  fill(byId("fit-results"));
  openDialog(byId("fit-dialog"));
}

const fitBatch = () => el("div", { class: "field" }, el("label", { for: "fit-batch", text: "Micro batch" }),
  el("input", { id: "fit-batch", type: "text", autocomplete: "off", value: print(state.config.train_micro_batch_size_per_gpu) || "1" }));

async function fit() {
  const asked = structuredClone(state);
  for (const [name] of FIT_FIELDS) {
    const value = byId(`fit-${name.replace("_", "-")}`).value;
    asked.setup[name] = name === "family" ? JSON.parse(value) : value;
  }
  // Sizes that were typed are meant, so the machine is the one they describe.
  asked.setup.this_machine = false;
  asked.config.train_micro_batch_size_per_gpu = Number(byId("fit-batch").value) || byId("fit-batch").value;
  delete asked.config.train_batch_size;
  const results = byId("fit-results");
  fill(results, el("p", { class: "sentence", text: "Looking…" }));
  try {
    const advice = await post("/advise", { state: asked });
    fill(results, ...(advice.fits ? fitting(advice) : nothing(advice)));
  } catch (error) {
    fill(results, el("p", { class: "error-line", text: error.message }));
  }
}

const fitting = (advice) => [
  el("h3", { text: "Fastest plan that fits" }), el("ul", { class: "list" }, candidate(advice.chosen)),
  advice.runners_up.length ? el("h3", { text: "Others that fit" }) : null,
  el("ul", { class: "list" }, ...advice.runners_up.map(candidate)),
  advice.rejected.length ? el("h3", { text: "Why not the others" }) : null,
  el("ul", { class: "list" }, ...advice.rejected.map(candidate))];
const nothing = (advice) => [
  el("p", { class: "error-line", text: `${advice.reason}. Fix: ${advice.fix}.` }),
  el("h3", { text: "Nearest" }), el("ul", { class: "list" }, candidate(advice.nearest))];

function candidate(one) {
  const needs = `GPU ${size(one.needs.device)}, RAM ${size(one.needs.host)}${one.needs.nvme ? `, NVMe ${size(one.needs.nvme)}` : ""}`;
  const missing = Object.entries(one.shortfalls).map(([place, bytes]) => `${size(bytes)} of ${place} missing`);
  const checkpointing = `${one.gradient_checkpointing ? "with" : "without"} checkpointing`;
  const kind = one.activation_offload ? `${checkpointing} and activation offload` : checkpointing;
  return el("li", { class: "candidate", "data-fits": String(one.fits) },
    el("div", {}, el("strong", { text: `${one.title}, ${kind}` }),
      el("p", { class: "hint", text: [needs, ...missing, one.reason].join("; ") })),
    one.fits ? el("button", { type: "button", text: "Use", "aria-label": `Use ${one.title}, ${kind}`, onclick: () => {
      byId("fit-dialog").close();
      load(one.state, [], `Took ${one.title}.`);
    } }) : null);
}

async function listTemplates() {
  const line = byId("templates-status");
  try {
    const found = await get("/templates");
    byId("templates-folder").textContent = `Yours are plain JSON files in ${found.folder}.`;
    fill(byId("templates-builtin"), ...found.builtin.map(builtin));
    fill(byId("templates-own"), ...(found.own.length ? found.own.map(own) : [el("li", { text: "None yet." })]));
  } catch (error) {
    line.textContent = error.message;
  }
}

const builtin = (one) => el("li", {}, el("div", {}, el("strong", { text: one.name }), el("p", { class: "hint", text: one.description })),
  el("button", { type: "button", text: "Use", "aria-label": `Use ${one.name}`, onclick: () => attempt(async () => {
    const used = await post("/templates/use", { id: one.id, setup: state.setup });
    if (!used.state) throw new ApiError(409, { error: `${used.reason}. Fix: ${used.fix}.` });
    known.template = null;
    byId("templates-dialog").close();
    load(used.state, [], `${one.name}: ${used.title}.`);
  }) }));

function own(one) {
  const rename = el("input", { type: "text", "aria-label": `New name of ${one.name}`, class: "hidden", value: one.name });
  const button = (text, action) => el("button", { type: "button", text, "aria-label": `${text} ${one.name}`, onclick: action });
  const renameButton = button("Rename", () => attempt(async () => {
    if (rename.classList.contains("hidden")) {
      rename.classList.remove("hidden");
      rename.focus();
      return;
    }
    await post("/templates/rename", { name: one.name, to: rename.value, version: one.version });
    await listTemplates();
  }));
  return el("li", {}, el("div", {}, el("strong", { text: one.name }), rename),
    el("div", { class: "row" },
      button("Use", () => attempt(async () => {
        const used = await post("/templates/use", { name: one.name });
        known.template = used.template;
        byId("template-name").value = one.name;
        byId("templates-dialog").close();
        load(used.state, [], `Loaded ${one.name}.`);
      })),
      renameButton,
      button("Export", () => download(`${one.name}.template.json`, `${JSON.stringify(one, null, 2)}\n`)),
      button("Delete", () => attempt(async () => {
        await post("/templates/delete", { name: one.name, version: one.version });
        await listTemplates();
      }))));
}

async function attempt(action) {
  const line = byId("templates-status");
  line.textContent = "";
  try {
    await action();
  } catch (error) {
    line.textContent = error.message;
    if (error.status === 409 || error.status === 404) await listTemplates();
  }
}

const saveTemplate = () => attempt(async () => {
  const name = byId("template-name").value.trim();
  const version = known.template?.name === name ? known.template.version : null;
  known.template = await post("/templates/save", { name, state, version });
  await listTemplates();
  status(`Saved the template ${name}.`, "good");
});

const importTemplate = (event) => attempt(async () => {
  const [file] = event.target.files;
  if (!file) return;
  const text = await file.text();
  event.target.value = "";
  const imported = await post("/templates/import", { text });
  await listTemplates();
  status(`Imported ${imported.name}.`, "good");
});
