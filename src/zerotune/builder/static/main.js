// Wiring: one state, one preview per change, the newest wins.

import { get, post } from "./api.js";
import { action, ask, byId, capital, fill, el, status } from "./dom.js";
import { bindDialogs } from "./dialogs.js";
import * as draft from "./draft.js";
import { bind, placeholders, refresh } from "./form.js";
import { bindHistory, record } from "./history.js";
import { renderMemory, renderStrip } from "./memory.js";
import { chipsOf, renderCounts, renderMessages, renderTitle } from "./messages.js";
import { refreshChoosers, setCapabilities, setCatalogue } from "./params.js";
import { bindResults, renderChanges, renderOutputs } from "./results.js";
import { onChange, read, replace, state } from "./state.js";

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
    const data = await post("/preview", { state }, mine.signal);
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
  setCapabilities(data.optimizers);
  const known = new Set(data.messages.map((message) => `${message.key} ${message.text}`));
  const reading = opened.filter((message) => !known.has(`${message.key} ${message.text}`));
  renderMessages([...data.messages, ...reading]);
  renderTitle(data);
  const chips = chipsOf(data);
  renderCounts(chips);
  renderOutputs(data);
  renderMemory(data.memory);
  renderStrip(chips, data.memory);
  renderChanges(data);
  placeholders(data.effective);
  const apply = byId("apply-button");
  if (apply) apply.disabled = data.verdict.kind === "stopped";
  byId("save-button").disabled = !data.valid;
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
  refreshChoosers({ typed: false });
  schedule();
}

function restore(earlier, notes) {
  replace(earlier);
  opened = notes;
  redraw();
}

async function machine() {
  const facts = byId("machine-facts");
  try {
    const found = await get("/machine");
    const devices = found.devices.length ? found.devices.join("; ") : `no GPU (${found.accelerator})`;
    facts.textContent = `${capital(devices)}; ${found.ram} of RAM. ${capital(found.deepspeed)}.`.replace("..", ".");
  } catch (error) {
    fill(facts, el("span", { text: error.message }));
  }
}

const DEFAULTS = { family: "sdxl", world_size: 1, ema: "none", gradient_checkpointing: true,
  base_dtype: "", card: "", this_machine: false, vram: "24", ram: "64", nvme: "0", total_steps: 10000 };

function first(start, setup) {
  const { messages, state: content } = start;
  draft.plan.version = start.version;
  load({ ...content, setup: { ...DEFAULTS, ...setup, ...content.setup } }, messages,
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
    const [start, catalogue] = await Promise.all([get("/start"), get("/catalogue")]);
    setCatalogue(catalogue);
    draft.begin(start);
    bind();
    bindResults(load);
    bindDialogs(load, schedule);
    const restoreDraft = resume(start);
    bindHistory(restore);
    onChange(() => { refreshChoosers(); schedule(); });
    onChange((source) => { if (!source) refresh(); });
    restoreDraft();
    byId("reset").addEventListener("click", () => reset(start.defaults));
    byId("status-close").addEventListener("click", () => status(""));
    document.body.dataset.loaded = "true";
    machine();
  } catch (error) {
    status(error.message, "error");
  }
}

start();
