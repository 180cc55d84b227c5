// Dialogs: open, save, apply, "Fit my card" and templates.

import { ApiError, get, post } from "./api.js";
import { action, all, ask, byId, el, onSubmit, openDialog, point, status, errorText } from "./dom.js";
import * as draft from "./draft.js";
import { state } from "./state.js";

let load = () => {};
let refresh = () => {};
const known = { saved: new Map(), typed: "open-text" };

export function bindDialogs(loader, refresher) {
  load = loader;
  refresh = refresher;
  for (const button of all("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
  for (const [name, act] of [["open", open], ["save", () => save(false)],
    ["ask", () => byId("ask-dialog").close("yes")]]) onSubmit(byId(`${name}-dialog`).querySelector("form"), act);
  for (const name of ["open", "save"]) {
    byId(`${name}-button`).addEventListener("click", () => { byId(`${name}-error`).textContent = ""; openDialog(byId(`${name}-dialog`)); });
  }
  for (const id of ["open-path", "open-text"]) byId(id).addEventListener("input", () => { known.typed = id; });
  byId("open-file").addEventListener("change", upload);
  byId("apply-button")?.addEventListener("click", () => apply(draft.plan.version));
  byId("fit-button").addEventListener("click", () => { openDialog(byId("fit-dialog")); byId("fit-title").focus(); fit(state); });
  byId("fit-results").addEventListener("click", ({ target }) => take(target.dataset));
  byId("templates-button").addEventListener("click", () => { templateStatus(""); openDialog(byId("templates-dialog")); });
  for (const button of all("[data-template]")) button.addEventListener("click", () => useTemplate(button));
}

// Asks only if unsaved changes would be lost.
const mayReplace = async (by) => !draft.isUnsaved() || ask({ title: "Replace the form?", yes: "Replace",
  text: `The form has unsaved changes. ${by} replaces the form; Undo brings it back.` });

async function open() {
  const path = byId("open-path").value.trim();
  const text = byId("open-text").value;
  // The last input counts: an old text may still be below a new path.
  const body = path && (known.typed === "open-path" || !text.trim()) ? { path } : { text, name: byId("open-text").dataset.name || "the pasted text" };
  try {
    const opened = await post("/open", body);
    if (!await mayReplace("The opened configuration")) return;
    const setup = { ...state.setup, ...opened.state.setup };
    load({ ...opened.state, setup }, opened.messages, `Opened ${opened.source}.`);
    byId("open-dialog").close();
    byId("open-path").value = byId("open-text").value = "";
    byId("open-text").removeAttribute("aria-invalid");
  } catch (error) {
    byId("open-text").setAttribute("aria-invalid", "true");
    byId("open-error").textContent = errorText(error);
    point(byId("open-text"), error.data);
  }
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
    const done = await post("/save", { state, path, version: overwrite ? null : (known.saved.get(path) ?? "absent") });
    known.saved.set(path, done.version);
    const file = done.paths.includes(draft.plan.file);
    if (file) draft.plan.version = done.version;
    byId("save-dialog").close();
    draft.markSaved({ file });
    reportSaved(`Saved ${done.paths.join(", ")}`, done);
    refresh();
  } catch (error) {
    const line = byId("save-error");
    line.replaceChildren(error.message, " ");
    if (error.status === 409) line.append(action("Overwrite it", () => save(true)));
  }
}

async function apply(version) {
  try {
    const done = await post("/apply", { state, version });
    draft.plan.version = done.version;
    draft.markSaved({ file: true });
    reportSaved(done.answer || `Applied${done.paths.length ? ` to ${done.paths.join(", ")}` : ""}`, done);
    refresh();
  } catch (error) {
    const changed = error.status === 409 && error.data.key === draft.plan.file;
    status(error.message, "error", ...(changed
      ? [action("Open it again", reopen), action("Overwrite it", () => apply(null))]
      : []));
  }
}

async function reopen() {
  if (!await mayReplace("The current file")) return;
  const start = await get("/start");
  draft.plan.version = start.version;
  load({ ...start.state, setup: { ...state.setup, ...start.state.setup } }, start.messages, `Opened ${start.plan_file}.`, { file: true });
}

function reportSaved(sentence, done) {
  const kept = done.backups.length ? `; the replaced file is kept as ${done.backups.join(", ")}` : "";
  status([`${sentence}${kept}.`, ...done.decisions].join(" "), "good");
}

// Plans for a form: the page's own, or a remedy's.
async function fit(form) {
  const results = byId("fit-results");
  results.replaceChildren(el("p", { className: "sentence", text: "Searching…" }));
  try {
    // The server's own HTML.
    results.innerHTML = (await post("/advise", { state: form })).html;
  } catch (error) {
    results.replaceChildren(el("p", { className: "error-line", text: error.message }));
  }
}

function take({ request, load: chosen }) {
  if (request) fit(JSON.parse(request));
  if (!chosen) return;
  const { state: form, title } = JSON.parse(chosen);
  byId("fit-dialog").close();
  load(form, [], `Plan chosen: ${title}.`, { label: title, further: true });
}

const templateStatus = (text) => { byId("templates-status").textContent = text; };

async function useTemplate(button) {
  const name = button.closest("li").querySelector("strong").textContent;
  templateStatus("");
  try {
    const used = await post("/templates/use", { id: button.dataset.template, setup: state.setup });
    if (!used.state) throw new ApiError(409, { error: `No plan fits: ${used.reason}. Fix: ${used.fix}.` });
    if (!await mayReplace(`The template ${name}`)) return;
    byId("templates-dialog").close();
    load(used.state, [], `${name}: ${used.title}.`, { label: `the template ${name}` });
  } catch (error) {
    templateStatus(error.message);
  }
}
