// Dialogs: open, save, apply, "Fit my card" and templates.

import { ApiError, get, post } from "./api.js";
import { action, all, ask, byId, capital, el, fill, onSubmit, openDialog, point, show, status, errorText } from "./dom.js";
import * as draft from "./draft.js";
import { hasFrames } from "./form.js";
import { size } from "./memory.js";
import { fixOf } from "./messages.js";
import { print, state } from "./state.js";

let load = () => {};
let refresh = () => {};
const known = { saved: new Map(), typed: "open-text" };

export function bindDialogs(loader, refresher) {
  load = loader;
  refresh = refresher;
  for (const button of all("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
  for (const [name, act] of [["open", open], ["save", () => save(false)], ["fit", fit],
    ["ask", () => byId("ask-dialog").close("yes")]]) onSubmit(byId(`${name}-dialog`).querySelector("form"), act);
  for (const name of ["open", "save"]) {
    byId(`${name}-button`).addEventListener("click", () => { byId(`${name}-error`).textContent = ""; openDialog(byId(`${name}-dialog`)); });
  }
  for (const id of ["open-path", "open-text"]) byId(id).addEventListener("input", () => { known.typed = id; });
  byId("open-file").addEventListener("change", upload);
  byId("apply-button")?.addEventListener("click", () => apply(draft.plan.version));
  byId("fit-button").addEventListener("click", fitOpen);
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
    fill(line, error.message, " ");
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

const FIT_FIELDS = ["family", "card", "vram", "ram", "nvme", "lora", "base_dtype", "ema", "resolution", "frames", "world_size"];
const PRECISIONS = ["bf16", "fp16", "fp32", "auto"];
const fitId = (name) => `fit-${name.replace("_", "-")}`;
// The form to fit: the page's own, or a remedy's.
let request = state;

function fitOpen() {
  request = structuredClone(state);
  // The sizes in this dialog describe the machine.
  request.setup.this_machine = false;
  fitFields();
  fill(byId("fit-results"));
  openDialog(byId("fit-dialog"));
}

function fitFields() {
  fill(byId("fit-fields"), ...FIT_FIELDS.map(fitField), fitPrecision(),
    field("fit-batch", "Micro batch", el("input", { type: "text", autocomplete: "off", value: print(request.config.train_micro_batch_size_per_gpu) || "1" })));
  fitFrames();
}

// Only clips have frames.
const fitFrames = () => show(byId("fit-frames").closest(".field"), hasFrames(JSON.parse(byId("fit-family").value)));

const field = (id, label, control) => {
  control.id = id;
  return el("div", { class: "field" }, el("label", { for: id, text: label }), control);
};

function fitField(name) {
  const model = byId(`setup-${name.replace("_", "-")}`);
  const value = request.setup[name];
  const label = model.labels[0].textContent;
  if (model.tagName !== "SELECT") {
    return field(fitId(name), label, el("input", { type: "text", autocomplete: "off", value: value ?? "", oninput: () => {
      if (name === "vram") byId("fit-card").value = '""';
    } }));
  }
  const control = el("select", { onchange: () => {
    const { vram } = JSON.parse(control.selectedOptions[0].dataset.sets ?? "{}");
    if (vram) byId("fit-vram").value = vram;
  } }, ...[...model.options].map((option) => option.cloneNode(true)));
  control.value = JSON.stringify(value ?? "");
  if (name === "family") control.addEventListener("change", fitFrames);
  return field(fitId(name), label, control);
}

function fitPrecision() {
  const radios = all("input[name=config-bf16-enabled]");
  const control = el("select", {}, ...radios.map((radio, place) => el("option", { value: radio.dataset.sets, text: PRECISIONS[place], selected: radio.checked })));
  return field("fit-precision", "Precision", control);
}

async function fit() {
  for (const name of FIT_FIELDS) {
    const control = byId(fitId(name));
    request.setup[name] = control.tagName === "SELECT" ? JSON.parse(control.value) : control.value;
  }
  for (const [path, value] of Object.entries(JSON.parse(byId("fit-precision").value))) {
    const [section, name] = path.split(".");
    if (value !== null || request.config[section]) request.config[section] = { ...request.config[section], [name]: value ?? false };
  }
  request.config.train_micro_batch_size_per_gpu = Number(byId("fit-batch").value) || byId("fit-batch").value;
  delete request.config.train_batch_size;
  const results = byId("fit-results");
  for (const control of all("[aria-invalid]", byId("fit-fields"))) control.removeAttribute("aria-invalid");
  fill(results, el("p", { class: "sentence", text: "Searching…" }));
  try {
    const advice = await post("/advise", { state: request });
    fill(results, ...(advice.fits ? plansThatFit(advice) : nearest(advice)));
  } catch (error) {
    fill(results, el("p", { class: "error-line", text: fitErrorText(error) }));
  }
}

// Returns an error's text, and marks the field of the dialog that caused it.
function fitErrorText(error) {
  const { key = "", reason, fix } = error.data ?? {};
  const control = key?.startsWith("setup.") && byId(fitId(key.slice("setup.".length)));
  if (!control) return error.message;
  control.setAttribute("aria-invalid", "true");
  control.focus();
  return `${control.labels[0].textContent}: ${reason}. ${fixOf({ fix })}`;
}

function plansThatFit(advice) {
  const others = [...advice.runners_up, ...advice.rejected];
  const next = others.filter((one) => one.foremost);
  const rest = others.filter((one) => !one.foremost);
  const shown = new Set();
  return [
    el("h3", { text: "Fastest plan that fits" }), provenance(advice.chosen), ...candidates([advice.chosen], shown),
    next.length ? el("h3", { text: "Next best" }) : null, ...candidates(next, shown),
    rest.length ? el("details", { class: "reasons" },
      el("summary", { text: rest.length === 1 ? "1 other" : `${rest.length} others` }),
      ...candidates(rest, shown)) : null];
}

const provenance = (one) => (one.predicted
  ? el("p", { class: "hint", id: "fit-rates", text: `Times are predicted, not measured; ${one.predicted.rates}.` }) : null);

const nearest = (advice) => [
  el("p", { class: "error-line", text: `${sentence(advice.reason)} Fix: ${advice.fix}.` }),
  ...advice.remedies.map(remedy),
  el("h3", { text: "Nearest plan" }), ...candidates([advice.nearest], new Set())];

function remedy(one) {
  if (!one.state) return el("p", { class: "hint", text: sentence(one.label) });
  return el("p", { class: "row" }, el("button", { type: "button", class: one.fits ? "primary" : null, text: one.label, onclick: () => {
    request = structuredClone(one.state);
    fitFields();
    fit();
  } }), one.gain ? el("span", { class: "hint", text: one.gain }) : null);
}

// A reason that several candidates share is shown once, above them.
function candidates(every, shown) {
  const groups = new Map();
  for (const one of every) groups.set(one.reason, [...(groups.get(one.reason) ?? []), one]);
  return [...groups].flatMap(([reason, members]) => members.length > 1
    ? [el("p", { class: "hint", text: sentence(reason) }),
       el("ul", { class: "list" }, ...members.map((one) => candidate(one, "", shown)))]
    : [el("ul", { class: "list" }, candidate(members[0], sentence(reason), shown))]);
}

const sentence = (reason) => `${capital(reason)}.`;

const PLACES = { device: "GPU memory", host: "RAM", nvme: "NVMe" };

// Repeating the same seconds would look like another measurement.
function seconds(one, shown) {
  if (!one.predicted) return null;
  const { seconds: words } = one.predicted;
  if (shown.has(words)) return el("p", { class: "seconds", text: "same time as a plan above" });
  shown.add(words);
  return el("p", { class: "seconds" }, el("b", { text: words }), " per step");
}

function candidate(one, why, shown) {
  const needs = `GPU ${size(one.needs.device)}, RAM ${size(one.needs.host)}${one.needs.nvme ? `, NVMe ${size(one.needs.nvme)}` : ""}`;
  const missing = Object.entries(one.shortfalls).map(([place, bytes]) => `${size(bytes)} of ${PLACES[place]}`);
  const checkpointing = `${one.gradient_checkpointing ? "with" : "without"} checkpointing`;
  const kind = one.activation_offload ? `${checkpointing} and activation offload` : checkpointing;
  return el("li", { class: "candidate", "data-fits": String(one.fits) },
    el("div", {}, el("strong", { text: capital(`${one.title}, ${kind}`) }),
      el("p", { class: "hint", text: needs }),
      missing.length ? el("p", { class: "hint over", text: `${missing.join(" and ")} missing` }) : null,
      why ? el("p", { class: "hint", text: why }) : null),
    seconds(one, shown),
    one.fits ? el("button", { type: "button", text: "Use", "aria-label": `Use ${one.title}, ${kind}`, onclick: () => {
      byId("fit-dialog").close();
      load(one.state, [], `Plan chosen: ${one.title}.`, { label: one.title, further: true });
    } }) : null);
}

const templateStatus = (text) => fill(byId("templates-status"), text);

async function useTemplate(button) {
  const name = button.closest("li").querySelector("strong").textContent;
  templateStatus("");
  try {
    const used = await post("/templates/use", { id: button.dataset.template, setup: state.setup });
    if (!used.state) throw new ApiError(409, { error: `${sentence(used.reason)} Fix: ${used.fix}.` });
    if (!await mayReplace(`The template ${name}`)) return;
    byId("templates-dialog").close();
    load(used.state, [], `${name}: ${used.title}.`, { label: `the template ${name}` });
  } catch (error) {
    templateStatus(error.message);
  }
}
