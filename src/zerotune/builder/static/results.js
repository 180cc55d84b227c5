// The configuration as text in four forms, of which one is shown, and its editor.

import { post } from "./api.js";
import { all, byId, download, onSubmit, point, show, status, errorText } from "./dom.js";
import { state } from "./state.js";

let current = "json";
let load = () => {};
const panel = () => byId(`panel-${current}`);
const output = (kind = current) => byId(`output-${kind}`).querySelector("pre");

export function bindResults(loader) {
  load = loader;
  const tabs = all("[data-tab]");
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  byId("tab-json").parentElement.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = tabs[(tabs.findIndex((tab) => tab.dataset.tab === current) + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
  byId("copy").addEventListener("click", copy);
  byId("download").addEventListener("click", () => download(panel().dataset.file, output().textContent));
  byId("edit").addEventListener("click", edit);
  byId("editor-cancel").addEventListener("click", leave);
  byId("editor").addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  onSubmit(byId("editor"), takeOver);
}

function edit() {
  byId("editor-text").value = output("json").textContent;
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
  for (const each of all("[role=tabpanel]")) show(each, !now && each === panel());
  show(byId("output-actions"), !now);
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
  current = chosen.dataset.tab;
  editing(false);
  for (const tab of all("[data-tab]")) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  renderActions();
}

// After the server has rendered the texts.
export function renderActions() {
  for (const id of ["copy", "download"]) byId(id).disabled = !byId(`output-${current}`).dataset.text;
  show(byId("edit"), current === "json");
}

async function copy() {
  try {
    await navigator.clipboard.writeText(output().textContent);
    status("Copied.", "good");
  } catch {
    const range = document.createRange();
    range.selectNodeContents(output());
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    status("The browser does not allow copying, so the text is selected instead.");
  }
}
