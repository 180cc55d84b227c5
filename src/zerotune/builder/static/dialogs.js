// Opening, saving, applying, fitting a card, and templates.

import { ApiError, get, post } from "./api.js";
import { action, all, ask, byId, download, el, fill, onSubmit, openDialog, point, status, placed } from "./dom.js";
import * as draft from "./draft.js";
import { size } from "./memory.js";
import { print, state } from "./state.js";

let load = () => {};
let refresh = () => {};
const known = { template: null, saved: new Map(), typed: "open-text", listed: [] };

export function bindDialogs(loader, refresher) {
  load = loader;
  refresh = refresher;
  for (const button of all("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
  for (const [name, act] of [["open", open], ["save", () => save(false)], ["fit", fit], ["templates", () => saveTemplate()],
    ["ask", () => byId("ask-dialog").close("yes")]]) onSubmit(byId(`${name}-dialog`).querySelector("form"), act);
  for (const name of ["open", "save"]) {
    byId(`${name}-button`).addEventListener("click", () => { byId(`${name}-error`).textContent = ""; openDialog(byId(`${name}-dialog`)); });
  }
  for (const id of ["open-path", "open-text"]) byId(id).addEventListener("input", () => { known.typed = id; });
  byId("open-file").addEventListener("change", upload);
  byId("apply-button")?.addEventListener("click", () => apply(draft.plan.version));
  byId("fit-button").addEventListener("click", fitOpen);
  byId("templates-button").addEventListener("click", async () => { said(""); openDialog(byId("templates-dialog")); await listTemplates(); });
  byId("template-import").addEventListener("change", importTemplate);
}

// Nothing is asked where nothing would be lost.
const mayReplace = async (by) => !draft.isUnsaved() || ask({ title: "Replace what is in the form?", yes: "Replace",
  text: `It is not saved. ${by} takes its place; Undo brings it back.` });

async function open() {
  const path = byId("open-path").value.trim();
  const text = byId("open-text").value;
  // What was typed last is meant: an old text may still stand below a new path.
  const body = path && (known.typed === "open-path" || !text.trim()) ? { path } : { text, name: byId("open-text").dataset.name || "the pasted text" };
  try {
    const opened = await post("/open", body);
    if (!await mayReplace("What was opened")) return;
    const setup = { ...state.setup, ...opened.state.setup };
    load({ ...opened.state, setup }, opened.messages, `Opened ${opened.source}.`);
    byId("open-dialog").close();
    byId("open-path").value = byId("open-text").value = "";
    byId("open-text").removeAttribute("aria-invalid");
  } catch (error) {
    byId("open-text").setAttribute("aria-invalid", "true");
    byId("open-error").textContent = placed(error);
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
    draft.settled({ file });
    told(`Saved ${done.paths.join(", ")}`, done);
    refresh();
  } catch (error) {
    const line = byId("save-error");
    fill(line, error.message, " ");
    if (error.status === 409) line.append(action("Save over it", () => save(true)));
  }
}

async function apply(version) {
  try {
    const done = await post("/apply", { state, version });
    draft.plan.version = done.version;
    draft.settled({ file: true });
    told(done.answer || `Applied${done.paths.length ? ` to ${done.paths.join(", ")}` : ""}`, done);
    refresh();
  } catch (error) {
    const changed = error.status === 409 && error.data.key === draft.plan.file;
    status(error.message, "error", ...(changed
      ? [action("Open it again", reopen), action("Overwrite it", () => apply(null))]
      : []));
  }
}

async function reopen() {
  if (!await mayReplace("The file as it is now")) return;
  const start = await get("/start");
  draft.plan.version = start.version;
  load({ ...start.state, setup: { ...state.setup, ...start.state.setup } }, start.messages, `Opened ${start.plan_file}.`, { file: true });
}

function told(sentence, done) {
  const kept = done.backups.length ? `; what it replaced is in ${done.backups.join(", ")}` : "";
  status([`${sentence}${kept}.`, ...done.decisions].join(" "), "good");
}

const FIT_FIELDS = [["family", "Model"], ["vram", "VRAM per GPU, GiB"], ["ram", "RAM, GiB"], ["nvme", "NVMe, GiB"],
  ["resolution", "Resolution"], ["frames", "Frames of clips"], ["world_size", "Processes"]];

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

function fitting(advice) {
  const others = [...advice.runners_up, ...advice.rejected];
  const next = others.filter((one) => one.foremost);
  const rest = others.filter((one) => !one.foremost);
  return [
    el("h3", { text: "Fastest plan that fits" }), ...candidates([advice.chosen]),
    next.length ? el("h3", { text: "What comes next" }) : null, ...candidates(next),
    rest.length ? el("details", { class: "reasons" },
      el("summary", { text: rest.length === 1 ? "1 other" : `${rest.length} others` }),
      ...candidates(rest)) : null];
}

const nothing = (advice) => [
  el("p", { class: "error-line", text: `${sentence(advice.reason)} Fix: ${advice.fix}.` }),
  el("h3", { text: "Nearest" }), ...candidates([advice.nearest])];

// A reason that several share is said once, above them.
function candidates(every) {
  const groups = new Map();
  for (const one of every) groups.set(one.reason, [...(groups.get(one.reason) ?? []), one]);
  return [...groups].flatMap(([reason, members]) => members.length > 1
    ? [el("p", { class: "hint", text: sentence(reason) }),
       el("ul", { class: "list" }, ...members.map((one) => candidate(one, "")))]
    : [el("ul", { class: "list" }, candidate(members[0], sentence(reason)))]);
}

const sentence = (reason) => `${reason[0].toUpperCase()}${reason.slice(1)}.`;

const PLACES = { device: "GPU memory", host: "RAM", nvme: "NVMe" };

function candidate(one, why) {
  const needs = `GPU ${size(one.needs.device)}, RAM ${size(one.needs.host)}${one.needs.nvme ? `, NVMe ${size(one.needs.nvme)}` : ""}`;
  const missing = Object.entries(one.shortfalls).map(([place, bytes]) => `${size(bytes)} of ${PLACES[place]}`);
  const checkpointing = `${one.gradient_checkpointing ? "with" : "without"} checkpointing`;
  const kind = one.activation_offload ? `${checkpointing} and activation offload` : checkpointing;
  return el("li", { class: "candidate", "data-fits": String(one.fits) },
    el("div", {}, el("strong", { text: `${one.title}, ${kind}` }),
      el("p", { class: "hint", text: needs }),
      missing.length ? el("p", { class: "hint over", text: `${missing.join(" and ")} missing` }) : null,
      why ? el("p", { class: "hint", text: why }) : null),
    one.seconds ? el("p", { class: "seconds" }, el("b", { text: one.seconds }), " per step, predicted") : null,
    one.fits ? el("button", { type: "button", text: "Use", "aria-label": `Use ${one.title}, ${kind}`, onclick: () => {
      byId("fit-dialog").close();
      load(one.state, [], `Took ${one.title}.`, { label: one.title, further: true });
    } }) : null);
}

function said(text, kind = "") {
  byId("templates-status").dataset.kind = kind;
  fill(byId("templates-status"), text);
}

async function listTemplates() {
  try {
    const found = await get("/templates");
    known.listed = found.own;
    byId("templates-folder").textContent = `Yours are plain JSON files in ${found.folder}.`;
    const groups = new Map();
    for (const one of found.builtin) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
    fill(byId("templates-builtin"), ...[...groups].map(([group, members]) => el("section", { "aria-label": group },
      el("h3", { text: group }), el("ul", { class: "list two" }, ...members.map(builtin)))));
    fill(byId("templates-own"), ...(found.own.length ? found.own.map(own) : [el("li", { text: "None yet." })]));
  } catch (error) {
    said(error.message);
  }
}

const builtin = (one) => el("li", {}, el("div", {}, el("strong", { text: one.name }), el("p", { class: "hint", text: one.description })),
  el("button", { type: "button", text: "Use", "aria-label": `Use ${one.name}`, onclick: () => attempt(async () => {
    const used = await post("/templates/use", { id: one.id, setup: state.setup });
    if (!used.state) throw new ApiError(409, { error: `${sentence(used.reason)} Fix: ${used.fix}.` });
    if (!await mayReplace(`The template ${one.name}`)) return;
    known.template = null;
    byId("templates-dialog").close();
    load(used.state, [], `${one.name}: ${used.title}.`, { label: `the template ${one.name}` });
  }) }));

function own(one) {
  const rename = el("input", { type: "text", "aria-label": `New name of ${one.name}`, class: "hidden", value: one.name });
  const button = (text, act) => el("button", { type: "button", text, "aria-label": `${text} ${one.name}`, onclick: act });
  const renamed = () => attempt(async () => {
    if (rename.classList.contains("hidden")) {
      rename.classList.remove("hidden");
      rename.select();
      return;
    }
    await post("/templates/rename", { name: one.name, to: rename.value, version: one.version });
    await listTemplates();
    said(`${one.name} is called ${rename.value} now.`, "good");
  });
  rename.addEventListener("keydown", (event) => { if (event.key === "Enter") renamed(); });
  return el("li", {}, el("div", {}, el("strong", { text: one.name }), rename),
    el("div", { class: "row" },
      button("Use", () => attempt(async () => {
        const used = await post("/templates/use", { name: one.name });
        if (!await mayReplace(`The template ${one.name}`)) return;
        known.template = used.template;
        byId("template-name").value = one.name;
        byId("templates-dialog").close();
        load(used.state, [], `Loaded ${one.name}.`, { label: `the template ${one.name}` });
      })),
      button("Rename", renamed),
      button("Export", () => download(`${one.name}.template.json`, `${JSON.stringify(one, null, 2)}\n`)),
      button("Delete", () => attempt(async () => {
        const sure = await ask({ title: `Delete ${one.name}?`, text: "Its file is removed. Export it first to keep a copy.", yes: "Delete" });
        if (!sure) return;
        await post("/templates/delete", { name: one.name, version: one.version });
        await listTemplates();
        said(`Deleted ${one.name}.`, "good");
      }))));
}

async function attempt(act) {
  said("");
  try {
    await act();
  } catch (error) {
    if (error.status === 409 || error.status === 404) await listTemplates();
    said(error.message);
    return error;
  }
}

async function saveTemplate(version) {
  const name = byId("template-name").value.trim();
  const seen = known.template?.name === name ? known.template.version : null;
  const failed = await attempt(async () => {
    known.template = await post("/templates/save", { name, state, version: version ?? seen });
    draft.settled();
    await listTemplates();
    said(`Saved the template ${name}.`, "good");
  });
  const there = known.listed.find((one) => one.name.toLowerCase() === name.toLowerCase());
  if (failed?.status === 409 && there) {
    byId("templates-status").append(" ", action(`Save over ${there.name}`, () => saveTemplate(there.version)));
  }
}

const importTemplate = (event) => attempt(async () => {
  const [file] = event.target.files;
  if (!file) return;
  const text = await file.text();
  event.target.value = "";
  const imported = await post("/templates/import", { text });
  await listTemplates();
  said(`Imported ${imported.name}.`, "good");
});
