// Wiring: one state, one preview per change, the newest wins.

import { get, post } from "./api.js";
import { action, ask, byId, status } from "./dom.js";
import { bindDialogs } from "./dialogs.js";
import * as draft from "./draft.js";
import { bind, choosers, placeholders, refresh } from "./form.js";
import { bindHistory, record } from "./history.js";
import { bindResults, renderActions } from "./results.js";
import { changed, onChange, read, rename, replace, state, write } from "./state.js";
import { controlOf, swap } from "./swap.js";

const WAIT = 120;
let timer = 0;
let running = null;
let opened = [];

function schedule() {
  show("waiting");
  // The answer to an older form would mark stale results as current.
  running?.abort();
  running = null;
  clearTimeout(timer);
  timer = setTimeout(preview, WAIT);
}

function show(progress) {
  document.body.dataset.state = progress;
  byId("results").setAttribute("aria-busy", String(progress === "waiting"));
}

async function preview() {
  const mine = new AbortController();
  running = mine;
  draft.keep();
  try {
    const data = await post("/preview", { state, opened }, mine.signal);
    if (running !== mine) return;
    render(data);
    show("ready");
  } catch (error) {
    if (error.name === "AbortError" || running !== mine) return;
    // The results belong to an older form and stay marked as stale.
    show("stale");
    status(error.message, "error", action("Try again", schedule));
  }
}

function render(data) {
  swap(data.html);
  choosers();
  refresh(document.activeElement);
  renderActions();
  placeholders(data.effective);
  const apply = byId("apply-button");
  if (apply) apply.disabled = data.verdict.kind === "stopped";
  byId("save-button").disabled = !data.valid;
}

// A button beside a message disappears with it, so the focus moves to its field.
function mend({ target }) {
  if (!target.dataset.repair) return;
  const { edits, moves } = JSON.parse(target.dataset.repair);
  if (moves) rename(edits[0].store, edits[0].path, edits[1].path);
  else for (const { store, path, value } of edits) write(store, path, value);
  record({ label: target.textContent, notes: opened });
  (controlOf(target) ?? byId("summary-title")).focus({ preventScroll: true });
  changed(null);
}

// Replaces the form. The new form counts as saved unless `further` is set; `file`: it is the content
// of the plan file.
function load(next, messages, sentence, { label, further = false, file = false } = {}) {
  replace(next);
  // Messages from reading stay until another configuration is opened; errors are found anew.
  opened = messages.filter((message) => message.severity !== "error");
  record({ label: label ?? sentence.replace(/\.$/, ""), notes: opened });
  if (!further) draft.markSaved({ file });
  redraw();
  if (Number(read("config", "zero_optimization.stage")) === 3) byId("stage-3-card").open = true;
  status(sentence, messages.some((message) => message.severity === "error") ? "error" : "good");
}

function redraw() {
  refresh();
  schedule();
}

function restore(earlier, notes) {
  replace(earlier);
  opened = notes;
  redraw();
}

function first(start, setup) {
  const { messages, state: content } = start;
  draft.plan.version = start.version;
  load({ ...content, setup: { ...start.setup, ...setup, ...content.setup } }, messages,
    messages.length ? messages[0].text : "", { label: "the content of the file", file: true });
}

// After a reload, restores this tab's form; no file contains the described machine.
function resume(start) {
  const stored = draft.load();
  first(start, stored?.state.setup);
  if (!stored?.pending) return () => {};
  return () => {
    load(stored.state, [], "", { label: "the form before the reload", further: true });
    const file = draft.resume(stored) ? " The file has changed since then." : "";
    status(`Your form was restored after the reload.${file}`, "",
      action("Discard it", () => first(start, state.setup)));
  };
}

async function reset(defaults) {
  const sure = !draft.isUnsaved() || await ask({ title: "Reset to defaults?", yes: "Reset",
    text: "This resets the configuration to the default plan. The model and machine are kept, and Undo restores the configuration." });
  if (sure) load({ ...defaults, setup: state.setup }, [], "Reset to defaults.", { label: "the reset", further: true });
}

async function start() {
  try {
    const start = await get("/start");
    draft.begin(start);
    bind();
    bindResults(load);
    bindDialogs(load, schedule);
    const restoreDraft = resume(start);
    bindHistory(restore);
    onChange(schedule);
    document.addEventListener("click", mend);
    onChange((source) => { if (!source) refresh(); });
    restoreDraft();
    byId("reset").addEventListener("click", () => reset(start.defaults));
    byId("status-close").addEventListener("click", () => status(""));
    document.body.dataset.loaded = "true";
  } catch (error) {
    status(error.message, "error");
  }
}

start();
