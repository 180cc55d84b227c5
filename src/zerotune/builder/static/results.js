// The configuration as text in four forms, and what changed.

import { all, byId, download, el, fill, status } from "./dom.js";

const ABOUT = {
  json: "What is saved: DeepSpeed's own format.",
  running: "With everything automatic decided for the machine and model on this page.",
  yaml: "For accelerate launch --config_file.",
  python: "Builds an equal plan.",
};
const FILES = { json: "ds_config.json", running: "ds_config_resolved.json", yaml: "accelerate.yaml", python: "plan.py" };
let outputs = {};
let current = "json";

export function bindResults() {
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
}

function choose(chosen) {
  current = chosen.dataset.tab;
  for (const tab of all("[data-tab]")) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  byId("output-panel").setAttribute("aria-labelledby", chosen.id);
  draw();
}

export function renderOutputs(found) {
  outputs = found;
  draw();
}

function draw() {
  const output = outputs[current];
  const text = output?.text;
  byId("output-about").textContent = ABOUT[current];
  byId("output").textContent = text ?? "Nothing to show until the errors are gone.";
  for (const id of ["copy", "download"]) byId(id).disabled = !text;
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
    status("The browser does not let the page copy here; the text is selected.");
  }
}

const show = (value) => (value !== null && typeof value === "object" && "$int" in value ? value.$int : JSON.stringify(value));

export function renderChanges({ changes, valid }) {
  const holder = byId("changes");
  if (!valid) return fill(holder, el("p", { class: "sentence", text: "Compared again when the errors are gone." }));
  if (!changes) return fill(holder, el("p", { class: "sentence", text: "Nothing was applied yet." }));
  if (!changes.changes.length) return fill(holder, el("p", { class: "sentence", text: "Nothing: this is what was applied." }));
  const words = {
    added: (one) => `+ ${one.key}: ${show(one.after)}`,
    removed: (one) => `− ${one.key}: ${show(one.before)}`,
    changed: (one) => `~ ${one.key}: ${show(one.before)} → ${show(one.after)}`,
  };
  fill(holder, el("ul", {}, ...changes.changes.map((one) =>
    el("li", { class: "change", "data-kind": one.kind, text: words[one.kind](one) }))));
}
