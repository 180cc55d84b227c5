// The configuration as text in four forms, and what changed.

import { post } from "./api.js";
import { all, byId, download, el, fill, onSubmit, point, show, status, errorText } from "./dom.js";
import { state } from "./state.js";

const ABOUT = {
  json: "DeepSpeed's own format, in which the builder saves the plan.",
  running: "The configuration with every auto value filled in for the model and machine on this page.",
  yaml: "A file for accelerate launch --config_file.",
  python: "Python code that builds the same plan.",
};
const FILES = { json: "ds_config.json", running: "ds_config_resolved.json", yaml: "accelerate.yaml", python: "plan.py" };
let outputs = {};
let runs = false;
let current = "json";
let load = () => {};

export function bindResults(loader) {
  load = loader;
  const tabs = all("[data-tab]");
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  byId("output-panel").previousElementSibling.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = tabs[(tabs.findIndex((tab) => tab.dataset.tab === current) + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
  byId("copy").addEventListener("click", copy);
  byId("download").addEventListener("click", () => download(FILES[current], outputs[current]?.text ?? ""));
  byId("edit").addEventListener("click", edit);
  byId("editor-cancel").addEventListener("click", leave);
  byId("editor").addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  onSubmit(byId("editor"), takeOver);
}

function edit() {
  byId("editor-text").value = outputs.json.text;
  byId("editor-error").textContent = "";
  editing(true);
  byId("editor-text").focus();
}

function leave() {
  editing(false);
  byId("edit").focus();
}

function editing(now) {
  show(byId("editor"), now);
  for (const id of ["output", "output-actions", "output-about", "output-messages"]) show(byId(id), !now);
}

async function takeOver() {
  const area = byId("editor-text");
  try {
    const opened = await post("/open", { text: area.value, name: "the edited text" });
    const launch = Object.keys(opened.state.launch).length ? opened.state.launch : state.launch;
    load({ ...opened.state, launch, setup: { ...state.setup, ...opened.state.setup } }, opened.messages,
      "Text applied.", { label: "the edited text", further: true });
    area.removeAttribute("aria-invalid");
    leave();
  } catch (error) {
    area.setAttribute("aria-invalid", "true");
    byId("editor-error").textContent = errorText(error);
    point(area, error.data);
  }
}

function choose(chosen) {
  editing(false);
  current = chosen.dataset.tab;
  for (const tab of all("[data-tab]")) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  byId("output-panel").setAttribute("aria-labelledby", chosen.id);
  draw();
}

export function renderOutputs(data) {
  outputs = data.outputs;
  runs = data.runs;
  draw();
}

function about() {
  if (current === "running") return runs ? ABOUT.running : "";
  return runs ? ABOUT[current] : `${ABOUT[current]} The plan cannot run yet.`;
}

function draw() {
  const output = outputs[current];
  const text = output?.text;
  byId("output-about").textContent = about();
  byId("output").textContent = text ?? (current === "running"
    ? "Correct the errors to see the running configuration."
    : "Correct the errors to see the file.");
  for (const id of ["copy", "download"]) byId(id).disabled = !text;
  show(byId("edit"), current === "json");
  fill(byId("output-messages"), ...(output?.messages ?? []).map((message) =>
    el("div", { class: "message", "data-severity": message.severity },
      el("code", { text: `${message.key} ${message.change}` }), ` ${message.text}`)));
}

async function copy() {
  try {
    await navigator.clipboard.writeText(outputs[current].text);
    status("Copied.", "good");
  } catch {
    const range = document.createRange();
    range.selectNodeContents(byId("output"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    status("The browser does not allow copying, so the text is selected instead.");
  }
}

const literal = (value) => (value !== null && typeof value === "object" && "$int" in value ? value.$int : JSON.stringify(value));

export function renderChanges({ changes, valid }) {
  const holder = byId("changes");
  if (!valid) return fill(holder, el("p", { class: "sentence", text: "Correct the errors to compare the plans." }));
  if (!changes) return fill(holder, el("p", { class: "sentence", text: "No plan has been applied yet." }));
  if (!changes.changes.length) return fill(holder, el("p", { class: "sentence", text: "No changes since the last Apply." }));
  const words = {
    added: (one) => `+ ${one.key}: ${literal(one.after)}`,
    removed: (one) => `− ${one.key}: ${literal(one.before)}`,
    changed: (one) => `~ ${one.key}: ${literal(one.before)} → ${literal(one.after)}`,
  };
  fill(holder, el("ul", {}, ...changes.changes.map((one) =>
    el("li", { class: "change", "data-kind": one.kind, text: words[one.kind](one) }))));
}
