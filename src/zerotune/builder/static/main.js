// Wiring: one state, one preview per change, the newest wins.

import { get, post } from "./api.js";
import { byId, fill, el, status } from "./dom.js";
import { bindAdvanced, refreshAdvanced } from "./advanced.js";
import { bindDialogs } from "./dialogs.js";
import { bind, placeholders, refresh } from "./form.js";
import { renderMemory } from "./memory.js";
import { renderCounts, renderMessages, renderTitle } from "./messages.js";
import { refreshChoosers, setCapabilities, setCatalogue } from "./params.js";
import { bindResults, renderChanges, renderOutputs } from "./results.js";
import { onChange, read, replace, state } from "./state.js";

const WAIT = 120;
let timer = 0;
let running = null;
let opened = [];

function schedule() {
  document.body.dataset.state = "waiting";
  clearTimeout(timer);
  timer = setTimeout(preview, WAIT);
}

async function preview() {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  try {
    const data = await post("/preview", { state }, mine.signal);
    if (running !== mine) return;
    render(data);
  } catch (error) {
    if (error.name !== "AbortError") status(error.message, "error");
  } finally {
    if (running === mine) document.body.dataset.state = "ready";
  }
}

function render(data) {
  setCapabilities(data.optimizers);
  const known = new Set(data.messages.map((message) => `${message.key} ${message.text}`));
  const reading = opened.filter((message) => !known.has(`${message.key} ${message.text}`));
  renderMessages([...data.messages, ...reading]);
  renderTitle(data);
  renderCounts(data);
  renderOutputs(data.outputs);
  renderMemory(data.memory);
  renderChanges(data);
  placeholders(data.effective);
  const apply = byId("apply-button");
  if (apply) apply.disabled = !data.runs;
  byId("save-button").disabled = !data.valid;
}

function load(next, messages, sentence) {
  replace(next);
  // What reading changed is told until the next thing is opened; errors are found again anyway.
  opened = messages.filter((message) => message.severity !== "error");
  refresh();
  refreshChoosers();
  refreshAdvanced();
  if (Number(read("config", "zero_optimization.stage")) === 3) byId("stage-3-card").open = true;
  status(sentence, messages.some((message) => message.severity === "error") ? "error" : "good");
  schedule();
}

async function machine() {
  const facts = byId("machine-facts");
  try {
    const found = await get("/machine");
    const devices = found.devices.length ? found.devices.join("; ") : `no GPU (${found.accelerator})`;
    facts.textContent = `${devices}; ${found.ram} of RAM. ${found.deepspeed}`;
  } catch (error) {
    fill(facts, el("span", { text: error.message }));
  }
}

async function start() {
  try {
    const [first, catalogue] = await Promise.all([get("/start"), get("/catalogue")]);
    setCatalogue(catalogue);
    bind();
    bindResults();
    bindAdvanced();
    bindDialogs(first, load, schedule);
    onChange(() => { refreshChoosers(); schedule(); });
    onChange((source) => { if (!source) { refresh(); refreshAdvanced(); } });
    const { setup } = first.state;
    const defaults = { family: "sdxl", world_size: 1, ema: "none", gradient_checkpointing: true,
      this_machine: false, vram: "24", ram: "64", nvme: "0", total_steps: 10000 };
    load({ ...first.state, setup: { ...defaults, ...setup } }, first.messages, first.messages.length ? first.messages[0].text : "");
    document.body.dataset.loaded = "true";
    machine();
  } catch (error) {
    status(error.message, "error");
  }
}

start();
